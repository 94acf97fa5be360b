"""Finds the exit code of a program for the exit record, which an atexit function writes.

An atexit function finds the exception that ended the program in `sys.last_value`, except a
SystemExit. So the outermost frame shows whether the program returned, and a wrapper of `sys.exit`
records its argument.
"""

from __future__ import annotations

import opcode
import sys
import threading
from typing import Any, NoReturn


class Ending:
    """The end of this program; create it once, in the main thread."""

    def __init__(self) -> None:
        self._frame = sys._getframe()
        while self._frame.f_back is not None:
            self._frame = self._frame.f_back
        self._arg: Any = self
        """The argument of the newest `sys.exit` in the main thread, or this object if none."""
        self._exit, sys.exit = sys.exit, self._recorded_exit

    def _recorded_exit(self, status: Any = None, /) -> NoReturn:
        if threading.current_thread() is threading.main_thread():
            self._arg = status
        self._exit(status)

    def found(self) -> tuple[int | None, str]:
        """Returns two values: the exit code, or None if it is not known; and the error, or "".

        If `sys.exit` did not raise the SystemExit (for example after `raise SystemExit(3)`), the
        code is None. But if the program caught the SystemExit of an earlier `sys.exit`, the code is
        wrongly that of the earlier call.
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
