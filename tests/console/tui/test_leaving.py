"""The screen in real terminals: its ends, sizes and colours, and stops by signals."""

from __future__ import annotations

import os
import signal
import sys
import termios
import time
from pathlib import Path

import pytest

from console.sources import process
from tests.launches import wait_for
from tests.terminal import Terminal

ROOT = Path(__file__).parents[3]
OPEN = "import sys; from console.cli import main; sys.exit(main(sys.argv[1:]))"
BREAKS = "import console.tui.app as m; m.ConsoleApp.do_help = lambda self: {}['nothing']; "


SLOW = (
    "import time, console.tui.app as m; true = m.ConsoleApp.get_default_screen; "
    "m.ConsoleApp.get_default_screen = lambda self: time.sleep(1) or true(self); "
)
"""Delays the first screen by one second, as a busy machine may do."""


def console(
    root: Path, code: str = OPEN, stderr: str = "/dev/tty", env: dict[str, str] | None = None
) -> Terminal:
    words = [sys.executable, "-c", code, "--root", str(root / "artifacts")]
    shell = ["sh", "-c", f'exec "$@" 2>{stderr}', "sh", *words]
    return Terminal(shell, ROOT, {"XDG_STATE_HOME": str(root)} | (env or {}))


def stop_reading(terminal: Terminal) -> None:
    """Makes the console write more than the terminal buffers, so that its main loop blocks."""
    for columns in range(80, 140):
        os.write(terminal.fd, b"\x1b[48;40;%d;800;%dt" % (columns, columns * 8))  # its new size
        time.sleep(0.03)


@pytest.mark.parametrize("blocked", [False, True])
@pytest.mark.parametrize("deaf", [False, True])
def test_it_ends_when_the_terminal_goes_away(tmp_path, blocked, deaf):
    """With `deaf`, no SIGHUP arrives, as if the terminal did not control the process."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP} if deaf else ())
    try:
        terminal = console(tmp_path)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    with terminal:
        terminal.wait("q leave")
        if blocked:
            stop_reading(terminal)
        terminal.hang_up()
        assert terminal.wait_exit() == 0


@pytest.mark.parametrize("blocked", [False, True])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_and_leaves_the_terminal_clean(tmp_path, number, blocked):
    with console(tmp_path) as terminal:
        terminal.wait("q leave")
        os.write(terminal.fd, b"\x1b[?2048;2$y")  # the terminal can report its size in its input
        terminal.settle(0.5)
        assert terminal.modes[b"2048"] == b"h"
        if blocked:
            stop_reading(terminal)
        os.kill(terminal.pid, number)
        if blocked:
            wait_unread(terminal)
        assert terminal.wait_exit() == 0
        assert terminal.left_on() == [], terminal.raw[-150:]


def wait_unread(terminal: Terminal) -> None:
    """Waits for the end of a program whose terminal reads nothing; about 3 s on an idle machine."""
    flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
    wait_for(lambda: os.waitid(os.P_PID, terminal.pid, flags))


def test_q_ends_it_where_the_terminal_reads_nothing(tmp_path):
    """The terminal still has output of the console to read when `q` is typed."""
    with console(tmp_path) as terminal:
        terminal.wait("q leave")
        terminal.settle(1)
        for width in range(6):
            terminal.resize(200 + width, 60)
            time.sleep(0.2)
        os.write(terminal.fd, b"q")
        wait_unread(terminal)
        assert terminal.wait_exit() == 0
        assert terminal.left_on() == [], terminal.raw[-150:]


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())


def test_it_ends_at_the_first_key_after_the_script_that_started_it_was_killed(tmp_path):
    """A shell with job control takes the terminal back, so reads by the screen fail."""
    words = [sys.executable, "-c", OPEN, "--root", str(tmp_path)]
    script = ["sh", "-c", '"$@"; true', "sh", *words]
    with Terminal(["sh", "-mc", '"$@"; sleep 100', "sh", *script], ROOT) as terminal:
        terminal.wait("checks passed")
        os.kill(child_of(terminal.pid), signal.SIGKILL)
        terminal.settle(0.5)
        assert terminal.left_on()
        terminal.press("x")
        terminal.wait(lambda _: not terminal.left_on(), 20)


def send(terminal: Terminal, pid: int, *numbers: signal.Signals) -> None:
    """Sends signals; waits after each signal that stops the process until it is stopped."""
    for number in numbers:
        os.kill(pid, number)
        if number in (signal.SIGSTOP, signal.SIGTSTP):
            terminal.wait(lambda _: process.state(pid) == "T")


@pytest.mark.parametrize(
    "numbers",
    [
        (signal.SIGCONT,),
        (signal.SIGSTOP, signal.SIGCONT),
        (signal.SIGTSTP, signal.SIGCONT),
        (signal.SIGTERM, signal.SIGCONT),
    ],
    ids=str,
)
def test_after_a_continue_the_exit_restores_the_line_mode_of_the_terminal(tmp_path, numbers):
    words = [sys.executable, "-c", OPEN, "--root", str(tmp_path)]
    with Terminal(["sh", "-c", '"$@"; echo ended; read x', "sh", *words], ROOT) as terminal:
        before = termios.tcgetattr(terminal.fd)
        terminal.wait("checks passed")
        pid = child_of(terminal.pid)
        send(terminal, pid, *numbers)
        if signal.SIGTERM not in numbers:
            terminal.press_until("?", "Keys in")
            terminal.play("esc", "q")
        terminal.wait("ended")
        assert termios.tcgetattr(terminal.fd) == before
        assert terminal.left_on() == []


def test_a_dump_signal_does_not_end_it(tmp_path):
    with console(tmp_path) as terminal:
        terminal.wait("q leave")
        os.kill(terminal.pid, signal.SIGUSR1)
        terminal.play("?", "…Keys in", "q")
        terminal.wait(lambda shown: "Keys in" not in shown)
        terminal.leave()


def test_input_before_the_first_screen_does_not_end_it(tmp_path):
    with console(tmp_path, SLOW + OPEN) as terminal:
        terminal.wait("q leave")
        terminal.press_until("?", "Keys in")
        terminal.press("q")
        terminal.wait(lambda shown: "Keys in" not in shown)
        terminal.leave()


def test_errors_that_go_to_a_file_leave_the_screen_on_the_terminal(tmp_path):
    with console(tmp_path, stderr=str(tmp_path / "errors")) as terminal:
        terminal.wait("plan cpu_smoke")
        terminal.leave()
    assert (tmp_path / "errors").read_text() == ""


@pytest.mark.parametrize("writable", [True, False])
def test_a_mistake_of_ours_is_one_sentence_and_says_where_the_traceback_lies(tmp_path, writable):
    with console(tmp_path if writable else Path("/dev/null/nowhere"), BREAKS + OPEN) as terminal:
        terminal.play("…q leave", "?")
        assert terminal.wait_exit() == 5
        assert terminal.left_on() == [], terminal.raw[-150:]
        assert "the screen failed: KeyError: 'nothing'" in terminal.text
        assert "Traceback" not in terminal.text
        shown = " ".join(terminal.text.split())
        assert writable or "the traceback is lost (Not a directory)" in shown
    crash = tmp_path / "nsa-console" / "crash.txt"
    assert not writable or "action_key" in crash.read_text()


SIZES = [(80, 24), (20, 5), (1, 1), (300, 10), (79, 23), (120, 40)]


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"LANG": "C", "LC_ALL": "C"}], ids=str)
def test_it_lives_through_every_size_and_without_colour(tmp_path, env):
    words = [sys.executable, "-m", "console", "--root", str(tmp_path)]
    with Terminal(words, ROOT, env, size=(20, 5)) as terminal:
        terminal.wait(lambda text: text.strip())
        terminal.settle(2)
        for columns, rows in SIZES:
            terminal.resize(columns, rows)
            for key in "1234":
                terminal.press(key)
        # The console may miss a change of size during its start, but not the next change.
        terminal.press_until("2", "plan cpu_smoke")
        terminal.resize(118, 39)
        shown = terminal.wait(
            lambda text: (
                "plan cpu_smoke" in text and "q leave" in text and len(text.splitlines()) == 39
            )
        )
        assert ("\u203a" in shown) == (env == {"NO_COLOR": "1"})
        terminal.leave()


def redraw_of_a_question(terminal: Terminal) -> None:
    terminal.press_until("L", "[ No ]")
    terminal.screen.reset()
    terminal.press("\x0c")
    terminal.wait("[ No ]")
    terminal.press("esc")


LOST = {
    "a key": lambda terminal: terminal.press("\x0c"),
    "a key, with a question": redraw_of_a_question,
    "a resize to the same size": lambda terminal: os.kill(terminal.pid, signal.SIGWINCH),
    "a continue": lambda terminal: send(terminal, terminal.pid, signal.SIGTSTP, signal.SIGCONT),
}


@pytest.mark.parametrize("why", LOST)
def test_a_lost_picture_is_drawn_again_as_a_whole(tmp_path, why):
    """Another program wrote to the terminal, or the terminal was attached to another window."""
    with console(tmp_path) as terminal:
        terminal.wait("checks passed")
        before = terminal.settle(1)
        terminal.screen.reset()
        LOST[why](terminal)
        terminal.wait(lambda shown: shown == before)
        terminal.leave()


def test_no_color_leaves_the_colours_of_the_terminal(tmp_path):
    with console(tmp_path, env={"NO_COLOR": "1"}) as terminal:
        terminal.wait("checks passed")
        terminal.press_until("L", "[ No ]")
        cells = [cell for row in terminal.screen.buffer.values() for cell in row.values()]
        assert {colour for cell in cells for colour in (cell.fg, cell.bg)} == {"default"}
        terminal.press("esc")
        terminal.leave()


def test_the_size_is_that_of_the_terminal_and_not_that_of_the_environment(tmp_path):
    with console(tmp_path, env={"COLUMNS": "120", "LINES": "40"}) as terminal:
        for columns, rows in ((80, 24), (60, 16), (80, 24)):
            terminal.resize(columns, rows)
            terminal.wait(
                lambda shown, rows=rows: "q leave" in "".join(shown.split("\n")[rows - 1 :])
            )
        terminal.leave()


def test_a_terminal_that_cannot_place_a_cursor_is_refused_in_one_sentence(tmp_path):
    words = [sys.executable, "-m", "console", "--root", str(tmp_path)]
    with Terminal(words, ROOT, {"TERM": "dumb"}) as terminal:
        assert terminal.wait_exit() == 2
        assert "this terminal cannot show the screen" in " ".join(terminal.text.split())
