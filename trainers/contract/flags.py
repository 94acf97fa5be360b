"""The registry of environment flags: the trainer parses from it, forms and help are drawn from it.

A new flag is one row in `TABLE`. A flag with a `setting` overrides that key of the settings; a
flag without one is for a library (NCCL, CUDA, OpenMP) and is only passed on and recorded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trainers.contract import drill
from trainers.contract.environ import ALERT_NAMES, CONTRACT_NAMES
from trainers.contract.errors import UsageError, did_you_mean
from trainers.contract.values import convert, takes

Kind = Literal["bool", "int", "float", "str", "choice", "drill"]
OWN_PREFIX = "NSA_"
DEVICES = "CUDA_VISIBLE_DEVICES"
Value = bool | int | float | str


@dataclass(frozen=True, slots=True)
class Flag:
    """One environment variable. `default` "" means: unset, the config decides."""

    name: str
    kind: Kind
    default: str
    group: str
    help: str
    setting: str = ""
    choices: tuple[str, ...] = ()
    at_least: float = -math.inf


TABLE: tuple[Flag, ...] = (
    Flag("NSA_LR", "float", "", "training", "Peak learning rate.", "train.lr", at_least=0.0),
    Flag("NSA_ACCUM", "int", "", "training", "Micro-batches per optimizer step.",
         "train.accumulate", at_least=1),
    Flag("NSA_OPT_FUSED", "bool", "", "training", "Fused AdamW kernel.", "optim.fused"),
    Flag("NSA_PREFILL_BATCHED", "bool", "", "attention",
         "All tokens at once (1), or one by one through the decoding cache (0).",
         "attention.prefill_batched"),
    Flag("NSA_SEL_RANGES_V2", "bool", "", "attention",
         "Selected branch from merged ranges of tokens instead of block indices.",
         "attention.sel_ranges"),
    Flag("NSA_FORCE_BRANCH", "choice", "", "attention", "Ablation: open one branch alone.",
         "attention.force_branch", ("none", "cmp", "sel", "win")),
    Flag("NSA_FORCE_UNIFORM_GATE", "bool", "", "attention",
         "Ablation: weigh all branches by 1/3.", "attention.uniform_gate"),
    Flag("NSA_SDPA_FLASH_ONLY", "bool", "", "attention", "SDPA through its flash kernel only.",
         "attention.flash_only"),
    Flag("NSA_SDPA_NO_FLASH", "bool", "", "attention", "SDPA through any kernel but flash.",
         "attention.no_flash"),
    Flag("NSA_USE_FA2", "bool", "", "attention", "Window branch through the flash-attn package.",
         "attention.use_fa2"),
    Flag("NSA_SCALER_INIT_SCALE", "float", "", "training", "First loss scale of fp16.",
         "scaler.init_scale", at_least=1),
    Flag("NSA_SCALER_GROWTH_INTERVAL", "int", "", "training",
         "Finite steps in a row that raise the loss scale.", "scaler.growth_interval", at_least=1),
    Flag("NSA_SCALER_GROWTH_FACTOR", "float", "", "training", "By how much they raise it.",
         "scaler.growth_factor", at_least=1),
    Flag("NSA_SCALER_BACKOFF_FACTOR", "float", "", "training",
         "What a non-finite step multiplies it by.", "scaler.backoff_factor", at_least=0),
    Flag("NSA_GC_RANGE", "str", "", "training",
         "Recompute activations: none, all, or blocks A:B.", "train.recompute"),
    Flag("NSA_TB_DISABLE", "bool", "0", "report", "Write nothing for TensorBoard.",
         "report.disable_tb"),
    Flag("NSA_MEM_DUMP_EVERY", "int", "", "report",
         "Steps between dumps of the CUDA allocator.", "report.memory_every", at_least=0),
    Flag("NSA_NVTX", "bool", "", "report", "Mark phases for Nsight Systems.", "report.nvtx"),
    Flag("NSA_SDPA_AUDIT", "bool", "", "report",
         "Say which kernels of SDPA the first step called, by branch.", "report.sdpa_audit"),
    Flag("NSA_PROFILE", "str", "", "report", "Steps A:B under torch.profiler.",
         "report.profile"),
    Flag("NSA_DISABLE_AUX_STATS", "bool", "0", "report",
         "Do not compute gate and selection statistics: their panels say so.",
         "report.disable_aux_stats"),
    Flag("NSA_DISABLE_CSV_LOGS", "bool", "0", "report", "Write no CSV files.",
         "report.disable_csv"),
    Flag("NSA_DDP_BUCKET_MB", "int", "", "ddp", "Gradient bucket size in MB.",
         "ddp.bucket_mb", at_least=1),
    Flag("NSA_DDP_FIND_UNUSED", "bool", "", "ddp", "Search for parameters without gradient.",
         "ddp.find_unused"),
    Flag("NSA_DDP_STATIC_GRAPH", "bool", "", "ddp", "Promise DDP that the graph never changes.",
         "ddp.static_graph"),
    Flag("NSA_DDP_COMPRESS", "choice", "", "ddp", "Compress gradients for the all-reduce.",
         "ddp.compress", ("none", "fp16", "bf16")),
    Flag("NSA_DDP_DISABLE_GC", "bool", "", "ddp", "Keep all activations under DDP.",
         "ddp.disable_gc"),
    Flag("NSA_DDP_SAFE_MODE", "bool", "", "ddp", "Small buckets, no views: to hunt a fault.",
         "ddp.safe_mode"),
    Flag("NSA_FSDP_SHARDING", "choice", "", "fsdp", "What FSDP frees after the forward.",
         "fsdp.sharding", ("full", "grad_op")),
    Flag("NSA_FSDP_PREFETCH", "int", "", "fsdp", "Blocks gathered ahead.", "fsdp.prefetch",
         at_least=0),
    Flag("NSA_PG_TIMEOUT_MIN", "float", "", "ddp", "Time limit of a collective in minutes.",
         "ddp.timeout_min", at_least=0.01),
    Flag("NSA_DRILL", "drill", "", "drills",
         "Faults that ranks shall have, to practise a rescue; docs/guide.md lists them.",
         "train.drill"),
    Flag("OMP_NUM_THREADS", "int", "", "library", "CPU threads per rank.", at_least=1),
    Flag("CUDA_VISIBLE_DEVICES", "str", "", "library", "GPUs that the ranks may use."),
    Flag("PYTORCH_CUDA_ALLOC_CONF", "str", "", "library", "Options of the CUDA allocator."),
    Flag("NCCL_DEBUG", "choice", "", "library", "How much NCCL logs.", "",
         ("VERSION", "WARN", "INFO", "TRACE")),
    Flag("NCCL_ALGO", "str", "", "library", "NCCL algorithms, Ring for PCIe."),
    Flag("NCCL_PROTO", "str", "", "library", "NCCL protocols, Simple for PCIe."),
    Flag("NCCL_IB_DISABLE", "bool", "", "library", "NCCL without InfiniBand."),
    Flag("NCCL_P2P_DISABLE", "bool", "", "library", "NCCL without GPU peer access."),
    Flag("TORCH_FR_BUFFER_SIZE", "int", "", "library", "Entries of the collective flight record.",
         at_least=0),
)  # fmt: skip

FLAGS: dict[str, Flag] = {flag.name: flag for flag in TABLE}


def lookup(name: str) -> Flag:
    """Returns the flag of that name. Raises UsageError with the nearest one."""
    flag = FLAGS.get(name)
    if flag is None:
        raise UsageError(f"there is no flag {name!r}{did_you_mean(name, FLAGS)}")
    return flag


def parse(name: str, text: str) -> Value:
    """Returns the value of a flag. Raises UsageError that says what would be right."""
    flag, text = lookup(name), text.strip()
    try:
        value = convert(text, _kind(flag), flag.at_least)
        if not text:
            raise ValueError(text)
    except ValueError:
        raise UsageError(f"the flag {name} cannot be {text!r}; it takes {expected(flag)}") from None
    if flag.kind == "drill":
        drill.parse(text, f"the flag {name}")
    return value


def _kind(flag: Flag) -> type | tuple[str, ...]:
    return flag.choices or {"bool": bool, "int": int, "float": float}.get(flag.kind, str)


def expected(flag: Flag) -> str:
    """Says in words which values a flag takes."""
    said = {"bool": "0 or 1", "drill": drill.GRAMMAR}
    return said.get(flag.kind) or takes(_kind(flag), flag.at_least)


def format_value(value: Value) -> str:
    """Returns a value as it stands in the environment."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def check_names(environment: Mapping[str, str]) -> None:
    """Raises UsageError for an `NSA_*` variable that is in no table: a typo would do nothing."""
    told = (*CONTRACT_NAMES, *ALERT_NAMES)
    for name in environment:
        if name.startswith(OWN_PREFIX) and name not in FLAGS and name not in told:
            raise UsageError(
                f"the environment sets {name}, which is no flag{did_you_mean(name, FLAGS)}"
            )


def from_shell(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the flags that a launch takes over from the operator's shell.

    Our own and the choice of GPUs; other libraries' variables stand in a shell for other reasons.
    Raises UsageError.
    """
    check_names(environment)
    return {
        name: format_value(parse(name, environment[name]))
        for name in FLAGS
        if environment.get(name) and (name.startswith(OWN_PREFIX) or name == DEVICES)
    }


def from_environment(environment: Mapping[str, str]) -> dict[str, Value]:
    """Returns the parsed values of all flags that are set. Raises UsageError."""
    check_names(environment)
    return {name: parse(name, environment[name]) for name in FLAGS if environment.get(name)}
