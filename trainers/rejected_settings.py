"""The table of rejected settings and combinations of settings, and the parser of ranges A:B."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from trainers import changes
from trainers.contract.errors import UsageError
from trainers.schema import Settings

VOCABULARIES = {
    "byte": {256},
    "gpt2": {-(-50_257 // step) * step for step in (1, 64, 128, 256, 512, 1024)},
}
"""Possible sizes of the vocabulary by tokenizer; the size for gpt2 may be rounded up."""
DRAWN = ("synthetic", "recall")
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Refusal:
    """One row of the table; the message has `keys` with values and origins, then `reason`."""

    keys: tuple[str, ...]
    when: Callable[[Settings], bool]
    reason: str


def _without_nccl(settings: Settings) -> bool:
    device = settings.train.device
    return device == "cpu" or (device == "auto" and not NVIDIA_DRIVER.exists())


def _recall_does_not_fit(settings: Settings) -> bool:
    model, data = settings.model, settings.data
    span, distance = data.recall_span, data.recall_distance
    window = model.nsa.window if model.attention == "nsa" else 0
    fits = max(span, window + 1) <= distance <= data.seq_len - span
    return data.source == "recall" and not fits


def recomputed(blocks: str, n_layers: int) -> range | None:
    """Returns the blocks that `train.recompute` selects, or None if the value is invalid."""
    if blocks in ("none", "all"):
        return range(n_layers if blocks == "all" else 0)
    found = step_range(blocks)
    return found if found is not None and found.stop <= n_layers else None


def step_range(text: str) -> range | None:
    """Returns the range `A:B` (B excluded), or None if the range is invalid or empty."""
    first, separator, end = text.partition(":")
    if not (separator and first.isdecimal() and end.isdecimal()):
        return None
    return range(int(first), int(end)) or None


TABLE: tuple[Refusal, ...] = (
    Refusal(
        ("data.tokenizer", "model.vocab_size"),
        lambda s: s.model.vocab_size not in VOCABULARIES[s.data.tokenizer],
        "the vocabulary of byte is exactly 256; gpt2 has 50257 tokens, which may be rounded up to "
        "a multiple of 64 (50304), 128, 256, 512 or 1024",
    ),
    Refusal(
        ("data.source", "data.tokenizer", "data.documents"),
        lambda s: (
            s.data.source in DRAWN and (s.data.tokenizer, s.data.documents) != ("byte", "joined")
        ),
        "random bytes have no documents and need no tokenizer; use data.documents=joined and "
        "data.tokenizer=byte",
    ),
    Refusal(
        ("data.documents", "train.compile"),
        lambda s: s.data.documents == "separate" and s.train.compile,
        "torch.compile would compile anew for the lengths of each batch; change one of the two",
    ),
    Refusal(
        ("data.source", "data.path"),
        lambda s: s.data.source in ("jsonl", "parquet") and not s.data.path,
        "there is no default folder of such files; set data.path",
    ),
    Refusal(
        ("ddp.static_graph", "train.accumulate"),
        lambda s: s.ddp.static_graph and s.train.accumulate > 1,
        "a static graph with no_sync crashes torch (pytorch#143580); use NSA_DDP_STATIC_GRAPH=0, "
        "or use NSA_ACCUM=1 and multiply train.batch_size by the present train.accumulate "
        "(configs/m7c_125m_2xa100_production_tuned.yaml)",
    ),
    Refusal(
        ("ddp.compress", "train.device"),
        lambda s: s.ddp.compress == "bf16" and _without_nccl(s),
        "bf16 gradients need NCCL, and gloo raises TypeError; use fp16 or none",
    ),
    Refusal(
        ("train.recompute",),
        lambda s: recomputed(s.train.recompute, s.model.n_layers) is None,
        "it takes none, all, or a range of blocks A:B within the model, B excluded",
    ),
    Refusal(
        ("report.profile", "data.skip"),
        lambda s: any(x and step_range(x) is None for x in (s.report.profile, s.data.skip)),
        "each takes a range of steps A:B, B excluded, or nothing",
    ),
    Refusal(
        ("checkpoint.from_step", "checkpoint.resume"),
        lambda s: s.checkpoint.from_step > 0 and not s.checkpoint.resume,
        "a step to resume from needs a run; add checkpoint.resume=auto",
    ),
    Refusal(
        ("checkpoint.allow_change",),
        lambda s: changes.allowed(s.checkpoint.allow_change) is None,
        "it takes precision, batch, schedule and data, comma-separated, or all; a change of the "
        "model cannot be allowed",
    ),
    Refusal(
        ("checkpoint.export", "attention.force_branch", "attention.uniform_gate"),
        lambda s: s.checkpoint.export != "" and s.attention.fixed_gate is not None,
        "the exported directory cannot describe these ablations; leave checkpoint.export empty",
    ),
    Refusal(
        ("data.recall_span", "data.recall_distance", "data.seq_len", "model.nsa.window"),
        _recall_does_not_fit,
        "recall needs a distance above the window and at least as long as the span, and span + "
        "distance in one sequence; change the distance, or lengthen seq_len",
    ),
    Refusal(
        ("train.stop_at_bytes_right", "data.source"),
        lambda s: s.train.stop_at_bytes_right > 0 and s.data.source != "recall",
        "only recall counts right bytes; set train.stop_at_bytes_right=0, or use recall",
    ),
    Refusal(
        ("data.path",),
        lambda s: s.data.source not in DRAWN and not Path(s.data.path).is_dir(),
        "there is no such folder; name a folder of files, or leave data.path empty (text: the "
        "sources of the Python standard library; fineweb_edu: the hub)",
    ),
)


def refuse(settings: Settings, origins: Mapping[str, str]) -> None:
    """Raises UsageError for the first row of `TABLE` that applies."""
    for row in TABLE:
        if row.when(settings):
            named = (f"{key}={attrgetter(key)(settings)} ({origins[key]})" for key in row.keys)
            raise UsageError(f"{' with '.join(named)} is rejected: {row.reason}")
