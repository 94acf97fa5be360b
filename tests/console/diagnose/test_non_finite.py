"""The watch rule `non_finite`: steps with a non-finite loss or gradient are reported."""

from __future__ import annotations

import pytest

from console.diagnose.rank_evidence import RankEvidence
from console.diagnose.readings import Readings
from console.diagnose.watchdog import Watchdog
from console.plan import Watch, WatchRule
from console.sources.pace import progress_of

GOOD = {"loss": 2.0, "grad_norm": 1.0}
NAN = {"loss": "nan", "grad_norm": "nan"}


def record(step: int, rank: int = 0, **fields):
    return progress_of({"rank": rank, "step": step} | GOOD | fields)


def pulse(step: int, count: int = -1, rank: int = 0) -> RankEvidence:
    return RankEvidence(rank, 100 + rank, "S", step, "forward", 0.1, nonfinite_steps=count)


class Run:
    """Updates a watchdog; `poll` returns the changes of the rule."""

    def __init__(self, watch: Watch | None = None, action: str = "warn"):
        self.dog, self.mono = Watchdog(watch or Watch(), {"non_finite": action}), 0.0
        self.newest = {}

    def poll(self, *fresh, ranks=(), after_s=1.0):
        self.mono += after_s
        self.newest |= {each.rank: each for each in fresh}
        now = Readings(mono=self.mono, ts=1e9 + self.mono, fresh=fresh, progress=self.newest,
                       ranks=ranks)  # fmt: skip
        return [(c.kind, c.text) for c in self.dog.update(now) if c.rule.name == "non_finite"]


def test_a_step_between_two_polls_is_reported_and_stays_until_the_attempt_ends():
    run = Run()
    assert run.poll(*map(record, range(1, 10))) == []
    steps = [record(10, **NAN), record(11), record(12)]
    text = "the loss of step 10 was not finite (1 step in this attempt)"
    assert run.poll(*steps) == [("raise", text)]
    for step in range(13, 2000):
        assert run.poll(record(step)) == []
    assert run.dog.raised() == ("non_finite",)


def test_a_step_without_a_record_is_reported_from_the_pulse_or_the_next_record():
    run = Run()
    assert run.poll(record(5, nonfinite_loss_steps=0), ranks=(pulse(6, 0),)) == []
    text = "the loss of a step from 6 to 8 was not finite (1 step in this attempt)"
    assert run.poll(ranks=(pulse(8, 1),)) == [("raise", text)]
    assert run.poll(record(10, nonfinite_loss_steps=1), ranks=(pulse(11, 1),)) == []
    run = Run()
    assert run.poll(record(5)) == []
    text = "the loss of rank 1 of step 10 or before was not finite (2 steps in this attempt)"
    assert run.poll(record(10, 1, nonfinite_loss_steps=2)) == [("raise", text)]


def test_later_steps_are_reported_again_and_steps_in_a_row_once():
    run = Run()
    assert [kind for kind, _ in run.poll(record(10, **NAN))] == ["raise"]
    for step in range(11, 200):
        assert run.poll(record(step, **NAN, nonfinite_loss_steps=step - 9)) == []
    assert run.poll(record(200, nonfinite_loss_steps=190)) == []
    text = "the loss of step 201 was not finite (191 steps in this attempt)"
    assert run.poll(record(201, **NAN, nonfinite_loss_steps=191)) == [
        ("clear", "replaced by the next alert"), ("raise", text),
    ]  # fmt: skip
    rises = 0
    for step in range(202, 500):
        rises += len(run.poll(record(step, **(NAN if step % 2 else GOOD)))) // 2
    assert rises == 4, "one alert a minute"


def test_an_overflow_is_reported_unless_it_only_lowers_the_loss_scale():
    run, inf = Run(), {"grad_norm": "inf"}
    assert run.poll(record(3, **inf, overflow_steps=1, scale_lowered_steps=1)) == []
    text = "the gradient norm of step 9 was not finite (1 step in this attempt)"
    found = run.poll(record(9, **inf, overflow_steps=2, scale_lowered_steps=1), record(10))
    assert found == [("raise", text)]
    assert Run().poll(record(3, **inf)) == [], "a foreign program may scale its loss too"


def test_an_action_needs_records_that_are_not_finite_now():
    """An earlier step keeps the alert raised, but neither halts the run nor withholds a halt."""
    run = Run(action="halt")
    kinds = [kind for kind, _ in run.poll(record(10, **NAN), record(11))]
    assert kinds == ["raise"]
    for step in range(12, 300):
        assert run.poll(record(step), ranks=(pulse(step, 1),)) == []
    found = [run.poll(record(step, **NAN), record(step, 1)) for step in range(300, 304)]
    assert [kind for change in found for kind, _ in change] == ["clear", "raise", "withhold"]
    assert run.poll(record(304)) == [("lapse", "halt is no longer due")]
    assert run.poll(record(305, **NAN), record(305, 1, **NAN))[-1][0] == "act"


@pytest.mark.parametrize("since", [1, 40])
def test_an_action_needs_three_times_the_time_of_the_rule(since):
    run = Run(Watch(rules={"non_finite": WatchRule(for_s=20)}), action="halt")
    kinds = []
    for step in range(1, 120):
        fields = NAN if step == 1 or step >= since else GOOD
        kinds += [(step, kind) for kind, _ in run.poll(record(step, 0, **fields),
                                                       record(step, 1, **fields))]  # fmt: skip
    acted = [step for step, kind in kinds if kind == "act"]
    assert kinds[0] == (21, "raise")
    assert acted == [since + 60]


def test_a_gradient_that_is_zero_in_three_records_between_two_polls_is_reported():
    dog = Watchdog(Watch())
    zeros = [record(step, grad_norm=0.0) for step in (1, 2, 3)]
    now = [Readings(mono=mono, ts=1e9, fresh=fresh, progress={0: fresh[-1]})
           for mono, fresh in ((1.0, [*zeros, record(4)]), (2.0, [record(5)]))]  # fmt: skip
    found = [(c.kind, c.rule.name) for each in now for c in dog.update(each)]
    assert found == [("raise", "zero_gradient"), ("clear", "zero_gradient")]


def test_the_share_of_fetch_is_that_of_all_records_since_the_last_poll():
    """With many steps a second, the newest record alone would change from poll to poll."""
    dog, kinds = Watchdog(Watch()), []
    for second in range(200):
        shares = (0.9, 0.9, 0.1) if second % 5 else (0.9, 0.1, 0.9)
        fresh = [record(3 * second + n, dt_fetch_s=share, steps_dt_s=[1.0])
                 for n, share in enumerate(shares)]  # fmt: skip
        now = Readings(mono=float(second), ts=1e9, fresh=fresh, progress={0: fresh[-1]})
        kinds += [c.text for c in dog.update(now) if c.rule.name == "loader_slow"]
    assert kinds == ["rank 0 waits for data for 63% of its step time"]
