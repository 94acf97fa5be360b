"""Parses plans into frozen data; `console.plans.plan_file` reads their files.

An unknown key raises UsageError, except a name in `set`, `gates` or `rules`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from trainers.contract import flags, values
from trainers.contract.errors import UsageError, did_you_mean
from trainers.settings import STRATEGIES

NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,47}")
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Surrogates, and control characters except tab and line feed."""
LONGEST_BACKOFF_S = 600.0
LIMITS: Mapping[str, tuple[float, float]] = {
    "nproc": (1, 1024), "gpus": (0, 1 << 20), "attempts": (1, 1000),
    "backoff_s": (0, LONGEST_BACKOFF_S), "threshold": (1e-9, 1e7), "for_s": (0, 1e7),
    "hook_every_s": (1, 86_400), "alive_every_s": (1, 86_400), "parameters": (1, 1e15),
    "seq_len": (1, 1e9), "tokens_per_step": (1, 1e12), "rounds": (9, 14),
}  # fmt: skip
"""Smallest and largest number by key; `ANY_SPAN` is for the keys that are not listed."""
ANY_SPAN = (1e-3, 1e7)
DEVICE = "train.device"
Between = Literal["go", "ask"]
BETWEEN: tuple[Between, ...] = get_args(Between)
RestartWhen = Literal["never", "crash", "stall"]
WatchAction = Literal["warn", "dump", "halt", "stop", "restart"]
WATCH_ACTIONS: tuple[WatchAction, ...] = get_args(WatchAction)
"""The actions of a watch rule, the weakest first."""


@dataclass(frozen=True, slots=True)
class WatchRule:
    """A plan's changes to one watch rule; None keeps the value from the table of rules."""

    threshold: float | None = None
    for_s: float | None = None
    action: WatchAction | None = None


@dataclass(frozen=True, slots=True)
class Watch:
    """Time limits of the supervisor in seconds, for example of stalls, and changes to watch rules.

    If `eval_s` or `save_s` is None, `startup_s` applies. On a stall, an action stronger than a dump
    waits at least `stall_act_s`. The default of `stall_act_s` is longer than that of
    `ddp.timeout_min`.
    """

    stall_floor_s: float = 60.0
    startup_s: float = 300.0
    grace_s: float = 30.0
    eval_s: float | None = None
    save_s: float | None = None
    stall_act_s: float = 1800.0
    rules: Mapping[str, WatchRule] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Restart:
    """The policy for restarts of a run from its newest verified checkpoint, or else from its start.

    The value "stall" of `when` includes "crash". After `attempts` attempts in a row that wrote no
    new checkpoint, the run is not restarted. The wait before a restart is `backoff_s`. Each attempt
    of such a row after the first doubles the wait, up to `LONGEST_BACKOFF_S`.
    """

    when: RestartWhen = "never"
    attempts: int = 3
    backoff_s: float = 10.0


PLACEHOLDER = "{checkpoint}"


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Options for new checkpoints: a load in another process (`load`), then a back-up.

    `backup` is a program with its arguments. It runs after a successful load, so a `backup` implies
    a load even if `load` is False. `PLACEHOLDER` in the arguments stands for the path of the
    checkpoint. Without a `PLACEHOLDER`, the path is the last argument.
    """

    load: bool = False
    backup: tuple[str, ...] = ()
    load_s: float = 300.0
    backup_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Expects:
    """Facts that a plan expects of a phase; a fact that is None is not checked."""

    parameters: int | None = None
    seq_len: int | None = None
    tokens_per_step: int | None = None
    """Tokens of all ranks in one optimizer step."""
    hours: float | None = None
    """Expected hours of the phase, for the watch rule `late`."""


@dataclass(frozen=True, slots=True)
class Preflight:
    """With `measure`, the preflight of a launch also measures devices, data and attention."""

    measure: bool = False


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of a plan. torchrun starts `module` or `script` with `args`.

    In a phase of a sweep, `sweep` and `variant` are the names of the sweep and the variant.
    """

    name: str
    proves: str = ""
    nproc: int = 1
    module: str = "trainers.ddp"
    script: str = ""
    args: tuple[str, ...] = ()
    config: str = ""
    set: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    gates: Mapping[str, Any] = field(default_factory=dict)
    expects: Expects = Expects()
    sweep: str = ""
    variant: str = ""

    @property
    def is_ours(self) -> bool:
        """True if the phase starts one of the two trainers of this project."""
        return not self.script and self.module in STRATEGIES


@dataclass(frozen=True, slots=True)
class Variant:
    """The settings and flags that one variant of a sweep changes."""

    set: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sweep:
    """The keys that only a sweep has. Each variant runs once in each round."""

    variants: Mapping[str, Variant] = field(default_factory=dict)
    rounds: int = 12


@dataclass(frozen=True, slots=True)
class Plan:
    """The phases of a launch, and the keys that apply to the whole launch.

    With `gpus` above 0, `parse` sets the device of some phases to CUDA (see `_on_gpus`).
    """

    name: str
    phases: tuple[Phase, ...]
    about: str = ""
    gpus: int = 0
    between: Between = "go"
    watch: Watch = Watch()
    restart: Restart = Restart()
    checkpoints: Checkpoints = Checkpoints()
    env: Mapping[str, str] = field(default_factory=dict)
    preflight: Preflight = Preflight()

    def as_dict(self) -> dict[str, Any]:
        """Returns the plan as plain data."""
        return asdict(self)


MAX_VARIANTS = 5
SIGNIFICANT_P = 0.005
"""The limit of the p-values of a sweep with two variants (see `highest_p`).

At most 1 % of the sweeps without a true difference should find a difference by chance. The limit is
only half of that, because load that lasts longer than a round adds some false differences.
"""


def highest_p(variants: int) -> float:
    """Returns the limit of the p-values of a sweep; with more variants, the limit is lower."""
    return SIGNIFICANT_P / math.comb(variants, 2)


MERGED_KEYS = ("flags", "set", "gates", "expects")
SHARED_KEYS = ("nproc", "module", "script", "config", *MERGED_KEYS)
"""Keys that a plan may set for all its phases (see `_phase`)."""


def parse(document: Mapping[str, Any], where: str) -> Plan:
    """Returns the plan in parsed YAML. Raises UsageError, whose message begins with `where`."""
    _check_printable(document, where)
    _check_keys(document, [*get_type_hints(Plan), *SHARED_KEYS], where)
    shared = {key: document[key] for key in SHARED_KEYS if key in document}
    own = {key: value for key, value in document.items() if key not in shared}
    raw_phases = own.pop("phases", None)
    if not isinstance(raw_phases, list) or not raw_phases:
        raise UsageError(f"{where}: 'phases' must be a list of at least one phase")
    phases = tuple(
        phase
        for i, raw in enumerate(raw_phases)
        for phase in _phases(raw, shared, f"{where}: phase {i + 1}")
    )
    names = [phase.name for phase in phases]
    if len(set(names)) != len(names):
        raise UsageError(f"{where}: two phases have the same name; give each its own")
    _check_name(own.get("name"), where)
    plan = section(Plan, own, where, phases=phases)
    if own.get("restart") and own["restart"].get("when") is None:
        raise UsageError(f"{where}: restart: 'when' is missing; add when: crash")
    return replace(plan, phases=tuple(map(_on_gpus, phases))) if plan.gpus else plan


def _on_gpus(phase: Phase) -> Phase:
    """Returns a phase; a phase that `is_ours` and has no device in `set` gets the device CUDA."""
    return replace(phase, set={DEVICE: "cuda", **phase.set}) if phase.is_ours else phase


def _phases(raw: Any, shared: Mapping[str, Any], where: str) -> Iterator[Phase]:
    """Yields the phases of one entry; a sweep has a phase for each variant in each round.

    Every second round has the reverse order, to balance a steady drift of the machine.
    """
    raw, keys = _mapping(raw, where), get_type_hints(Sweep)
    own = {k: v for k, v in raw.items() if k not in keys}
    base = _phase(own, shared, where)
    given = {k: v for k, v in raw.items() if k in keys and v is not None}  # null removes a key
    if raw.get("variants", "") is None or not given:
        yield base
        return
    sweep = section(Sweep, given, where)
    names = list(sweep.variants)
    if not 2 <= len(names) <= MAX_VARIANTS:
        raise UsageError(f"{where}: 'variants' must name 2 to {MAX_VARIANTS} variants to compare")
    if 2 ** (1 - sweep.rounds) > highest_p(len(names)):
        raise UsageError(
            f"{where}: {sweep.rounds} 'rounds' of {len(names)} variants cannot show a difference; "
            "set more rounds or compare fewer variants"
        )
    changes = _mapping(given["variants"], where)
    variants = {name: _phase(own, shared, where, changes[name]) for name in names}
    for number in range(1, sweep.rounds + 1):
        for name in names if number % 2 else names[::-1]:
            run = f"{base.name}-{number}-{name}"
            _check_name(run, where)
            yield replace(variants[name], name=run, sweep=base.name, variant=name)


def _phase(
    raw: Mapping[str, Any], shared: Mapping[str, Any], where: str, variant: Mapping[str, Any] = {}
) -> Phase:
    """Returns a phase: `variant` overrides `raw`, which overrides `shared`; a null removes."""
    merged = {**shared, **raw}
    if "script" in raw or "module" in raw:
        merged = {k: v for k, v in merged.items() if k not in ("script", "module") or k in raw}
    for key in MERGED_KEYS:
        top = {} if key == "set" and merged.get("script") else shared
        parts = (_mapping(each.get(key) or {}, f"{where}: {key}") for each in (top, raw, variant))
        merged[key] = {name: value for part in parts for name, value in part.items()}
    for key in ("module", "script"):
        if str(merged.get(key, "")).strip().startswith("-"):
            raise UsageError(
                f"{where}: {key!r} cannot start with '-': torchrun would read it as an option"
            )
    _check_keys(merged, list(get_type_hints(Phase)), where)
    _check_name(merged.get("name"), where)
    return section(Phase, merged, where)


def section(cls: Any, raw: Any, where: str, **read: Any) -> Any:
    """Returns an object of `cls`, whose annotations say how the values of `raw` are converted.

    A null is treated as a missing value, also in a field that is a mapping. Raises UsageError.
    """
    raw, kinds = _mapping(raw, where), get_type_hints(cls)
    _check_keys(raw, list(kinds), where)
    for key, value in raw.items():
        if value is not None:
            read[key] = _read(value, kinds[key], key, where)
    return cls(**read)


def _read(value: Any, kind: Any, key: str, where: str) -> Any:
    inside, parts = f"{where}: {key}", get_args(kind)
    if is_dataclass(kind):
        return section(kind, value, inside)
    if get_origin(kind) is Mapping:
        held = {name: x for name, x in _mapping(value, inside).items() if x is not None}
        if is_dataclass(parts[1]):
            return {name: section(parts[1], x, f"{inside}: {name!r}") for name, x in held.items()}
        return _flag_values(held, inside) if parts[1] is str else held
    if get_origin(kind) is tuple:
        if not isinstance(value, list) or {type(word) for word in value} - {str, int, float}:
            raise UsageError(
                f"{where}: {key!r} must be a list of words; quote no, off, null, dates and braces"
            )
        return tuple(map(str, value))
    if NoneType in parts:
        return _read(value, parts[0], key, where)
    plain = " ".join(value.split()) if isinstance(value, str) else value
    unit = " seconds" if key.endswith("_s") else ""
    return values.read(
        plain, parts or kind, *LIMITS.get(key, ANY_SPAN), f"{where}: {key!r}", unit
    )  # fmt: skip


def _flag_values(raw: Any, where: str) -> dict[str, str]:
    found = {}
    for name, value in _mapping(raw, where).items():
        if not isinstance(value, bool | int | float | str):
            raise UsageError(f"{where}: {name} cannot be {value!r}; write one text, in quotes")
        try:
            found[name] = flags.format_value(flags.parse(name, flags.format_value(value)))
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from None
    return found


def _check_printable(value: Any, where: str) -> None:
    """Raises UsageError if a text contains a character of `UNPRINTABLE`."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check_printable(key, where)
            _check_printable(inner, f"{where}: {key}")
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_printable(inner, where)
    elif isinstance(value, str):
        bad = UNPRINTABLE.search(value)
        if bad:
            raise UsageError(f"{where} contains the control character {bad[0]!r}; remove it")


def _check_keys(raw: Mapping[str, Any], known: list[str], where: str) -> None:
    for key in raw:
        if key not in known:
            raise UsageError(f"{where}: there is no key {key!r}{did_you_mean(str(key), known)}")


def _mapping(raw: Any, where: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        given = "empty" if raw is None else f"a {type(raw).__name__}"
        raise UsageError(f"{where} must be key: value lines, not {given}")
    if any(isinstance(key, bool) for key in raw):
        raise UsageError(f"{where}: YAML reads on, off, yes and no as booleans; quote such names")
    return {str(key): value for key, value in raw.items()}


def _check_name(raw: Any, where: str) -> None:
    if raw is None:
        raise UsageError(f"{where}: 'name' is missing; add 'name: NAME'")
    if not isinstance(raw, str) or not NAME.fullmatch(raw):
        raise UsageError(
            f"{where}: the name {raw!r} must be lower-case letters, digits, '_', '.' or '-', "
            "and have at most 48 characters"
        )
