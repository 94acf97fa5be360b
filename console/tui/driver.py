"""The terminal's driver: paints on stdout, and ends the process when the terminal or a signal asks.

Textual paints on stderr, which may be a file. Its writer thread dies when the terminal goes away,
and then the 31st write blocks the event loop for good: what needs the loop is no sure way out.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable
from typing import Any

from textual.drivers.linux_driver import LinuxDriver

GRACE_S = 2.0
RESTORE = (
    b"\x1b[?1000l\x1b[?1003l\x1b[?1006l\x1b[?2004l\x1b[?1004l\x1b[?7h\x1b[<u\x1b[?1049l\x1b[?25h"
)
"""Mouse, paste, focus, line wrap, keyboard protocol, alternate screen and cursor, as they were."""


class TerminalDriver(LinuxDriver):
    """Leaves at once when the terminal is gone, and within `GRACE_S` of SIGTERM or SIGHUP."""

    def __init__(self, *given: Any, **named: Any):
        super().__init__(*given, **named)
        out = sys.__stdout__
        assert out is not None
        self._file = open(  # noqa: SIM115 - lives as long as the process
            out.fileno(), "w", encoding=out.encoding, errors="replace", closefd=False
        )

        self._late: threading.Thread | None = None

    def close(self) -> None:
        """Closes, unless the terminal is being restored for a loop that was late: that ends all."""
        if self._late is not None:
            self._late.join()
        super().close()

    def start_application_mode(self) -> None:
        super().start_application_mode()
        _thread(self._end_with_terminal)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._app.exit, 0)
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGUSR1, lambda *_: None)

    def _end_with_terminal(self) -> None:
        """Waits for the hang-up of the terminal; there is nothing left to restore then."""
        poll = select.poll()
        poll.register(self.fileno, 0)
        poll.poll()
        os._exit(0)

    def _on_signal(self, *_: object) -> None:
        """Python runs this also while the loop is blocked, and the loop's own handler if it can."""
        _thread(self._end_late)

    def _end_late(self) -> None:
        """Ends a process whose loop did not, because the terminal reads nothing.

        What waits for it is dropped and the writer is turned away, so that there is room for what
        restores it.
        """
        time.sleep(GRACE_S)
        self._late = threading.current_thread()
        painted, writer = self._file.fileno(), self._writer_thread
        terminal = os.dup(painted)
        os.dup2(os.open(os.devnull, os.O_WRONLY), painted)
        if writer is not None and writer.ident is not None and writer.is_alive():
            signal.pthread_kill(writer.ident, signal.SIGUSR1)
        if self.attrs_before is not None:
            termios.tcsetattr(terminal, termios.TCSANOW, self.attrs_before)
        time.sleep(GRACE_S / 20)
        termios.tcflush(terminal, termios.TCOFLUSH)
        _thread(lambda: os.write(terminal, RESTORE))
        time.sleep(GRACE_S / 20)
        os._exit(0)


def _thread(work: Callable[[], object]) -> None:
    threading.Thread(target=work, name="leaving", daemon=True).start()
