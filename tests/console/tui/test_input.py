"""In a real terminal, pasted text and bytes that are no text start no action."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path

from console.tui.driver import IGNORED
from tests.terminal import Terminal

ROOT = Path(__file__).parents[3]
PASTED = ("The Halt of Dump, Kill and Launch yes?\r" * 30_000)[:1_000_000]
MOST_MIB = 20


def console(folder: Path) -> Terminal:
    words = [sys.executable, "-m", "console", "--root", str(folder / "artifacts")]
    return Terminal(words, ROOT, {"XDG_STATE_HOME": str(folder)})


def peak_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024


def write(terminal: Terminal, text: str) -> None:
    """Writes text as fast as the program reads it, as a terminal does when it pastes."""
    data = text.encode()
    while data:
        with contextlib.suppress(BlockingIOError):
            data = data[os.write(terminal.fd, data[:4096]) :]
        terminal.pump(0)


def test_a_large_paste_does_nothing(tmp_path):
    with console(tmp_path) as terminal:
        terminal.wait("checks passed")
        before = peak_mib(terminal.pid)
        write(terminal, PASTED)
        terminal.wait(IGNORED)
        assert peak_mib(terminal.pid) < before + MOST_MIB
        assert b"not answered" not in terminal.raw
        assert "Launch cpu_smoke?" not in terminal.text
        terminal.settle(2)
        terminal.press_until("L", "Launch cpu_smoke?")
        terminal.press("n")
        terminal.wait(lambda shown: "Launch cpu_smoke?" not in shown)
        terminal.leave()
    assert not (tmp_path / "artifacts").exists()


def test_a_marked_paste_and_a_paste_beside_a_focus_event_do_nothing(tmp_path):
    with console(tmp_path) as terminal:
        terminal.wait("checks passed")
        for before in ("\x1b[I", "\x1b[200~hello\x1b[201~"):
            write(terminal, f"{before}Let it be launched: yes, and then look at the logs")
            write(terminal, "\x1b[200~Ly\x1b[201~")
            terminal.wait(IGNORED)
            terminal.settle(1)
        for part in ("\x1b[200~the end of this paste comes in two reads\x1b[20", "1~"):
            write(terminal, part)
            terminal.settle(0.1)
        assert "Launch cpu_smoke?" not in terminal.text
        terminal.press_until("?", "Keys in")
        terminal.play("\x1b[B\x1b[B", "q")
        terminal.wait(lambda shown: "Keys in" not in shown)
        terminal.leave()
    assert not (tmp_path / "artifacts").exists()


def test_bytes_that_are_no_text_do_not_end_the_screen(tmp_path):
    with console(tmp_path) as terminal:
        terminal.wait("checks passed")  # a change of the view clears messages
        os.write(terminal.fd, "x\xe9".encode("latin-1"))
        os.write(terminal.fd, b"y" * 300)
        terminal.wait(IGNORED)
        terminal.settle(1)
        terminal.press_until("?", "Keys in")
        terminal.press("q")
        terminal.wait(lambda shown: "Keys in" not in shown)
        terminal.leave()
