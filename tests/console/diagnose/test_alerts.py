"""The alerts of the watch rules: which changes are reported, when, and with which text."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from console.diagnose.rank_evidence import RankEvidence
from console.model import Gpu
from console.plan import Watch, WatchRule
from console.sources.pace import progress_of
from tests.console.diagnose.watched import GPU, Watched

# --- GPUs ---------------------------------------------------------------------------------------


def gpu_texts(*moments: tuple[Gpu, ...]):
    """Updates a watchdog with one moment a second; returns second, kind and text of each change."""
    run = Watched()
    return [(second, *change) for second, gpus in enumerate(moments)
            for change in run.texts(gpus=gpus, ts=1e9 + second)]  # fmt: skip


def with_xids(index: int, *numbers: int, second: float) -> Gpu:
    return replace(
        GPU, index=index, xid=numbers[-1], xids=numbers, xid_count=len(numbers), xid_ts=1e9 + second
    )


def at(second: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(1e9 + second))


def test_each_xid_is_reported_with_its_gpu_and_clears_after_ten_minutes():
    well, other = replace(GPU, index=3), replace(GPU, index=4)
    first, again = with_xids(3, 79, second=5), with_xids(3, 79, 79, second=40)
    elsewhere = with_xids(4, 31, second=60)
    said = gpu_texts(
        *[(well, other)] * 5, *[(first, other)] * 35, *[(again, other)] * 20,
        *[(again, elsewhere)] * 700,
    )  # fmt: skip
    both = f"Xid 79 on GPU 3, 2 times, last {at(40)}; Xid 31 on GPU 4 at {at(60)}"
    assert said == [
        (5, "raise", f"Xid 79 on GPU 3 at {at(5)}"),
        (40, "clear", "replaced by the next alert"),
        (40, "raise", f"Xid 79 on GPU 3, 2 times, last {at(40)}"),
        (60, "clear", "replaced by the next alert"),
        (60, "raise", both),
        (660, "clear", "xid cleared"),
    ]


def test_many_xids_are_reported_a_few_times_with_their_number():
    moments = [(with_xids(0, *[31] * (1 + second), second=second),) for second in range(60)]
    said = [text for _, kind, text in gpu_texts(*moments) if kind == "raise"]
    assert len(said) == 6
    assert said[-1] == f"Xid 31 on GPU 0, 51 times, last {at(50)}"


def test_an_xid_that_ended_the_attempt_before_is_reported():
    """The Xid came before the first update of this attempt."""
    assert gpu_texts((with_xids(3, 79, second=-4),)) == [
        (0, "raise", f"Xid 79 on GPU 3 at {at(-4)}")
    ]
    assert gpu_texts((with_xids(3, 79, second=-700),), (GPU,)) == []


def test_a_gpu_that_is_lost_again_or_another_one_is_reported_again():
    zero, one = GPU, replace(GPU, index=1)
    lost, lost_one = replace(zero, state="lost", why="lost"), replace(one, state="lost", why="lost")
    said = gpu_texts(
        *(*[(lost, one)] * 20, *[(lost, lost_one)] * 20) * 2,
        *[(zero, one)] * 5, *[(zero, lost_one)] * 5,
    )  # fmt: skip
    both = "GPU 0 is lost; GPU 1 is lost"
    assert [(second, text) for second, kind, text in said if kind == "raise"] == [
        (0, "GPU 0 is lost"), (20, both), (60, both), (85, "GPU 1 is lost"),
    ]  # fmt: skip


def test_a_gpu_without_values_clears_none_of_its_alerts_and_has_its_own():
    hot = replace(GPU, throttle="hardware thermal")
    silent = replace(GPU, state="error", why="NVML has not answered for 6 s", throttle="")
    other = replace(GPU, index=1)
    said = gpu_texts(*[(hot, other)] * 70, *[(silent, other)] * 30, *[(hot, other)] * 5)
    assert said == [
        (60, "raise", "GPU 0 is throttled (hardware thermal)"),
        (80, "raise", "NVML returns no values for GPU 0 (NVML has not answered for 6 s)"),
        (100, "clear", "gpu_silent cleared"),
    ]


def test_full_memory_stays_reported_while_its_gpu_does_not_answer():
    full, other = replace(GPU, mem_used_mib=999.0), replace(GPU, index=1)
    silent = replace(GPU, state="ok", mem_used_mib=None, why="no memory (Unknown Error)")
    said = gpu_texts(*[(full, other)] * 70, *[(silent, other)] * 30, *[(GPU, other)] * 5)
    assert said == [
        (60, "raise", "100% of the memory of GPU 0 is in use"),
        (100, "clear", "gpu_memory_ceiling cleared"),
    ]


def test_memory_errors_are_reported_again_and_clear_after_a_reset():
    worse = [replace(GPU, ecc_uncorrected=count) for count in (3, 4, 7)]
    reset = replace(GPU, ecc_uncorrected=0)
    said = gpu_texts(*[(gpu,) for gpu in worse for _ in range(20)], *[(reset,)] * 3)
    start = "uncorrected memory errors in this attempt:"
    assert [text for _, _, text in said] == [
        f"{start} 1 on GPU 0", "replaced by the next alert", f"{start} 4 on GPU 0",
        "ecc cleared",
    ]  # fmt: skip


# --- non_finite ---------------------------------------------------------------------------------

GOOD = {"loss": 2.0, "grad_norm": 1.0}
NAN = {"loss": "nan", "grad_norm": "nan"}


def record(step: int, rank: int = 0, **fields):
    return progress_of({"rank": rank, "step": step} | GOOD | fields)


def pulse(step: int, count: int = -1, rank: int = 0) -> RankEvidence:
    return RankEvidence(rank, 100 + rank, "S", step, "forward", 0.1, nonfinite_steps=count)


def test_a_step_between_two_polls_is_reported_and_stays_until_the_attempt_ends():
    run = Watched(rule="non_finite")
    assert run.texts(*map(record, range(1, 10))) == []
    steps = [record(10, **NAN), record(11), record(12)]
    text = "the loss was not finite in 1 step of this attempt, last at step 10 or before"
    assert run.texts(*steps) == [("raise", text)]
    for step in range(13, 2000):
        assert run.texts(record(step)) == []
    assert run.dog.raised() == ("non_finite",)


def test_a_step_without_a_record_is_reported_from_the_pulse_or_the_next_record():
    run = Watched(rule="non_finite")
    assert run.texts(record(5, nonfinite_loss_steps=0), ranks=(pulse(6, 0),)) == []
    text = "the loss was not finite in 1 step of this attempt, last at step 8 or before"
    assert run.texts(ranks=(pulse(8, 1),)) == [("raise", text)]
    assert run.texts(record(10, nonfinite_loss_steps=1), ranks=(pulse(11, 1),)) == []
    text = "the loss of rank 1 was not finite in 2 steps of this attempt, last at step 10 or before"
    assert Watched(rule="non_finite").texts(record(10, 1, nonfinite_loss_steps=2)) == [
        ("raise", text)
    ]


def test_later_steps_are_reported_again_every_ten_minutes():
    run = Watched(rule="non_finite")
    found = [kind for step in range(10, 1300) for kind, _ in run.texts(record(step, **NAN))]
    assert found == ["raise", *["clear", "raise"] * 2]


def test_an_overflow_is_reported_unless_it_only_lowers_the_loss_scale():
    run, inf = Watched(rule="non_finite"), {"grad_norm": "inf"}
    assert run.texts(record(3, **inf, overflow_steps=1, scale_lowered_steps=1)) == []
    text = "the gradient norm was not finite in 1 step of this attempt, last at step 9 or before"
    found = run.texts(record(9, **inf, overflow_steps=2, scale_lowered_steps=1), record(10))
    assert found == [("raise", text)]
    assert Watched(rule="non_finite").texts(record(3, **inf)) == [], (
        "a foreign program may scale its loss too"
    )


def test_an_action_needs_records_that_are_not_finite_now():
    """An earlier non-finite step keeps the alert raised, but leads to no action."""
    run = Watched(rule="non_finite", action="halt")
    kinds = [kind for kind, _ in run.texts(record(10, **NAN), record(11))]
    assert kinds == ["raise"]
    for step in range(12, 300):
        assert run.texts(record(step), ranks=(pulse(step, 1),)) == []
    found = [run.texts(record(step, **NAN), record(step, 1)) for step in range(300, 304)]
    assert [kind for change in found for kind, _ in change] == ["withhold"]
    assert run.texts(record(304)) == []
    assert run.texts(record(305, **NAN), record(305, 1, **NAN))[-1][0] == "act"


@pytest.mark.parametrize(("since", "acts_at"), [(1, 81), (40, 99)])
def test_an_action_needs_three_times_the_time_of_the_rule(since, acts_at):
    run = Watched(Watch(rules={"non_finite": WatchRule(for_s=20)}), "non_finite", "halt")
    kinds = []
    for step in range(1, 120):
        fields = NAN if step == 1 or step >= since else GOOD
        kinds += [(step, kind) for kind, _ in run.texts(record(step, 0, **fields),
                                                       record(step, 1, **fields))]  # fmt: skip
    acted = [step for step, kind in kinds if kind == "act"]
    assert kinds[0] == (21, "raise")
    assert acted == [acts_at]


def test_the_share_of_fetch_is_that_of_all_records_since_the_last_poll():
    """With many steps a second, the share in the newest record may differ between polls."""
    run, kinds = Watched(rule="loader_slow"), []
    for second in range(200):
        shares = (0.9, 0.9, 0.1) if second % 5 else (0.9, 0.1, 0.9)
        fresh = [record(3 * second + n, dt_fetch_s=share, steps_dt_s=[1.0])
                 for n, share in enumerate(shares)]  # fmt: skip
        kinds += [text for _, text in run.texts(*fresh)]
    assert kinds == ["rank 0 waits for data for 63% of its step time"]


# --- alerts of a former working process ---------------------------------------------------------

WELL = {"loss": 2.12345, "grad_norm": 1.12345, "gate_entropy_mean": 0.8, "toks_per_s": 500.0,
        "batch_crc32": "1", "dt_fetch_s": 0.1, "steps_dt_s": [1.0]}  # fmt: skip


def restored(*raised: str) -> Watched:
    run = Watched()
    run.dog.restore(raised)
    return run


def cleared(run: Watched, *records: dict | None) -> list[str]:
    """Reads one record a second, or none for None; returns the rules that are cleared."""
    found = []
    for each in records:
        step = 5001 + int(run.mono)
        fresh = [progress_of({"rank": 0, "step": step} | each)] if each is not None else []
        ranks = (RankEvidence(0, 100, "S", step, "forward", 0.1, nonfinite_steps=0),)
        run.newest[0] = progress_of({"rank": 0, "step": step})
        found += run.poll(*fresh, gpus=(GPU,), ranks=ranks)
    return [each.rule.name for each in found if each.kind == "clear"]


OWN_DATA = ("dead_parameters", "non_finite", "zero_gradient", "gate_collapse",
            "gate_never_learned", "constant_figure", "throughput_drop", "loader_slow",
            "same_batch", "memory_growth")  # fmt: skip


@pytest.mark.parametrize("name", OWN_DATA)
def test_nothing_is_cleared_before_the_first_record(name):
    run = restored(name)
    assert cleared(run, *[None] * 300) == []
    assert run.dog.raised() == (name,)


def test_one_record_does_not_show_that_a_figure_changes():
    run = restored("constant_figure")
    assert cleared(run, *[WELL] * 5) == []
    assert cleared(run, WELL | {"loss": 2.2345678, "grad_norm": 1.2345678}) == ["constant_figure"]


@pytest.mark.parametrize("name", ["dead_parameters", "non_finite"])
def test_an_alert_on_what_only_the_former_process_saw_stays(name):
    run = restored(name)
    assert cleared(run, *[WELL] * 900) == []


def test_ranks_that_have_not_recorded_the_same_step_yet_do_not_clear_the_same_batch():
    run = restored("same_batch")
    for rank, step in [(1, 20), (0, 40), (1, 40), (0, 60), (1, 60)]:
        fresh = progress_of({"rank": rank, "step": step, "batch_crc32": str(step)})
        assert run.poll(fresh, progress={0: fresh}) == []
