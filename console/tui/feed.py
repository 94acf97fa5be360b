"""Polls the run for the screen in one thread, and delivers the data of each poll as a snapshot.

The thread is a daemon thread, so a directory that does not answer blocks neither the screen nor its
exit. No executor owns it, because the interpreter waits at exit for the threads of executors.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from console.model import (
    CLOCK_S,
    CONTINUED,
    LIVE_STATES,
    Alert,
    LaunchState,
    LogLine,
    RunState,
    Verdict,
)
from console.sources.series import Points
from console.tui.draft import next_phase_values
from trainers.contract import jsonl, rundir
from trainers.contract.errors import ContractError

if TYPE_CHECKING:
    from console.sources.logs import LogSource
    from console.sources.run import RunSource

POLL_S = 1.0
GLANCE_S = 0.25
CONTINUED_S = 10.0
"""Interval of the looks for a new launch, which may continue an ended launch."""
RECENT = 50
"""Among this many of the newest launches, a live one is also found without a supervisor."""
LOOK_BYTES = 1 << 20
"""`limit_bytes` of the `RunSource`: a long run is shown while its records are still being read."""
STAMPED = ("supervisor.json", "events.jsonl", "gates.json", "../plan_state.json")
"""Paths relative to the run directory. When one of these files changes, the next poll is due."""


@dataclass(frozen=True, slots=True)
class ScreenData:
    """The data of one poll. `at` is a monotonic time, `now` is in unix seconds.

    `recorded` has the names of all series of the run; `charts` has the points of the `wanted`
    series.
    """

    at: float
    now: float
    state: RunState | None = None
    charts: Mapping[str, Points] = field(default_factory=dict)
    recorded: Collection[str] = ()
    stacks: Mapping[int, Any] = field(default_factory=dict)
    last_verdict: Verdict | None = None
    """The newest verdict in the run directory, for the Stall view."""
    log: tuple[LogLine, ...] = ()
    """The new log lines; `log_begins` is true if they begin another log."""
    log_begins: bool = False
    trouble: str = ""
    coming: Mapping[str, str] = field(default_factory=dict)
    """The planned flags of the next phase; `coming_trouble` says why they are missing."""
    coming_trouble: str = ""


def open_source(path: Path) -> RunSource:
    from console.sources.run import RunSource

    return RunSource(path, LOOK_BYTES, reads="charts")


def find_newest(root: Path) -> Path | None:
    """Returns the launch in `root` that `find_live` finds, or else the newest launch.

    If there is no launch, returns the newest run that was started by hand, or None.
    """
    from console.sources import launches

    found = launches.launches(root)
    return find_live(found) or next(iter(found or launches.bare_runs(root)), None)


def find_live(found: Sequence[Path]) -> Path | None:
    """Returns the first launch that may be alive, or None.

    After the first `RECENT` launches, only those with a locked directory are read. A launch on
    another host or in another container counts only while its state is recent, because a host that
    crashes records no end.
    """
    from console.sources import launch_documents, liveness

    for path in chain(found[:RECENT], filter(liveness.is_locked, found[RECENT:])):
        state = rundir.read_json(path / rundir.PLAN_STATE) or {}
        named = launch_documents.launch_state(path, path.name, {}, state).state
        if named in ("running", "waiting"):
            return path
        is_here = not liveness.elsewhere(jsonl.mapping(state, "supervisor"))
        if named == "unsupervised" and is_here and open_source(path).poll().state in LIVE_STATES:
            return path
    return None


class Feed:
    """Polls a run in a thread. The thread calls `deliver`, which must only pass the data on.

    The next snapshot is made only after `allow_next()`. So a slow screen gets fewer snapshots, and
    snapshots do not queue up.
    """

    def __init__(self, deliver: Callable[[ScreenData], object], path: Path | None, root: Path):
        self._deliver, self._open = deliver, open_source
        self._root = root
        self._path = path
        self._newest: Path | None = None
        """The screen's thread sets `_path`, the launch or run that the operator chose. Without it,
        the feed's thread sets `_newest`, the newest launch or run."""
        self._source: RunSource | None = None
        self._opened: Path | None = None
        self._last: ScreenData | None = None
        """The last snapshot of this source; None until a read of the source succeeds."""
        self._logs: LogSource | None = None
        self._made: dict[str, tuple[object, Any]] = {}
        """The mark and the value of each part that is read only after a change of the mark."""
        self._stamps: list[object] = []
        self._watched: list[Path] = []
        self._nudged = threading.Event()
        self._taken = threading.Event()
        self._stopped = False
        self.wanted: tuple[str, ...] = ()
        """The series that the view draws."""
        self.wants_stacks = self.wants_coming = False
        self.paused = False
        """True while the display is paused; new log lines are then left unread."""
        self._reading_since: float | None = None

    def start(self) -> None:
        threading.Thread(target=self._run, name="feed", daemon=True).start()

    def stop(self) -> None:
        self._stopped = True
        self._taken.set()
        self.nudge()

    def follow(self, path: Path) -> None:
        """Polls another launch or run from now on."""
        self._path = path
        self.nudge()

    def nudge(self) -> None:
        """Requests a snapshot now."""
        self._nudged.set()

    def allow_next(self) -> None:
        """Allows the next snapshot. The app calls this method when it has processed a snapshot."""
        self._taken.set()

    @property
    def silent_s(self) -> float:
        """Duration of the present read of the run directory, or 0 between reads.

        The feed's thread sets the start of the read, so a busy screen does not look like a silent
        directory.
        """
        since = self._reading_since
        return time.monotonic() - since if since is not None else 0.0

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        self._reading_since = time.monotonic()
        yield
        self._reading_since = None

    def _run(self) -> None:
        while not self._stopped:
            with self._reading():
                snapshot = self._take_or_say()
            self._taken.clear()
            self._deliver(snapshot)
            self._wait()

    def _take_or_say(self) -> ScreenData:
        """Reads once; after an error, returns the last snapshot with a text about the error.

        The snapshot keeps its `at`, so the header shows the age of the data.
        """
        path = self._path or self._newest or self._root
        try:
            return self.take()
        except OSError as error:
            text = f"{path} cannot be read: {error.strerror}"
        except Exception as mistake:
            text = f"cannot read {path}: {type(mistake).__name__}: {mistake}; please report it"
        if self._last is None:
            return ScreenData(time.monotonic(), time.time(), log_begins=True, trouble=text)
        return replace(self._last, log=(), log_begins=False, trouble=text)

    def take(self) -> ScreenData:
        """Reads once and returns the data."""
        from console.plans.gate_check import poll_confirmed

        at, now = time.monotonic(), time.time()
        if self._path is None and self._newest is None:
            self._newest = find_newest(self._root)
        path = self._path or self._newest
        if path is None:
            return ScreenData(at, now)
        if self._source is None or self._opened != path:
            self._source, self._opened = self._open(path), path
            self._logs, self._last, self._made = None, None, {}
        source = self._source
        self._stamps = self._stamp()  # a file that changes during the read is read again
        state = self._with_continued(poll_confirmed(source, former=False))
        coming = self._poll_coming(state.launch)
        run = source.run_path
        log, begins = self._poll_logs(run, state)
        begins |= self._last is None
        series, recorded = source.series, source.series.names
        charts = {name: series.points(name) for name in self.wanted}
        stacks, last_verdict = self._poll_stacks(run, state), self._poll_last_verdict(run)
        self._watched = [run / name for name in STAMPED] if run else []
        self._last = ScreenData(
            at, now, state, charts, recorded, stacks, last_verdict, log, begins, "", *coming
        )
        return self._last

    def _with_continued(self, state: RunState) -> RunState:
        """Returns the state with the alert `CONTINUED` if another launch continues its launch."""
        launch = state.launch
        if launch is None or launch.state not in ("ended", "unsupervised"):
            return state
        from console import rest_of_launch
        from console.sources import launches

        path, turn = Path(launch.path), time.monotonic() // CONTINUED_S
        known = self._unless_same(
            "launches", turn, lambda: launches.paths(self._root, launches.root_of(path))
        )
        text = self._unless_same(
            CONTINUED,
            (path, known),
            lambda: rest_of_launch.continued_words(path, self._root, False),
        )
        alert = Alert(CONTINUED, time.time(), "info", f"{text}; o opens it", observed=True)
        return replace(state, alerts=(*state.alerts, alert)) if text else state

    def _unless_same(self, name: str, mark: object, make: Callable[[], Any]) -> Any:
        """Returns the stored part `name`; if its mark has changed, `make` makes the part again."""
        if name not in self._made or self._made[name][0] != mark:
            self._made[name] = (mark, make())
        return self._made[name][1]

    def _poll_logs(self, run: Path | None, state: RunState) -> tuple[tuple[LogLine, ...], bool]:
        if run is None or self.paused:
            return (), False
        from console.sources.logs import LogSource, before

        held = self._logs
        begins = held is None or (held.run, held.attempt) != (run, state.attempt)
        if held is None or begins:
            held = self._logs = LogSource(run, state.attempt, skips=True)
        first = before(run, state.attempt) if begins else []
        return (*first, *held.poll(over=state.state not in LIVE_STATES)), begins

    def _poll_stacks(self, run: Path | None, state: RunState) -> Mapping[int, Any]:
        """Returns each rank's newest dump, except dumps of former processes; {} if not wanted."""
        if run is None or not self.wants_stacks:
            return {}
        pids = {rank.rank: rank.pid for rank in state.ranks}

        def read() -> Mapping[int, Any]:
            from console.sources import stacks

            # A dump from the future, written before the clock was set back, would stay the newest.
            until_ts = time.time() + CLOCK_S
            found = stacks.latest(run, pids, until_ts=until_ts)
            return {
                rank: stack for rank, stack in found.items()
                if 0 in (pids[rank], stack.pid) or pids[rank] == stack.pid
            }  # fmt: skip

        mark = (run, rundir.stamp(run.resolve()), pids)  # the path may be a link
        return self._unless_same("stacks", mark, read)

    def _poll_last_verdict(self, run: Path | None) -> Verdict | None:
        if run is None or not self.wants_stacks:
            return None
        from console.sources import verdicts

        mark = (run, rundir.stamp(run / rundir.VERDICTS))
        return self._unless_same("verdict", mark, lambda: verdicts.newest(run))

    def _poll_coming(self, launch: LaunchState | None) -> tuple[Mapping[str, str], str]:
        if launch is None or not launch.under_way or not self.wants_coming:
            return {}, ""

        def read() -> tuple[Mapping[str, str], str]:
            try:
                return next_phase_values(launch), ""
            except (ContractError, OSError) as error:
                return {}, str(error)

        mark = launch.path, launch.phase, rundir.stamp(Path(launch.path) / rundir.PLAN)
        return self._unless_same("coming", mark, read)

    def _stamp(self) -> list[object]:
        return [rundir.stamp(path) for path in self._watched]

    def _wait(self) -> None:
        state = self._last.state if self._last else None
        behind = state is not None and state.behind_bytes > 0
        end = time.monotonic() + (0.0 if behind else POLL_S)
        while not self._stopped and time.monotonic() < end:
            if self._nudged.wait(GLANCE_S):
                self._nudged.clear()
                break
            with self._reading():
                stamps = self._stamp()
            if time.monotonic() >= end - GLANCE_S / 2 or stamps != self._stamps:
                break
        self._taken.wait()
