"""A plan: the phases of a launch as data. Read from YAML, strict, frozen."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from trainers.contract import flags, yamlfile
from trainers.contract.errors import UsageError, did_you_mean

NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,47}")
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters but tab and line feed, and halves of characters."""
LARGEST_NUMBER, JUST_BELOW_0 = 1e7, -5e-324
LONGEST_BACKOFF_S = 600.0
Between = Literal["go", "ask"]
BETWEEN: tuple[Between, ...] = ("go", "ask")
RestartWhen = Literal["never", "crash", "stall"]
RESTART_WHEN: tuple[RestartWhen, ...] = ("never", "crash", "stall")
WATCH_ACTIONS = ("warn", "dump", "halt", "stop", "restart")
"""What a watch rule may do, each stronger than the one before."""


@dataclass(frozen=True, slots=True)
class WatchRule:
    """What a plan changes of one watch rule; None leaves the table's own value."""

    threshold: float | None = None
    for_s: float | None = None
    action: str | None = None


@dataclass(frozen=True, slots=True)
class Watch:
    """When the supervisor calls a run stalled, and how long things may take (seconds).

    `eval_s` and `save_s` None: as `startup_s`. A stall is answered with more than a dump only when
    it has lasted `stall_act_s` in all; the default is longer than a collective may take.
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
    """When the supervisor starts a run again from its newest good checkpoint.

    `stall` includes `crash`. It gives up after `attempts` without a new checkpoint; `backoff_s` is
    what it waits before the first of them, and it doubles.
    """

    when: RestartWhen = "never"
    attempts: int = 3
    backoff_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Phase:
    """One run of a plan. `module` or `script` is what torchrun starts with `args`."""

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


@dataclass(frozen=True, slots=True)
class Plan:
    """Phases with what they share."""

    name: str
    phases: tuple[Phase, ...]
    about: str = ""
    gpus: int = 0
    between: Between = "go"
    watch: Watch = Watch()
    restart: Restart = Restart()
    env: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Returns the plan as plain data, for plan.json."""
        return asdict(self)


SHARED_KEYS = ("nproc", "module", "script", "config", "flags")
"""Keys that may stand once for all phases; a phase overrides them (flags are merged)."""


def load(path: Path) -> Plan:
    """Returns the plan in a YAML file. Raises UsageError with file, key and what to do."""
    return parse(yamlfile.load(path), str(path))


def parse(document: Mapping[str, Any], where: str) -> Plan:
    """Returns the plan in parsed YAML; `where` stands in the error."""
    own = [f.name for f in fields(Plan)]
    _printable(document, where)
    _known(document, [*own, *SHARED_KEYS], where)
    raw_phases = document.get("phases")
    if not isinstance(raw_phases, list) or not raw_phases:
        raise UsageError(f"{where}: 'phases' must be a list of at least one phase")
    shared = {key: document[key] for key in SHARED_KEYS if key in document}
    phases = tuple(
        _phase(raw, shared, f"{where}: phase {i + 1}") for i, raw in enumerate(raw_phases)
    )
    names = [phase.name for phase in phases]
    if len(set(names)) != len(names):
        raise UsageError(f"{where}: two phases have the same name; give each its own")
    between = document.get("between", "go")
    if between not in BETWEEN:
        raise UsageError(f"{where}: 'between' cannot be {between!r}; it is go or ask")
    gpus = document.get("gpus", 0)
    if isinstance(gpus, bool) or not isinstance(gpus, int) or gpus < 0:
        raise UsageError(f"{where}: 'gpus' cannot be {gpus!r}; it is how many GPUs the plan needs")
    return Plan(
        name=_name(document.get("name"), where),
        phases=phases,
        about=_text(document.get("about", ""), f"{where}: about"),
        gpus=gpus,
        between=between,
        watch=watch(document.get("watch", {}), f"{where}: watch"),
        restart=_restart(document.get("restart", {}), f"{where}: restart"),
        env=_flag_values(document.get("env", {}), f"{where}: env"),
    )


def _phase(raw: Any, shared: Mapping[str, Any], where: str) -> Phase:
    if not isinstance(raw, dict):
        raise UsageError(f"{where} must be a mapping with a name")
    _known(raw, [f.name for f in fields(Phase)], where)
    merged = {**shared, **raw}
    if "script" in raw or "module" in raw:
        merged = {k: v for k, v in merged.items() if k not in ("script", "module") or k in raw}
    flag_values = {
        **_mapping(shared.get("flags", {}), where),
        **_mapping(raw.get("flags", {}), where),
    }
    nproc = merged.get("nproc", 1)
    if isinstance(nproc, bool) or not isinstance(nproc, int) or not 1 <= nproc <= 1024:
        raise UsageError(f"{where}: 'nproc' cannot be {nproc!r}; it is 1 to 1024 processes")
    for key in ("module", "script"):
        if str(merged.get(key, "")).strip().startswith("-"):
            raise UsageError(
                f"{where}: {key!r} cannot start with '-': torchrun takes it as its own"
            )
    args = merged.get("args", [])
    if not isinstance(args, list):
        raise UsageError(f"{where}: 'args' must be a list of words")
    return Phase(
        name=_name(merged.get("name"), where),
        proves=_text(merged.get("proves", ""), f"{where}: proves"),
        nproc=nproc,
        module=_text(merged.get("module", "trainers.ddp"), f"{where}: module"),
        script=_text(merged.get("script", ""), f"{where}: script"),
        args=tuple(str(word) for word in args),
        config=_text(merged.get("config", ""), f"{where}: config"),
        set=_mapping(merged.get("set", {}), f"{where}: set"),
        flags=_flag_values(flag_values, f"{where}: flags"),
        gates=_mapping(merged.get("gates", {}), f"{where}: gates"),
    )


def watch(raw: Any, where: str) -> Watch:
    """Returns the `watch` section of a plan. Raises UsageError; rules are known by shape alone."""
    raw = _given(raw, [f.name for f in fields(Watch)], where)
    rules = _mapping(raw.pop("rules", {}), f"{where}: rules")
    spans = {key: _number(value, key, where, "seconds", 0.0) for key, value in raw.items()}
    return Watch(**spans, rules={
        name: _watch_rule(given, f"{where}: rule {name!r}") for name, given in rules.items()
    })  # fmt: skip


def _watch_rule(raw: Any, where: str) -> WatchRule:
    raw = _given(raw, [f.name for f in fields(WatchRule)], where)
    action = raw.pop("action", None)
    if action not in (None, *WATCH_ACTIONS):
        known = ", ".join(WATCH_ACTIONS)
        raise UsageError(f"{where}: 'action' cannot be {action!r}; it is one of {known}")
    return WatchRule(action=action, **{
        key: _number(value, key, where, "seconds", JUST_BELOW_0) if key == "for_s"
        else _number(value, key, where, "its unit", 0.0)
        for key, value in raw.items()
    })  # fmt: skip


def _given(raw: Any, known: list[str], where: str) -> dict[str, Any]:
    """Returns what a section gives; null, as plan.json has it, is not given."""
    raw = _mapping(raw, where)
    _known(raw, known, where)
    return {key: value for key, value in raw.items() if value is not None}


def _number(value: Any, key: str, where: str, unit: str, above: float) -> float:
    """Returns a finite number above a bound. Raises UsageError."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not above < value < LARGEST_NUMBER:
        raise UsageError(f"{where}: {key!r} cannot be {value!r}; it is a number of {unit}")
    return float(value)


def _restart(raw: Any, where: str) -> Restart:
    raw = _mapping({"when": raw} if isinstance(raw, str) else raw, where)
    _known(raw, [f.name for f in fields(Restart)], where)
    held = asdict(Restart()) | raw
    when = held["when"]
    if when not in RESTART_WHEN:
        raise UsageError(f"{where}: 'when' cannot be {when!r}; it is {', '.join(RESTART_WHEN)}")
    attempts = held["attempts"]
    if isinstance(attempts, bool) or not isinstance(attempts, int) or not 1 <= attempts <= 1000:
        raise UsageError(f"{where}: 'attempts' cannot be {attempts!r}; it is 1 to 1000")
    backoff_s = _number(held["backoff_s"], "backoff_s", where, "seconds", JUST_BELOW_0)
    if backoff_s > LONGEST_BACKOFF_S:
        raise UsageError(f"{where}: 'backoff_s' is at most {LONGEST_BACKOFF_S:g} seconds")
    return Restart(when, attempts, backoff_s)


def _flag_values(raw: Any, where: str) -> dict[str, str]:
    values = {}
    for name, value in _mapping(raw, where).items():
        try:
            values[name] = flags.format_value(flags.parse(name, flags.format_value(value)))
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from None
    return values


def _printable(value: Any, where: str) -> None:
    """Refuses what no command line and no environment can hold, wherever it stands."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _printable(key, where)
            _printable(inner, f"{where}: {key}")
    elif isinstance(value, list | tuple):
        for inner in value:
            _printable(inner, where)
    elif isinstance(value, str):
        bad = UNPRINTABLE.search(value)
        if bad:
            raise UsageError(f"{where} holds the control character {bad[0]!r}; take it out")


def _known(raw: Mapping[str, Any], known: list[str], where: str) -> None:
    for key in raw:
        if key not in known:
            raise UsageError(f"{where}: there is no key {key!r}{did_you_mean(str(key), known)}")


def _mapping(raw: Any, where: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise UsageError(f"{where} must be key: value lines, not a {type(raw).__name__}")
    return {str(key): value for key, value in raw.items()}


def _text(raw: Any, where: str) -> str:
    if not isinstance(raw, str):
        raise UsageError(f"{where} must be a text, not a {type(raw).__name__}")
    return " ".join(raw.split())


def _name(raw: Any, where: str) -> str:
    if not isinstance(raw, str) or not NAME.fullmatch(raw):
        raise UsageError(
            f"{where}: the name {raw!r} must be lower-case letters, digits, '_', '.' or '-'"
        )
    return raw
