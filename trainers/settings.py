"""Resolves the settings: defaults < YAML < environment flags < command line, with origins.

This module needs no torch, so the console can check a configuration quickly. `trainers.schema` has
the keys, and `trainers.rejected_settings` has the rejected combinations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from trainers.contract import drill_kinds, flags, values, yamlfile
from trainers.contract.errors import UsageError, did_you_mean
from trainers.rejected_settings import refuse
from trainers.schema import DRILL, STRATEGY, Key, Settings, keys, section_keys

DEFAULT, COMMAND_LINE = "default", "--set"
AUTO = "auto"
T = TypeVar("T")
STRATEGIES = {"trainers.ddp": "ddp", "trainers.fsdp": "fsdp"}
"""Default strategy of each entry point."""
ALIASES: Mapping[str, str] = {
    "nsa.l": "model.nsa.block_size",
    "nsa.d": "model.nsa.block_stride",
    "nsa.l_sel": "model.nsa.select_block_size",
    "nsa.n_sel": "model.nsa.n_select",
    "nsa.w": "model.nsa.window",
    "nsa.phi": "model.nsa.compress",
    "runtime.device": "train.device",
    "runtime.precision": "train.precision",
    "runtime.gradient_checkpointing": "train.recompute",
    "runtime.use_flash": "attention.no_flash",
    "train.seq_len": "data.seq_len",
    "train.accumulate_grad_batches": "train.accumulate",
    "train.weight_decay": "optim.weight_decay",
    "train.grad_clip": "optim.grad_clip",
    "train.log_every": "report.log_every",
    "train.save_every": "checkpoint.every",
    "train.eval_every": "eval.every",
    "train.out_dir": "report.out_dir",
}
"""Names of our keys in the configurations of other systems."""
VALUES: Mapping[str, Mapping[str, Any]] = {
    "runtime.gradient_checkpointing": dict.fromkeys(values.TRUE, "all")
    | dict.fromkeys(values.FALSE, "none"),
    "runtime.use_flash": dict.fromkeys(values.TRUE, False) | dict.fromkeys(values.FALSE, True),
    "nsa.phi": {"avg": "mean"},
}
"""The translations of values of other systems: by the name of the key there, and then by the value
as a text in small letters."""
INCLUDE = "include"


@dataclass(frozen=True, slots=True)
class Resolved:
    """The settings, the origin of each dotted key, and the configuration file ("" for none)."""

    settings: Settings
    origins: Mapping[str, str]
    config: str = ""

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Returns `{key: {"value": …, "origin": …}}` as plain data."""
        plain = flatten(asdict(self.settings))
        return {key: {"value": value, "origin": self.origins[key]} for key, value in plain}


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields `(dotted key, value)` of nested mappings; an empty mapping is treated as a value."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def resolve(
    config: Path | str | None,
    environment: Mapping[str, str],
    overrides: Mapping[str, Any] | None = None,
    entry: str = "trainers.ddp",
    origins: Mapping[str, str] | None = None,
) -> Resolved:
    """Returns the settings of a training in this environment.

    `overrides` maps dotted keys to values, as text or typed. `origins` maps those keys of
    `overrides` that do not come from `--set` to their origins. `entry` is the module that is
    started. Raises UsageError; its message names the file, flag or key.
    """
    known, named = keys(), origins or {}
    plain = dict(flatten(asdict(Settings())))
    found = dict.fromkeys(plain, DEFAULT)
    if entry in STRATEGIES:
        plain[STRATEGY], found[STRATEGY] = STRATEGIES[entry], f"entry {entry}"
    layers: list[tuple[str, Any, str]] = []
    if config is not None:
        layers += _from_yaml(Path(config), known)
    for name, value in flags.from_environment(environment).items():
        if key := flags.FLAGS[name].setting:
            layers.append((key, value, f"flag {name}"))
    for key, value in (overrides or {}).items():
        origin = named.get(key, COMMAND_LINE)
        if key not in known:
            where = _source(origin, key)
            raise UsageError(f"{where}: there is no such setting{did_you_mean(key, known)}")
        layers.append((key, value, origin))
    for key, value, origin in layers:  # from the weakest source to the strongest
        plain[key] = _convert(key, value, known[key], origin)
        found[key] = origin
    settings = _build(Settings, "", plain, str(config) if config else "settings")
    refuse(settings, found)
    drill_kinds.parse(settings.train.drill, _source(found[DRILL], DRILL))
    return Resolved(settings, found, str(config or ""))


def _from_yaml(path: Path, known: Mapping[str, Key]) -> Iterator[tuple[str, Any, str]]:
    """Yields key, value and origin of each setting in a file; the files it includes come first."""
    names = known.keys() | ALIASES.keys()
    for file, document in yamlfile.load_chain(path, INCLUDE, lambda at, name: (at.parent / name,)):
        wrong = []
        for written, value in flatten(document):
            if written in names:
                value = VALUES.get(written, {}).get(str(value).lower(), value)
                yield ALIASES.get(written, written), value, f"config {file}"
            elif not any(name.startswith(f"{written}.") for name in names):
                wrong.append(f"there is no setting {written!r}{did_you_mean(written, names)}")
            elif value not in (None, {}):
                wrong.append(f"{written!r} is a section of key: value lines, not {value!r}")
        if wrong:
            raise UsageError(f"{file}: {'; '.join(wrong)}")


def _convert(name: str, value: Any, key: Key, origin: str) -> Any:
    """Returns `value` with its key's type. Raises UsageError with the accepted values."""
    return values.read(value, key.kind, key.low, key.high, _source(origin, name))


def _source(origin: str, key: str) -> str:
    """Returns the place where the operator wrote a value, for an error message."""
    if origin.startswith("flag "):
        return f"the {origin} ({key})"
    if origin == COMMAND_LINE:
        return f"--set {key}"
    return f"{origin.removeprefix('config ')}: {key}"


def section(cls: type[T], prefix: str, plain: Mapping[str, Any], where: str) -> T:
    """Returns a section of settings, made from the keys of `plain` that begin with `prefix`.

    A missing key gets its default. Raises UsageError, and TypeError if a missing key has no
    default.
    """
    known, found = dict(section_keys(cls, prefix)), {}
    for key, value in plain.items():
        if key in known:
            found[key] = _convert(key, value, known[key], where)
        elif key.startswith(prefix):
            raise UsageError(f"{where}: there is no setting {key!r}{did_you_mean(key, known)}")
    return _build(cls, prefix, found, where)


def _build(cls: Any, prefix: str, plain: Mapping[str, Any], where: str) -> Any:
    """Returns a frozen section with its subsections. Raises UsageError for a rejected value."""
    hints, arguments = get_type_hints(cls), {}
    for each in fields(cls):
        key, kind = f"{prefix}{each.name}", hints[each.name]
        if is_dataclass(kind):
            arguments[each.name] = _build(kind, f"{key}.", plain, where)
        elif key in plain:
            arguments[each.name] = plain[key]
    try:
        return cls(**arguments)
    except ValueError as error:
        raise UsageError(f"{where}: {prefix.rstrip('.')}: {str(error).rstrip('.')}") from None
