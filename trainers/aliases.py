"""Names that configurations of other systems use for our settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAMES: Mapping[str, str] = {
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
VALUES: Mapping[str, Mapping[Any, Any]] = {
    "runtime.gradient_checkpointing": {True: "all", False: "none"},
    "nsa.phi": {"avg": "mean"},
}
"""Values that are called otherwise too, by the foreign name of the key."""


def translate(key: str, value: Any) -> tuple[str, Any]:
    """Returns our name of a key and our word for its value; what is ours stays as it is."""
    if isinstance(value, str | bool):
        value = VALUES.get(key, {}).get(value, value)
    return NAMES.get(key, key), value
