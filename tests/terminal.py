"""A real terminal for tests: a pty with an emulated screen behind it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pyte

from tests.launches import HANG_GUARD_S

KEYS = {"enter": "\r", "esc": "\x1b", "tab": "\t", "space": " ", "up": "\x1b[A", "down": "\x1b[B"}
QUERIES = re.compile(
    rb"\x1b\[[<>=][0-9;:]*[A-Za-z]|\x1b\[\?[0-9;]*\$p|\x1bP[^\x1b]*\x1b\\|\x1b_[^\x1b]*\x1b\\"
    rb"|\x1b\[[0-9;]* q|\x1b\[[0-9;]*t"
)
UNFINISHED = re.compile(rb"\x1b(\[[0-9;:<=>?!$ ]*|P[^\x1b]*|\][^\x07\x1b]*)?$")
UNLIKE_A_TERMINAL = ("TMUX", "SSH", "COLUMNS", "LINES")
"""Prefixes of variables that the program does not inherit; a test runner may set a fixed size."""
KEPT_BYTES = 1 << 20
LEFT_ON = {b"25": b"l"} | dict.fromkeys(
    (b"1000", b"1003", b"1006", b"1015", b"1049", b"2004", b"2048"), b"h"
)


class Terminal:
    """One program in one pty; `text` is the text on the emulated screen."""

    def __init__(
        self,
        argv: Sequence[str],
        cwd: Path,
        env: Mapping[str, str] | None = None,
        size: tuple[int, int] = (80, 24),
    ):
        columns, rows = size
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        self._carry = b""
        self.received = 0
        self.raw = b""
        self.modes: dict[bytes, bytes] = {}
        self.closed = False
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            try:
                os.chdir(cwd)
                fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
                named = {k: v for k, v in os.environ.items() if not k.startswith(UNLIKE_A_TERMINAL)}
                named |= {"TERM": "xterm-256color", "COLORTERM": "truecolor", "LANG": "C.UTF-8"}
                os.execvpe(argv[0], list(argv), named | dict(env or {}))
            finally:
                os._exit(127)
        os.set_blocking(self.fd, False)
        self.resize(columns, rows)

    def resize(self, columns: int, rows: int) -> None:
        """Changes the size of the terminal, as after a change of its window."""
        self.screen.resize(rows, columns)
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read(self, seconds: float) -> bytes:
        """Returns output of the program, or nothing if none comes in time or the program ended."""
        if not select.select([self.fd], [], [], seconds)[0]:
            return b""
        try:
            data = os.read(self.fd, 65536)
        except BlockingIOError:
            return b""
        except OSError:
            data = b""
        self.closed = not data
        return data

    def draw(self, data: bytes) -> None:
        """Draws output of the program on the emulated screen."""
        self.received += len(data)
        self.raw = (self.raw + data)[-KEPT_BYTES:]
        # A sequence may be cut by the end of a read.
        for found in re.finditer(rb"\x1b\[\?([0-9;]+)([hl])", self.raw[-len(data) - 16 :]):
            for mode in found[1].split(b";"):
                self.modes[mode] = found[2]
        data = self._carry + data
        cut = UNFINISHED.search(data)
        self._carry, data = (data[cut.start() :], data[: cut.start()]) if cut else (b"", data)
        self._stream.feed(QUERIES.sub(b"", data))

    def pump(self, seconds: float = 0.05) -> None:
        """Reads some output of the program, and draws it on the emulated screen."""
        if data := self.read(seconds):
            self.draw(data)

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display)

    def wait(self, wanted: str | Callable[[str], object], seconds: float = HANG_GUARD_S) -> str:
        """Waits until the screen contains `wanted`, or `wanted(screen)` is true; returns the text.

        A screen is drawn in parts, so `wanted` must check everything that the test then asserts.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.closed:
            shown = self.text
            if wanted in shown if isinstance(wanted, str) else wanted(shown):
                return shown
            self.pump()
        raise AssertionError(f"{wanted!r} is not on the screen:\n{self.text}")

    def settle(self, seconds: float = 1.0) -> str:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.closed:
            self.pump(0.05)
        return self.text

    def press(self, *keys: str) -> None:
        """Types keys, with a short pause after each of them."""
        for key in keys:
            os.write(self.fd, KEYS.get(key, key).encode())
            self.settle(0.15)

    def play(self, *steps: str) -> None:
        """Types keys; for a step that begins with "…", waits until the rest is on the screen."""
        for step in steps:
            if step.startswith("…"):
                self.wait(step[1:])
            else:
                self.press(step)

    def leave(self) -> None:
        """Closes the console with `q`; asserts that it exits with 0 and restores the modes."""
        self.press("q")
        assert self.wait_exit() == 0
        assert self.left_on() == [], self.raw[-150:]

    def press_until(self, key: str, wanted: str) -> str:
        """Types a key repeatedly until the text is on the screen.

        Outside of a field, the program ignores more than 8 characters that it reads at once,
        because they may have been pasted.
        """

        def reached(shown: str) -> bool:
            if wanted not in shown:
                self.press(key)
                self.settle(1.0)
            return wanted in self.text

        return self.wait(reached)

    def click(self, words: str) -> None:
        """Presses and releases the left button on the first line that contains the words."""
        for y, line in enumerate(self.screen.display):
            x = line.find(words)
            if x >= 0:
                at = f"{x + 1 + len(words) // 2};{y + 1}"
                os.write(self.fd, f"\x1b[<0;{at}M\x1b[<0;{at}m".encode())
                self.settle(0.15)
                return
        raise AssertionError(f"{words!r} is not on the screen:\n{self.text}")

    def wait_exit(self, seconds: float = HANG_GUARD_S) -> int:
        """Waits for the end; returns the exit code, or the negative number of a signal."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not self.closed:
                self.pump(0.05)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                while not self.closed:
                    self.pump(0.05)
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        raise AssertionError(f"the program does not end:\n{self.text}")

    def left_on(self) -> list[bytes]:
        """Returns the terminal modes that the program has not restored."""
        return [mode for mode, bad in LEFT_ON.items() if self.modes.get(mode) == bad]

    def hang_up(self) -> None:
        """Closes the terminal as a dropped connection does."""
        os.close(self.fd)
        self.closed = True

    def close(self) -> None:
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
            self.pid = 0
        with contextlib.suppress(OSError):
            os.close(self.fd)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
