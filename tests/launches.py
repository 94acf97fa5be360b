"""Starts real launches for the tests, waits for their progress, and ends their processes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from console import actions
from console.sources import process
from trainers.contract import rundir

ROOT = Path(__file__).parents[1]
CONSOLE = [sys.executable, "-m", "console"]
PROGRAMS = Path(__file__).with_name("programs")
STUB: Mapping[str, str] = {"PYTHONPATH": str(PROGRAMS / "stub")}
"""Replaces torch's torchrun by a small one, for programs that need no torch."""
ENDED = ("halted", "stopped", "completed", "failed", "crashed", "killed")
HANG_GUARD_S = 300.0
"""Longest wait for an expected event. It ends a test that hangs, and is no limit of speed."""


def wait_for(
    reached: Callable[[], Any], timeout_s: float = HANG_GUARD_S, every_s: float = 0.05,
    told: Callable[[], object] = str,
) -> Any:  # fmt: skip
    """Polls until `reached` returns a true value, and returns this value; else fails with `told`.

    `reached` must check everything that the test then asserts, because events come in any order. An
    error that says that a file, a process, a record or an element does not exist counts as not
    reached.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, StopIteration, IndexError):
            if value := reached():
                return value
        if time.monotonic() >= deadline:
            raise AssertionError(f"not reached in {timeout_s:g} s: {told()}")
        time.sleep(every_s)


def console(*words: object, env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """Runs `nsa-console` in its own process; returns exit code, output and errors."""
    done = subprocess.run(
        [*CONSOLE, *map(str, words)], cwd=ROOT, text=True, capture_output=True,
        timeout=HANG_GUARD_S, env={**os.environ, **(env or {})},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def records(path: Path) -> list[dict[str, Any]]:
    """Returns the records in the complete lines of a file; its last line may be incomplete."""
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    return [json.loads(line) for line in whole.splitlines()]


def kill(pid: int) -> None:
    """Sends KILL to a process, which may have ended by itself or with another one."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def sleeping(**variables: str) -> subprocess.Popen[bytes]:
    """Starts `sleep`; returns when the kernel shows the environment of the new process."""
    given = os.environ | variables
    found = subprocess.Popen(["sleep", "600"], env=given)
    wait_for(lambda: given.items() <= process.environment(found.pid).items(), every_s=0.002)
    return found


class Started:
    """A launch under test."""

    def __init__(self, path: Path):
        self.path = path

    @property
    def plan_state(self) -> dict[str, Any]:
        return rundir.read_json(self.path / rundir.PLAN_STATE) or {}

    def run(self, index: int = 0) -> Path:
        return next(iter(self.path.glob(f"{index}-*")))

    def runs(self) -> list[Path]:
        return sorted(self.path.glob("[0-9]*-*"))

    def state(self, index: int = 0) -> dict[str, Any]:
        try:
            return rundir.read_json(self.run(index) / rundir.SUPERVISOR) or {}
        except StopIteration:
            return {}

    def token(self, index: int = 0) -> str:
        born = rundir.read_json(self.run(index) / rundir.RUN) or {}
        return born["environment"]["NSA_CONSOLE_TOKEN"]

    def pids(self, index: int = 0) -> dict[int, int]:
        return {w["rank"]: w["pid"] for w in self.state(index).get("workers", [])}

    def child(self) -> int:
        """Returns the pid of the supervisor's working process.

        The working process is in the session of the owner. torchrun gets its own session before its
        exec, when its command line is still that of the supervisor.
        """
        owner = self.owner["pid"]

        def found() -> int:
            for pid in process.children(owner):
                with contextlib.suppress(ProcessLookupError):
                    if os.getsid(pid) == owner and process.state(pid) != "Z":
                        return pid
            return 0

        return self.wait(found)

    @property
    def owner(self) -> dict[str, Any]:
        """The identity of the supervisor's owner."""
        return self.wait(lambda: self.plan_state.get("supervisor"))

    def kill_supervisor(self) -> dict[str, Any]:
        """Kills the supervisor and waits for its end; returns the identity that it had."""
        former = self.owner
        os.kill(former["pid"], signal.SIGKILL)
        # The kernel then kills the working process, which may be in the middle of a write.
        self.wait(lambda: not any(map(rundir.is_alive, (former, former["child"]))))
        return former

    def replace_supervisor(self) -> None:
        """Kills the supervisor; waits until an adopting supervisor has written supervisor.json."""
        former = self.kill_supervisor()
        actions.adopt(self.path)
        self.wait(lambda: self.state().get("pid") not in (None, former["pid"]))

    def wait_gone(self) -> None:
        """Waits until no process has the token of the first run."""
        self.wait(lambda: not process.with_token(self.token()))

    def alerts(self, name: str, index: int = 0) -> list[dict[str, Any]]:
        """Returns the events about an alert."""
        return [event for event in self.events(index) if event.get("alert") == name]

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stops both processes of the supervisor until the block ends."""
        pids = (self.owner["pid"], self.child())
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            self.wait(lambda: all(process.state(pid) in "Tt" for pid in pids))
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    def events(self, index: int | None = None) -> list[dict[str, Any]]:
        return records((self.path if index is None else self.run(index)) / rundir.EVENTS)

    def samples(self, index: int = 0) -> list[dict[str, Any]]:
        return records(rundir.samples(self.run(index), rundir.host_name()))

    def heartbeats(self, index: int = 0, rank: int = 0) -> list[dict[str, Any]]:
        return records(rundir.heartbeat(self.run(index), rank))

    def wait(
        self, reached: Callable[[], Any], timeout_s: float = HANG_GUARD_S, every_s: float = 0.05
    ) -> Any:
        """Polls as `wait_for` does; a failure shows the states of the launch and its first run."""
        return wait_for(reached, timeout_s, every_s, lambda: f"{self.plan_state} {self.state()}")

    def wait_state(
        self, *states: str, index: int = 0, timeout_s: float = HANG_GUARD_S
    ) -> dict[str, Any]:
        return self.wait(lambda: (s := self.state(index)).get("state") in states and s, timeout_s)

    def wait_steps(self, count: int, index: int = 0, timeout_s: float = HANG_GUARD_S) -> None:
        """Waits until the run is running with all ranks, and rank 0 has recorded `count` steps.

        A run that has ended need not have all ranks.
        """

        def known() -> bool:
            state = self.state(index)
            world = (rundir.read_json(self.run(index) / rundir.RUN) or {}).get("nproc")
            return state.get("state") in ENDED or (
                state.get("state") == "running" and len(state["workers"]) == world
            )

        def done() -> bool:
            steps = rundir.heartbeat(self.run(index), 0).read_bytes().count(b"progress")
            return steps >= count

        self.wait(known, timeout_s)
        self.wait(done, timeout_s)

    def wait_end(self, timeout_s: float = HANG_GUARD_S) -> dict[str, Any]:
        return self.wait(lambda: (s := self.plan_state).get("state") == "ended" and s, timeout_s)

    def wait_over(self) -> dict[str, Any]:
        """Waits until the launch and the owner of its supervisor have ended."""
        ended = self.wait_end()
        self.wait(lambda: not rundir.is_alive(ended["supervisor"]))
        return self.plan_state

    def ask(self, action: str, where: Path | None = None, **args: Any) -> dict[str, Any]:
        path = where or self.path
        request = actions.send(path, action, args, "tester")
        answer = actions.answer(path, request, HANG_GUARD_S)
        assert answer is not None, f"no answer to {action}"
        return answer

    def clean(self) -> None:
        """Kills the processes that are left of the launch, and removes its live directories."""
        owner = self.plan_state.get("supervisor", {})
        if rundir.is_alive(owner):
            kill(owner["pid"])
        for run in self.runs():
            born = rundir.read_json(run / rundir.RUN) or {}
            token = born.get("environment", {}).get("NSA_CONSOLE_TOKEN")
            for pid in process.with_token(token) if token else ():
                kill(pid)
            state = rundir.read_json(run / rundir.SUPERVISOR) or {}
            for worker in state.get("workers", []):  # a rank may have overwritten its environment
                if rundir.is_alive({"boot_id": state.get("boot_id"), **worker}):
                    kill(worker["pid"])
            if token:
                shutil.rmtree(f"/dev/shm/nsa-console-{os.geteuid()}-{token}", ignore_errors=True)


def write_plan(folder: Path, **plan: Any) -> Path:
    document = {
        "name": "tested", "nproc": 2, "env": {"OMP_NUM_THREADS": 1},
        "watch": {"stall_floor_s": 10, "startup_s": 60, "grace_s": 3}, **plan,
    }  # fmt: skip
    path = folder / "tested.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


def phase(name: str, program: str, *args: object, **more: Any) -> dict[str, Any]:
    return {
        "name": name, "script": str(PROGRAMS / program), "args": [str(a) for a in args], **more,
    }  # fmt: skip


class Begin:
    """Starts launches; `clean` ends them."""

    def __init__(self, folders: pytest.TempPathFactory):
        self._folders = folders
        self.begun: list[Started] = []

    def __call__(
        self, *phases: dict[str, Any], root: Path | None = None,
        shell: Mapping[str, str] | None = None, **plan: Any,
    ) -> Started:  # fmt: skip
        """Launches a plan of these phases; the launcher's shell exports the variables `shell`."""
        return self.launch(self.options(*phases, root=root, **plan), shell)

    def launch(
        self, options: actions.LaunchOptions, shell: Mapping[str, str] | None = None
    ) -> Started:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (shell or {}).items():
                patch.setenv(name, value)
            return self.adopt(actions.launch(options, "tester"))

    def options(
        self, *phases: dict[str, Any], root: Path | None = None, **plan: Any
    ) -> actions.LaunchOptions:
        """Writes a plan and returns the options that launch it."""
        folder = self._folders.mktemp("launch")
        file = write_plan(folder, phases=list(phases), **plan)
        return actions.LaunchOptions(plan=str(file), root=root or folder / "artifacts")

    def adopt(self, path: Path | str) -> Started:
        self.begun.append(Started(Path(path)))
        return self.begun[-1]

    def clean(self) -> None:
        for each in self.begun:
            each.clean()


def set_hook(folder: Path, patch: pytest.MonkeyPatch, *words: str) -> None:
    """Sets `hook.py` with these arguments as the operator's alert hook."""
    settings = folder / "nsa-console" / "settings.yaml"
    settings.parent.mkdir(mode=0o700)
    hook = [sys.executable, str(PROGRAMS / "hook.py"), *words]
    settings.write_text(json.dumps({"hook": hook, "hook_every_s": 1}))
    settings.chmod(0o600)
    patch.setenv("XDG_CONFIG_HOME", str(folder))
