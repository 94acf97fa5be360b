"""Finds the exit code of a program in a function of atexit, for its exit record.

Python shows such a function the exception that ended the program (`sys.last_value`), but not a
SystemExit. So the outermost frame shows whether the program returned, and `sys.exit` is wrapped.
From Python 3.12 on, `sys.monitoring` also reports the exception that leaves the outermost frame.
"""

from __future__ import annotations

import opcode
import sys
import threading
from types import CodeType
from typing import Any, NoReturn

TOOL = 4
"""The number of this module among the tools of `sys.monitoring`; no common tool has it."""


class Ending:
    """The end of this program; create it once, in the main thread."""

    def __init__(self) -> None:
        self._frame = sys._getframe()
        while self._frame.f_back is not None:
            self._frame = self._frame.f_back
        self._arg: Any = self
        """The argument of the newest SystemExit that is known; this object if there was none."""
        self._exit, sys.exit = sys.exit, self._recorded_exit
        if sys.version_info >= (3, 12) and sys.monitoring.get_tool(TOOL) is None:
            event = sys.monitoring.events.PY_UNWIND
            sys.monitoring.use_tool_id(TOOL, __name__)
            sys.monitoring.register_callback(TOOL, event, self._unwound)
            sys.monitoring.set_events(TOOL, event)

    def _recorded_exit(self, status: Any = None, /) -> NoReturn:
        if threading.current_thread() is threading.main_thread():
            self._arg = status
        self._exit(status)

    def _unwound(self, code: CodeType, _offset: int, error: BaseException) -> None:
        if code is self._frame.f_code and isinstance(error, SystemExit):
            self._arg = error.code

    def found(self) -> tuple[int | None, str]:
        """Returns two values: the exit code, or None if it is not known; and the error, or "".

        Before Python 3.12, the code of a SystemExit that `sys.exit` did not raise is not known; but
        if the program called `sys.exit` before, and this call did not end it, the code of that call
        is returned.
        """
        error = getattr(sys, "last_value", None)
        if error is not None:
            return 1, f"{type(error).__name__}: {error}"[:400]
        if opcode.opname[self._frame.f_code.co_code[self._frame.f_lasti]].startswith("RETURN"):
            return 0, ""
        if self._arg is self:
            return None, ""
        code = self._arg & 0xFF if isinstance(self._arg, int) else int(self._arg is not None)
        return code, f"SystemExit: {self._arg}"[:400] if code else ""
