"""Gates over recorded heartbeats: value, window, bound and result."""

from __future__ import annotations

import json

import pytest

from console.plans import gates
from console.plans.gates import Summary, evaluate, overall
from console.sources.gate_files import GateFiles
from tests.console.plans.histories import (
    EVERY_BOUND,
    FIGURES,
    Written,
    attempt,
    killed_then_resumed,
    lines,
    result,
    saved,
    summed,
    whole,
    with_files,
)
from tests.console.plans.test_histories import Truth
from trainers.contract.errors import UsageError


def summary(*records, **counted):
    """Returns the sums of an attempt; the first record is of step 1, the next of step 2.

    A record with the key `rank` is of that rank, and each other record of rank 0.
    """
    ranks = {0: Written(0)} | {r["rank"]: Written(r["rank"]) for r in records if "rank" in r}
    for step, record in enumerate(records, start=1):
        fields = {key: value for key, value in record.items() if key != "rank"}
        ranks[record.get("rank", 0)].add("progress", step, **fields)
    for written in ranks.values():
        written.add("exit", max(len(records), 1), exit_code=0)
    return summed(*ranks.values(), **counted)


def every_fifth() -> Written:
    """Returns records of every fifth step, from a program that counts no non-finite steps."""
    written = Written()
    for step in (5, 10):
        written.add("progress", step, loss=1.0, steps_dt_s=[0.1] * 5)
    written.add("exit", 10, exit_code=0)
    return written


def losses(*values):
    return summary(*({"loss": value} for value in values))


FALLING = (5, 5, 5, 5, 5, 4, 3, 3, 3, 3, 3)
FLAT = [5.545 + 0.01 * (i % 2) for i in range(40)]


@pytest.mark.parametrize(
    ("found", "name", "bound", "expected"),
    [
        (summary(), "steps_done", 1, "unknown"),
        (losses(2.0, "nan", 1.0), "loss_finite", True, "fail"),
        (summary({"loss": 2.0}, {"loss": 1.5}, {}), "loss_finite", True, "pass"),
        (summary({"loss": 2.0}, {}, {"loss": 1.0}), "loss_finite", True, "unknown"),
        (summed(every_fifth()), "loss_finite", True, "unknown"),
        (summary({"grad_norm": "nan"}, {"grad_norm": 1.0}), "grad_norm_above", 0, "fail"),
        (summary({"grad_norm": 1.0}, {"grad_norm": "nan"}), "grad_norm_above", 0, "fail"),
        (losses(*FALLING), "loss_falls", True, "pass"),
        (losses(*FALLING), "loss_falls", 2.5, "fail"),
        (losses(*FALLING[:9]), "loss_falls", True, "unknown"),
        (losses(*FALLING, "nan"), "loss_falls", True, "fail"),
        (losses(*FALLING, *["-inf"] * 5), "loss_falls", True, "fail"),
        (losses("nan", *FALLING), "loss_falls", True, "pass"),
        (losses(*FLAT), "loss_falls", True, "fail"),
        (summary({}), "bytes_right", 0.9, "unknown"),
    ],
)
def test_a_gate_compares_its_value_with_its_bound(found, name, bound, expected):
    """test_histories.py compares the gates with the true values of random histories."""
    assert result(found, **{name: bound}).result == expected


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([(1.0, "nan", 1, 1), (1.0, 0.5, 1, 1)], "pass"),
        ([(1.0, 0.5, 1, 1), (1.0, "nan", 3, 3)], "pass"),
        ([(1.0, 0.5, 0, 0), (1.0, "nan", 1, 0)], "fail"),
        ([(1.0, 0.5, 1, 1), (1.0, "nan", 1, 1)], "fail"),
        ([(1.0, 0.5, 0, 0), ("nan", "nan", 1, 1)], "fail"),
    ],
)
def test_the_norm_of_an_overflow_that_only_lowered_the_loss_scale_does_not_count(rows, expected):
    names = ("loss", "grad_norm", "overflow_steps", "scale_lowered_steps")
    gate = result(summary(*(dict(zip(names, row, strict=True)) for row in rows)), grad_norm_above=0)
    assert (gate.result, gate.value == 0.5) == (expected, expected == "pass")


def test_one_failed_gate_fails_the_phase_and_one_unknown_leaves_it_open():
    done = summary({"loss": 1.0})
    assert overall(evaluate(done, {"steps_done": 1, "loss_finite": True})) == "pass"
    assert overall(evaluate(done, {"steps_done": 1, "bytes_right": 0.9})) == "unknown"
    assert overall(evaluate(done, {"steps_done": 2, "bytes_right": 0.9})) == "fail"


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        ({"loss_fals": True}, "did you mean 'loss_falls'"),
        ({"steps_done": True}, "use a number"),
        ({"no_stall": False}, "use true"),
        ({"loss_falls": False}, "use true or a number"),
        ({"bytes_right": "many"}, "use a number"),
        *(({"grad_norm_above": bound}, "use a number") for bound in
          (float("nan"), float("inf"), 10**400)),
    ],
)  # fmt: skip
def test_a_wrong_gate_is_a_usage_error(bounds, text):
    with pytest.raises(UsageError, match=text):
        gates.check(bounds, "plan.yaml")


def test_a_load_counts_only_for_the_attempt_whose_file_remains():
    first, second = saved(), attempt(2, range(51, 61), **FIGURES)
    second.records.pop()
    second.add("checkpoint", 60)
    once, again = summed(first), summed(first, second)
    for summary, attempts, expected in ((once, 1, 1), (again, 1, 1), (again, 2, 2)):
        summary.take_load(attempts, 60, True)
        assert result(summary, checkpoints_loaded_at_least=9).value == expected
    again.take_load(2, 60, False)
    assert result(again, checkpoints_loaded_at_least=9).value == 1


def test_the_newest_loads_count_after_a_long_run_and_after_a_restart_from_the_first_step():
    written = attempt(1, range(1, 1201), exit_code=None, **FIGURES)
    again = attempt(2, range(1, 11), exit_code=None, **FIGURES)
    for saving in (written, again):
        for record in [each for each in saving.records if each["msg"] == "progress"]:
            saving.add("checkpoint", record["step"])
    found = summed(written)
    for step in range(1, 1201):
        found.take_load(1, step, True)
    assert result(found, checkpoints_loaded_at_least=9).value == 64
    for record in lines(again):
        found.add(record)
    for step in range(1, 11):
        found.take_load(2, step, True)
    assert result(found, checkpoints_loaded_at_least=9).value == 10


PLANTED = {
    "gpu_mem_growth_below_mib": ("second half", {"gpu_mem_reserved": 50.0}),
    "toks_per_s_50_above": ("all", {"toks_per_s": 0.5}),
    "step_ratio_below": ("one", {"steps_dt_s": [100.0]}),
    "entropy_above": ("one", {"gate_entropy_mean": 0.05}),
    "collapse_below": ("one", {"gate_collapse_frac": 0.9}),
    "fetch_below_s": ("one", {"dt_fetch_s": 6.0}),
    "comm_hook_active": ("start", {"comm_hook": "none"}),
}
"""For each gate: the records that get a fault, and their faulty figures."""


@pytest.mark.parametrize("name", PLANTED)
def test_a_gate_finds_its_planted_fault(name):
    where, figures = PLANTED[name]
    written = saved()
    parts = {"all": slice(1, 61), "second half": slice(55, 61), "one": slice(20, 21),
             "start": slice(0, 1)}  # fmt: skip
    for record in written.records[parts[where]]:
        record |= figures
    (gate,) = evaluate(with_files(written), {name: EVERY_BOUND[name]})
    assert (gate.name, gate.result) == (name, "fail"), gate


def test_a_gpu_without_a_number_does_not_count_as_gpu_0():
    found = with_files(saved(), use_pct=50.0)
    pulses = [{"pulse": {"phase": "forward", "step": 60}}]
    gpus = [{"index": 0, "state": "ok", "util_pct": 50.0}, {"state": "ok", "util_pct": 95.0}]
    for second in range(61, 1000):
        found.gpus.add({"mono": float(second), "attempt": 1, "gpus": gpus, "ranks": pulses})
    assert result(found, gpu_util_above_pct=80).result == "unknown"


def test_the_use_of_gpus_includes_the_samples_after_a_reboot():
    first = attempt(1, range(1, 501), exit_code=None, **FIGURES)
    found = summed(first, attempt(2, range(501, 1001), **FIGURES))
    found.take_end(1, 0, first.pulse(500))
    one = [{"index": 0, "state": "ok", "util_pct": 96.0}]
    samples = []
    for number, steps, mono in ((1, range(1, 501), 3e6), (2, range(501, 1001), 300.0)):
        for step in steps:
            ranks = [{"pulse": {"phase": "forward", "step": step}}]
            sample = {"mono": mono + step, "attempt": number, "gpus": one, "ranks": ranks}
            samples.append(sample)
    for sample in (*samples, *samples[-9:], *samples[490:500]):  # the last ones are copies
        found.gpus.add(sample)
    gate = result(found, gpu_util_above_pct=80)
    assert (gate.result, gate.value) == ("pass", pytest.approx(96, abs=1)), gate
    assert "0% of it without a sample" in gate.window, gate


def test_gates_over_files_and_samples_find_their_planted_fault():
    found = with_files(saved(), use_pct=50.0)
    assert result(found, gpu_util_above_pct=80).result == "fail"
    assert result(with_files(saved()), gpu_util_above_pct=80).value == pytest.approx(59 / 60 * 95)
    pair = with_files(saved(), whole(1))
    pair.gpus.busy_s[1] /= 3
    gate = result(pair, gpu_balance_below_pct=10)
    assert (gate.result, gate.why) == ("fail", "GPU 0 93 %, GPU 1 31 %")
    pair = with_files(saved(), whole(1))
    pulses = [{"pulse": {"phase": "forward", "step": 60}}] * 2
    one = {"index": 0, "state": "ok", "util_pct": 95.0}
    for mono, gpus in ((61.0, [one, one]), (64.0, [])):
        pair.gpus.add({"mono": mono, "attempt": 1, "gpus": gpus * 8, "ranks": pulses})
    gate = result(pair, gpu_balance_below_pct=5)
    assert (gate.result, "8% of it without a sample" in gate.window) == ("fail", True), gate
    assert gate.why == "GPU 0 89 %, GPU 1 88 %"
    assert result(with_files(whole()), checkpoints_at_least=1).result == "fail"
    assert result(with_files(whole()), checkpoints_loaded_at_least=1).result == "fail"
    again = summed(*killed_then_resumed())
    again.take_end(1, 0, killed_then_resumed()[0].pulse(26, 0))
    assert result(again, checkpoints_loaded_at_least=1).result == "pass"
    found.files = GateFiles(1, "rank0.log: NCCL error", "", "step_00000060", 0.5)
    gate = result(found, no_log_errors=True)
    assert (gate.result, gate.why) == ("fail", "rank0.log: NCCL error")
    assert result(found, checkpoint_mib_above=1).result == "fail"
    found.files = GateFiles(0, "", "rank0.log is missing", "", None, "")
    assert result(found, no_log_errors=True).result == "unknown"
    assert result(found, checkpoint_mib_above=1).result == "unknown"
    assert result(found, scaling_above=0.9).result == "unknown"
    found.files = GateFiles(single="0-one", single_toks_per_s=11.0)
    gate = result(found, scaling_above=0.9)
    assert (gate.result, gate.value) == ("fail", pytest.approx(9 / 11))
    found.files = None
    assert result(found, no_log_errors=True).why == "the logs were not read"


def test_all_checkpoints_count_and_an_attempt_loads_one_checkpoint():
    written = Written()
    for step in range(1, 81):
        written.add("progress", step, loss=1.0)
        written.add("checkpoint", step)
    first, second = written, attempt(2, range(71, 91))
    for _ in range(2):
        second.records.insert(1, dict(second.records[1]))
    for number, record in enumerate(second.records, 1):
        record |= {"n": number, "mono": 1e6 + number}
    found = summed(first)
    assert result(found, checkpoints_at_least=80).value == 80
    again = summed(first, second)
    assert result(again, checkpoints_at_least=70).value == 70, "ten are saved again"
    assert result(again, checkpoints_loaded_at_least=3).value == 1
    all_lost = summed(first, attempt(2, range(2, 4)))
    gates_of_saves = (result(each, checkpoints_at_least=1) for each in (found, all_lost))
    assert [(gate.value, "number is lost" in gate.why) for gate in gates_of_saves] == [
        (80, False), (None, True),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["toks_per_s_50_above", "step_ratio_below", "scaling_above"])
def test_a_gate_over_fifty_steps_needs_fifty(name):
    few = attempt(1, range(1, 50), **FIGURES)
    gate = result(with_files(few), **{name: EVERY_BOUND[name]})
    assert (gate.result, gate.why) == ("unknown", "50 steps are needed, 49 are known")
    assert result(with_files(attempt(1, range(1, 51), **FIGURES)), **{name: 0.5 + (
        name == "step_ratio_below")}).result == "pass"  # fmt: skip


def test_a_program_that_reports_no_speed_has_a_step_ratio():
    """Its last record may lack the figures that its other records have."""
    silent = attempt(1, range(1, 61), **{**FIGURES, "toks_per_s": None})
    gate = result(summed(silent), step_ratio_below=1)
    assert (gate.result, gate.value, gate.why) == ("pass", 1.0, "")
    for name in ("toks_per_s_50_above", "scaling_above"):
        assert result(with_files(silent), **{name: 0.5}).result == "unknown"
    bare_end = attempt(1, range(1, 61), **FIGURES)
    bare_end.records[-2] |= {"toks_per_s": None, "steps_dt_s": [9.0]}
    assert result(summed(bare_end), toks_per_s_50_above=8).value == 9.0
    bare_end.records[-3] |= {"toks_per_s": None}
    gates = [result(summed(bare_end), **{name: 8}) for name in
             ("toks_per_s_50_above", "step_ratio_below")]  # fmt: skip
    assert [(gate.result, gate.value) for gate in gates] == [("unknown", None), ("fail", 9.0)]


def long(rate: float, until: int = 140, **figures: float) -> Written:
    """Returns steps of one second: 100 tokens per second up to step 100, then `rate`."""
    written = attempt(1, range(1, until + 1), exit_code=None, **FIGURES | figures)
    for record in written.records[1:]:
        record["toks_per_s"] = rate if record["step"] > 100 else 100.0
    return written


def test_a_gate_at_a_step_keeps_its_value_of_that_step():
    """Later steps do not change the value; repeated steps of the window change the value.

    `reached` leaves out a gate whose step is still to come.
    """
    bounds = {"toks_per_s_50_above": {"bound": 50, "at": [100, 500]}}
    written = long(1.0)
    found = summed(written)
    assert gates.reached(summed(long(1.0, 99)), bounds) == ()
    (gate,) = gates.reached(found, bounds)
    assert (gate.name, gate.value, gate.result) == ("toks_per_s_50_above@100", 100.0, "pass")
    assert gate.window == "surviving steps, last 50 steps at step 100"
    written.add("exit", 140, exit_code=0)
    at_end = {gate.name: gate for gate in evaluate(summed(written), bounds)}
    assert [gate.result for gate in at_end.values()] == ["fail", "pass", "unknown"]
    assert at_end["toks_per_s_50_above@500"].why == "rank 0 has no record at or after step 500"
    again = attempt(2, range(81, 141), **FIGURES)
    resumed = summed(long(1.0, 120), again)
    resumed.take_end(1, 0, long(1.0, 120).pulse(121, 0))
    assert [gate.value for gate in evaluate(resumed, bounds)][1] == pytest.approx(63.6), "repeated"


def test_an_override_needs_a_reason_and_leaves_the_result():
    bounds = {"entropy_above": {"bound": 5, "override": "A new gate; see the notes."}}
    gates.check(bounds, "plan")
    (gate,) = found = evaluate(with_files(saved()), bounds)
    assert (gate.result, gate.blocks, overall(found)) == ("fail", False, "pass")
    assert gate.override == "A new gate; see the notes."
    for wrong in ({"bound": 5, "override": " "}, {"bound": 5, "override": True}, {"at": 100},
                  {"bound": 5, "at": 7}, {"bound": 5, "att": 100}):  # fmt: skip
        with pytest.raises(UsageError, match="entropy_above"):
            gates.check({"entropy_above": wrong}, "plan")
    with pytest.raises(UsageError, match="at the end only"):
        gates.check({"no_stall": {"bound": True, "at": 100}}, "plan")


def test_a_live_run_is_judged_so_far_and_unknown_is_not_a_pass():
    bounds = EVERY_BOUND | {"steps_done": 200, "toks_per_s_50_above": 1000}
    found = {gate.name: gate for gate in evaluate(summed(long(1.0)), bounds, is_live=True)}
    assert (found["steps_done"].result, found["steps_done"].value) == ("unknown", 140)
    assert found["toks_per_s_50_above"].result == "unknown", "the speed can still rise"
    assert found["grad_norm_above"].result == "pass"
    assert found["grad_norm_above"].window.endswith(", so far")
    assert found["no_log_errors"].result == "unknown"
    run = summed(long(1.0))
    evaluate(run, bounds, is_live=True)
    assert result(run, grad_norm_above=0).result == "unknown", "at the end no record may be missing"
    bad = long(1.0, gate_entropy_mean=0.0)
    found = {gate.name: gate for gate in evaluate(summed(bad), bounds, is_live=True)}
    assert found["entropy_above"].result == "fail", "no later record can change that"


def test_every_gate_has_a_bound_and_a_true_value_here():
    assert EVERY_BOUND.keys() == Truth(1).values().keys() == gates.RULES.keys()


@pytest.mark.parametrize("name", EVERY_BOUND)
def test_a_gate_passes_over_whole_records_only(name):
    bounds = {name: EVERY_BOUND[name]}
    assert overall(evaluate(with_files(saved()), bounds)) == "pass"
    holed = saved()
    del holed.records[10:13]
    (gate,) = evaluate(with_files(holed), bounds)
    assert gate.result == "unknown"
    assert "rank 0, attempt 1: records 11 to 13 are missing" in gate.why
    cut = saved()
    del cut.records[-1:]
    (gate,) = evaluate(with_files(cut), bounds)
    assert (gate.result, "the number of records after" in gate.why) == ("unknown", True)
    without = saved()
    for record in without.records:
        del record["n"]
    assert overall(evaluate(with_files(without), bounds)) == "unknown"
    assert overall(evaluate(Summary(1, 1, 0), bounds)) == "unknown"
    two = evaluate(with_files(saved(), world=2), bounds)
    source = gates.RULES[name].source
    assert overall(two) == ("pass" if source == gates.RANK0 else "unknown"), source


def test_the_durations_count_if_a_long_record_lost_other_figures():
    written = attempt(1, range(1, 61), **FIGURES)
    bounds = {"toks_per_s_50_above": 1, "step_ratio_below": 2}
    for cut, wanted in (("other figures", "pass"), ("steps_dt_s", "unknown")):
        for record in written.records:
            record["cut"] = cut
        assert overall(evaluate(summed(written), bounds)) == wanted, cut


def test_supervisor_json_gives_the_same_result_to_the_next_reader():
    first, second = killed_then_resumed()
    found = summed(first, second, stalls=1)
    found.take_end(1, 0, first.pulse(26, 0))
    found.take_end(2, 0, second.pulse(30, 0))
    document = json.loads(json.dumps(found.as_dict()))
    read = Summary(1, 2, document["stalls"])
    read.take_document(document)
    for record in lines(first, second):
        read.add(record)
    bounds = {"steps_done": 30, "loss_finite": True, "no_stall": True, "stalls_at_most": 1}
    assert evaluate(read, bounds) == evaluate(found, bounds)
