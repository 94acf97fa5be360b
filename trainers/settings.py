"""Settings: defaults < YAML < environment flags < command line, strict, each value with its origin.

Needs no torch, so the console checks a configuration without loading it. What can be set is in
`trainers.schema`; what does not fit together is in `trainers.refusals`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from trainers.contract import drill, flags, yamlfile
from trainers.contract.errors import UsageError, did_you_mean
from trainers.contract.values import convert, takes
from trainers.refusals import refuse
from trainers.schema import ANY_COUNT, LIMITS, Settings

DEFAULT, COMMAND_LINE = "default", "--set"
AUTO = "auto"
T = TypeVar("T")
DRILL = "train.drill"
STRATEGY, STRATEGIES = "train.strategy", {"trainers.ddp": "ddp", "trainers.fsdp": "fsdp"}
"""Settings of an entry point, unless a configuration says otherwise."""
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
    "train.seq_len": "data.seq_len",
    "train.accumulate_grad_batches": "train.accumulate",
    "train.weight_decay": "optim.weight_decay",
    "train.grad_clip": "optim.grad_clip",
    "train.log_every": "report.log_every",
    "train.save_every": "checkpoint.every",
    "train.eval_every": "eval.every",
    "train.out_dir": "report.out_dir",
}
"""Names that configurations of other systems use for our settings."""
VALUES: Mapping[str, Mapping[Any, Any]] = {
    "runtime.gradient_checkpointing": {True: "all", False: "none"},
    "nsa.phi": {"avg": "mean"},
}
"""Values that are called otherwise too, by the foreign name of the key."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """Settings and, for each dotted key, which source set it."""

    settings: Settings
    origins: Mapping[str, str]

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Returns `{key: {"value": …, "origin": …}}` as plain data, for run.json."""
        values = dict(flatten(asdict(self.settings)))
        return {key: {"value": values[key], "origin": self.origins[key]} for key in values}


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields `(dotted key, value)` of nested mappings, an empty one as a value."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def types() -> dict[str, Any]:
    """Returns the annotation of each dotted key."""
    return dict(_types(Settings, ""))


def _types(cls: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    hints = get_type_hints(cls)
    for each in fields(cls):
        hint = hints[each.name]
        if is_dataclass(hint):
            yield from _types(hint, f"{prefix}{each.name}.")
        else:
            yield f"{prefix}{each.name}", hint


def resolve(
    config: Path | str | None,
    environment: Mapping[str, str],
    overrides: Mapping[str, Any] | None = None,
    entry: str = "trainers.ddp",
    origins: Mapping[str, str] | None = None,
) -> Resolved:
    """Returns the settings of a training that would start here and now.

    `overrides` are values by dotted key, as text or already typed; `origins` says who set one, if
    it was not `--set`. `entry` is the module that torchrun starts. Raises UsageError: one sentence
    that names the file, flag or key.
    """
    known, said = types(), origins or {}
    values = dict(flatten(asdict(Settings())))
    found = dict.fromkeys(values, DEFAULT)
    if entry in STRATEGIES:
        values[STRATEGY], found[STRATEGY] = STRATEGIES[entry], f"entry {entry}"
    layers: list[tuple[str, Any, str]] = []
    if config is not None:
        own = _from_yaml(Path(config), known)
        layers += ((key, value, f"config {config}") for key, value in own)
    for name, value in flags.from_environment(environment).items():
        if key := flags.FLAGS[name].setting:
            layers.append((key, value, f"flag {name}"))
    for key, value in (overrides or {}).items():
        if key not in known:
            raise UsageError(f"--set {key}: there is no such setting{did_you_mean(key, known)}")
        layers.append((key, value, said.get(key, COMMAND_LINE)))
    for key, value, origin in layers:  # from the weakest source to the strongest
        values[key] = _convert(key, value, known[key], origin)
        found[key] = origin
    settings = _build(Settings, "", values, str(config) if config else "settings")
    refuse(settings, found)
    drill.parse(settings.train.drill, _source(found[DRILL], DRILL))
    return Resolved(settings, found)


def _from_yaml(path: Path, known: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    names = known.keys() | ALIASES.keys()
    for written, value in flatten(yamlfile.load(path)):
        if written in names:
            yield translate(written, value)
        elif not any(name.startswith(f"{written}.") for name in names):
            raise UsageError(
                f"{path}: there is no setting {written!r}{did_you_mean(written, names)}"
            )
        elif value not in (None, {}):
            raise UsageError(f"{path}: {written!r} is a section of key: value lines, not {value!r}")


def translate(key: str, value: Any) -> tuple[str, Any]:
    """Returns our name of a key and our word for its value; what is ours stays as it is."""
    if isinstance(value, str | bool):
        value = VALUES.get(key, {}).get(value, value)
    return ALIASES.get(key, key), value


def _convert(key: str, value: Any, kind: Any, origin: str) -> Any:
    """Returns `value` as the annotation says. Raises UsageError that says what would be right."""
    kind, limits = get_args(kind) or kind, LIMITS.get(key, ANY_COUNT)
    try:
        return convert(value, kind, *limits)
    except ValueError:
        raise UsageError(
            f"{_source(origin, key)} cannot be {value!r}; it takes {takes(kind, *limits)}"
        ) from None


def _source(origin: str, key: str) -> str:
    """Names a value by where the operator wrote it."""
    if origin.startswith("flag "):
        return f"the {origin} ({key})"
    if origin == COMMAND_LINE:
        return f"--set {key}"
    return f"{origin.removeprefix('config ')}: {key}"


def section(cls: type[T], prefix: str, plain: Mapping[str, Any], where: str) -> T:
    """Returns a section, whose keys begin with `prefix`, from plain data as a checkpoint has it.

    What is not there has its default. Raises UsageError, and TypeError where there is none.
    """
    known, values = dict(_types(cls, prefix)), {}
    for key, value in plain.items():
        if key in known:
            values[key] = _convert(key, value, known[key], where)
        elif key.startswith(prefix):
            raise UsageError(f"{where}: there is no setting {key!r}{did_you_mean(key, known)}")
    return _build(cls, prefix, values, where)


def _build(cls: Any, prefix: str, values: Mapping[str, Any], where: str) -> Any:
    """Returns a frozen section with those in it. Raises UsageError where its rules are broken."""
    hints, held = get_type_hints(cls), {}
    for each in fields(cls):
        key, kind = f"{prefix}{each.name}", hints[each.name]
        if is_dataclass(kind):
            held[each.name] = _build(kind, f"{key}.", values, where)
        elif key in values:
            held[each.name] = values[key]
    try:
        return cls(**held)
    except ValueError as error:
        raise UsageError(f"{where}: {prefix.rstrip('.')}: {str(error).rstrip('.')}") from None
