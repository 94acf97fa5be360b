"""How long a rank may stay in a phase follows from what its records tell of that phase."""

from __future__ import annotations

from console.diagnose.stall import Seen, limit_s
from console.supervisor.follow import Story
from trainers.contract.plan import Watch


def record(step, **fields):
    return {"v": 1, "attempt": 1, "rank": 0, "step": step, "ts": 1.0, "msg": "progress"} | fields


def story(*records):
    told = Story()
    told.take(record(2, steps_dt_s=[90.0, 30.0]))
    for step, fields in enumerate(records, 3):
        told.take(record(step, **fields))
    return told


def test_a_phase_has_its_own_percentile_and_others_that_of_the_steps():
    told = story({"steps_dt_s": [10.0], "dt_fetch_s": 0.5, "dt_forward_s": 6.0})
    assert told.p99_s(0, "fetch") == 0.5
    assert told.p99_s(0, "forward") == 6.0
    assert told.p99_s(0, "log") == told.p99_s(0) == 10.0
    assert told.p99_s(1, "fetch") is None


def test_of_many_steps_a_phase_is_as_long_as_it_can_have_been_in_one():
    told = story({"steps_dt_s": [1.0] * 19 + [21.0], "dt_fetch_s": 1.0, "dt_forward_s": 2.0})
    assert told.p99_s(0, "fetch") == 20.0
    assert told.p99_s(0, "forward") == 21.0


def test_phases_that_a_gpu_was_timed_in_do_not_bound_the_host():
    told = story({"steps_dt_s": [9.0], "dt_fetch_s": 0.1, "dt_forward_s": 1.0,
                  "gpu_mem_reserved": 5})  # fmt: skip
    assert told.p99_s(0, "fetch") == 0.1
    assert told.p99_s(0, "forward") == 9.0


def test_evaluation_and_saving_have_budgets_of_their_own():
    watch = Watch(stall_floor_s=10, startup_s=120, eval_s=40, save_s=50)

    def limit(phase, p99_s=None):
        return limit_s(Seen(0, 1, "S", 9, phase, 0.0, 0, p99_s), watch)

    assert [limit(phase) for phase in ("eval", "save", "halt", "forward")] == [40, 50, 50, 10]
    assert limit("eval", 20.0) == 100
    assert limit_s(Seen(0, 1, "S", 9, "save", 0.0), Watch(startup_s=77)) == 77


def test_one_absurd_step_does_not_stick():
    told = story({})
    told.take(record(10**12))
    told.take(record(5))
    assert told.steps[0] == 5
    told.take(record(3, msg="checkpoint"))
    assert told.steps[0] == 5, "a checkpoint is of a step before"
    told.take(record(10**12, msg="resume"))
    told.take(record(20, msg="resume"))
    assert told.first_step == 21
