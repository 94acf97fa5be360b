"""The only module of nsa, trainers and console that reads os.environ directly."""

from __future__ import annotations

import os
from collections.abc import Mapping

from trainers.contract import values

RUN_DIR = "NSA_CONSOLE_RUN_DIR"
RUN_ID = "NSA_CONSOLE_RUN_ID"
ATTEMPT = "NSA_CONSOLE_ATTEMPT"
LIVE_DIR = "NSA_CONSOLE_LIVE_DIR"
TOKEN = "NSA_CONSOLE_TOKEN"
CONFIG = "CONFIG"
"""Variable with the YAML file of a trainer that is started without `--config`."""
TORCHRUN_ID = "TORCHELASTIC_RUN_ID"
"""Variable that torchrun sets for its ranks."""
CONTRACT_NAMES = (RUN_DIR, RUN_ID, ATTEMPT, LIVE_DIR, TOKEN)
"""Variables in which the supervisor passes facts about the run to its processes."""

ALERT_PREFIX = "NSA_ALERT_"
ALERT_NAMES = tuple(
    f"{ALERT_PREFIX}{name}" for name in ("NAME", "LEVEL", "TEXT", "RUN", "STATE", "TS", "COUNT")
)
"""Variables that the supervisor sets for the operator's hooks."""

INHERITED = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR",
    "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CUDA_HOME", "CUDA_PATH",
    "HF_HOME", "HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE", "TIKTOKEN_CACHE_DIR",
    "DATA_GYM_CACHE_DIR", "XDG_CACHE_HOME", "http_proxy", "https_proxy", "all_proxy", "no_proxy",
    "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY",
)  # fmt: skip
"""The variables that a launch passes on from the operator's shell, besides flags."""

DEVICE_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""A launch sets this variable, so that CUDA numbers the GPUs as NVML and `nvidia-smi` do."""


def snapshot() -> dict[str, str]:
    """Returns a copy of the whole environment."""
    return dict(os.environ)


def get(name: str, default: str = "") -> str:
    """Returns the value of a variable, or `default` if it is not set."""
    return os.environ.get(name, default)


def integer(variables: Mapping[str, str], name: str, default: int) -> int:
    """Returns a variable such as RANK as a whole number, or `default` if it is not set.

    Raises UsageError for a value that is not a whole number from 0 to 2^31 - 1.
    """
    return values.read(variables.get(name, default), int, 0, 2**31 - 1, f"the variable {name}")


def inherited() -> dict[str, str]:
    """Returns the variables of `INHERITED` that are set."""
    return {name: os.environ[name] for name in INHERITED if name in os.environ}
