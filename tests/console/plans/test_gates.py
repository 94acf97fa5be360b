"""Gates over recorded heartbeats: value, window, bound, result."""

from __future__ import annotations

import json

import pytest

from console.plans import gates
from console.plans.gates import Summary, evaluate, overall
from console.supervisor.follow import Files
from trainers.contract.errors import UsageError


def summary(*records, **more):
    found = Summary()
    for step, record in enumerate(records, start=1):
        found.take({"msg": "progress", "rank": 0, "step": step} | record)
    found.stalls = more.get("stalls", 0)
    return found


def result(found, **bounds):
    (gate,) = evaluate(found, bounds)
    return gate


def test_steps_done_counts_finished_steps_and_believes_metrics():
    done = summary({}, {}, {})
    assert result(done, steps_done=3).result == "pass"
    assert result(done, steps_done=4).result == "fail"
    done.take_metrics({"steps_done": 4})
    assert result(done, steps_done=4).value == 4
    assert result(summary(), steps_done=1).result == "unknown"


def test_one_nonfinite_loss_fails_and_its_step_is_named():
    gate = result(summary({"loss": 2.0}, {"loss": "nan"}, {"loss": 1.0}), loss_finite=True)
    assert (gate.result, gate.value) == ("fail", 1)
    assert "step 2" in gate.why
    assert result(summary({"loss": 2.0}), loss_finite=True).result == "pass"
    assert result(summary({}), loss_finite=True).result == "unknown"


def test_a_gradient_norm_of_zero_or_nan_fails():
    for bad in (0.0, "nan"):
        for order in ((1.0, bad), (bad, 1.0)):
            norms = ({"grad_norm": norm} for norm in order)
            assert result(summary(*norms), grad_norm_above=0).result == "fail", order
    assert result(summary({"grad_norm": 0.1}), grad_norm_above=0).result == "pass"


def test_loss_falls_compares_both_ends_and_needs_enough_records():
    losses = [{"loss": x} for x in (5, 5, 5, 5, 5, 4, 3, 3, 3, 3, 3)]
    gate = result(summary(*losses), loss_falls=True)
    assert (gate.result, gate.value) == ("pass", pytest.approx(2.0))
    assert result(summary(*losses), loss_falls=2.5).result == "fail"
    assert result(summary(*losses[:9]), loss_falls=True).result == "unknown"
    flat = [{"loss": 5.545 + 0.01 * (i % 2)} for i in range(40)]
    assert result(summary(*flat), loss_falls=True).result == "fail"


def test_bytes_right_is_the_last_value_of_rank_0():
    found = summary({"bytes_right": 0.95}, {"bytes_right": 0.5}, {"rank": 1, "bytes_right": 1.0})
    gate = result(found, bytes_right=0.9)
    assert (gate.value, gate.result, gate.window) == (0.5, "fail", "record of step 2")
    assert result(summary({}), bytes_right=0.9).result == "unknown"


def test_a_stall_fails_no_stall():
    assert result(summary({}, stalls=1), no_stall=True).result == "fail"
    assert result(summary({}), no_stall=True).result == "pass"


def test_throughput_is_a_median_and_memory_the_fullest_rank():
    found = summary(*({"toks_per_s": x} for x in (1, 100, 102, 101, 5000)))
    assert result(found, toks_per_s_above=100).value == 101
    memory = summary({"gpu_mem_reserved": 10}, {"rank": 1, "gpu_mem_reserved": 30})
    assert result(memory, gpu_mem_below_mib=30).result == "pass"
    assert result(memory, gpu_mem_below_mib=29).result == "fail"


def test_one_failed_gate_fails_the_phase_and_one_unknown_leaves_it_open():
    done = summary({"loss": 1.0})
    assert overall(evaluate(done, {"steps_done": 1, "loss_finite": True})) == "pass"
    assert overall(evaluate(done, {"steps_done": 1, "bytes_right": 0.9})) == "unknown"
    assert overall(evaluate(done, {"steps_done": 2, "bytes_right": 0.9})) == "fail"


@pytest.mark.parametrize(
    ("bounds", "says"),
    [
        ({"loss_fals": True}, "did you mean 'loss_falls'"),
        ({"steps_done": True}, "takes a number"),
        ({"no_stall": False}, "takes true"),
        ({"loss_falls": False}, "true or a number"),
        ({"bytes_right": "many"}, "takes a number"),
    ],
)
def test_a_gate_that_is_not_there_is_refused_with_a_suggestion(bounds, says):
    with pytest.raises(UsageError, match=says):
        gates.check(bounds, "plan.yaml")


def test_the_files_give_the_same_answer_as_the_live_records(tmp_path):
    records = [
        {"v": 1, "rank": rank, "step": step, "attempt": 1, "ts": 1.0, "msg": "progress",
         "loss": 5.0 - step / 10, "grad_norm": 1.0}
        for step in range(1, 21) for rank in (0, 1)
    ]  # fmt: skip
    live = Summary()
    for record in records:
        live.take(record)
    for rank in (0, 1):
        lines = [json.dumps(r) for r in records if r["rank"] == rank]
        (tmp_path / f"heartbeat_rank{rank}.jsonl").write_text("\n".join([*lines, "{broken", ""]))
    read = Summary()
    files, behind = Files(tmp_path, 1, 2), True
    while behind:
        news = files.look(heartbeats=True)
        behind = news.behind
        for record in news.records:
            read.take(record)
    bounds = {"steps_done": 20, "loss_finite": True, "loss_falls": True, "no_stall": True}
    assert evaluate(read, bounds) == evaluate(live, bounds)
