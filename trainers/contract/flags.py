"""The registry of environment flags.

A flag of this project overrides one key of the settings. `OWN` maps each flag to its key, and
`trainers.schema.keys` returns the type, limits, default and help of each key. Flags of libraries
(for example of NCCL) are passed to the training and recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainers.contract import drill_kinds
from trainers.contract.environ import ALERT_NAMES, CONTRACT_NAMES
from trainers.contract.errors import UsageError, did_you_mean
from trainers.contract.values import Kind, accepted_values, convert
from trainers.schema import ANY_COUNT, DRILL, Key, keys

OWN_PREFIX = "NSA_"
DEVICES = "CUDA_VISIBLE_DEVICES"
Value = bool | int | float | str
OWN: Mapping[str, str] = {
    "NSA_LR": "train.lr",
    "NSA_ACCUM": "train.accumulate",
    "NSA_OPT_FUSED": "optim.fused",
    "NSA_SCALER_INIT_SCALE": "scaler.init_scale",
    "NSA_SCALER_GROWTH_INTERVAL": "scaler.growth_interval",
    "NSA_SCALER_GROWTH_FACTOR": "scaler.growth_factor",
    "NSA_SCALER_BACKOFF_FACTOR": "scaler.backoff_factor",
    "NSA_GC_RANGE": "train.recompute",
    "NSA_DRILL": DRILL,
    "NSA_PREFILL_BATCHED": "attention.prefill_batched",
    "NSA_SEL_RANGES_V2": "attention.sel_ranges",
    "NSA_FORCE_BRANCH": "attention.force_branch",
    "NSA_FORCE_UNIFORM_GATE": "attention.uniform_gate",
    "NSA_SDPA_FLASH_ONLY": "attention.flash_only",
    "NSA_SDPA_NO_FLASH": "attention.no_flash",
    "NSA_USE_FA2": "attention.use_fa2",
    "NSA_TB_DISABLE": "report.disable_tb",
    "NSA_MEM_DUMP_EVERY": "report.memory_every",
    "NSA_NVTX": "report.nvtx",
    "NSA_SDPA_AUDIT": "report.sdpa_audit",
    "NSA_PROFILE": "report.profile",
    "NSA_DISABLE_AUX_STATS": "report.disable_aux_stats",
    "NSA_DISABLE_CSV_LOGS": "report.disable_csv",
    "NSA_DDP_BUCKET_MB": "ddp.bucket_mb",
    "NSA_DDP_FIND_UNUSED": "ddp.find_unused",
    "NSA_DDP_STATIC_GRAPH": "ddp.static_graph",
    "NSA_DDP_COMPRESS": "ddp.compress",
    "NSA_DDP_DISABLE_GC": "ddp.disable_gc",
    "NSA_DDP_SAFE_MODE": "ddp.safe_mode",
    "NSA_PG_TIMEOUT_MIN": "ddp.timeout_min",
    "NSA_FSDP_SHARDING": "fsdp.sharding",
}
"""The key of the settings that each of our flags overrides."""
LIBRARY: Mapping[str, tuple[Kind, int, str]] = {
    "OMP_NUM_THREADS": (int, 1, "CPU threads per rank."),
    DEVICES: (str, 0, "GPUs that the ranks may use."),
    "PYTORCH_CUDA_ALLOC_CONF": (str, 0, "Options of the CUDA allocator."),
    "NCCL_DEBUG": (("VERSION", "WARN", "INFO", "TRACE"), 0, "Log level of NCCL."),
    "NCCL_ALGO": (str, 0, "NCCL algorithms, for example Ring on PCIe."),
    "NCCL_PROTO": (str, 0, "NCCL protocols, for example Simple on PCIe."),
    "NCCL_IB_DISABLE": (bool, 0, "Run NCCL without InfiniBand."),
    "NCCL_P2P_DISABLE": (bool, 0, "Run NCCL without GPU peer access."),
    "TORCH_FR_BUFFER_SIZE": (int, 0, "Entries of the collective flight record."),
}
"""Kind, lower limit and help of each flag of a library."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One environment variable. `default` is the default as text, or "" if there is none."""

    name: str
    key: Key
    setting: str = ""

    @property
    def group(self) -> str:
        """The section of the setting ("training" for train, optim and scaler), or "library"."""
        section = self.setting.partition(".")[0] or "library"
        return "training" if section in ("train", "optim", "scaler") else section

    @property
    def default(self) -> str:
        return "" if self.key.default is None else format_value(self.key.default)


FLAGS: Mapping[str, Flag] = {
    name: Flag(name, keys()[setting], setting) for name, setting in OWN.items()
} | {
    name: Flag(name, Key(kind, None, low, ANY_COUNT[1], text))
    for name, (kind, low, text) in LIBRARY.items()
}


def lookup(name: str) -> Flag:
    """Returns the flag of that name. Raises UsageError if there is none."""
    flag = FLAGS.get(name)
    if flag is None:
        raise UsageError(f"there is no flag {name!r}{did_you_mean(name, FLAGS)}")
    return flag


def parse(name: str, text: str) -> Value:
    """Returns the value of a flag. Raises UsageError."""
    flag, text = lookup(name), text.strip()
    try:
        value = convert(text, flag.key.kind, flag.key.low, flag.key.high)
        if not text:
            raise ValueError(text)
    except ValueError:
        raise UsageError(f"the flag {name} cannot be {text!r}; it takes {expected(flag)}") from None
    if flag.setting == DRILL:
        drill_kinds.parse(text, f"the flag {name}")
    return value


def expected(flag: Flag) -> str:
    """Returns a short description of the values that a flag accepts."""
    if flag.setting == DRILL:
        return drill_kinds.GRAMMAR
    key = flag.key
    return "0 or 1" if key.kind is bool else accepted_values(key.kind, key.low, key.high)


def format_value(value: Value) -> str:
    """Returns a value as text for the environment."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def from_shell(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the flags that a launch copies from the operator's shell: `NSA_*` and `DEVICES`.

    Empty flags are left out. Other flags of libraries are not copied, because the shell may
    set them for other reasons. Raises UsageError.
    """
    ours = {n: x for n, x in environment.items() if n.startswith(OWN_PREFIX) or n == DEVICES}
    return {name: format_value(value) for name, value in from_environment(ours).items()}


def from_environment(environment: Mapping[str, str]) -> dict[str, Value]:
    """Returns the parsed values of the flags that are set and not empty.

    Raises UsageError, also for an unknown `NSA_*` variable, which may be a typo.
    """
    known = {*FLAGS, *CONTRACT_NAMES, *ALERT_NAMES}
    for name in environment:
        if name.startswith(OWN_PREFIX) and name not in known:
            raise UsageError(
                f"the environment sets {name}, which is not a flag{did_you_mean(name, FLAGS)}"
            )
    return {name: parse(name, environment[name]) for name in FLAGS if environment.get(name)}
