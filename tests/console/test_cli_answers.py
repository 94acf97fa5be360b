"""What commands say of a run and its launch: true now, the same everywhere, with a next step."""

from __future__ import annotations

import pytest

from console import cli, plain
from console.diagnose.watch import Watchdog
from console.sources.run import RunSource
from tests.console.sources import directory
from trainers.contract.plan import Watch


def said(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = cli.main([str(word) for word in words])
    return code, *capsys.readouterr()


@pytest.fixture
def launch(tmp_path):
    return directory.launch(tmp_path / "artifacts")


@pytest.mark.parametrize("command", ["status", "check"])
@pytest.mark.parametrize(
    ("state", "supervisor"), [("stalled", {}), ("running", directory.DEAD)]
)  # fmt: skip
def test_a_run_that_is_stalled_or_unsupervised_is_not_healthy(
    launch, capsys, command, state, supervisor
):
    directory.run(launch / "0-first", state=state, **supervisor)
    code, out, _ = said(capsys, command, launch)
    assert code == 1
    if command == "check":
        assert "no go; toy/0-first is" in out
    assert not plain.is_over(RunSource(launch).poll()), "whoever waits for the end goes on waiting"


def test_nothing_is_armed_where_no_supervisor_lives(launch, capsys):
    promised = "if it stalls for 10 s: alert, then restart"
    directory.run(launch / "0-first", armed=promised, **directory.DEAD)
    _, out, _ = said(capsys, "status", launch)
    assert (promised in out, "armed: nothing, no supervisor lives" in out) == (False, True)


@pytest.mark.parametrize(
    ("action", "act_s", "text"),
    [
        ("warn", 1800, "if it stalls for 10 s: alert only"),
        ("dump", 1800, "if it stalls for 10 s: alert, then dump"),
        ("restart", 35, "if it stalls for 10 s: alert, after 25 s more restart"),
        ("stop", 5, "if it stalls for 10 s: alert, after 20 s more stop"),
    ],
)
def test_what_is_armed_says_when_it_comes(action, act_s, text):
    watch = Watch(stall_floor_s=10, stall_act_s=act_s)
    assert Watchdog(watch, {"stall": action}).stall_words() == text
