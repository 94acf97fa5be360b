"""What a burst of input does, in a real terminal that does not mark a paste: nothing."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from pathlib import Path

import pytest
from textual.events import Key, Paste

from console.tui.bursts import PASTE_KEYS, QUIET_S, Bursts
from tests.console.tui import recorded
from tests.console.tui.recorded import app_on, drive, picture, until
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
    """Writes as a terminal pastes: as fast as the program reads."""
    data = text.encode()
    while data:
        with contextlib.suppress(BlockingIOError):
            data = data[os.write(terminal.fd, data[:4096]) :]
        terminal.pump(0)


def test_a_large_paste_is_counted_and_does_nothing(tmp_path):
    with console(tmp_path) as terminal:
        terminal.wait("ready: ")
        before = peak_mib(terminal.pid)
        write(terminal, PASTED)
        terminal.wait("input ignored: 1,000,000 characters pasted")
        assert peak_mib(terminal.pid) < before + MOST_MIB
        assert b"not answered" not in terminal.raw
        assert "Launch cpu_smoke?" not in terminal.text
        terminal.settle(2 * QUIET_S)
        terminal.press("L")
        terminal.wait("Launch cpu_smoke?")
        terminal.press("n", "q")
        assert terminal.wait_exit() == 0
    assert not (tmp_path / "artifacts").exists()


SENTENCE = "Let them all start to work tod"
"""Opens the question with its first letter, and says neither no nor quit."""


@pytest.mark.parametrize(
    "pieces", [[SENTENCE + "ay"], [*SENTENCE, "ay"]], ids=["at once", "slowly"]
)
def test_no_key_of_a_burst_answers_what_the_burst_has_asked(tmp_path, pieces):
    with console(tmp_path) as terminal:
        terminal.wait("ready: ")
        for piece in pieces:
            os.write(terminal.fd, piece.encode())
            time.sleep(0.012)
        terminal.settle(2)
        assert "ignored: it came together with other input" in terminal.text
        assert not (tmp_path / "artifacts").exists()
        if "Launch cpu_smoke?" not in terminal.text:
            terminal.press("L")
        terminal.wait("Launch cpu_smoke?")
        terminal.press("n", "q")
        assert terminal.wait_exit() == 0


def test_bytes_that_are_no_text_do_not_end_the_screen(tmp_path):
    with console(tmp_path) as terminal:
        terminal.wait("q leave")
        os.write(terminal.fd, "x\xe9".encode("latin-1"))
        os.write(terminal.fd, b"y" * 300)
        terminal.wait("input ignored: ")
        terminal.settle(2 * QUIET_S)
        terminal.press("?")
        terminal.wait("Keys in")
        terminal.press("q", "q")
        assert terminal.wait_exit() == 0


def keys(*names: str) -> list[Key]:
    return [Key(name, None) for name in names]


def admitted(bursts: Bursts, names: str, now: float, in_field: bool = False) -> str:
    return "".join(key.key for key in bursts.admit(keys(*names), now, in_field)[0])


def test_typed_keys_count_and_a_held_key_is_no_paste():
    bursts = Bursts()
    assert admitted(bursts, "H", 10.0) == "H"
    assert admitted(bursts, "y", 10.2) == "y"
    for press in range(300):
        assert admitted(bursts, "j", 11 + press / 66) == "j"
    assert admitted(bursts, "jjj", 20.0) == "jjj"
    assert not bursts.pasted


def test_only_the_keys_that_act_are_left_out_of_a_few_together():
    bursts = Bursts()
    assert admitted(bursts, "1Hyj", 10.0) == "1j"
    assert admitted(bursts, "Hyj", 11.0, in_field=True) == "Hyj"
    typed, said = bursts.admit(keys("a", "enter"), 12.0, in_field=True)
    assert [key.key for key in typed] == ["a"]
    assert said.startswith("enter ignored")


def test_a_paste_ends_when_it_is_quiet_and_ctrl_c_leaves_during_it():
    bursts = Bursts()
    assert admitted(bursts, "x" * (PASTE_KEYS + 1), 10.0) == ""
    bursts.count(4096, 10.1)
    assert bursts.report(10.2) == 0
    assert [key.key for key in bursts.admit(keys("ctrl+c"), 10.2, False)[0]] == ["ctrl+c"]
    assert admitted(bursts, "q", 10.3) == ""
    assert bursts.report(11.0) == PASTE_KEYS + 1 + 4096 + 2
    assert admitted(bursts, "q", 11.1) == "q"


def test_marked_text_that_no_field_takes_is_counted():
    app = app_on(recorded.running())

    async def body(pilot):
        app.post_message(Paste("Hy\n" * 7))
        await until(pilot, lambda: "input ignored: 21 characters pasted" in picture(app))
        assert app.overlay is None
        await pilot.press("K")
        await until(pilot, lambda: "type 1-plumbing to go on" in picture(app))
        app.post_message(Paste("1-plumbing"))
        await until(pilot, lambda: not app.query_one("#choice0").disabled)

    drive(app, body)
