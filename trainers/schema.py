"""The settings: type, default and limits of every key, help of most keys.

This module needs no torch.

A key is one field of a section of `Settings`. The annotation of the field is the type of the key
(`Literal` for choices). `key` makes a field with a default, a help text and limits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, Literal, get_args, get_type_hints

from nsa.backends import Switches
from nsa.config import ModelConfig, NSAConfig

ANY_COUNT = (0.0, float(1 << 40))
MODEL_LIMITS: dict[str, tuple[float, float]] = {
    "model.rope_base": (1, 1e12), "model.norm_eps": (1e-30, 1), "model.init_std": (1e-12, 1e3),
    "model.nsa.gate_hidden": (0, float(1 << 20)),
}  # fmt: skip
BELOW_1 = 0.999999
ANY_MODEL_SIZE = (1.0, float(1 << 20))
DRILL, STRATEGY = "train.drill", "train.strategy"
LOG_EVERY_MOST = 200
"""With more, the times of the steps do not fit into a record (4 KiB), and gates need them all."""


def key(default: Any, text: str, low: float = ANY_COUNT[0], high: float = ANY_COUNT[1]) -> Any:
    """Returns a field with its default, its help and, for numbers, its inclusive limits."""
    return field(default=default, metadata={"help": text, "limits": (low, high)})


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """The source of tokens: one global stream of sequences, which all ranks divide."""

    source: Literal["synthetic", "recall", "text", "jsonl", "parquet", "fineweb_edu"] = key(
        "synthetic", "Tokens: random bytes, repeated spans, files of a folder, or FineWeb-Edu."
    )
    seq_len: int = key(128, "S: predicted tokens per sequence.", 2, 1 << 20)
    path: str = key("", "Folder of files; empty: the Python sources (text), the hub (fineweb_edu).")
    pattern: str = key("**/*", "Glob pattern of files below `path`; hidden files are skipped.")
    text_key: str = key("text", "Key or column of the text in jsonl and parquet rows.")
    subset: str = key("sample-10BT", "Configuration of FineWeb-Edu.")
    tokenizer: Literal["byte", "gpt2"] = key("byte", "Bytes, or gpt2 from tiktoken's cached files.")
    held_out: float = key(0.01, "Fraction of files or documents held out for evaluation.", 0, 0.5)
    lanes: int = key(16, "Streams of files that are interleaved; 1: one file at a time.", 1, 4096)
    documents: Literal["joined", "separate"] = key(
        "joined", "joined: attention crosses ends of documents; separate: each sees only itself."
    )
    recall_span: int = key(48, "Bytes in the span; all but the first are scored.", 2, 1 << 20)
    recall_distance: int = key(64, "Bytes to the repetition; must exceed the window.", 1, 1 << 20)
    skip: str = key("", "Skip the data of steps A:B (B excluded) of the resumed training.")
    prefetch: int = key(4, "Micro-batches that the loader reads ahead.", 1, 1024)
    timeout_s: float = key(60.0, "Longest wait for one micro-batch, in seconds.", 0.01, 86_400)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """Settings of the training, for example steps, batch size, learning rate and precision."""

    steps: int = key(100, "Number of optimizer steps.", 1)
    batch_size: int = key(8, "B: sequences per rank and micro-batch.", 1, 1 << 20)
    accumulate: int = key(1, "Micro-batches per optimizer step.", 1, 1 << 16)
    lr: float = key(2.5e-3, "Peak learning rate.", 0, 1e3)
    warmup_steps: int = key(30, "Steps of linear warm-up.")
    min_lr_ratio: float = key(
        1.0, "Final learning rate as a fraction of `lr`; 1: constant after the warm-up.", 0, 1
    )
    schedule_steps: int = key(0, "Step at which the cosine schedule ends; 0: `steps`.")
    seed: int = key(1337, "Seed of weights and data.", 0, (1 << 63) - 1)
    strategy: Literal["ddp", "fsdp"] = key(
        "ddp", "Strategy for several ranks; `-m trainers.fsdp` sets fsdp. One rank uses neither."
    )
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = key(
        "fp32", "bf16, fp16: autocast over fp32 weights, fp16 with loss scaling; fp64: for tests."
    )
    tf32: bool = key(False, "Compute fp32 products in TF32 on GPUs that support it.")
    compile: bool = key(False, "Compile each block with torch.compile.")
    recompute: str = key("none", "Blocks that the backward computes again: none, all, or A:B.")
    device: Literal["auto", "cpu", "cuda"] = key("auto", "Device; auto: CUDA where available.")
    max_nonfinite_steps: int = key(
        5, "Stop after N non-finite steps in a row (not overflows that lower the loss scale).", 1
    )
    stop_at_bytes_right: float = key(0.0, "Stop at this fraction of right bytes; 0: never.", 0, 1)
    drill: str = key("", "Faults for practice, KIND@STEP:RANK:SECONDS,…; see docs/drills.md.")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimSettings:
    """Settings of AdamW, of the gradient clipping, and of skipped spikes."""

    beta1: float = key(0.9, "Decay of the average of gradients.", 0, BELOW_1)
    beta2: float = key(0.95, "Decay of the average of squared gradients.", 0, BELOW_1)
    eps: float = key(1e-8, "Term added to the denominator.", 0, 1)
    weight_decay: float = key(0.1, "Weight decay of parameters with 2 or more dimensions.", 0, 1e3)
    grad_clip: float = key(1.0, "Largest global gradient norm.", 1e-6, 1e9)
    skip_spikes_sigma: float = key(
        0.0, "Skip steps with a grad norm N sigma above the mean of the last 128; 0: none.", 0, 1e3
    )
    fused: bool = key(True, "Use the fused AdamW kernel, which skips non-finite steps by itself.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerSettings:
    """Settings of the loss scale of fp16."""

    init_scale: float = key(65536.0, "Initial loss scale of fp16.", 1, 1 << 32)
    growth_interval: int = key(2000, "Consecutive finite steps before the loss scale grows.", 1)
    growth_factor: float = key(2.0, "Growth factor of the loss scale.", 1, 1e3)
    backoff_factor: float = key(0.5, "Backoff factor of the loss scale after an overflow.", 1e-3, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpSettings:
    """Settings of data parallelism (DDP), and the time limit of a collective."""

    bucket_mb: int = key(25, "Size of a gradient bucket in MB.", 1, 1 << 20)
    find_unused: bool = key(False, "Search for parameters without a gradient in each step.")
    static_graph: bool = key(False, "Enable static_graph of DDP; the graph must not change.")
    compress: Literal["none", "fp16", "bf16"] = key(
        "none", "Data type of gradients in the all-reduce; none: their own type."
    )
    timeout_min: float = key(
        10.0, "Time limit of a collective in minutes, also with FSDP; in a save: 30.", 0.01, 10_000
    )
    disable_gc: bool = key(False, "Keep all activations under DDP; overrides `train.recompute`.")
    safe_mode: bool = key(False, "For debugging: buckets of 2 MB; gradients are no views of them.")


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpSettings:
    """Settings of fully sharded data parallelism (FSDP2)."""

    sharding: Literal["full", "grad_op"] = key(
        "full", "full: free parameters after the forward (ZeRO-3); grad_op: keep them (ZeRO-2)."
    )
    replicas: int = key(1, "Groups of ranks, each with a sharded copy; above 1: HSDP.", 1, 1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSettings:
    """Settings of the records and profiles of the run."""

    out_dir: str = key("", "Parent directory of runs started by hand; empty: artifacts/<config>.")
    log_every: int = key(
        10,
        "Steps between progress records; also the first 5 of an attempt and the last.",
        1,
        LOG_EVERY_MOST,
    )
    disable_aux_stats: bool = key(False, "No statistics of the attention gate and the selection.")
    disable_csv: bool = key(False, "Write no training.csv and no other CSV file.")
    disable_tb: bool = key(False, "Write nothing for TensorBoard.")
    nvtx: bool = key(False, "Mark step phases and attention branches for Nsight Systems (CUDA).")
    sdpa_audit: bool = key(False, "Report the SDPA kernels of the first step, by branch.")
    memory_every: int = key(0, "Steps between CUDA memory dumps; 0: at start and after one step.")
    profile: str = key("", "Steps A:B (B excluded) to profile; the trace goes to profiles/.")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSettings:
    """Settings of the evaluation on held-out data."""

    every: int = key(0, "Steps between evaluations; 0: none.")
    batches: int = key(8, "Micro-batches per rank and evaluation; the same each time.", 1, 1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """Settings of the checkpoints, of the resume, and of the export of the final model."""

    every: int = key(0, "Steps between checkpoints; 0: none before the end.")
    at_end: bool = key(True, "Save after the last step; a halted run always saves.")
    keep_last: int = key(3, "Number of newest checkpoints to keep.", 1, 1 << 20)
    keep_every: int = key(0, "Also keep the checkpoint of every N-th step forever; 0: none.")
    background: Literal["auto", "on", "off"] = key("auto", "Save while training; auto: on GPUs.")
    resume: str = key("", "Run or checkpoint directory to resume; auto: this run directory.")
    from_step: int = key(0, "Resume from the checkpoint of this step; 0: the newest.")
    allow_change: str = key("", "Allowed changes: all, or some of precision,batch,schedule,data.")
    export: str = key("", "Write the final model to this directory.")


TINY_MODEL = ModelConfig(
    dim=128, n_layers=2, n_heads=4, n_kv_groups=2, d_k=32, d_v=32, mlp_hidden=256, init_std=0.03,
    nsa=NSAConfig(block_size=4, block_stride=2, select_block_size=8, n_select=8, window=32),
)  # fmt: skip
"""The built-in toy: the default model, small enough for a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of a training."""

    model: ModelConfig = TINY_MODEL
    attention: Switches = field(default_factory=Switches)
    data: DataSettings = DataSettings()
    train: TrainSettings = TrainSettings()
    optim: OptimSettings = OptimSettings()
    scaler: ScalerSettings = ScalerSettings()
    ddp: DdpSettings = DdpSettings()
    fsdp: FsdpSettings = FsdpSettings()
    report: ReportSettings = ReportSettings()
    eval: EvalSettings = EvalSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()

    @property
    def tokens_per_step(self) -> int:
        """The number of tokens that one rank trains on in one optimizer step."""
        return self.train.batch_size * self.train.accumulate * self.data.seq_len


@dataclass(frozen=True, slots=True)
class Key:
    """One key: `kind` is a type or the choices; `default` is None if there is no default."""

    kind: type | tuple[str, ...]
    default: Any
    low: float
    high: float
    help: str


@functools.cache
def keys() -> dict[str, Key]:
    """Returns the keys of `Settings` by dotted name."""
    return dict(section_keys(Settings, ""))


def section_keys(section: Any, prefix: str) -> Iterator[tuple[str, Key]]:
    """Yields two values for each key of a section: its name with the `prefix`, and the key."""
    hints = get_type_hints(section)
    for each in fields(section):
        name, hint = f"{prefix}{each.name}", hints[each.name]
        if is_dataclass(hint):
            yield from section_keys(hint, f"{name}.")
        else:
            default = None if each.default is MISSING else each.default
            usual = ANY_MODEL_SIZE if name.startswith("model.") else ANY_COUNT
            low, high = each.metadata.get("limits") or MODEL_LIMITS.get(name, usual)
            text = each.metadata.get("help", "")
            yield name, Key(get_args(hint) or hint, default, low, high, text)
