"""Settings: defaults < YAML < environment flags < command line, strict, each value with its origin.

Needs no torch, so the console checks a configuration without loading it. A key is one field of a
section below; the fields' docstrings are the manual. What a value may be is in the annotation
(`Literal` for choices) and in `LIMITS`; what does not fit together is in `trainers.refusals`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from nsa.config import ModelConfig
from trainers.contract import flags, yamlfile
from trainers.contract.errors import UsageError, did_you_mean
from trainers.refusals import refuse

DEFAULT, COMMAND_LINE = "default", "--set"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """Where tokens come from. One global stream of sequences; every rank keeps its share."""

    source: Literal["synthetic", "recall", "text"] = "synthetic"
    """Uniform random bytes, spans that return, or the files of a folder."""
    seq_len: int = 128
    """S: predicted tokens per sequence."""
    path: str = ""
    """Folder of text files; empty: packages of the Python standard library."""
    pattern: str = "**/*"
    """Which files below `path`; hidden ones never."""
    lanes: int = 16
    """Streams of text side by side, so that a batch mixes files; 1: file after file."""
    recall_span: int = 48
    """Bytes that return; all but the first of them are scored."""
    recall_distance: int = 64
    """How far behind its origin the span returns, in bytes; beyond the window."""
    prefetch: int = 4
    """Batches that wait ready."""
    timeout_s: float = 60.0
    """Longest wait for one batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """How long, how much and how precisely."""

    steps: int = 100
    """Optimizer steps."""
    batch_size: int = 8
    """B: sequences per rank and micro-batch."""
    accumulate: int = 1
    """Micro-batches per optimizer step."""
    lr: float = 2.5e-3
    """Peak learning rate."""
    warmup_steps: int = 30
    """Linear warm-up."""
    min_lr_ratio: float = 1.0
    """The cosine ends at this share of `lr`; 1: constant after the warm-up."""
    schedule_steps: int = 0
    """Length of the cosine; 0: `steps`."""
    seed: int = 1337
    """Weights and data follow from it."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: autocast over fp32 master weights."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is one."""
    max_nonfinite_steps: int = 5
    """So many skipped steps in a row end the run."""
    stop_at_bytes_right: float = 0.0
    """Stop when this share of copied bytes is right; 0: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimSettings:
    """AdamW."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    """Only on parameters of two dimensions and more."""
    grad_clip: float = 1.0
    """Largest global gradient norm."""
    fused: bool = True
    """One kernel per step, which also skips a non-finite step without the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpSettings:
    """Data parallelism."""

    bucket_mb: int = 25
    """Gradient bucket size."""
    find_unused: bool = False
    """Search for parameters that got no gradient."""
    static_graph: bool = False
    """Promise that the graph never changes."""
    compress: Literal["none", "fp16", "bf16"] = "none"
    """Type in which gradients travel."""
    timeout_min: float = 10.0
    """Time limit of a collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSettings:
    """What is said about the run."""

    log_every: int = 10
    """Steps between progress records, after one each for steps 1 to 5."""
    disable_aux_stats: bool = False
    """Compute no gate and selection statistics."""
    disable_csv: bool = False
    """Write no training.csv."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """What is kept."""

    at_end: bool = True
    """Save when the run ends or is halted."""


TINY_MODEL: dict[str, Any] = {
    "dim": 128, "n_layers": 2, "n_heads": 4, "n_kv_groups": 2, "d_k": 32, "d_v": 32,
    "mlp_hidden": 256, "vocab_size": 256, "init_std": 0.03,
    "nsa": {
        "block_size": 4, "block_stride": 2, "select_block_size": 8, "n_select": 8, "window": 32,
    },
}  # fmt: skip
"""The model where no configuration names one: runs anywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that decides what a training does."""

    model: ModelConfig = field(default_factory=lambda: ModelConfig.from_dict(TINY_MODEL))
    data: DataSettings = DataSettings()
    train: TrainSettings = TrainSettings()
    optim: OptimSettings = OptimSettings()
    ddp: DdpSettings = DdpSettings()
    report: ReportSettings = ReportSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()


LIMITS: dict[str, tuple[float, float]] = {
    "data.seq_len": (2, 1 << 20),
    "data.recall_span": (2, 1 << 20),
    "data.recall_distance": (1, 1 << 20),
    "data.lanes": (1, 1 << 12),
    "data.prefetch": (1, 1024),
    "data.timeout_s": (0.01, 86_400),
    "train.steps": (1, 1 << 40),
    "train.batch_size": (1, 1 << 20),
    "train.accumulate": (1, 1 << 16),
    "train.lr": (0, 1e3),
    "train.warmup_steps": (0, 1 << 40),
    "train.min_lr_ratio": (0, 1),
    "train.schedule_steps": (0, 1 << 40),
    "train.seed": (0, (1 << 63) - 1),
    "train.max_nonfinite_steps": (1, 1 << 40),
    "train.stop_at_bytes_right": (0, 1),
    "optim.beta1": (0, 1),
    "optim.beta2": (0, 1),
    "optim.eps": (0, 1),
    "optim.weight_decay": (0, 1e3),
    "optim.grad_clip": (1e-6, 1e9),
    "ddp.bucket_mb": (1, 1 << 20),
    "ddp.timeout_min": (0.01, 10_000),
    "report.log_every": (1, 1 << 40),
}
"""Smallest and largest value of a key, both allowed."""


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
    """Yields `(dotted key, value)` of nested mappings."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
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
) -> Resolved:
    """Returns the settings of a training that would start here and now.

    `overrides` are `--set` values by dotted key, as text or already typed. Raises UsageError: one
    sentence that names the file, flag or key.
    """
    known = types()
    values = dict(flatten(asdict(Settings())))
    origins = dict.fromkeys(values, DEFAULT)
    for key, value, origin in _layers(config, environment, overrides or {}, known):
        values[key] = _convert(key, value, known[key], origin)
        origins[key] = origin
    settings = _build(values, str(config) if config else "settings")
    refuse(settings, origins)
    return Resolved(settings, origins)


def _layers(
    config: Path | str | None,
    environment: Mapping[str, str],
    overrides: Mapping[str, Any],
    known: Mapping[str, Any],
) -> Iterator[tuple[str, Any, str]]:
    """Yields `(key, value, origin)` from the weakest source to the strongest."""
    if config is not None:
        origin = f"config {config}"
        for key, value in _from_yaml(Path(config), known):
            yield key, value, origin
    for name, value in flags.from_environment(environment).items():
        key = flags.FLAGS[name].setting
        if key:
            yield key, value, f"flag {name}"
    for key, value in overrides.items():
        if key not in known:
            raise UsageError(f"--set {key}: there is no such setting{did_you_mean(key, known)}")
        yield key, value, COMMAND_LINE


def _from_yaml(path: Path, known: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    document = yamlfile.load(path)
    sections = {part for key in known for part in _parents(key)}
    for key, value in _flatten_strictly(document, sections, str(path)):
        if key not in known:
            raise UsageError(f"{path}: there is no setting {key!r}{did_you_mean(key, known)}")
        yield key, value


def _parents(key: str) -> Iterator[str]:
    parts = key.split(".")
    for length in range(1, len(parts)):
        yield ".".join(parts[:length])


def _flatten_strictly(
    tree: Mapping[Any, Any], sections: set[str], where: str, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key not in sections:
            yield key, value
        elif isinstance(value, Mapping):
            yield from _flatten_strictly(value, sections, where, f"{key}.")
        elif value is not None:
            raise UsageError(f"{where}: {key!r} is a section of key: value lines, not {value!r}")


def _convert(key: str, value: Any, kind: Any, origin: str) -> Any:
    """Returns `value` as the annotation says. Raises UsageError that says what would be right."""
    try:
        converted = _CONVERT[get_origin(kind) or kind](value, kind)
    except (TypeError, ValueError, OverflowError):
        raise UsageError(
            f"{_source(origin, key)} cannot be {value!r}; {_takes(key, kind)}"
        ) from None
    low, high = LIMITS.get(key, (-math.inf, math.inf))
    if isinstance(converted, int | float) and not low <= converted <= high:
        raise UsageError(f"{_source(origin, key)} cannot be {value!r}; {_takes(key, kind)}")
    return converted


def _source(origin: str, key: str) -> str:
    """Names a value by where the operator wrote it."""
    if origin.startswith("flag "):
        return f"the {origin} ({key})"
    if origin == COMMAND_LINE:
        return f"--set {key}"
    return f"{origin.removeprefix('config ')}: {key}"


def _takes(key: str, kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "it takes one of " + ", ".join(get_args(kind))
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    low, high = LIMITS.get(key, (-math.inf, math.inf))
    bounds = f" from {low:g} to {high:g}" if high < 1 << 20 else f" of at least {low:g}"
    return f"it takes {words[kind]}{bounds if math.isfinite(low) else ''}"


def _bool(value: Any, _kind: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).lower()
    if text in flags.TRUE or text in flags.FALSE:
        return text in flags.TRUE
    raise ValueError(value)


def _int(value: Any, _kind: Any) -> int:
    if isinstance(value, bool | float):
        raise ValueError(value)
    return int(value)


def _float(value: Any, _kind: Any) -> float:
    """Takes text too: YAML 1.1 reads 1e-3 as a word."""
    if isinstance(value, bool) or not math.isfinite(number := float(value)):
        raise ValueError(value)
    return number


def _str(value: Any, _kind: Any) -> str:
    if not isinstance(value, str) or any(ord(character) < 32 for character in value):
        raise ValueError(value)
    return value


def _choice(value: Any, kind: Any) -> str:
    if value not in get_args(kind):
        raise ValueError(value)
    return value


_CONVERT: dict[Any, Any] = {
    bool: _bool, int: _int, float: _float, str: _str, Literal: _choice,
}  # fmt: skip


def _build(values: Mapping[str, Any], where: str) -> Settings:
    """Returns the frozen tree. Raises UsageError where the model's own rules are broken."""
    tree: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    model = tree.pop("model")
    try:
        shaped = ModelConfig.from_dict(model)
    except ValueError as error:
        raise UsageError(f"{where}: model: {str(error).rstrip('.')}") from None
    hints = get_type_hints(Settings)
    return Settings(model=shaped, **{name: hints[name](**part) for name, part in tree.items()})
