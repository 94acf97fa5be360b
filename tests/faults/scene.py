"""An injected fault: when and how a console shows it, and which processes and files remain."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from console.model import RunState
from console.sources import process
from console.sources.run import RunSource
from console.supervisor import live_directory
from tests.launches import CONSOLE, ROOT, Started, console, wait_for
from tests.terminal import Terminal
from tests.trainers.runs import latest_checkpoint
from trainers import manifest
from trainers.contract import rundir

LOOK_EVERY_S = 0.02
Seen = Callable[[RunState], str]
"""Returns the sentence with which a console shows the fault, or "" before that."""


@contextmanager
def watching(path: Path, shows: str = "RUNNING") -> Iterator[Terminal]:
    """Yields a screen that shows a launch; afterwards, closes the screen if it is open."""
    with Terminal([*CONSOLE, "watch", str(path)], ROOT) as screen:
        screen.wait(shows)
        yield screen
        if not screen.closed:
            screen.leave()


def status(path: Path) -> tuple[int, dict[str, Any]]:
    """Returns the exit code and the output of `nsa-console status --json`."""
    code, out, err = console("status", path, "--json")
    assert out, err
    return code, json.loads(out)


def files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if not path.is_dir() and os.path.lexists(path)}


def order(folder: Path, rank: int, words: str) -> None:
    """Writes an order for a rank of `obedient.py`; returns when the rank has read the order."""
    path = folder / f"rank{rank}"
    rundir.write_atomic(path, words)
    wait_for(lambda: not path.exists(), every_s=0.002, told=lambda: f"rank {rank}, order {words!r}")


def sweep_own(tokens: Iterable[str]) -> list[Path]:
    """Removes old live directories, as a launch does; returns those of `tokens` that are left.

    Only the directories of `tokens` are made old. Another test may do the same at the same time.
    """
    found = [path for t in tokens for path in rundir.SHARED_MEMORY.glob(f"*nsa-console-*{t}")]
    for path in found:
        with suppress(FileNotFoundError):
            os.utime(path, (0, 0))
    live_directory.sweep()
    return [path for path in found if path.exists()]


def all_run(pids: Mapping[int, int]) -> bool:
    return all(process.state(pid) in "RSD" for pid in pids.values())


def plant_kill(run: Path) -> Path:
    """Writes the request `kill` into the mailbox of a run; returns the file."""
    path = run / rundir.REQUESTS / "planted.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"v": 1, "id": "planted", "action": "kill", "args": {"yes": True}, "by": "x"}
    rundir.write_json(path, record | {"ts": time.time()})
    return path


def sentence_of(alert: str) -> Seen:
    """Returns a function that looks for an alert by its name."""
    return lambda state: next((a.text for a in state.alerts if a.id == alert), "")


def verdict_of(cause: str = "", rank: int = 1) -> Seen:
    """Returns a function that looks for a stalled run whose verdict has this cause and rank."""

    def seen(state: RunState) -> str:
        found = state.verdict
        fits = found is not None and found.rank == rank and cause in ("", found.cause)
        return found.sentence if fits and state.state == "stalled" else ""

    return seen


def state_of(state: str, words: str = "") -> Seen:
    """Returns a function that looks for a state, and for words in its reason."""
    return lambda seen: (
        (seen.why or seen.state) if seen.state == state and words in seen.why else ""
    )


def spray(started, until: threading.Event) -> None:
    """Sends SIGUSR1 to the processes of the run and their groups until `until` is set."""
    while not until.wait(0.02):
        agent = (started.state().get("torchrun") or {}).get("pid")
        if not agent:
            continue
        for pid in {agent, *process.with_token(started.token())}:
            for send in (os.kill, os.killpg):
                try:
                    send(pid, signal.SIGUSR1)
                except ProcessLookupError:
                    continue


class Scene:
    """The results of a fault test; `record` receives them for the report."""

    def __init__(self, home: Path, record: Callable[[dict[str, Any]], None]):
        self._home, self._before, self._record = home, files(home), record
        self.seen_s: float | None = None
        self._words, self._left = "nothing to see", "0 files"

    def inject(
        self, started: Started, act: Callable[[], object], seen: Seen, cause: Seen | None = None
    ) -> str:
        """Injects a fault, and waits until a console shows the fault.

        With `cause`, then waits until the console also shows the cause, which needs evidence.
        Returns the last words that the console showed.
        """
        source = RunSource(started.path)
        source.poll()
        act()
        begun = time.monotonic()
        words = started.wait(lambda: seen(source.poll()), every_s=LOOK_EVERY_S)
        self.note(words, time.monotonic() - begun)
        if cause is not None:
            words = started.wait(lambda: cause(source.poll()), every_s=LOOK_EVERY_S)
            self.note(f"cause after {time.monotonic() - begun:.1f} s: {words}")
        return words

    def note(self, words: str, seconds: float | None = None) -> None:
        """Records the words with which the fault was shown, and the seconds until then."""
        self._words, self.seen_s = words, self.seen_s if seconds is None else seconds

    def goes_on(self, started: Started, pids: Mapping[int, int], for_s: float = 0.0) -> None:
        """Checks that the same ranks live for `for_s`, and then make progress that a console shows.

        They must not have been restarted.
        """
        until = time.monotonic() + for_s
        while time.monotonic() < until:
            assert started.pids() == pids, started.state()
            time.sleep(0.2)
        source = RunSource(started.path)
        before = started.wait(lambda: source.poll().step)
        started.wait(lambda: (source.poll().step or 0) > before + 5)
        started.wait(lambda: source.poll().state == "running")
        assert started.pids() == pids
        assert all_run(pids)
        assert started.state()["attempt"] == 1
        self._left = "0 killed, 0 files"

    def stop(self, started: Started) -> None:
        """Stops the run, and checks its end."""
        assert started.ask("stop")["ok"]
        started.wait_end()
        self.ended(started, "stopped", 4)

    def ended(self, started: Started, state: str, code: int) -> str:
        """Checks that a launch has ended in this state and with this exit code of `status`.

        No process of the launch and no file in shared memory may remain, and the newest checkpoint
        of each run, if there is one, must be intact. Returns the reason of the state.
        """
        tokens = [started.token(int(run.name.partition("-")[0])) for run in started.runs()]
        owner = started.plan_state.get("supervisor", {})
        started.wait(
            lambda: not rundir.is_alive(owner) and not any(map(process.with_token, tokens))
        )
        started.wait(lambda: sweep_own(tokens) == [])
        for run in started.runs():
            if (run / rundir.CHECKPOINTS).exists():
                newest = latest_checkpoint(run)
                assert newest is not None
                manifest.verify(newest)
        found, said = status(started.path)
        assert (found, said["state"]) == (code, state), said["why"]
        self._left = "0 processes, 0 files"
        return said["why"]

    def close(self) -> None:
        """Checks that no file was left in the home directory; records the result."""
        left = files(self._home) - self._before
        assert not left
        self._record({"seen_s": self.seen_s, "words": self._words, "left": self._left})
