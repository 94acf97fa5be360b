"""What does not fit together in a configuration, as one table: key, condition, reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainers.contract.errors import UsageError

if TYPE_CHECKING:
    from trainers.settings import Settings

BYTES = 256
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Refusal:
    """`keys` are named with their values and origins before `reason`."""

    keys: tuple[str, ...]
    when: Callable[[Settings], bool]
    reason: str


def _without_nccl(settings: Settings) -> bool:
    device = settings.train.device
    return device == "cpu" or (device == "auto" and not NVIDIA_DRIVER.exists())


def _within_window(settings: Settings) -> bool:
    model, data = settings.model, settings.data
    return (
        data.source == "recall"
        and model.attention == "nsa"
        and data.recall_distance <= model.nsa.window
    )


def _missing_folder(settings: Settings) -> bool:
    data = settings.data
    return data.source == "text" and data.path != "" and not Path(data.path).is_dir()


TABLE: tuple[Refusal, ...] = (
    Refusal(
        ("model.vocab_size",),
        lambda s: s.model.vocab_size != BYTES,
        "tokens are bytes, so the vocabulary is exactly 256",
    ),
    Refusal(
        ("ddp.static_graph", "train.accumulate"),
        lambda s: s.ddp.static_graph and s.train.accumulate > 1,
        "a static graph with no_sync crashes torch (pytorch#143580); turn one of them off",
    ),
    Refusal(
        ("ddp.static_graph", "ddp.find_unused"),
        lambda s: s.ddp.static_graph and s.ddp.find_unused,
        "a static graph finds unused parameters by itself; turn one of them off",
    ),
    Refusal(
        ("ddp.compress", "train.device"),
        lambda s: s.ddp.compress == "bf16" and _without_nccl(s),
        "bf16 gradients need NCCL, and gloo raises TypeError; use fp16 or none",
    ),
    Refusal(
        ("data.recall_span", "data.recall_distance", "data.seq_len"),
        lambda s: (
            s.data.source == "recall"
            and s.data.recall_span + s.data.recall_distance > s.data.seq_len
        ),
        "the span and its return need span + distance bytes in one sequence; lengthen seq_len",
    ),
    Refusal(
        ("data.recall_span", "data.recall_distance"),
        lambda s: s.data.source == "recall" and s.data.recall_span > s.data.recall_distance,
        "the span would overlap its return; raise the distance",
    ),
    Refusal(
        ("data.recall_distance", "model.nsa.window"),
        _within_window,
        "the return lies within the window, so recall would prove nothing; raise the distance",
    ),
    Refusal(
        ("train.stop_at_bytes_right", "data.source"),
        lambda s: s.train.stop_at_bytes_right > 0 and s.data.source != "recall",
        "only recall counts right bytes; leave it at 0 or use data.source=recall",
    ),
    Refusal(
        ("data.path",),
        _missing_folder,
        "there is no such folder; give a folder of text files, or leave it empty for the sources "
        "of the Python standard library",
    ),
    Refusal(
        ("optim.beta1", "optim.beta2"),
        lambda s: s.optim.beta1 >= 1 or s.optim.beta2 >= 1,
        "the averages of AdamW need factors below 1",
    ),
)


def refuse(settings: Settings, origins: Mapping[str, str]) -> None:
    """Raises UsageError for the first row of `TABLE` that applies."""
    for row in TABLE:
        if row.when(settings):
            named = " with ".join(_named(key, settings, origins) for key in row.keys)
            raise UsageError(f"{named} is refused: {row.reason}")


def _named(key: str, settings: Settings, origins: Mapping[str, str]) -> str:
    value: object = settings
    for part in key.split("."):
        value = getattr(value, part)
    return f"{key}={value} ({origins[key]})"
