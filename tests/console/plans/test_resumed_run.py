"""Gates of a run that resumed an earlier run, so that it makes only the rest of the steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from console.plans import catalog, gate_check, gates
from console.plans.gates import evaluate, overall
from console.sources.gate_files import GateFiles
from console.sources.summary import Summary
from tests.console.plans.histories import FIGURES, Written, attempt, result, summed
from tests.console.sources import directory
from trainers.contract import rundir

BEGIN, STEPS, LOGGED, SAVED = 30_000, 50_000, 20, 5_000
BOUNDS = catalog.load("m7c_2xa100").phases[-1].gates
HEALTHY = FIGURES | {"steps_dt_s": [0.2] * LOGGED, "toks_per_s": 45.0, "gpu_mem_reserved": 30_000}


def resumed(rank: int = 0, begin: int = BEGIN) -> Written:
    """Returns the records of the phase production, resumed at the step `begin`."""
    written = Written(rank)
    written.add("loader_ready", 0, comm_hook="none")
    written.add("resume", begin)
    for step in range(begin + LOGGED, STEPS + 1, LOGGED):
        loss = 5 - step / STEPS
        written.add("progress", step, loss=loss, nonfinite_loss_steps=0, **HEALTHY)
        if step % SAVED == 0:
            written.add("checkpoint", step)
    written.add("exit", STEPS, exit_code=0, nonfinite_loss_steps=0)
    return written


def whole(*written: Written, unloaded: int = 1, **counted: int) -> Summary:
    """Returns the sums of the records, and loads of the checkpoints without the first ones."""
    found = summed(*written, **counted)
    found.files = GateFiles(checkpoint=f"step_{STEPS:08d}", checkpoint_mib=937.0)
    for step in list(found.of_rank(0).checkpoints)[unloaded:]:
        found.take_load(1, step, True)
    return found


def test_a_production_run_that_was_halted_and_resumed_can_be_go():
    found = whole(resumed(0), resumed(1))
    rows = {gate.name: gate for gate in evaluate(found, BOUNDS)}
    assert overall(tuple(rows.values())) == "pass", rows
    assert rows.keys() == BOUNDS.keys(), "the steps 100, 500 and 5,000 are those of another run"
    assert gates.reached(found, BOUNDS) == ()
    saves, loads = rows["checkpoints_at_least"], rows["checkpoints_loaded_at_least"]
    assert (saves.value, saves.bound, loads.value, loads.bound) == (4, "≥ 4", 3, "≥ 3")
    assert saves.window == "surviving steps, bound for 20,000 of 50,000 steps"
    assert loads.window.endswith(", bound for 20,000 of 50,000 steps")


def planted(name: str) -> Summary:
    """Returns the sums of a resumed run with a fault that breaks the bound of one gate."""
    written, fault, where = resumed(), {}, slice(-100, -99)
    if name in RECORDED:
        where, fault = RECORDED[name]
    progress = [each for each in written.records if each["msg"] == "progress"]
    for record in progress[where]:
        record |= fault
    if name == "steps_done":
        del written.records[-3:]
        written.add("exit", STEPS - LOGGED, exit_code=0, nonfinite_loss_steps=0)
    if name == "checkpoints_at_least":
        written.records[-2]["msg"] = "checkpoint_failed"
    found = whole(written, resumed(1), **COUNTED.get(name, {}))
    if name == "checkpoint_mib_above":
        assert found.files is not None
        found.files = replace(found.files, checkpoint_mib=500.0)
    return found


RECORDED = {
    "loss_finite": (slice(-100, -99), {"loss": "nan", "nonfinite_loss_steps": 1}),
    "grad_norm_above": (slice(-100, -99), {"grad_norm": 0.0}),
    "loss_falls": (slice(None), {"loss": 4.0}),
    "toks_per_s_50_above": (slice(-3, None), {"toks_per_s": 38.0}),
    "gpu_mem_below_mib": (slice(-100, -99), {"gpu_mem_reserved": 41_000}),
    "gpu_mem_growth_below_mib": (slice(-100, -99), {"gpu_mem_reserved": 30_600}),
    "entropy_above": (slice(-100, -99), {"gate_entropy_mean": 0.4}),
    "collapse_below": (slice(-100, -99), {"gate_collapse_frac": 0.1}),
    "fetch_below_s": (slice(-100, -99), {"dt_fetch_s": 6.0}),
}
"""For each gate: the progress records that get a fault, and their faulty figures."""
COUNTED = {
    "no_stall": {"stalls": 1}, "stalls_at_most": {"stalls": 4}, "restarts_at_most": {"attempts": 5},
    "checkpoints_loaded_at_least": {"unloaded": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", BOUNDS)
def test_a_gate_finds_its_planted_fault_in_a_resumed_run(name):
    results = {gate.name: gate.result for gate in evaluate(planted(name), BOUNDS)}
    assert results[name] == "fail", results


def test_a_run_begins_at_its_first_step_without_the_record_of_its_own_resume():
    """Its first record is no evidence, because records may be lost; nor is a later resume."""
    unrecorded, other = resumed(), resumed(1)
    unrecorded.records.pop(1)
    assert [summed(*each).begin for each in ((unrecorded,), (other, unrecorded))] == [0, 0]
    later = attempt(2, range(1_001, 1_003), **FIGURES)
    assert summed(attempt(1, range(1, 2_001), exit_code=None, **FIGURES), later).begin == 0
    again = attempt(2, range(40_001, 40_003), **FIGURES)
    assert summed(resumed(), again).begin == BEGIN
    bounds = {"gpu_mem_below_mib": {"bound": 40_960, "at": [500]}}
    assert [gate.name for gate in evaluate(whole(unrecorded), bounds)][1:] == [
        "gpu_mem_below_mib@500"
    ]


def test_an_attempt_that_failed_before_its_resume_does_not_hide_where_the_run_begins():
    failed = Written()
    failed.add("boot", 0)
    assert summed(failed, attempt(2, range(BEGIN + 1, BEGIN + 3), **FIGURES)).begin == BEGIN


def test_a_short_rest_needs_one_checkpoint_and_one_load():
    rest = resumed(begin=STEPS - 100)
    for record in rest.records:
        record["msg"] = record["msg"].replace("checkpoint", "checkpoint_failed")
    for name in ("checkpoints_at_least", "checkpoints_loaded_at_least"):
        for bound in (1, 9):
            found = result(summed(rest), **{name: bound})
            assert (found.bound, found.result) == ("≥ 1", "fail")


def test_a_rank_without_records_does_not_confirm_where_the_run_begins():
    found = summed(resumed())
    found.world = 2
    assert found.begin == 0


def test_a_step_after_the_resume_is_evaluated_and_the_step_of_the_resume_is_not():
    bounds = {"gpu_mem_below_mib": {"bound": 9, "at": [100, 500]}}
    for begin, names in ((99, ["100", "500"]), (100, ["500"]), (499, ["500"]), (500, [])):
        found = summed(attempt(1, range(begin + 1, 602), **FIGURES))
        wanted = [f"gpu_mem_below_mib@{step}" for step in names]
        assert [gate.name for gate in gates.reached(found, bounds)] == wanted
        rows = evaluate(found, bounds)
        assert [gate.name for gate in rows] == ["gpu_mem_below_mib", *wanted]
        assert overall(rows) == "pass"


@pytest.mark.parametrize("begin", [0, 20_000, 30_000, 40_000])
def test_the_growth_is_that_of_the_later_half_of_the_steps_of_the_run(begin):
    for step, grown in ((0.4, 0), (0.6, 600)):
        written = resumed(begin=begin) if begin else attempt(1, range(1, 1_001), **FIGURES)
        rows = [each for each in written.records if each["msg"] == "progress"]
        for record in rows[round(step * len(rows)) :]:
            record["gpu_mem_reserved"] = rows[0]["gpu_mem_reserved"] + 600
        assert result(summed(written), gpu_mem_growth_below_mib=512).value == grown


def test_a_live_run_has_the_bound_of_its_end():
    """Without a planned last step the whole bound remains until the end."""
    written = resumed()
    early = summed()
    early.attempts = 1
    for record in written.records[:20]:
        early.add(record)
    bounds = {"steps_done": STEPS, "checkpoints_at_least": 10}
    live = evaluate(early, bounds, is_live=True)[1]
    assert (live.bound, live.result) == ("≥ 4", "unknown")
    low = evaluate(early, bounds | {"steps_done": BEGIN + 1}, is_live=True)[1]
    assert (low.bound, low.result) == ("≥ 10", "unknown")
    assert evaluate(early, {"checkpoints_at_least": 10}, is_live=True)[0].bound == "≥ 10"
    assert result(whole(written), checkpoints_at_least=10).bound == "≥ 4"
    assert result(whole(written), checkpoints_at_least=2.5).bound == "≥ 1"


def test_without_a_further_step_the_bound_is_that_of_the_earlier_run():
    done = Written()
    done.add("resume", STEPS)
    done.add("exit", STEPS, exit_code=0)
    bounds = {"steps_done": STEPS, "checkpoints_at_least": 10}
    for former, bound in ((resumed(), "≥ 4"), (attempt(1, range(1, 101), **FIGURES), "≥ 10")):
        found = summed(done)
        assert evaluate(found, bounds)[1].result == "unknown"
        found.former = whole(former)
        saves = evaluate(found, bounds)[1]
        assert (saves.bound, saves.result) == (bound, "pass" if bound == "≥ 4" else "fail")


@pytest.mark.parametrize(
    ("key", "continues"),
    [("checkpoint.resume", True), ("checkpoint.from_step", True), ("train.lr", False)],
)
def test_a_run_continues_only_a_run_whose_other_settings_are_equal(tmp_path, key, continues):
    """`resume` changes the two settings that select a checkpoint; nothing else may differ."""
    settings = {"checkpoint.resume": "", "checkpoint.from_step": 0, "train.lr": 0.1}
    settings = {name: {"value": value} for name, value in settings.items()}
    bounds, born = {"steps_done": 20}, {"settings": settings | {key: {"value": "old"}}}
    before = directory.completed(tmp_path / "0-first", bounds, (), **born)
    own = rundir.read_json(before / rundir.RUN) or {}
    own["settings"] = settings | {"checkpoint.resume": {"value": str(before)}}
    assert (gate_check.continued(own, 20) is not None) is continues
