"""In a real terminal, pasted text and bytes that are no text start no action."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path

from textual.events import Paste

from console.tui.driver import IGNORED
from tests.console.tui import recorded
from tests.console.tui.recorded import app_on, driven, play, see, until
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
        terminal.wait("ready: ")
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


def test_a_paste_beside_escape_sequences_does_nothing(tmp_path):
    """A focus event, a colour or the end of a marked paste may come in the same read."""
    with console(tmp_path) as terminal:
        terminal.wait("ready: ")
        for before in ("\x1b[I", "\x1b[0m", "\x1b[200~hello\x1b[201~"):
            write(terminal, f"{before}Let it be launched: yes, and then look at the logs")
            write(terminal, "\x1b[200~Ly\x1b[201~Ly")
            terminal.wait(IGNORED)
            terminal.settle(1)
        assert "Launch cpu_smoke?" not in terminal.text
        terminal.press_until("?", "Keys in")
        terminal.play("\x1b[B\x1b[B", "q")
        terminal.wait(lambda shown: "Keys in" not in shown)
        terminal.leave()
    assert not (tmp_path / "artifacts").exists()


def test_bytes_that_are_no_text_do_not_end_the_screen(tmp_path):
    with console(tmp_path) as terminal:
        terminal.wait("q leave")
        os.write(terminal.fd, "x\xe9".encode("latin-1"))
        os.write(terminal.fd, b"y" * 300)
        terminal.wait(IGNORED)
        terminal.settle(1)
        terminal.press_until("?", "Keys in")
        terminal.press("q")
        terminal.wait(lambda shown: "Keys in" not in shown)
        terminal.leave()


async def test_marked_text_that_no_field_takes_is_counted():
    async with driven(app_on(recorded.running())) as (app, pilot):
        app.post_message(Paste("Hy\n" * 7))
        await see(pilot, "input ignored: 21 characters pasted")
        assert app.overlay is None
        await play(pilot, "K", "…type 1-plumbing to continue")
        app.post_message(Paste("1-plumbing"))
        await until(pilot, lambda: not app.query_one("#choice0").disabled)
