"""Gates over recorded heartbeats: value, span, bound, result, and what is missing."""

from __future__ import annotations

import json

import pytest

from console.plans import gates
from console.plans.gates import Summary, evaluate, overall
from console.sources.record_files import RecordFiles
from console.sources.reducer import Reducer
from console.sources.series import Series
from console.supervisor.run_files import Files
from tests.console.plans.histories import Written, attempt, lines, told
from trainers.contract.errors import UsageError


def summary(*records, **counted):
    """One rank, one attempt, one record a step; `rank` in a record names another one."""
    ranks = {0: Written(0)} | {r["rank"]: Written(r["rank"]) for r in records if "rank" in r}
    for step, record in enumerate(records, start=1):
        fields = {key: value for key, value in record.items() if key != "rank"}
        ranks[record.get("rank", 0)].add("progress", step, **fields)
    for written in ranks.values():
        written.add("exit", max(len(records), 1), exit_code=0)
    return told(*ranks.values(), **counted)


def result(found, **bounds):
    (gate,) = evaluate(found, bounds)
    return gate


def test_steps_done_counts_finished_steps():
    done = summary({}, {}, {})
    assert result(done, steps_done=3).result == "pass"
    assert result(done, steps_done=4).result == "fail"
    assert result(summary(), steps_done=1).result == "unknown"


def test_one_nonfinite_loss_fails_and_its_step_is_named():
    gate = result(summary({"loss": 2.0}, {"loss": "nan"}, {"loss": 1.0}), loss_finite=True)
    assert (gate.result, gate.value) == ("fail", 1)
    assert "step 2" in gate.why
    assert result(summary({"loss": 2.0}), loss_finite=True).result == "pass"
    assert result(summary({}), loss_finite=True).result == "unknown"


def test_steps_that_were_not_finite_between_two_records_fail():
    """A trainer that writes every tenth step counts the others in `nonfinite_loss_steps`."""
    written = Written()
    written.add("progress", 10, loss=2.0, nonfinite_loss_steps=0)
    written.add("progress", 20, loss=2.0, nonfinite_loss_steps=4)
    written.add("exit", 20, exit_code=0, nonfinite_loss_steps=4)
    gate = result(told(written), loss_finite=True)
    assert (gate.result, gate.value, gate.unit) == ("fail", 4, "steps")


def test_a_program_that_does_not_count_needs_a_record_of_every_step():
    every = [{"loss": 2.0}, {"loss": 1.5}, {}]
    assert result(summary(*every), loss_finite=True).result == "pass", "nobody has the last loss"
    gate = result(summary({"loss": 2.0}, {}, {"loss": 1.0}), loss_finite=True)
    assert (gate.result, "not every step has a record" in gate.why) == ("unknown", True)
    written = Written()
    for step in (5, 10):
        written.add("progress", step, loss=1.0, steps_dt_s=[0.1] * 5)
    written.add("exit", 10, exit_code=0)
    assert result(told(written), loss_finite=True).result == "unknown"


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
    gate = result(found, bytes_right=0.4)
    assert (gate.value, gate.result) == (0.5, "pass")
    assert gate.window == "surviving steps, record of step 2"
    assert result(summary({}), bytes_right=0.9).result == "unknown"


def test_a_stall_fails_no_stall_and_stalls_at_most_bounds_them():
    assert result(summary({}, stalls=1), no_stall=True).result == "fail"
    assert result(summary({}), no_stall=True).result == "pass"
    assert result(summary({}, stalls=2), stalls_at_most=2).result == "pass"
    assert result(summary({}, stalls=3), stalls_at_most=2).result == "fail"


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
        ({"restarts_at_most": True}, "takes a number"),
    ],
)
def test_a_gate_that_is_not_there_is_refused_with_a_suggestion(bounds, says):
    with pytest.raises(UsageError, match=says):
        gates.check(bounds, "plan.yaml")


def test_the_files_give_the_same_answer_as_the_live_records(tmp_path):
    written = [Written(rank) for rank in (0, 1)]
    for step in range(1, 21):
        for each in written:
            each.add("progress", step, loss=5.0 - step / 10, grad_norm=1.0)
    for each in written:
        each.add("exit", 20, exit_code=0)
    for rank, each in enumerate(written):
        text = [json.dumps(record) for record in each.records]
        (tmp_path / f"heartbeat_rank{rank}.jsonl").write_text("\n".join([*text, "{broken", ""]))
    read = Summary(2, 1, 0)
    reducer = Reducer(Series(keeps=False), read)
    files, behind = Files(tmp_path, 1, 2, RecordFiles(tmp_path)), True
    while behind:
        news = files.look(heartbeats=True)
        behind = news.behind
        for batch in news.batches:
            reducer.take(batch)
    bounds = {"steps_done": 20, "loss_finite": True, "loss_falls": True, "no_stall": True}
    found = evaluate(read, bounds)
    assert found == evaluate(told(*written), bounds)
    assert overall(found) == "pass"


# --- spans: all attempts, or the steps that survived --------------------------------------------


def killed_then_resumed(**figures):
    """Killed in step 26 after 25 steps, goes on behind the checkpoint of step 20, up to 30."""
    first = attempt(1, range(1, 26), exit_code=None, **figures)
    return first, attempt(2, range(21, 31), loss_of=1, **figures)


def test_a_run_is_measured_over_both_attempts_and_restarts_are_bounded():
    first, second = killed_then_resumed(grad_norm=1.0)
    found = told(first, second)
    found.take_end(1, 0, first.pulse(26, 0))
    bounds = {"steps_done": 30, "loss_finite": True, "grad_norm_above": 0, "no_stall": True}
    assert overall(evaluate(found, bounds)) == "pass"
    assert result(found, restarts_at_most=1).result == "pass"
    assert result(found, restarts_at_most=0).result == "fail"


def test_steps_done_is_measured_where_the_last_attempt_had_no_step_to_do():
    """The first crashed behind its last checkpoint; the second only says that it is done."""
    first, second = attempt(1, range(1, 31), exit_code=None), attempt(2, range(31, 31))
    found = told(first, second)
    found.take_end(1, 0, first.pulse(30, 0))
    gate = result(found, steps_done=30)
    assert (gate.value, gate.result) == (30, "pass")


def test_a_nan_in_the_first_attempt_fails_although_no_record_has_it():
    """The rank was killed before it could write the record; its pulse has the count."""
    first, second = killed_then_resumed()
    found = told(first, second, stalls=1)
    found.take_end(1, 0, first.pulse(26, 3))
    assert result(found, loss_finite=True).result == "fail"
    assert result(found, no_stall=True).result == "fail"


def test_what_was_done_again_is_not_measured_twice():
    first = attempt(1, range(1, 26), exit_code=None, gpu_mem_reserved=10)
    first.add("progress", 26, loss=9.0, gpu_mem_reserved=99, bytes_right=1.0, toks_per_s=9e9)
    second = attempt(2, range(21, 31), gpu_mem_reserved=10, bytes_right=0.5, toks_per_s=100)
    found = told(first, second)
    found.take_end(1, 0, first.pulse(27, 0))
    assert result(found, gpu_mem_below_mib=10).result == "pass"
    assert result(found, bytes_right=0.9).result == "fail"
    assert result(found, toks_per_s_above=101).result == "fail"


def test_the_largest_memory_of_many_is_never_forgotten_by_a_roll_back():
    for steps, exact in ((60, True), (500, False)):
        rising = attempt(1, range(1, 2), exit_code=None)
        for step in range(2, steps):
            rising.add("progress", step, gpu_mem_reserved=step, nonfinite_loss_steps=0)
        for start in (3, 30, 50, 400):
            found = told(rising, attempt(2, range(start, start + 3), gpu_mem_reserved=1))
            found.take_end(1, 0, rising.pulse(steps, 0))
            gate = result(found, gpu_mem_below_mib=1e9)
            largest = min(start, steps) - 1
            assert gate.value == largest if exact else gate.value >= largest
            assert gate.result == "pass"


def test_a_window_that_a_roll_back_reaches_behind_is_unknown():
    first = attempt(1, range(1, 3000), exit_code=None, toks_per_s=100)
    found = told(first, attempt(2, range(20, 30), toks_per_s=100))
    found.take_end(1, 0, first.pulse(3000, 0))
    assert result(found, toks_per_s_above=50).result == "unknown"
    assert result(found, loss_falls=-1).result == "pass", "its ten records stand in the window"
    more = told(first, attempt(2, range(20, 80), toks_per_s=100))
    more.take_end(1, 0, first.pulse(3000, 0))
    assert result(more, toks_per_s_above=50).result == "pass"


# --- gaps ---------------------------------------------------------------------------------------

EVERY_BOUND = {
    "steps_done": 1, "loss_finite": True, "grad_norm_above": 0, "no_stall": True, "loss_falls": -1,
    "bytes_right": 0.5, "toks_per_s_above": 1, "gpu_mem_below_mib": 100, "restarts_at_most": 9,
    "stalls_at_most": 9,
}  # fmt: skip
FIGURES = {"grad_norm": 1.0, "bytes_right": 1.0, "toks_per_s": 9.0, "gpu_mem_reserved": 1.0}


def whole(rank: int = 0) -> Written:
    return attempt(1, range(1, 31), rank, **FIGURES)


def test_every_gate_of_the_table_is_tried_here():
    assert EVERY_BOUND.keys() == gates.RULES.keys()


@pytest.mark.parametrize("name", EVERY_BOUND)
def test_a_gate_passes_over_whole_records_only(name):
    bounds = {name: EVERY_BOUND[name]}
    assert overall(evaluate(told(whole()), bounds)) == "pass"
    holed = whole()
    del holed.records[10:13]
    (gate,) = evaluate(told(holed), bounds)
    assert gate.result == "unknown"
    assert "rank 0, attempt 1: records 11 to 13 are missing" in gate.why
    cut = whole()
    del cut.records[-1:]
    (gate,) = evaluate(told(cut), bounds)
    assert (gate.result, "the number of records after" in gate.why) == ("unknown", True)
    without = whole()
    for record in without.records:
        del record["n"]
    assert overall(evaluate(told(without), bounds)) == "unknown"
    assert overall(evaluate(Summary(1, 1, 0), bounds)) == "unknown"
    two = evaluate(told(whole(), world=2), bounds)
    source = gates.RULES[name].source
    assert overall(two) == ("pass" if source == gates.RANK0 else "unknown"), source


def test_a_tail_that_the_pulse_knows_of_is_missing():
    first, second = killed_then_resumed(grad_norm=1.0)
    pulse = first.pulse(26, 0)
    del first.records[-2:]
    found = told(first, second)
    found.take_end(1, 0, pulse)
    gate = result(found, grad_norm_above=0)
    assert (gate.result, gate.why) == ("unknown", "rank 0, attempt 1: records 25 to 26 are missing")
    assert result(found, loss_finite=True).result == "pass", "the pulse has the count"
    assert result(found, steps_done=30).result == "pass", "those steps were done again"


def test_a_hole_in_steps_that_were_done_again_matters_to_all_attempts_only():
    for numbers, survives in (((24, 25), False), ((10, 11), True)):
        first, second = killed_then_resumed()
        pulse = first.pulse(26, 0)
        first.records = [r for r in first.records if r["n"] not in numbers]
        found = told(first, second)
        found.take_end(1, 0, pulse)
        assert result(found, steps_done=30).result == ("unknown" if survives else "pass")
        assert result(found, loss_finite=True).result == "unknown"


def test_one_absurd_step_is_not_believed():
    """In the newest progress record, in the exit record, or in one that the next one corrects."""
    for place, expected in ((-2, "unknown"), (-1, "unknown"), (10, "pass")):
        written = whole()
        pulse = written.pulse(30, 0)
        written.records[place]["step"] = 10**12
        found = told(written)
        found.take_end(1, 0, pulse)
        assert result(found, steps_done=30).result == expected, place


def test_an_absurd_step_in_an_exit_record_needs_a_second_source():
    written = whole()
    written.records[-1]["step"] = 10**12
    gate = result(told(written), steps_done=31)
    assert (gate.value, gate.result) == (30, "fail")


def test_a_stall_count_or_an_attempt_that_is_lost_leaves_gates_unknown():
    found = told(whole())
    found.stalls = None
    gate = result(found, no_stall=True)
    assert (gate.result, "stalls before is lost" in gate.why) == ("unknown", True)
    found.count_stall()
    assert result(found, no_stall=True).result == "fail"
    found = told(whole())
    found.attempts = None
    assert result(found, restarts_at_most=5).result == "unknown"
    found = told(whole(), attempt(2, range(21, 31)), attempts=1)
    assert "the supervisor counts 1" in result(found, restarts_at_most=5).why
    absurd = whole()
    absurd.records[7]["attempt"] = 10**6
    assert result(told(absurd, attempts=1), restarts_at_most=5).result == "unknown"


def test_ranks_that_tell_of_different_checkpoints_leave_the_surviving_steps_unknown():
    parts = [attempt(1, range(1, 31), rank) for rank in (0, 1)]
    parts += [attempt(2, range(21 + rank, 41), rank) for rank in (0, 1)]
    gate = result(told(*parts), steps_done=40)
    assert gate.why == "the ranks started attempt 2 at different steps: rank 0 at 21, rank 1 at 22"


def test_a_file_that_was_replaced_by_its_copy_is_read_again_and_counts_once():
    first, second = killed_then_resumed()
    found = told(first, second, first, second)
    once = told(first, second)
    for each in (found, once):
        each.take_end(1, 0, first.pulse(26, 0))
    bounds = {"steps_done": 30, "loss_finite": True, "loss_falls": -1}
    assert evaluate(found, bounds) == evaluate(once, bounds)
    assert overall(evaluate(found, bounds)) == "pass"


def test_a_second_writer_under_the_same_number_is_not_taken_for_a_copy():
    first, other = whole(), whole()
    assert "exists twice" in result(told(first, other), loss_finite=True).why


def test_a_rank_that_died_before_it_joined_leaves_no_gap():
    found = told(attempt(2, range(1, 31)))
    assert result(found, no_stall=True).why == "rank 0, attempt 1: no record"
    found.take_end(1, 0, None)
    assert result(found, no_stall=True).result == "pass"


def test_what_supervisor_json_keeps_says_the_same_to_the_next_reader():
    first, second = killed_then_resumed()
    found = told(first, second, stalls=1)
    found.take_end(1, 0, first.pulse(26, 0))
    found.take_end(2, 0, second.pulse(30, 0))
    document = json.loads(json.dumps(found.as_dict()))
    assert [end["attempt"] for end in document["ends"]] == [1], "exit records tell the others"
    read = Summary(1, 2, document["stalls"])
    read.take_document(document)
    for record in lines(first, second):
        read.take(record)
    bounds = {"steps_done": 30, "loss_finite": True, "no_stall": True, "stalls_at_most": 1}
    assert evaluate(read, bounds) == evaluate(found, bounds)
