"""The watch rule `non_finite`; the last test is about `loader_slow`."""

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
    text = "the loss was not finite in 1 step of this attempt, last at step 10 or before"
    assert run.poll(*steps) == [("raise", text)]
    for step in range(13, 2000):
        assert run.poll(record(step)) == []
    assert run.dog.raised() == ("non_finite",)


def test_a_step_without_a_record_is_reported_from_the_pulse_or_the_next_record():
    run = Run()
    assert run.poll(record(5, nonfinite_loss_steps=0), ranks=(pulse(6, 0),)) == []
    text = "the loss was not finite in 1 step of this attempt, last at step 8 or before"
    assert run.poll(ranks=(pulse(8, 1),)) == [("raise", text)]
    assert run.poll(record(10, nonfinite_loss_steps=1), ranks=(pulse(11, 1),)) == []
    text = "the loss of rank 1 was not finite in 2 steps of this attempt, last at step 10 or before"
    assert Run().poll(record(10, 1, nonfinite_loss_steps=2)) == [("raise", text)]


def test_later_steps_are_reported_again_every_ten_minutes():
    run = Run()
    found = [kind for step in range(10, 1300) for kind, _ in run.poll(record(step, **NAN))]
    assert found == ["raise", *["clear", "raise"] * 2]


def test_an_overflow_is_reported_unless_it_only_lowers_the_loss_scale():
    run, inf = Run(), {"grad_norm": "inf"}
    assert run.poll(record(3, **inf, overflow_steps=1, scale_lowered_steps=1)) == []
    text = "the gradient norm was not finite in 1 step of this attempt, last at step 9 or before"
    found = run.poll(record(9, **inf, overflow_steps=2, scale_lowered_steps=1), record(10))
    assert found == [("raise", text)]
    assert Run().poll(record(3, **inf)) == [], "a foreign program may scale its loss too"


def test_an_action_needs_records_that_are_not_finite_now():
    """An earlier non-finite step keeps the alert raised, but leads to no action."""
    run = Run(action="halt")
    kinds = [kind for kind, _ in run.poll(record(10, **NAN), record(11))]
    assert kinds == ["raise"]
    for step in range(12, 300):
        assert run.poll(record(step), ranks=(pulse(step, 1),)) == []
    found = [run.poll(record(step, **NAN), record(step, 1)) for step in range(300, 304)]
    assert [kind for change in found for kind, _ in change] == ["withhold"]
    assert run.poll(record(304)) == []
    assert run.poll(record(305, **NAN), record(305, 1, **NAN))[-1][0] == "act"


@pytest.mark.parametrize(("since", "acts_at"), [(1, 81), (40, 99)])
def test_an_action_needs_three_times_the_time_of_the_rule(since, acts_at):
    run = Run(Watch(rules={"non_finite": WatchRule(for_s=20)}), action="halt")
    kinds = []
    for step in range(1, 120):
        fields = NAN if step == 1 or step >= since else GOOD
        kinds += [(step, kind) for kind, _ in run.poll(record(step, 0, **fields),
                                                       record(step, 1, **fields))]  # fmt: skip
    acted = [step for step, kind in kinds if kind == "act"]
    assert kinds[0] == (21, "raise")
    assert acted == [acts_at]


def test_the_share_of_fetch_is_that_of_all_records_since_the_last_poll():
    """With many steps a second, the share in the newest record changes from poll to poll."""
    dog, kinds = Watchdog(Watch()), []
    for second in range(200):
        shares = (0.9, 0.9, 0.1) if second % 5 else (0.9, 0.1, 0.9)
        fresh = [record(3 * second + n, dt_fetch_s=share, steps_dt_s=[1.0])
                 for n, share in enumerate(shares)]  # fmt: skip
        now = Readings(mono=float(second), ts=1e9, fresh=fresh, progress={0: fresh[-1]})
        kinds += [c.text for c in dog.update(now) if c.rule.name == "loader_slow"]
    assert kinds == ["rank 0 waits for data for 63% of its step time"]
