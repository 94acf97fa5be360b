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

from console.tui.paste import PASTE_KEYS, Bursts
from tests.console.tui import recorded
from tests.console.tui.recorded import app_on, drive, picture, until
from tests.terminal import Terminal

ROOT = Path(__file__).parents[3]
PASTED = ("The Halt of Dump, Kill and Launch yes?\r" * 30_000)[:1_000_000]
MOST_MIB = 20
IGNORED = "input ignored: keys that come together count as pasted; type them one by one"


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
        assert IGNORED in terminal.text
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
        terminal.wait(IGNORED)
        terminal.settle(1)
        terminal.press("?")
        terminal.wait("Keys in")
        terminal.press("q", "q")
        assert terminal.wait_exit() == 0


def admitted(bursts: Bursts, names: str, now: float, in_field: bool = False) -> str:
    """Returns which keys count of those that came in one read."""
    given, together = (Key(name, None) for name in names), len(names) > 1
    return "".join(key.key for key in given if bursts.accepts(key, now, together, in_field))


def test_typed_keys_count_and_a_held_key_is_no_paste():
    bursts = Bursts()
    assert admitted(bursts, "H", 10.0) == "H"
    assert admitted(bursts, "y", 10.2) == "y"
    for press in range(300):
        assert admitted(bursts, "j", 11 + press / 66) == "j"
    assert admitted(bursts, "jjj", 20.0) == "jjj"


def test_only_the_keys_that_act_are_left_out_behind_another():
    bursts = Bursts()
    assert admitted(bursts, "1Hyj", 10.0) == "1j"
    assert admitted(bursts, "H", 11.0) == "H"
    assert admitted(bursts, "y", 11.01) == "", "nobody has read what H asks"
    assert admitted(bursts, "Hyj", 12.0, in_field=True) == "Hyj"
    assert not bursts.accepts(Key("enter", None), 12.01, together=False, in_field=True)


def test_a_paste_ends_when_it_is_quiet_and_ctrl_c_leaves_during_it():
    bursts = Bursts()
    assert len(admitted(bursts, "j" * 3 * PASTE_KEYS, 10.0)) == PASTE_KEYS + 2
    assert bursts.accepts(Key("ctrl+c", None), 10.0, together=False, in_field=False)
    assert admitted(bursts, "q", 10.2) == ""
    assert admitted(bursts, "q", 10.5) == "q"


def test_marked_text_that_no_field_takes_is_counted():
    app = app_on(recorded.running())

    async def body(pilot):
        app.post_message(Paste("Hy\n" * 7))
        await until(pilot, lambda: "input ignored: 21 characters pasted" in picture(app))
        assert app.overlay is None
        await pilot.press("K")
        await until(pilot, lambda: "type 1-plumbing to continue" in picture(app))
        app.post_message(Paste("1-plumbing"))
        await until(pilot, lambda: not app.query_one("#choice0").disabled)

    drive(app, body)
