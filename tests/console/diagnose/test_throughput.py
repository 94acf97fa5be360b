"""The rules `throughput_drop` and `loader_slow`, and rules on records while no record comes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from console.diagnose.rank_evidence import RankEvidence
from console.diagnose.readings import History, Readings
from console.plan import Watch, WatchRule
from console.sources.pace import progress_of
from tests.console.diagnose.watched import Watched

FAST, SLOW = 1000.0, 50.0
COLLAPSED = 0.95


class Run(Watched):
    """Updates a watchdog once a second; `kinds` has the kind of each change."""

    def __init__(self, rule: str = "throughput_drop", action: str = "halt", **given):
        super().__init__(Watch(rules={rule: WatchRule(**given)}), rule, action)
        self.step, self.kinds = 0, list[str]()

    def tick(self, phase: str, *records: dict) -> None:
        fresh = [progress_of({"rank": rank, "step": self.step} | each)
                 for each in records for rank in (0, 1)]  # fmt: skip
        ranks = tuple(RankEvidence(rank, 100, "S", self.step, phase, 0.1) for rank in (0, 1))
        self.kinds += [each.kind for each in self.poll(*fresh, ranks=ranks)]

    def train(self, seconds: int, toks_per_s: float = FAST, every: int = 1, **fields) -> None:
        """Finishes a step, with a record, every `every` seconds."""
        for second in range(1, seconds + 1):
            if second % every:
                self.tick("forward")
            else:
                self.step += 1
                self.tick("forward", {"toks_per_s": toks_per_s} | fields)

    def wait(self, seconds: int, phase: str) -> None:
        for _ in range(seconds):
            self.tick(phase)


@pytest.mark.parametrize("phase", ["eval", "save", "halt", "forward"])
def test_a_run_that_was_slow_is_not_halted_while_no_new_record_says_so(phase):
    run = Run()
    run.train(700)
    run.train(16, SLOW, every=2)
    run.wait(600, phase)
    run.train(100)
    assert run.kinds == []


@pytest.mark.parametrize("phase", ["eval", "forward"])
def test_the_time_without_records_does_not_count_for_an_action_on_throughput(phase):
    run = Run()
    run.train(700)
    run.train(160, SLOW, every=20)
    run.train(70, SLOW, every=2)
    assert run.kinds == ["raise"]
    run.wait(600, phase)
    assert run.kinds == ["raise"]
    run.train(200, SLOW, every=20)
    assert run.kinds == ["raise", "act"]


def test_an_evaluation_is_no_loss_of_pace():
    run = Run()
    run.train(300)
    run.wait(300, "eval")
    run.train(30)
    assert run.dog._history.pace_ratio == pytest.approx(1.0, abs=0.05)


def test_a_lost_pulse_is_no_loss_of_pace():
    history = History()
    for second in range(600):
        rank = RankEvidence(0, 100, "S", second, "forward", 0.1)
        lost = replace(rank, rank=1, step=300, doubt="lost")
        history.update(Readings(mono=float(second), ts=1e9 + second, ranks=(rank, lost)))
    assert history.pace_ratio == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(("step_s", "every"), [(1, 1), (20, 1), (120, 1), (10, 20), (600, 1)])
def test_slow_steps_are_no_loss_of_pace_and_slower_steps_are(step_s, every):
    """`every` is the number of steps until a new step is seen, as in records."""
    history, took_s = History(), every * step_s
    slow_from = 30 * max(took_s, 10)
    ratios = list[float | None]()
    for second in range(slow_from + 20 * max(took_s, 10)):
        trained_s = min(second, slow_from) + max(0, second - slow_from) / 10
        rank = RankEvidence(0, 100, "S", every * int(trained_s // took_s), "forward", 0.1)
        history.update(Readings(mono=float(second), ts=1e9 + second, ranks=(rank,)))
        ratios.append(history.pace_ratio)
    steady = ratios[slow_from // 2 : slow_from]
    assert [min(steady), max(steady)] == pytest.approx([1.0, 1.0], abs=0.3)
    assert 0.05 < (ratios[-1] or 0.0) < 0.3


def test_a_lasting_drop_stays_an_alert_until_the_throughput_is_back():
    run = Run(action="warn")
    run.train(100)
    run.train(2000, FAST / 2)
    assert run.kinds == ["raise"]
    run.train(300)
    assert run.kinds == ["raise", "clear"]
    run.train(200, FAST / 2)
    assert run.kinds == ["raise", "clear", "raise"]


def test_a_small_lasting_drop_stays_an_alert_if_the_plan_has_a_higher_limit():
    run = Run(action="warn", threshold=0.9)
    run.train(100)
    run.train(2000, 0.8 * FAST)
    assert run.kinds == ["raise"]
    run.train(1000)
    assert run.kinds == ["raise", "clear"]


def test_a_drop_in_a_run_of_many_records_a_second_is_reported():
    run = Run(action="warn")
    for rate in (FAST, FAST / 2):
        for _ in range(200):
            run.step += 1
            run.tick("forward", *[{"toks_per_s": rate}] * 8)
    assert run.kinds == ["raise"]


def test_a_collapsed_gate_in_records_before_an_evaluation_halts_nothing_in_it():
    run = Run("gate_collapse")
    run.train(100)
    run.train(3, gate_max_gate=COLLAPSED)
    run.wait(600, "eval")
    assert run.kinds == []
    run.train(190, gate_max_gate=COLLAPSED)
    assert run.kinds == ["raise", "act"]


def test_one_record_of_a_loss_that_is_not_finite_does_not_last_until_the_next_record():
    run = Run("non_finite", for_s=20)
    run.train(10, loss=2.0)
    run.train(1, loss="nan")
    run.wait(600, "eval")
    assert run.kinds == ["raise"]


# --- loader_slow -----------------------------------------------------------------------------


def fetching(run: Run, share: float, step_s: int, steps: int = 1) -> None:
    """Trains until a record of `steps` steps, in which fetch takes `share` of the time."""
    run.wait(step_s * steps - 1, "forward")
    run.step += steps
    run.tick("forward", {"dt_fetch_s": share * step_s, "steps_dt_s": [float(step_s)] * steps})


@pytest.mark.parametrize("step_s", [10, 40, 130])
@pytest.mark.parametrize("every", [1, 20])
def test_one_step_that_waits_for_data_is_no_slow_loader(step_s, every):
    run = Run("loader_slow", "warn")
    for step in range(1, 6):
        fetching(run, 0.55 if step == 5 else 0.02, step_s)
    for _ in range(4):
        fetching(run, 0.02, step_s, every)
    assert run.kinds == []


@pytest.mark.parametrize("every", [1, 20])
def test_a_loader_that_stays_slow_is_reported(every):
    run = Run("loader_slow", "warn")
    for share in (0.02, 0.6):
        for _ in range(80 // every):
            fetching(run, share, 10, every)
    assert run.kinds == ["raise"]
