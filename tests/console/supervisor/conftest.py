"""The parts of real launches; they begin in tests/console/conftest.py."""

from __future__ import annotations

from tests.launches import ENDED, PROGRAMS, Begin, Started, phase, write_plan

__all__ = ["ENDED", "PROGRAMS", "Begin", "Started", "phase", "write_plan"]
