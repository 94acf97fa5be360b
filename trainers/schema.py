"""The settings and their limits. Needs no torch.

A key is one field of a section below; the fields' docstrings are the manual. What a value may be
is in the annotation (`Literal` for choices) and in `LIMITS`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from nsa.backends import Switches
from nsa.config import ModelConfig, NSAConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """Where tokens come from. One global stream of sequences; every rank keeps its share."""

    source: Literal["synthetic", "recall", "text", "jsonl", "parquet", "fineweb_edu"] = "synthetic"
    """Uniform random bytes, spans that return, the files of a folder, or FineWeb-Edu."""
    seq_len: int = 128
    """S: predicted tokens per sequence."""
    path: str = ""
    """Folder of files; empty: packages of the Python standard library, or FineWeb-Edu's hub."""
    pattern: str = "**/*"
    """Which files below `path`; hidden ones never."""
    text_key: str = "text"
    """Where jsonl and parquet rows have their text."""
    subset: str = "sample-10BT"
    """Which configuration of FineWeb-Edu."""
    tokenizer: Literal["byte", "gpt2"] = "byte"
    """byte: 256 tokens; gpt2: 50,257, through tiktoken where its files are cached."""
    held_out: float = 0.01
    """Share of text files, or of documents, that training never sees; for evaluation."""
    lanes: int = 16
    """Streams of files side by side, so that a batch mixes files; 1: file after file."""
    recall_span: int = 48
    """Bytes that return; all but the first of them are scored."""
    recall_distance: int = 64
    """How far behind its origin the span returns, in bytes; beyond the window."""
    recall_distance_max: int = 0
    """Farthest return, the distance drawn for each sequence; 0: always `recall_distance`."""
    skip: str = ""
    """Pass over the data of steps A:B (B not included), which are trained on what follows."""
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
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """How several ranks share the work; `-m trainers.fsdp` sets fsdp. One process needs neither."""
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """bf16, fp16: autocast over fp32 master weights, fp16 with a scaled loss; fp64: for tests."""
    tf32: bool = False
    """fp32 products in TF32 on GPUs that have it."""
    compile: bool = False
    """torch.compile each block."""
    recompute: str = "none"
    """Activation checkpointing: none, all, or blocks A:B (B not included); non-reentrant."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is one."""
    max_nonfinite_steps: int = 5
    """So many skipped steps in a row end the run."""
    stop_at_bytes_right: float = 0.0
    """Stop when this share of copied bytes is right; 0: never."""
    drill: str = ""
    """Faults that ranks shall have, KIND@STEP:RANK:SECONDS by commas; docs/guide.md lists them."""


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
    skip_spikes_sigma: float = 0.0
    """Skip steps whose gradient norm lies so many deviations above the last 128; 0: none."""
    fused: bool = True
    """One kernel per step, which also skips a non-finite step without the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerSettings:
    """Loss scale of fp16."""

    init_scale: float = 65536.0
    """First factor of the loss."""
    growth_interval: int = 2000
    """So many finite steps in a row raise the factor."""
    growth_factor: float = 2.0
    """By how much they raise it."""
    backoff_factor: float = 0.5
    """What a non-finite step multiplies it by."""


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
    disable_gc: bool = False
    """Keep all activations under DDP, whatever `train.recompute` says."""
    safe_mode: bool = False
    """For the hunt of a fault: buckets of 2 MB, gradients not as views of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpSettings:
    """Fully sharded data parallelism (FSDP2)."""

    sharding: Literal["full", "grad_op"] = "full"
    """full: parameters are freed after the forward (ZeRO-3); grad_op: kept (ZeRO-2)."""
    replicas: int = 1
    """Groups of ranks with a whole copy each; above 1: HSDP, sharded inside a group."""
    prefetch: int = 0
    """Blocks gathered ahead of the one at work; 0: as torch decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSettings:
    """What is said about the run."""

    out_dir: str = ""
    """Runs that are started by hand go below it; empty: artifacts/<config>."""
    log_every: int = 10
    """Steps between progress records, after one each for steps 1 to 5."""
    disable_aux_stats: bool = False
    """Compute no gate and selection statistics."""
    disable_csv: bool = False
    """Write no training.csv."""
    disable_tb: bool = False
    """Write nothing for TensorBoard."""
    nvtx: bool = False
    """Mark the phases of a step and the branches of the attention for Nsight Systems (CUDA)."""
    sdpa_audit: bool = False
    """Say which kernels of SDPA the first step called, by branch."""
    memory_every: int = 0
    """Steps between files with the CUDA allocator's statistics; 0: none."""
    profile: str = ""
    """Steps A:B (B not included) under torch.profiler; the trace goes to profiles/."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSettings:
    """Loss on data that is held out of training."""

    every: int = 0
    """Steps between evaluations; 0: none."""
    batches: int = 8
    """Micro-batches of each rank, the same ones every time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """What is kept, and what a run begins with."""

    every: int = 0
    """Steps between checkpoints; 0: only at the end."""
    at_end: bool = True
    """Save when the run ends or is halted."""
    keep_last: int = 3
    """So many of the newest stay."""
    keep_every: int = 0
    """Those of every so many steps stay for good; 0: none."""
    background: Literal["auto", "on", "off"] = "auto"
    """Write beside the training; auto: on GPUs."""
    resume: str = ""
    """auto: from this run's newest checkpoint that verifies; or a run or checkpoint directory."""
    from_step: int = 0
    """Resume from this step's checkpoint; 0: the newest."""
    export: str = ""
    """Write the final weights to this safetensors file."""


TINY_MODEL = ModelConfig(
    dim=128, n_layers=2, n_heads=4, n_kv_groups=2, d_k=32, d_v=32, mlp_hidden=256, init_std=0.03,
    nsa=NSAConfig(block_size=4, block_stride=2, select_block_size=8, n_select=8, window=32),
)  # fmt: skip
"""The model where no configuration names one: runs anywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that decides what a training does."""

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


ANY_COUNT = (0, 1 << 40)
LIMITS: dict[str, tuple[float, float]] = {
    **dict.fromkeys((
        "model.dim", "model.n_layers", "model.n_heads", "model.n_kv_groups", "model.d_k",
        "model.d_v", "model.mlp_hidden", "model.vocab_size", "model.nsa.block_size",
        "model.nsa.block_stride", "model.nsa.select_block_size", "model.nsa.n_select",
        "model.nsa.window",
    ), (1, 1 << 20)),
    "model.rope_base": (1, 1e12),
    "model.norm_eps": (1e-30, 1),
    "model.init_std": (1e-12, 1e3),
    "data.seq_len": (2, 1 << 20),
    "data.recall_span": (2, 1 << 20),
    "data.recall_distance": (1, 1 << 20),
    "data.held_out": (0, 0.5),
    "data.lanes": (1, 1 << 12),
    "data.prefetch": (1, 1024),
    "data.timeout_s": (0.01, 86_400),
    "train.steps": (1, 1 << 40),
    "train.batch_size": (1, 1 << 20),
    "train.accumulate": (1, 1 << 16),
    "train.lr": (0, 1e3),
    "train.min_lr_ratio": (0, 1),
    "train.seed": (0, (1 << 63) - 1),
    "train.max_nonfinite_steps": (1, 1 << 40),
    "train.stop_at_bytes_right": (0, 1),
    "optim.beta1": (0, 1),
    "optim.beta2": (0, 1),
    "optim.eps": (0, 1),
    "optim.weight_decay": (0, 1e3),
    "optim.grad_clip": (1e-6, 1e9),
    "optim.skip_spikes_sigma": (0, 1e3),
    "scaler.init_scale": (1, 1 << 32),
    "scaler.growth_interval": (1, 1 << 40),
    "scaler.growth_factor": (1, 1e3),
    "scaler.backoff_factor": (1e-3, 1),
    "ddp.bucket_mb": (1, 1 << 20),
    "ddp.timeout_min": (0.01, 10_000),
    "fsdp.replicas": (1, 1 << 20),
    "fsdp.prefetch": (0, 64),
    "report.log_every": (1, 1 << 40),
    "eval.batches": (1, 1 << 20),
    "checkpoint.keep_last": (1, 1 << 20),
}  # fmt: skip
"""Smallest and largest value of a key, both allowed; of any other number, `ANY_COUNT`."""
