"""The watch rules: when they are raised and cleared, and when an action is due."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from console import plan
from console.diagnose import rules, truth
from console.diagnose.rank_evidence import RankEvidence
from console.diagnose.readings import Readings, setting_values, steady_growth
from console.diagnose.rules import (
    ACTIONS,
    HALTING,
    RULES,
    STRONG,
    STRONG_TIMES,
    TABLE,
    Measured,
    Rule,
    check,
)
from console.diagnose.watchdog import Watchdog
from console.model import Gpu
from console.plan import Watch
from console.sources.pace import Progress, progress_of
from console.sources.procfs import HOST_MEMORY, LIMITED_MEMORY, Memory
from tests.console.diagnose.watched import GPU, Watched
from trainers.contract.errors import UsageError

WATCH = Watch(stall_floor_s=10, startup_s=60, stall_act_s=20)


def ranks(unchanged_s: float) -> tuple[RankEvidence, ...]:
    return (RankEvidence(0, 100, "S", 50, "forward", unchanged_s),)


def records(**fields):
    """Returns a function that makes readings with a new progress record with these fields."""
    return lambda tick: {"fresh": (p := progress_of({"rank": 0, "step": tick} | fields),),
                              "progress": {0: p}}  # fmt: skip


def fixed(**fields):
    return lambda tick: fields


def memory(free_mib, total_mib=1000.0):
    return (Memory(HOST_MEMORY, total_mib, free_mib),)


def gpus(**fields):
    return fixed(gpus=(replace(GPU, **fields),))


SETTINGS: dict[str, float] = {}
"""The settings of the run in `CASES`; a new rule that reads a setting needs an entry here."""
WELL = {"loss": 2.0, "grad_norm": 1.0, "gate_entropy_mean": 0.8, "toks_per_s": 1000.0}
WELL_S, SICK_S, RECOVERY_S = 200, 500, 1200
CASES = {
    "stall": (fixed(ranks=ranks(11)), None, fixed(ranks=ranks(1))),
    "throughput_drop": (
        lambda tick: records(toks_per_s=100.0)(tick) if tick < WELL_S + 100 else {},
        None, records(**WELL),
    ),
    "non_finite": (
        lambda tick: records(**WELL | ({"loss": "nan"} if tick == WELL_S + 1 else {}))(tick),
        None, None,
    ),
    "zero_gradient": (records(grad_norm=0), None, records(**WELL)),
    "gate_collapse": (records(gate_max_gate=0.95), None, records(gate_max_gate=0.5)),
    "gate_never_learned": (
        lambda tick: records(gate_entropy_mean=1.0986)(100 * tick), None, records(**WELL),
    ),
    "memory_ceiling": (
        fixed(memory=memory(40)), fixed(memory=memory(70)), fixed(memory=memory(90)),
    ),
    "gpu_memory_ceiling": (gpus(mem_used_mib=990), gpus(mem_used_mib=975), gpus()),
    "loader_slow": (
        records(dt_fetch_s=0.6, steps_dt_s=[1.0]), records(dt_fetch_s=0.45, steps_dt_s=[1.0]),
        records(dt_fetch_s=0.1, steps_dt_s=[1.0]),
    ),
    "gpu_lost": (gpus(state="lost"), None, gpus()),
    "gpu_silent": (gpus(state="error", why="silent"), None, gpus()),
    "xid": (gpus(xid=79, xids=(79,), xid_count=1), None, gpus()),
    "throttle": (gpus(throttle="heat"), None, gpus()),
    "disk": (fixed(disk_free_gib=2.5, checkpoint_gib=1.3), fixed(disk_free_gib=1.1),
             fixed(disk_free_gib=9.0)),
    "memory_growth": (
        lambda tick: {"rss_mib": {0: 50 * tick}, "memory": memory(2e4, 1e5)}, None,
        lambda tick: {"rss_mib": {0: 5000.0}, "memory": memory(2e4, 1e5)},
    ),
    "ecc": (gpus(ecc_uncorrected=4), None, gpus()),
    "clock": (fixed(newest_ts=5e9), None, fixed(newest_ts=1.0)),
}  # fmt: skip
"""For each rule that is no truth check, three functions that make readings; two may be None.

The first readings raise the rule, the second neither raise nor clear it, and the third clear it.
Without the third function, the rule stays raised until the attempt ends.
"""


class Clock(Watched):
    """Updates a watchdog once a second."""

    def run(self, make, seconds: int) -> list[tuple[float, str, str]]:
        """Returns the time, the kind and the rule of each change."""
        found = []
        for _ in range(seconds):
            given = make(int(self.mono) + 1) if make else {}
            found += [(self.mono, c.kind, c.rule.name) for c in self.poll(**given)]
        return found


def test_every_rule_has_a_case():
    assert CASES.keys() | {rule.name for rule in truth.ROWS} == RULES.keys()


@pytest.mark.parametrize("name", CASES)
def test_a_rule_is_raised_once_and_cleared_once(name):
    sick, between, well = CASES[name]
    clock = Clock(WATCH, settings=SETTINGS)
    assert clock.run(well or records(**WELL), WELL_S) == [], "healthy readings raise no rule"
    changes = clock.run(sick, SICK_S)
    assert [change[1:] for change in changes] == [("raise", name)]
    at = changes[0][0]
    assert at - WELL_S > RULES[name].for_s
    if between is not None:
        assert clock.run(between, 30) == []
    cleared = [change[1:] for change in clock.run(well or records(**WELL), RECOVERY_S)]
    assert cleared == ([("clear", name)] if well else [])


@pytest.mark.parametrize(
    ("name", "setting"),
    [("gate_collapse", {"attention.force_branch": "win"}),
     ("gate_never_learned", {"attention.uniform_gate": True})],
)  # fmt: skip
def test_the_fixed_weights_of_an_ablation_are_no_fault_of_the_gate(name, setting):
    assert Clock(WATCH, settings=setting).run(CASES[name][0], SICK_S) == []
    trained = {"attention.force_branch": "none", "attention.uniform_gate": False}
    assert Clock(WATCH, settings=trained).run(CASES[name][0], SICK_S)[0][1:] == ("raise", name)


@pytest.mark.parametrize(
    "name", ["stall", "zero_gradient", "gate_collapse", "gate_never_learned", "loader_slow",
             "gpu_lost", "throttle", "disk"],
)  # fmt: skip
def test_a_rule_that_a_former_watchdog_raised_is_not_raised_again_and_is_cleared(name):
    sick, _, well = CASES[name]
    clock = Clock(WATCH)
    clock.dog.restore([name, "no-rule"])
    assert clock.dog.raised() == (name,)
    assert clock.run(sick, 300) == []
    assert [change[1:] for change in clock.run(well, 300)] == [("clear", name)]


@pytest.mark.parametrize(("value", "raised"), [(20, 21.0), ("twenty", 1.0), (None, 1.0)])
def test_a_new_rule_is_one_row_and_sees_the_settings_of_the_run(monkeypatch, value, raised):
    def spike(now, history, _watch):
        warm = now.progress[0].step > history.number("train.warmup_steps", 0)
        return Measured(now.progress[0].loss if warm else 0.0, "the loss is too high")

    row = Rule("spike", "loss after the warm-up", "nats", 5.0, 4.0, 0.0, spike)
    monkeypatch.setattr(rules, "TABLE", (row,))
    settings = setting_values(
        {"settings": {"train.warmup_steps": {"value": value, "origin": "plan"}}}
    )
    clock = Clock(WATCH, settings=settings)
    assert clock.run(records(loss=9.0), 100) == [(raised, "raise", "spike")]


@pytest.mark.parametrize(("between", "kinds"), [(0.5, ["raise"]), (2.0, ["raise", "act"])])
def test_a_strong_action_needs_a_severe_value_without_a_pause(monkeypatch, between, kinds):
    row = Rule("odd", "an odd value", "", 1.0, 0.0, 10.0,
               lambda now, _history, _watch: Measured(now.disk_free_gib, "it is odd"),
               lambda _now, _history: "", action="halt", severe=2.0)  # fmt: skip
    monkeypatch.setattr(rules, "TABLE", (row,))
    values = [*[2.0] * 25, *[between] * 5, *[2.0] * 15]
    changes = Clock(WATCH).run(lambda tick: {"disk_free_gib": values[tick - 1]}, len(values))
    assert [kind for _, kind, _ in changes] == kinds


def test_a_rule_that_reads_a_figure_without_a_field_is_told_where_it_belongs(monkeypatch):
    def rate(now, _history, _watch):
        return Measured(now.progress[0].warmth, "the warmth is too high")

    monkeypatch.setattr(rules, "TABLE", (Rule("warm", "warmth", "", 1.0, 0.5, 0.0, rate),))
    with pytest.raises(AttributeError, match="'warmth' of a record to the fields of Progress"):
        Clock(WATCH).run(records(), 1)


def test_a_value_that_is_not_measured_raises_nothing_and_clears_nothing():
    clock = Clock(WATCH)
    assert clock.run(None, 400) == []
    clock.run(CASES["gpu_lost"][0], 3)
    assert clock.run(None, 400) == []
    assert clock.dog.raised() == ("gpu_lost",)


def test_a_plateau_and_a_jump_are_no_growth():
    rising = [(t, 5.0 * t) for t in range(90)]
    assert steady_growth(rising) == pytest.approx(5.0)
    assert steady_growth([(t, 5.0 * min(t, 40)) for t in range(90)]) == 0
    assert steady_growth([(t, 500.0 * (t > 45)) for t in range(90)]) == 0


def test_the_growth_of_memory_names_a_rank_that_still_runs():
    run, said = Watched(WATCH), []
    for second in range(500):
        rss_mib = {0: 20.0 * second} | ({1: 60.0 * second} if second < 350 else {})
        said += [text for _, text in run.texts(rss_mib=rss_mib, memory=memory(2e4, 1e5))]
    assert len(said) == 1
    assert "grows by 1200 MiB a minute (fastest: rank 0); " in said[0]


def test_a_rule_on_memory_names_the_memory_that_is_full_first():
    limit = Memory(LIMITED_MEMORY, 8000.0, 300.0)
    run, said = Watched(WATCH), []
    for second in range(500):
        found = {"rss_mib": {0: 2.0 * second}, "memory": (*memory(2e5, 3e5), limit)}
        said += [text for _, text in run.texts(**found)]
    assert [text.rpartition("; ")[2] for text in said] == [
        "96% of the memory within the limit of the cgroup is in use",
        "the memory within the limit of the cgroup may be full in 2 min",
    ]


def test_the_time_of_a_rank_whose_pulse_is_in_doubt_is_not_the_time_of_a_stall():
    lost = RankEvidence(1, 101, "T", 0, "", 5000.0, doubt="lost")
    (change,) = Watchdog(WATCH).update(Readings(mono=0, ts=1e9, ranks=(*ranks(11), lost)))
    assert (change.kind, change.value) == ("raise", 1.1)


def test_a_jump_of_the_wall_clock_is_reported_and_then_accepted():
    changes = Clock(WATCH).run(lambda tick: {"ts": 1e9 + tick + (30 if tick > 50 else 0)}, 200)
    assert [change[1:] for change in changes] == [("raise", "clock"), ("clear", "clock")]


def test_a_host_that_was_suspended_has_no_jump_of_its_wall_clock():
    def make(tick):
        asleep_s = 3600.0 if tick > 50 else 0.0
        return {"ts": 1e9 + tick + asleep_s, "suspended_s": 7.0 + asleep_s}

    assert Clock(WATCH).run(make, 200) == []


EXITED_LONG_AGO = RankEvidence(1, 101, "gone", 60, "exit", 5000.0)


@pytest.mark.parametrize(
    ("action", "act_s", "others", "expected"),
    [
        ("dump", 20, (), 11), ("stop", 20, (), 31), ("restart", 300, (), 300),
        ("stop", 300, (EXITED_LONG_AGO,), 300),
    ],
    ids=["dump at the limit", "stop at three limits", "no earlier than a collective gives up",
         "a rank that exited long ago does not count"],
)  # fmt: skip
def test_a_stall_is_acted_upon_after_its_time(action, act_s, others, expected):
    dog, acted = Watchdog(replace(WATCH, stall_act_s=act_s), {"stall": action}), []
    for second in range(400):
        stalled = (*ranks(float(second)), *others)
        now = Readings(mono=second, ts=1e9 + second, stall_doubt="", ranks=stalled)
        acted += [(second, c.action) for c in dog.update(now) if c.kind == "act"]
    assert acted == [(expected, action)]


def test_a_watchdog_that_was_frozen_or_starts_late_observes_first():
    dog = Watchdog(WATCH, dict.fromkeys(RULES, "stop"))
    first = dog.update(Readings(mono=0, ts=1e9, ranks=ranks(5000), disk_free_gib=0.1))
    assert [(c.kind, c.rule.name) for c in first] == [("raise", "stall")]
    after = dog.update(Readings(mono=4000, ts=1e9 + 4000, ranks=ranks(9000), disk_free_gib=0.1))
    assert [(c.kind, c.rule.name) for c in after] == [("raise", "disk")]


MOMENTS = st.lists(
    st.tuples(
        st.floats(0.1, 60),
        st.fixed_dictionaries({}, optional={
            "disk_free_gib": st.floats(0, 3), "ranks": st.floats(0, 100).map(ranks),
            "gpus": st.sampled_from([(GPU,), (replace(GPU, throttle="heat", mem_used_mib=999),)]),
            "memory": st.floats(0, 1000).map(memory),
            "progress": st.sampled_from([{}, {0: progress_of({"rank": 0, "step": 3})}]),
        }),
    ),
    max_size=60,
)  # fmt: skip


@given(MOMENTS, st.sampled_from(ACTIONS))
def test_no_alert_or_action_comes_before_its_condition_lasted_long_enough(moments, action):
    dog = Watchdog(WATCH, dict.fromkeys(RULES, action))
    began: dict[str, float] = {}
    mono, raises, acts = 0.0, Counter(), Counter()
    for gap, fields in moments:
        mono += gap
        changes = dog.update(now := Readings(mono=mono, ts=1e9 + mono, **fields))
        for rule in TABLE:
            measured = rule.measure(now, dog._history, WATCH)
            if measured is not None and rule.is_breached(measured.value):
                began.setdefault(rule.name, mono)
            elif measured is not None and rule.name not in dog.raised():
                began.pop(rule.name, None)
        for change in changes:
            name, for_s = change.rule.name, change.rule.for_s
            lasted = mono - began.get(name, mono)
            raises[name] += change.kind == "raise"
            acts[name] += change.kind == "act"
            assert acts[name] <= raises[name]
            if change.kind == "raise":
                assert lasted >= for_s
            if change.kind == "act" and action in STRONG:
                assert lasted >= (STRONG_TIMES - 1) * for_s
            if change.kind == "clear":
                began.pop(name, None)


JUNK = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(
    st.floats() | st.text(max_size=3) | st.integers(), max_size=4
)  # fmt: skip
FIELDS = ("steps_dt_s", *Progress.__dataclass_fields__)


@settings(max_examples=60)
@given(st.lists(st.dictionaries(st.sampled_from(FIELDS), JUNK), max_size=30), st.floats(),
       st.lists(st.floats(), min_size=3, max_size=3))  # fmt: skip
def test_garbage_never_raises(found, figure, more):
    dog = Watchdog(Watch(), dict.fromkeys(HALTING, "halt"))
    gpu = Gpu(0, "x", "?", mem_used_mib=figure, mem_total_mib=more[0], ecc_uncorrected=1)
    for tick, record in enumerate(found * 2):
        gpu = replace(gpu, xid=tick, xid_count=tick % 7, xid_ts=more[tick % 3])
        fresh = progress_of(record)
        dog.update(
            Readings(
                mono=tick * 20.0, ts=1e9, fresh=(fresh,) * 3, progress={0: fresh, 1: fresh},
                rss_mib={0: figure, 1: more[1]}, memory=memory(more[1], more[0]),
                gpus=(gpu,), disk_free_gib=figure, checkpoint_gib=more[2], newest_ts=figure,
            )
        )  # fmt: skip


def test_a_plan_changes_threshold_duration_and_action_of_a_rule():
    given = {"rules": {"disk": {"threshold": 4, "for_s": 0, "action": "halt"}}}
    found = Watchdog(plan.section(Watch, given, "x")).rules
    rule = next(rule for rule in found if rule.name == "disk")
    assert (rule.threshold, rule.for_s, rule.action) == (4, 0, "halt")
    assert rule.clear == pytest.approx(4.8)


@pytest.mark.parametrize("rule", TABLE, ids=lambda rule: rule.name)
@given(share=st.floats(0.01, 0.99))
def test_a_changed_threshold_of_a_ratio_leaves_healthy_values_that_clear_the_rule(rule, share):
    """The threshold is drawn between that of the table and 1, the value of a healthy run."""
    threshold = rule.threshold + share * (1 - rule.threshold)
    changed = plan.section(Watch, {"rules": {rule.name: {"threshold": threshold}}}, "x")
    (found,) = (each for each in rules.with_plan(changed, {}) if each.name == rule.name)
    assert (found.threshold >= found.clear) == (rule.threshold >= rule.clear)
    if rule.unit in ("share", "ratio") and not found.is_breached(1.0):
        assert found.is_cleared(1.0)


@pytest.mark.parametrize(
    ("given", "action"),
    [({"action": "halt"}, "halt"), ({"action": "warn"}, "warn"), ({"for_s": 5}, "restart")],
)
def test_the_action_of_a_plan_replaces_the_restart_that_is_the_default_for_a_stall(given, action):
    watch = plan.section(Watch, {"rules": {"stall": given}}, "x")
    assert Watchdog(watch, {"stall": "restart"}).stall_action == action


@pytest.mark.parametrize(
    ("given_rules", "text"),
    [
        ({"disk": {"treshold": 1}}, "did you mean 'threshold'"),
        ({"disk": {"action": "explode"}}, "warn, dump, halt, stop, restart"),
        ({"disk": {"for_s": -1}}, "'for_s' cannot be -1"),
        ({"disk": {"threshold": 0}}, "'threshold' cannot be 0"),
        ({"disk": {"threshold": math.inf}}, "'threshold' cannot be inf"),
        ({"disk": 3}, "must be key: value lines"),
        ({"disc": {}}, "no watch rule 'disc'; did you mean 'disk'"),
        ({"xid": {"action": "halt"}}, "'xid' cannot have the action halt, because it has"),
    ],
)
def test_a_wrong_rule_is_a_usage_error(given_rules, text):
    with pytest.raises(UsageError, match=re.escape(text)):
        check(plan.section(Watch, {"rules": given_rules}, "watch"), "watch")
