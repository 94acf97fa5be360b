"""Reads the kernel's evidence about a process until the process waits as expected."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

from console.sources.kernel_evidence import ProcessEvidence, collect
from tests.launches import wait_for


def until(pid: int, reached: Callable[[ProcessEvidence], bool]) -> ProcessEvidence:
    """Returns the first reading for which `reached` is true."""

    def look() -> ProcessEvidence | None:
        found = collect(pid)
        return found if found is not None and reached(found) else None

    return wait_for(look, every_s=0.01, told=lambda: collect(pid))


def waiting(child: subprocess.Popen[bytes], kind: str, words: str = "") -> str:
    """Returns the text of a wait, as soon as the wait has this kind and these words."""
    return until(
        child.pid, lambda found: found.main.kind == kind and words in found.main.text
    ).main.text


def asleep(start: Callable[..., subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """Returns a process that sleeps."""
    child = start("import time; time.sleep(600)")
    waiting(child, "timer")
    return child
