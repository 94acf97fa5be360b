"""The Textual driver: paints on stdout, drops pasted keys, exits even if the loop is blocked.

Textual's own driver paints on stderr, which may be a file. When the terminal goes away, Textual's
writer thread dies, and some writes later the event loop is blocked forever. So the exit must not
depend on the loop.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import select
import signal
import sys
import termios
import threading
import time
from codecs import getincrementaldecoder
from collections.abc import Callable
from typing import Any

from textual._xterm_parser import XTermParser
from textual.drivers.linux_driver import LinuxDriver

GRACE_S, RESTORE_S = 2.0, 0.5
READ_BYTES = 4096
POLL_S, IDLE_POLL_S, QUIET_S = 0.1, 0.5, 0.25
"""The longest waits for input: during the second after an input, and later. Characters that follow
pasted characters within `QUIET_S` count as pasted."""
FEW, FIELD_CHARS = 8, 256
"""More characters than this in one read count as pasted: outside a field, and in a field."""
PASTE_BEGIN = "\x1b[200~"
IGNORED = "input ignored: keys that come together count as pasted; type them one by one"
SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|O.|[\]P^_X].*?(?:\x07|\x1b\\)|.?)", re.DOTALL)
"""Matches an escape sequence: a key, the mouse, the begin or end of a paste, or an answer."""
RESTORE = (
    b"\x1b[?1000l\x1b[?1003l\x1b[?1015l\x1b[?1006l\x1b[?2048l\x1b[?2004l\x1b[?1004l\x1b[?7h"
    b"\x1b[<u\x1b[?1049l\x1b[?25h"
)
"""Restores mouse, reports of the size, paste, focus, line wrap, keyboard protocol, alternate screen
and cursor."""


class TerminalDriver(LinuxDriver):
    """Ends the process when the terminal is gone, or if the exit takes longer than `GRACE_S`.

    An exit can take too long if the terminal reads nothing: it blocks the writer, and the writer
    blocks the event loop.
    """

    def __init__(self, *given: Any, **named: Any):
        super().__init__(*given, **named)
        out = sys.__stdout__
        assert out is not None
        self._file = open(  # noqa: SIM115 - open as long as the process runs
            out.fileno(), "w", encoding=out.encoding, errors="replace", closefd=False
        )

        self._console: Any = self._app
        self._late: threading.Thread | None = None
        self._ends = threading.Lock()
        self._pasted_at = -math.inf

    def close(self) -> None:
        """Waits for the writer thread, and for the thread that restores the terminal, if any."""
        super().close()
        if self._late is not None:
            self._late.join()

    def start_application_mode(self) -> None:
        super().start_application_mode()
        _thread(self._end_with_terminal)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._app.exit, 0)
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGUSR1, lambda *_: None)

    def _get_terminal_size(self) -> tuple[int, int]:
        """Returns the present size; Textual returns the size in COLUMNS and LINES, if any."""
        try:
            columns, rows = os.get_terminal_size(self._file.fileno())
        except OSError:
            columns = rows = 0
        return (columns, rows) if columns and rows else super()._get_terminal_size()

    def _sigcont_application(self, *_: object) -> None:
        """Starts the application mode; first stops it if no SIGTSTP did, for example after SIGSTOP.

        A second start without a stop would save the modes of the screen as the modes to restore,
        and would start a second input thread.
        """
        if self._must_signal_resume or self.attrs_before is None:
            super()._sigcont_application()
        else:
            self._app.call_later(self._start_again)

    def _start_again(self) -> None:
        self.suspend_application_mode()
        self.resume_application_mode()

    def run_input_thread(self) -> None:
        """Reads input until the driver stops. Bytes need not be UTF-8.

        If the input ends, the app exits: no key could end it later. The reads of a process fail,
        for example, after the end of the script that started it: the shell reads the terminal.
        """
        parser = XTermParser(self._debug)
        decode = getincrementaldecoder("utf-8")("replace").decode
        read_at = time.monotonic()
        while not self.exit_event.is_set():
            wait_s = POLL_S if time.monotonic() - read_at < 1.0 else IDLE_POLL_S
            ready, _, _ = select.select([self.fileno], [], [], wait_s)
            read_at = time.monotonic() if ready else read_at
            try:
                read = os.read(self.fileno, READ_BYTES) if ready else b""
            except OSError:
                read = b""
            if ready and not read:
                self._app.call_later(self._app.exit, 0)
                return
            text = self._typed(decode(read))
            typed = parser.feed(text) if text else ()
            for message in (*typed, *parser.tick()):
                self.process_message(message)

    def _typed(self, text: str) -> str:
        """Returns the text of one read, without its characters if they count as pasted.

        Characters count as pasted if one read has more of them than a person types, or if they soon
        follow pasted characters. Escape sequences are passed to Textual, except the sequence that
        begins a dropped paste. If Textual read it, and if the sequence that ends the paste got
        lost, Textual would ignore all keys.
        """
        sequences = SEQUENCE.findall(text)
        count = len(text) - sum(map(len, sequences))
        now, most = time.monotonic(), FIELD_CHARS if self._console.in_field else FEW
        follows = now - self._pasted_at < QUIET_S
        if not count or (count <= most and not follows):
            return text
        self._pasted_at = now
        if not follows:
            self._app.call_later(self._console.say, IGNORED, "error")
        return "".join(sequences).replace(PASTE_BEGIN, "")

    # --- the exit ------------------------------------------------------------------------------

    def end_in_time(self) -> None:
        """Ends the process if it still exists after `GRACE_S`; called when the exit begins."""

        def wait() -> None:
            time.sleep(GRACE_S)
            self._end_now()

        _thread(wait)

    def _end_with_terminal(self) -> None:
        """Waits for the hang-up of the terminal, then ends the process; restores nothing."""
        poll = select.poll()
        poll.register(self.fileno, 0)
        poll.poll()
        os._exit(0)

    def _on_signal(self, *_: object) -> None:
        """Starts `end_in_time`; Python calls this handler even if the loop is blocked."""
        self.end_in_time()

    def _end_now(self) -> None:
        """Ends the process even if the terminal reads nothing and the event loop is blocked.

        Drops pending output and redirects the writer to /dev/null, so that the terminal has room
        for `RESTORE`. Also drops typed input, because the shell would run it.
        """
        if not self._ends.acquire(blocking=False):
            return
        self._late = threading.current_thread()
        painted, writer = self._file.fileno(), self._writer_thread
        terminal = os.dup(painted)
        os.dup2(os.open(os.devnull, os.O_WRONLY), painted)
        if writer is not None and writer.ident is not None and writer.is_alive():
            signal.pthread_kill(writer.ident, signal.SIGUSR1)
        if self.attrs_before is not None:
            termios.tcsetattr(terminal, termios.TCSANOW, self.attrs_before)
        self._wait_until_drained()
        termios.tcflush(terminal, termios.TCIOFLUSH)
        _thread(lambda: os.write(terminal, RESTORE)).join(RESTORE_S)
        time.sleep(RESTORE_S / 10)
        os._exit(0)

    def _wait_until_drained(self) -> None:
        """Waits a short time for the writer to drop its output, which would undo `RESTORE`."""
        end, writer = time.monotonic() + RESTORE_S, self._writer_thread
        time.sleep(RESTORE_S / 10)
        while writer is not None and writer._queue.qsize() and time.monotonic() < end:
            time.sleep(RESTORE_S / 50)


def _thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, name="leaving", daemon=True)
    thread.start()
    return thread
