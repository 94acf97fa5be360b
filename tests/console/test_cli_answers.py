"""What the commands say of a run and its launch: true now, the same everywhere, with a next step."""

from __future__ import annotations

import pytest

from console import cli, plain
from console.sources.run import RunSource
from tests.console.sources import directory


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
