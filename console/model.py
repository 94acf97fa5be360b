"""Defines the data that the console shows, as frozen dataclasses.

This module uses no Textual, files or processes. A time is in unix seconds unless its name says
otherwise. `None` means that there is no value.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

State = Literal[
    "queued", "starting", "running", "stalled", "halting", "halted", "stopping",
    "stopped", "restarting", "completed", "failed", "crashed", "killed", "unsupervised", "lost",
]  # fmt: skip
Level = Literal["crit", "warn", "info"]
Result = Literal["fail", "unknown", "pass"]
Sure = Literal["high", "medium", "low"]
LEVELS: tuple[Level, ...] = get_args(Level)
RESULTS: tuple[Result, ...] = get_args(Result)
"""`LEVELS` and `RESULTS` both start with the worst value."""

LIVE_STATES: frozenset[State] = frozenset((
    "queued", "starting", "running", "stalled", "halting", "stopping", "restarting", "unsupervised",
))  # fmt: skip
"""States of a run that has not ended."""
BAD_STATES: frozenset[State] = frozenset(("stalled", "failed", "crashed", "killed", "lost"))
RANK_GONE = "rank-gone"
"""The alert on a rank that failed while other ranks ran. The supervisor then ends the attempt."""
STALL = "stall"
"""The alert and the watch rule of a run that makes no progress."""
OPERATOR = "operator "
"""Start of the origin of a flag that a request has set."""
LOSS_UNIT = "nats/token"
OWN_DIRECTORY = "own-directory"
"""The alert of a directory that was moved, replaced or removed; requests there are ignored."""
END_MISSING = "end-missing"
"""The alert of a run whose end is recorded, but not in supervisor.json."""
CONTINUED = "continued"
"""The alert of an ended launch that another launch continues."""
NO_GO = "no-go"
"""The alert of a run or launch whose records do not confirm that it passed."""
EXIT_CODES: Mapping[State, int] = {
    "completed": 0, "halted": 4, "stopped": 4, "killed": 4, "failed": 5, "crashed": 5, "lost": 5,
}  # fmt: skip
"""Exit codes of `--wait` and `status` for each state of an ended run, apart from its gates."""
ENDED_EARLY: tuple[State, ...] = ("halted", "stopped", "killed", "failed", "crashed", "lost")
"""States of a run that ended and is not completed."""
UNHEALTHY_STATES: frozenset[State] = frozenset(("stalled", "unsupervised"))
"""Live states that need an operator."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured number with its unit, its window, and the time of the measurement."""

    value: float
    unit: str
    window: str
    at: float


@dataclass(frozen=True, slots=True)
class Pulse:
    """The step and the phase of a rank, as they were `age_s` seconds ago.

    `age_s` is None if it is not available. `since_s` is the time of the rank in this phase; it is
    None after the end of the run, and without `age_s`. `collectives` is None if it is zero or was
    not counted.
    """

    step: int
    phase: str
    since_s: float | None
    age_s: float | None
    collectives: int | None
    device_step: int
    device_phase: str
    live: bool


CLOCK_S = 2.0
"""A time that is further in the future than this is not used."""
RECENT_XID_S = 600.0
"""An Xid (an error that the GPU driver reports) is shown for this time."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One sample of a GPU. `why` may have the reason for a missing figure.

    `state` is `ok`, `lost` (NVML says that the GPU is lost or not found), or `error` (no readings).
    """

    index: int
    name: str
    state: str
    util_pct: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    mem_used_mib: float | None = None
    mem_total_mib: float | None = None
    temp_c: float | None = None
    sm_mhz: float | None = None
    why: str = ""
    throttle: str = ""
    """The reason for which the driver lowers the clocks to protect the GPU, or "" without one."""
    xid: int | None = None
    """The number of the newest Xid."""
    ecc_uncorrected: int | None = None
    """Uncorrected memory errors since the driver was loaded."""
    uuid: str = ""
    xids: tuple[int, ...] = ()
    """The newest Xids, oldest first."""
    xid_count: int = 0
    """Number of Xids since the process that samples the GPU started."""
    xid_ts: float | None = None
    """Time of the newest Xid (unix s)."""
    minor: int | None = None
    """The N of its device file /dev/nvidiaN. A process that has this file open may use the GPU."""


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank: its process, its pulse and its GPU.

    `state` is the kernel's letter for the process, "gone", or "" if it is not available.
    """

    rank: int
    host: str
    pid: int
    state: str
    cpu_pct: float | None
    rss_mib: float | None
    pulse: Pulse | None
    gpu: Gpu | None
    exit: str = ""
    age_s: float | None = None
    """Age of the newest pulse or record of this rank."""


@dataclass(frozen=True, slots=True)
class Alert:
    """A condition that an operator should know; `key` is the key to press, or "" for no key."""

    id: str
    ts: float
    level: Level
    text: str
    key: str = ""
    acknowledged: bool = False
    observed: bool = False
    """True if this reader raised the alert, not the supervisor. It then clears automatically."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a diagnosis: rank, phase, cause, confidence and evidence."""

    ts: float
    sentence: str
    cause: str
    rank: int | None
    phase: str
    step: int | None
    sure: Sure
    evidence: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    """Signs that name only other ranks."""
    missing: tuple[str, ...] = ()
    """Evidence that is not available."""
    action: str = ""
    """The next step of an operator, or "" if none is known."""
    place: str = ""
    """File and line in the rank's own code, or "" if they are not known."""
    end: str = ""
    """The end of the stall as a sentence, or "" if it is not known."""
    end_ts: float | None = None

    def may_save(self, is_ours: bool) -> bool:
        """Returns whether a rank may be saving. Our trainers have saved when they enter `halt`."""
        return self.phase == "save" or (self.phase == "halt" and not is_ours)

    def of_past(self) -> Verdict:
        """Returns the verdict without its next step, because pids may be reused by now."""
        command = self.action.partition("; ")[0]
        sentence = self.sentence.replace(f"; {command}", "") if command else self.sentence
        return replace(self, sentence=sentence, action="")

    def signs(self) -> list[tuple[str, str]]:
        """Returns the lines of `evidence` (mark +), `against` (mark -) and `missing` (mark ?)."""
        marked = {"+": self.evidence, "-": self.against, "?": self.missing}
        return [(mark, line) for mark, lines in marked.items() for line in lines]


@dataclass(frozen=True, slots=True)
class Gate:
    """One gate of a phase with its measured value and its bound."""

    name: str
    value: float | None
    unit: str
    window: str
    source: str
    bound: str
    result: Result
    why: str = ""
    override: str = ""
    """The reason of an override, in the plan or by request, or "" if there is no override."""

    @property
    def blocks(self) -> bool:
        """True if the gate did not pass and has no override."""
        return self.result != "pass" and not self.override


@dataclass(frozen=True, slots=True)
class PhaseState:
    """One phase of a launch. A phase that has not begun has the `state` `next` or `later`."""

    index: int
    name: str
    proves: str
    state: str
    why: str
    result: str
    steps: int | None
    steps_planned: int | None
    started_ts: float | None
    ended_ts: float | None
    dir: str
    has_gates: bool = False
    """True if the plan has gates for the phase. Without gates, a completed phase has passed."""
    sweep: str = ""
    """The sweep of which the phase is a run, or ""."""

    @property
    def numbered(self) -> str:
        """The number of the phase, counted from 0, and its name."""
        return f"{self.index}-{self.name}"


@dataclass(frozen=True, slots=True)
class PendingFlag:
    """A flag that an operator set for the `next` phase, or for `all` later phases."""

    name: str
    value: str
    by: str
    ts: float
    phases: str = "next"


@dataclass(frozen=True, slots=True)
class LaunchState:
    """A launch with its phases and pending flags."""

    id: str
    path: str
    plan: str
    state: Literal["running", "waiting", "ended", "unsupervised", "unknown"]
    why: str
    phase: int
    phases: tuple[PhaseState, ...]
    between: str
    next_flags: tuple[PendingFlag, ...] = ()
    doubt: str = ""
    """A gap or contradiction in the documents about the phases, or "" if there is none."""
    ended_by: str = ""
    """The request or file that ends the launch after the current phase, or "" if there is none."""
    continues: tuple[str, ...] = ()
    """The ids of the launches that plan.json names as continued by this launch."""

    @property
    def under_way(self) -> bool:
        return self.state in ("running", "waiting")

    @property
    def current(self) -> str:
        """The name of the current phase, or "" for a launch without phases."""
        return self.phases[self.phase].name if self.phases else ""

    def unconfirmed(self, folders: Collection[str]) -> LaunchState:
        """Returns a copy: passed phases with a directory in `folders` have the result unknown."""
        return replace(self, phases=tuple(
            replace(phase, result="unknown")
            if phase.result == "pass" and phase.dir in folders else phase
            for phase in self.phases
        ))  # fmt: skip

    @property
    def rest(self) -> tuple[PhaseState, ...]:
        """The phases after the current phase."""
        return self.phases[self.phase + 1 :]

    @property
    def not_started(self) -> str:
        """The names of the phases from the current phase on that have not started."""
        left = self.phases[self.phase :]
        return ", ".join(phase.name for phase in left if phase.state in ("next", "later"))

    @property
    def has_passed(self) -> bool:
        """True if the current phase has passed its gates, and another phase follows."""
        current = self.phases[self.phase : self.phase + 1]
        return bool(self.rest) and ("completed", "pass") in [(p.state, p.result) for p in current]


ALL_SOURCES = "all"
"""The source of a log line that concerns all sources, not only one."""


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a log, safe for a terminal."""

    source: str
    text: str


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of one run after one poll, without its logs and charts."""

    id: str
    path: str
    state: State
    why: str
    since_ts: float | None = None
    attempt: int = 1
    host: str = ""
    world: int = 0
    step: int | None = None
    steps_planned: int | None = None
    eta_s: float | None = None
    data_age_s: float | None = None
    """Age of the newest pulse or record of any rank, or of the newest sample."""
    ranks: tuple[Rank, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    figures: Mapping[str, Figure] = field(default_factory=dict)
    alerts: tuple[Alert, ...] = ()
    verdict: Verdict | None = None
    gates: tuple[Gate, ...] = ()
    bounds: Mapping[str, str] = field(default_factory=dict)
    """The bound of each gate of this phase. The key is the name of the gate."""
    armed: str = ""
    """The policy: what the supervisor does by itself on a stall or crash."""
    armed_short: str = ""
    launch: LaunchState | None = None
    skipped_records: int = 0
    skipped_in: str = ""
    """The place of `skipped_records` ("in the newest …"), or "" for whole files."""
    behind_bytes: int = 0
    """Number of bytes of records that have not been read yet; these may have newer values."""
    directory_blocked_s: float = 0.0
    """Seconds since the current write or other work in the run directory began; 0 without work."""
    checkpoint: str = ""
    """Name of the newest complete checkpoint in the directory of the run, or "" without one."""
    resumed_step: int = 0
    """The step before the first recorded step of this attempt, or 0 if none is recorded."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """The flags of this run's processes."""
    decided: Mapping[str, str] = field(default_factory=dict)
    """The resolved settings that have a flag. The key is the name of the flag."""
    origins: Mapping[str, str] = field(default_factory=dict)
    argv: tuple[str, ...] = ()
    backend: str = ""

    @property
    def own_phase(self) -> PhaseState | None:
        """The phase of this run in the launch, or else the launch's current phase, or None."""
        if self.launch is None or not self.launch.phases:
            return None
        name, phases = self.path.rpartition("/")[2], self.launch.phases
        return next((each for each in phases if each.dir == name), phases[self.launch.phase])

    @property
    def saved_step(self) -> int:
        """The step in the name of `checkpoint`, or else `resumed_step`."""
        saved = self.checkpoint.removeprefix("step_")
        return int(saved) if saved.isdecimal() else self.resumed_step

    @property
    def can_resume(self) -> bool:
        """True if the launch has ended, and a resume has a checkpoint or starts the next phase.

        A foreign program has no `decided` settings; its checkpoints are not used.
        """
        continued = any(alert.id == CONTINUED for alert in self.alerts)
        if self.launch is None or self.launch.state != "ended" or continued:
            return False
        has_checkpoint = bool(self.saved_step and self.decided)
        return (has_checkpoint and self.state in ENDED_EARLY) or self.launch.has_passed


def loss_unit(settings: object) -> str:
    """Returns the unit of the loss of a run, or "" for a foreign program, which has no settings."""
    return LOSS_UNIT if settings else ""
