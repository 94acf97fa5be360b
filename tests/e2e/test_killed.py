"""After a kill of its processes, a plan continues in the right phase and repeats no saved step."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from console import actions, status_text
from console.actions import LaunchOptions
from console.plans.gate_check import poll_confirmed
from console.sources import process
from console.sources.run import RunSource
from tests.launches import HANG_GUARD_S, STUB, Begin, Started, kill
from trainers.contract import rundir

ROOT = Path(__file__).parents[2]
PHASES, STEPS, EVERY, RANKS = ("one", "two", "three"), 24, 6, 2
PLAN: dict[str, Any] = {
    "config": "configs/tiny_cpu.yaml", "module": "trainers.ddp",
    "gates": {"steps_done": STEPS, "loss_finite": True},
}  # fmt: skip
RESTART = {"restart": {"when": "crash", "attempts": 3, "backoff_s": 0.1}}
WHO = ("launcher", "owner", "working process", "all")
WHERE = ("in the first", "after the first", "in the second", "at the end")
MOST_LAUNCHES, ALL_DONE = 6, "all phases are done"


class Line(NamedTuple):
    """One line of a journal of `counting.py`."""

    what: str
    step: int
    life: tuple[str, int]
    at: float


class Journey:
    """A plan whose processes a test kills, and the launches in which the plan continued."""

    def __init__(self, begin: Begin, folder: Path, draw: random.Random, **plan: Any):
        self.journals, self._begin, self._draw = folder / "journals", begin, draw
        self.journals.mkdir()
        self.told: list[str] = []
        settings = {
            "data.source": "synthetic", "train.steps": STEPS, "checkpoint.every": EVERY,
            "checkpoint.keep_last": 2, "report.out_dir": str(self.journals),
        }  # fmt: skip
        options = begin.options(
            *({"name": name} for name in PHASES), **PLAN, set=settings, nproc=RANKS, **plan
        )
        words = [sys.executable, "-m", "console", "--root", options.root, "launch", options.plan]
        self.launcher = subprocess.Popen(
            [*map(str, words), "--wait"], cwd=ROOT, env=os.environ | STUB,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.root, self.launches = options.root, list[Started]()
        pattern = f"*/*/{rundir.PLAN_STATE}"
        first = self.until(lambda: next(iter(options.root.glob(pattern)), None))
        self.launches.append(begin.adopt(first.parent))

    @property
    def now(self) -> Started:
        return self.launches[-1]

    def until(self, reached):
        """Polls until `reached` returns a true value; continues the plan after an interruption."""
        deadline, at = time.monotonic() + HANG_GUARD_S, time.monotonic() + 0.3
        while not (found := reached()):
            if time.monotonic() > deadline or len(self.launches) > MOST_LAUNCHES:
                pytest.fail("\n".join(self.told))
            time.sleep(0.003)
            if self.launches and time.monotonic() > at:
                self.go_on()
                at = time.monotonic() + 0.3
        return found

    def lines(self, phase: str = "", rank: int = 0) -> list[Line]:
        found = []
        for name in (phase,) if phase else PHASES:
            with contextlib.suppress(FileNotFoundError):
                whole, _, _ = (self.journals / f"{name}.{rank}").read_text().rpartition("\n")
                for text in whole.splitlines():
                    what, step, launch, attempt, at = text.split()
                    found.append(Line(what, int(step), (launch, int(attempt)), float(at)))
        return found

    def count(self, phase: str, what: str) -> int:
        return len({line.step for line in self.lines(phase) if line.what == what})

    # --- actions of a test ---------------------------------------------------------------------

    def wait_for(self, where: str) -> None:
        """Waits for a random moment in the part `where` of the plan."""
        match where:
            case "in the first":
                step = self._draw.randrange(1, STEPS)
                self.until(lambda: self.count("one", "step") >= step)
            case "after the first":
                self.until(lambda: "completed" in str(self.now.state(0).get("state"))
                           or self.now.plan_state.get("phase", 0) > 0)  # fmt: skip
                time.sleep(self._draw.choice((0.0, 0.02, 0.1)))
            case "in the second":
                saved = self._draw.randrange(1, STEPS // EVERY)
                self.until(lambda: self.count("two", "saved") >= saved)
                time.sleep(self._draw.uniform(0.0, 0.1))
            case _:
                self.until(lambda: self.count("three", "step") >= STEPS)
                time.sleep(self._draw.uniform(0.0, 0.3))

    def kill(self, who: str) -> None:
        launch, pids = self.now, []
        owner = launch.plan_state["supervisor"]
        if who == "launcher":
            pids = [self.launcher.pid] if self.launcher.poll() is None else []
        if who in ("owner", "all") and rundir.is_alive(owner):
            pids += [owner["pid"]]
        if who == "working process":
            pids += [each["pid"] for each in [owner["child"]] if rundir.is_alive(each)]
        if who == "all":
            pids += [pid for run in launch.runs() for pid in self._ranks(run)]
            self._draw.shuffle(pids)
        for pid in pids:
            kill(pid)
        while owner["pid"] in pids and rundir.is_alive(owner):
            time.sleep(0.01)
        self.told.append(f"{who}: {len(pids)} killed")

    @staticmethod
    def _ranks(run: Path) -> list[int]:
        record = rundir.read_json(run / rundir.RUN) or {}
        token = record.get("environment", {}).get("NSA_CONSOLE_TOKEN")
        return process.with_token(token) if token else []

    def go_on(self) -> bool:
        """Adopts or resumes the plan if needed; returns whether all phases have passed."""
        state, path = self.now.plan_state, self.now.path
        if rundir.is_alive(state["supervisor"]):
            return False
        state = self.now.plan_state
        if state["state"] == "ended" and state["why"] == ALL_DONE:
            return True
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", STUB["PYTHONPATH"])
            if state["state"] != "ended":
                self.told.append(actions.adopt(path))
                return False
            self.told.append(f"resume: {state['why']}")
            again = actions.launch(LaunchOptions(resume=path, root=self.root), "tester")
        self.launches.append(self._begin.adopt(again))
        return False

    # --- checks --------------------------------------------------------------------------------

    def check(self) -> None:
        told = "\n".join(self.told)
        for rank in range(RANKS):
            for phase in PHASES:
                self._check_steps(phase, rank, told)
        times = [(lines[0].at, lines[-1].at) for lines in map(self.lines, PHASES)]
        for (_, end), (begin, _) in itertools.pairwise(times):
            assert end < begin, f"a completed phase was repeated\n{told}"
        done: set[str] = set()
        for launch in self.launches:
            phases = launch.plan_state["phases"]
            assert not done & {each["name"] for each in phases}, told
            done |= {each["name"] for each in phases if each["result"] == "pass"}
        assert done == set(PHASES), told
        confirmed = poll_confirmed(RunSource(self.now.path, reads="all"))
        assert status_text.exit_code(confirmed, True) == 0, (confirmed.alerts, told)

    def _check_steps(self, phase: str, rank: int, told: str) -> None:
        lines, saves = self.lines(phase, rank), self.lines(phase, 0)
        of_lives = itertools.groupby(lines, key=lambda line: line.life)
        lives = [[line for line in each if line.what == "step"] for _, each in of_lives]
        lives = [steps for steps in lives if steps]
        names = [steps[0].life for steps in lives]
        assert len(set(names)) == len(names), f"{phase}: two at once {names}\n{told}"
        reached = 0
        for steps in lives:
            first = steps[0]
            numbers = [line.step for line in steps]
            assert numbers == list(range(first.step, first.step + len(numbers))), told
            sealed = [s.step for s in saves if s.what == "saved" and s.at < first.at]
            newest = max(sealed, default=0)
            assert first.step > newest, f"{phase}: {newest} is sealed, {first} repeats\n{told}"
            assert first.step <= reached + 1, (
                f"{phase}: {reached} is reached, {first} skips\n{told}"
            )
            reached = max(reached, numbers[-1])
        assert reached == STEPS, f"{phase}: only {reached} steps\n{told}"


def travel(begin: Begin, folder: Path, draw: random.Random, kills, **plan: Any) -> Journey:
    """Runs a plan to its end with the given kills; returns the journey."""
    journey = Journey(begin, folder, draw, **plan)
    for where, who in kills:
        journey.told.append(where)
        journey.wait_for(where)
        journey.kill(who)
        if who in ("owner", "all"):
            journey.go_on()
    journey.until(journey.go_on)
    journey.launcher.kill()
    journey.launcher.communicate()
    return journey


def test_a_plan_goes_on_in_the_right_phase_when_each_of_its_processes_is_killed(begin, tmp_path):
    draw = random.Random(7)
    kills = zip(WHERE, ("working process", "launcher", "all", "owner"), strict=True)
    travel(begin, tmp_path, draw, kills).check()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_a_plan_goes_on_whatever_is_killed_whenever(begin, tmp_path, seed):
    draw = random.Random(seed)
    plan = RESTART if draw.random() < 0.5 else {}
    where = sorted(draw.sample(WHERE, draw.randrange(1, 5)), key=WHERE.index)
    kills = [(each, draw.choice(WHO)) for each in where]
    travel(begin, tmp_path, draw, kills, **plan).check()


def test_ranks_that_ended_before_any_supervisor_saw_them_have_completed(begin, tmp_path):
    (tmp_path / "hold").touch()  # so that the ranks do not end before the supervisor is killed
    settings = {"data.source": "synthetic", "train.steps": STEPS, "report.out_dir": str(tmp_path)}
    started = begin({"name": "one"}, **PLAN, shell=STUB, nproc=RANKS, set=settings)
    started.wait_steps(2)
    started.kill_supervisor()
    (tmp_path / "hold").unlink()
    started.wait_gone()
    rundir.write_json(started.run() / rundir.SUPERVISOR, started.state() | {"workers": []})
    actions.adopt(started.path)
    assert started.wait_end()["why"] == ALL_DONE


def test_a_phase_whose_end_was_lost_passes_by_the_records_of_its_steps(begin, tmp_path):
    journals, given = tmp_path / "journals", {"data.source": "synthetic", "train.steps": STEPS}
    journals.mkdir()
    (journals / "hold").touch()
    settings = given | {"checkpoint.every": EVERY, "report.out_dir": str(journals)}
    started = begin({"name": "one"}, **PLAN, shell=STUB, nproc=RANKS, set=settings)
    started.wait_steps(1)
    heartbeat = rundir.heartbeat(started.run(), 0)
    started.wait(lambda: f"step_{STEPS:08d}" in heartbeat.read_text())
    # A rank records a step when it begins the next one.
    started.wait(lambda: started.heartbeats(rank=1)[-1]["step"] == STEPS - 1)
    started.kill_supervisor()  # so that the supervisor does not see the ends of the ranks
    for pid in process.with_token(started.token()):
        kill(pid)
    started.wait_gone()
    (journals / "hold").unlink()
    actions.adopt(started.path)
    assert started.wait_end()["phases"][0]["result"] != "pass"
    again = begin.launch(LaunchOptions(resume=started.path, root=started.path.parents[1]), STUB)
    assert again.wait_end()["why"] == ALL_DONE
    confirmed = poll_confirmed(RunSource(again.path, reads="all"))
    assert status_text.exit_code(confirmed, True) == 0, confirmed.alerts
    assert all("in the records of" in gate.window for gate in confirmed.gates)
    steps = [line.split()[:2] for line in (journals / "one.0").read_text().splitlines()]
    assert [step for what, step in steps if what == "step"] == [str(n + 1) for n in range(STEPS)]
    record = rundir.read_json(started.run() / rundir.RUN) or {}
    record["settings"]["train.seed"]["value"] = 99  # records of another training are not accepted
    rundir.write_json(started.run() / rundir.RUN, record)
    confirmed = poll_confirmed(RunSource(again.path, reads="all"))
    assert "recorded no step before it exited" in confirmed.alerts[0].text


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_real_training_goes_on_and_its_checkpoints_are_loaded_and_backed_up(begin, tmp_path):
    """Uses the trainers with torch; the owner and the processes of the second run are killed."""
    store = tmp_path / "store"
    store.mkdir()
    settings = {
        "data.source": "synthetic", "train.steps": 40, "checkpoint.every": 10,
        "checkpoint.keep_last": 9,
    }  # fmt: skip
    started = begin(
        *({"name": name} for name in PHASES), **PLAN | {"gates": {
            "steps_done": 40, "checkpoints_loaded_at_least": 1,
        }}, nproc=RANKS, set=settings,
        checkpoints={"load": True, "backup": ["cp", "-r", "{checkpoint}", str(store)]},
    )  # fmt: skip
    latest = started.path / "1-two" / rundir.CHECKPOINTS / rundir.LATEST
    started.wait(latest.exists, 300)
    for pid in [*process.with_token(started.token(1)), started.owner["pid"]]:
        kill(pid)
    sealed = int(latest.read_text().strip().removeprefix("step_"))
    started.wait(lambda: not rundir.is_alive(started.owner))
    actions.adopt(started.path)
    assert started.wait_end(300)["why"].startswith("two: ")
    loaded = events(started)
    options = LaunchOptions(resume=started.path, root=started.path.parents[1])
    started = begin.launch(options)
    assert started.wait_end(300)["why"] == ALL_DONE
    assert [each["name"] for each in started.plan_state["phases"]] == ["two", "three"]
    lines = rundir.heartbeat(started.run(0), 0).read_text().splitlines()
    (first,) = (each["step"] for each in map(json.loads, lines) if each["msg"] == "resume")
    assert first >= sealed
    loaded |= events(started)
    assert loaded == {("load", "pass"), ("backup", "pass")}, loaded
    assert (store / "step_00000040" / "manifest.json").exists()


def events(started: Started) -> set[tuple[str, str]]:
    """Returns the checks of checkpoints in all phases of a launch, with their results."""
    lines = (line for run in started.runs() for line in (run / rundir.EVENTS).open())
    records = (each for each in map(json.loads, lines) if each["kind"] == "checkpoint")
    return {(each["what"], each["result"]) for each in records}
