"""The error sweep over a checkpoint save: one process saves many times while calls fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.fakes import errors
from tests.fakes.errors import Failure
from tests.launches import PROGRAMS

ROOT = Path(__file__).parents[2]
KINDS = ("new", "again", "background")
"""A save of a new step, of a step with a checkpoint, and of a new step in the background."""


class Saves:
    """A process with the library; each call of `save` makes this process save once."""

    def __init__(self, folder: Path, library: Path):
        folder.mkdir()
        self._record = folder / "calls"
        control, data = folder / "control", folder / "data"
        data.mkdir()
        errors.write(control, None)
        variables = os.environ | errors.environment(library, control, data, self._record)
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAMS / "saving.py"), str(data), str(control)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env=variables | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def save(self, kind: str, failure: Failure | None) -> dict[str, Any]:
        """Returns `said`, `seen`, `failed` and `wrong` of one save."""
        ask, answer = self._process.stdin, self._process.stdout
        assert ask is not None
        assert answer is not None
        case = {"kind": kind, "failure": asdict(failure) if failure else None}
        ask.write(json.dumps(case) + "\n")
        ask.flush()
        line = answer.readline()
        assert line, f"the process died while it saved: {failure}"
        return json.loads(line)

    def sites(self, kind: str) -> dict[tuple[str, str], int]:
        """Returns the calls of a save without a failure."""
        self._record.write_bytes(b"")
        found = self.save(kind, None)
        assert not found["wrong"], found
        return errors.sites(self._record)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
