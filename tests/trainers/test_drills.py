"""Drills in real trainers: their grammar, and the effect of each kind."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console import plan
from console.sources.tail import Tail
from tests.trainers.runs import ROOT, Run, small
from trainers import settings
from trainers.contract import drill_kinds, dumps, environ, flags, heartbeat, pulse, rundir
from trainers.contract.drill_kinds import KINDS, Drill
from trainers.contract.errors import UsageError
from trainers.faults import DRILLS

THOUSANDTHS = st.integers(1, 99_999_999).map(lambda n: n / 1000)


@st.composite
def drills(draw):
    kind = draw(st.sampled_from(sorted(KINDS)))
    amount = draw(THOUSANDTHS) if KINDS[kind].amount is not None else None
    step, rank = draw(st.integers(1, 10**12 - 1)), draw(st.none() | st.integers(0, 99_999))
    return Drill(kind, step, rank, amount, draw(st.booleans()))


@given(st.lists(drills(), min_size=1, max_size=5))
def test_what_a_drill_is_written_as_asks_for_that_drill(several):
    assert drill_kinds.parse(",".join(map(str, several)), "x") == tuple(several)


def test_a_drill_is_of_rank_0_and_the_first_attempt_unless_it_says_more():
    found = drill_kinds.parse("raise@20, sleep@3:1,slow@5:all:0.25,gil@7:2!", "x")
    assert found == (
        Drill("raise", 20), Drill("sleep", 3, 1, drill_kinds.FOREVER_S),
        Drill("slow", 5, None, 0.25), Drill("gil", 7, 2, drill_kinds.FOREVER_S, every_attempt=True),
    )  # fmt: skip


WRONG = {
    "slep@20:1": "did you mean 'sleep'",
    "sleep": "KIND@STEP",
    "sleep@0": "KIND@STEP",
    "sleep@20:-1": "KIND@STEP",
    "sleep@20!:1": "KIND@STEP",
    "sleep@٢": "KIND@STEP",
    "sleep@20:1:2:3": "KIND@STEP",
    "sleep@20:1:1e3": "KIND@STEP",
    "raise@20:1:5": "accepts no SECONDS",
    "raise@20,": "there is no drill ''",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_drill_is_refused_wherever_it_is_asked_for(text):
    """The text is a flag of a launch, of a plan, or of a trainer, or it is a setting."""
    document = {"name": "p", "phases": [{"name": "a", "flags": {"NSA_DRILL": text}}]}
    for ask in (
        lambda: flags.parse("NSA_DRILL", text),
        lambda: plan.parse(document, "p.yaml"),
        lambda: settings.resolve(None, {"NSA_DRILL": text}),
        lambda: settings.resolve(None, {}, {"train.drill": text}),
    ):
        with pytest.raises(UsageError) as caught:
            ask()
        assert WRONG[text] in str(caught.value)
        assert "\n" not in str(caught.value)
        assert "NSA_DRILL" in str(caught.value) or "train.drill" in str(caught.value)


def test_every_kind_has_a_function_and_a_row_in_the_documents():
    assert set(DRILLS) == set(KINDS)
    page = (ROOT / "docs/drills.md").read_text()
    for name, kind in KINDS.items():
        assert f"| `{name}` | {kind.about} |" in page


def drilled(
    tmp_path: Path, words: str, nproc: int = 1, variables: dict[str, str] | None = None, **more
) -> Run:
    """Starts a run of 40 small steps with these drills; each step has a record."""
    changes = {"train__steps": 40, "report__log_every": 1} | more
    live = tmp_path / "live"
    live.mkdir()
    asked = {"NSA_DRILL": words, environ.LIVE_DIR: str(live)} | (variables or {})
    return Run(tmp_path, small(**changes), nproc=nproc, flags=asked)


def fired(run: Run, words: str, rank: int = 0) -> bool:
    """Returns whether a record says that the drill fires."""
    (asked,) = drill_kinds.parse(words, "x")
    records = run.records(rank, "drill")
    return any(r["drill"] == str(asked) and r["state"] == "fires" for r in records)


def kernel_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


FATAL = {
    "raise": (1, "in _raise"),
    "exit": (7, ""),
    "oom": (11, "out of GPU memory"),
    "kill": (-signal.SIGKILL, ""),
    "segv": (-signal.SIGSEGV, "Fatal Python error: Segmentation fault"),
}
"""By kind: the exit code, or minus the number of the signal, and a text in the rank's log."""
QUICK = ("oom", "kill", "segv")


@pytest.fixture(scope="module")
def dying(tmp_path_factory):
    """Starts the runs of `QUICK` together, because each run spends most time on importing torch."""
    return {kind: drilled(tmp_path_factory.mktemp(kind), f"{kind}@3") for kind in QUICK}


@pytest.mark.parametrize(
    "kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in FATAL]
)
def test_a_fatal_drill_ends_the_rank_at_its_step_as_the_real_fault_does(kind, dying, tmp_path):
    run = dying.get(kind) or drilled(tmp_path, f"{kind}@3")
    code, words = FATAL[kind]
    assert run.wait() == code, run.text()
    assert words in run.text()
    reader = Tail(run.path / "heartbeat_rank0.jsonl", heartbeat.accept)
    records = reader.poll()
    assert reader.skipped == 0
    assert max(r["step"] for r in records if r["msg"] == "progress") == 2
    told = [(r["state"], r["step"]) for r in records if r["msg"] == "drill"]
    assert told == [("armed", 0), ("fires", 3)]
    if kind in ("raise", "oom"):
        error = next(r for r in records if r["msg"] == "error")
        assert (error["step"], error["exit_code"]) == (3, code)
        assert error["error_class"] == {"raise": "ValueError", "oom": "OutOfMemoryError"}[kind]
    else:
        assert records[-1]["msg"] == "drill"
    if kind == "segv":
        frames = run.text().partition("Fatal Python error")[2]
        assert f"in {DRILLS[kind].__name__}" in frames
        assert "in forward_backward" in frames


PASSING = (
    "nan@3,inf_grad@5,sleep@7:0:0.4,spin@9:0:0.4,gil@11:0:0.4,backward@13:0:0.4,stop@15,"
    "slow@18:all:0.05,leak@22:0:8,loader@36:0:4"
)


@pytest.fixture(scope="module")
def survivor(tmp_path_factory):
    """Returns a completed run with the drills of `PASSING`; SIGCONT resumed it after `stop@15`."""
    run = drilled(tmp_path_factory.mktemp("survivor"), PASSING, data__prefetch=1)
    run.until(lambda: fired(run, "stop@15"))
    run.until(lambda: kernel_state(run.process.pid) == "T")
    assert run.records(0, "progress")[-1]["step"] == 14
    run.process.send_signal(signal.SIGCONT)
    return run.done()


def test_drills_that_pass_happen_at_their_step_and_training_goes_on(survivor):
    progress = {r["step"]: r for r in survivor.records(0, "progress")}
    assert len(progress) == 40
    for step in (7, 9, 11):
        assert progress[step]["dt_forward_s"] >= 0.4
    assert progress[13]["dt_backward_s"] >= 0.4
    assert min(progress[step]["dt_forward_s"] for step in range(18, 41)) >= 0.05
    assert progress[36]["dt_fetch_s"] > 0.3
    assert progress[40]["rss_mib"] - progress[21]["rss_mib"] >= 19 * 8 * 0.9
    env = (survivor.path / rundir.ENV).read_text()
    assert PASSING in env
    assert '"flag NSA_DRILL"' in env


def test_a_loss_that_is_nan_and_a_gradient_that_is_inf_are_skipped_by_the_guards(survivor):
    progress = survivor.records(0, "progress")
    assert [r["step"] for r in progress if r["loss"] == "nan"] == [3]
    assert [r["step"] for r in progress if r["grad_norm"] in ("nan", "inf")] == [3, 5]
    assert [r["skipped_steps"] for r in progress[:6]] == [0, 0, 1, 1, 2, 2]
    assert [r["nonfinite_loss_steps"] for r in progress[:6]] == [0, 0, 1, 1, 1, 1]
    assert [r["overflow_steps"] for r in progress[:6]] == [0, 0, 0, 0, 1, 1]
    for name in ("scale_lowered_steps", "spike_steps"):
        assert [r[name] for r in progress[:6]] == [0] * 6
    last = survivor.records(0)[-1]
    assert (last["msg"], last["nonfinite_loss_steps"]) == ("exit", 1)
    assert [r["n"] for r in survivor.records(0)] == list(range(1, last["n"] + 1))


def test_every_drill_says_that_it_is_armed_and_that_it_fires(survivor):
    told = {}
    for record in survivor.records(0, "drill"):
        told.setdefault(record["drill"], []).append(record["state"])
    assert list(told.values()) == [["armed", "fires"]] * len(PASSING.split(","))
    text = survivor.text()
    assert text.count("a drill is armed") == text.count("a drill fires") == len(told)
    assert not re.search(r"SIGSTOP|stop@15", text), "the log does not name the fault"


def dumped(run: Run) -> str:
    return rundir.live_stack(run.path.parent / "live", 0).read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "frame"), [
    ("sleep", "in _sleep"), ("spin", "in _spin"), ("gil", "in _hold_gil"),
    ("backward", "in <lambda>"),
])  # fmt: skip
def test_a_stall_lasts_until_the_rank_is_killed_and_a_dump_names_its_line(kind, frame, tmp_path):
    run = drilled(tmp_path, f"{kind}@3")
    run.until(lambda: fired(run, f"{kind}@3"))
    holds_gil = kind == "gil"
    run.until(lambda: pulse_phase(run) == ("backward" if kind == "backward" else "forward"))
    run.process.send_signal(signal.SIGUSR1)
    if holds_gil:
        time.sleep(0.5)
        assert not dumped(run)
        run.process.send_signal(dumps.LAST_RESORT)
    run.until(lambda: frame in dumped(run) and "in run_steps" in dumped(run))
    if not holds_gil:
        run.until(lambda: dumps.END_MARK in dumped(run))
    run.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert run.process.poll() is None
    assert (dumps.END_MARK in dumped(run)) == (not holds_gil)
    assert run.records()[-1]["msg"] == "drill"
    run.process.kill()
    assert run.wait() == -signal.SIGKILL


def pulse_phase(run: Run, rank: int = 0) -> str:
    found = pulse.read(rundir.pulse(run.path.parent / "live", rank))
    return found.phase if found else ""


@pytest.mark.slow
def test_a_loader_that_stalls_for_ever_ends_the_run_as_data(tmp_path):
    run = drilled(tmp_path, "loader@8", data__timeout_s=1.0)
    assert run.wait() == 12
    assert run.records(0, "progress")[-1]["step"] == 7
    assert "within 1 s" in run.metrics()["reason"]


@pytest.mark.slow
def test_a_drill_happens_once_in_a_run_unless_it_is_for_every_attempt(tmp_path):
    run = drilled(tmp_path, "exit@3,raise@5!", variables={environ.ATTEMPT: "2"})
    assert run.wait() == 1
    assert run.records(0, "error")[-1]["step"] == 5
    states = {r["drill"]: r["state"] for r in run.records(0, "drill")}
    assert states == {"exit@3:0": "rests", "raise@5:0!": "fires"}
    assert "drill exit@3:0 is skipped: its step or its attempt is past" in run.text()
