"""Supervisors with one method that is broken on purpose."""

from __future__ import annotations

import importlib
from pathlib import Path

from tests.launches import STUB

PROGRAM = """
import sys
if "console.supervisor" in sys.orig_argv:
    import ctypes, os, pathlib, time
    from console.supervisor import owner as owners
    {setup}
    from console.supervisor.{module} import {kind}
    true, begun = {kind}.{name}, []
    def broken(self, *given, **named):
        begun.append(1)
        {harm}
        return true(self, *given, **named)
    {kind}.{name} = broken
"""


def shell(folder: Path, method: str, harm: str, setup: str = "") -> dict[str, str]:
    """Returns environment variables for a launch in whose supervisor `method` executes `harm`.

    `method` is "module.Class.name"; unless `harm` raises, the method then continues as usual. The
    statements `setup` and `harm` may use `owners`; `harm` may also use the list `begun`, which has
    one entry per call. `folder` gets the module that breaks the method.
    """
    module, kind, name = method.split(".")
    there = getattr(importlib.import_module(f"console.supervisor.{module}"), kind)
    assert hasattr(there, name), f"there is no {method} to break"
    program = PROGRAM.format(setup=setup, module=module, kind=kind, name=name, harm=harm)
    (folder / "sitecustomize.py").write_text(program)
    return {"PYTHONPATH": f"{folder}:{STUB['PYTHONPATH']}"}
