"""Builds the fake of NVML's C interface and writes what its GPUs say."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("nvml.c")
GPU = {
    "util": 97, "power_mw": 321_500, "used": 61_000, "total": 81_920, "temp": 64, "mhz": 1410,
    "state": "ok", "xid": 0, "delay_ms": 0, "throttle": 4, "ecc": 0,
}  # fmt: skip


def build(folder: Path) -> Path:
    """Compiles libnvidia-ml.so.1 into `folder`; skips the test where there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler (cc) for the fake of NVML")
    library = folder / "libnvidia-ml.so.1"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"], check=True
    )
    write(folder)
    return library


def write(folder: Path, count: int = 8, **changed: dict[str, object]) -> None:
    """Replaces gpus.txt; `gpu3={"state": "lost"}` changes one GPU."""
    lines = []
    for index in range(count):
        gpu = {**GPU, **changed.get(f"gpu{index}", {})}
        lines.append(" ".join(str(word) for word in (index, *gpu.values())))
    temporary = folder / "gpus.tmp"
    temporary.write_text("\n".join(lines) + "\n")
    temporary.replace(folder / "gpus.txt")
