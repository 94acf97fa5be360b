"""Fakes of hardware and of failing calls, driven by data."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def compiled(source: Path, library: Path) -> Path:
    """Compiles a shared library; skips the test where there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip(f"needs a C compiler (cc) for {source.name}")
    flags = ["-shared", "-fPIC", "-O1", "-o", str(library)]
    subprocess.run([compiler, *flags, str(source), "-ldl"], check=True)
    return library
