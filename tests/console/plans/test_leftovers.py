"""A leftover is ended only if all sources agree that its supervisor is dead."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from console import leftovers
from console.cli import main
from trainers.contract import environ, rundir

TOKEN = "c0ffee"
DEAD = {"pid": 1 << 22, "start_ticks": 7, "boot_id": rundir.boot_id(), "host": rundir.host_name()}
PROGRAM = """
import signal, sys, time
if sys.argv[1] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""


class Launch:
    """A launch directory whose supervisor is dead, and one process of its run."""

    def __init__(self, folder: Path):
        self.folder, self.children = folder, list[subprocess.Popen[bytes]]()
        self.lock: Any = None
        self.run = folder / "launch" / "0-train"
        rundir.make_directory(self.run)
        self.write(rundir.RUN, {"environment": {environ.TOKEN: TOKEN}})
        self.write(rundir.SUPERVISOR, DEAD)
        rundir.write_json(self.run.parent / rundir.PLAN_STATE, {"supervisor": DEAD})

    def write(self, name: str, record: dict[str, Any]) -> None:
        rundir.write_json(self.run / name, record)

    def start(self, kind: str = "plain", token: str = TOKEN) -> subprocess.Popen[bytes]:
        script = self.folder / "train_showcase.py"
        script.write_text(PROGRAM)
        named = {environ.TOKEN: token, environ.RUN_DIR: str(self.run), "RANK": "3"}
        child = subprocess.Popen(
            [sys.executable, str(script), kind], env=named if token else {},
            stdout=subprocess.PIPE,
        )  # fmt: skip
        self.children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        return child

    def found(self, child: subprocess.Popen[bytes]) -> tuple[list[leftovers.Leftover], str]:
        """Returns the leftovers with the child's pid, and the sentence on the child (or "")."""
        mine, others = leftovers.find()
        said = [text for text in others if text.startswith(f"pid {child.pid} ")]
        return [each for each in mine if each.handle.pid == child.pid], "; ".join(said)


@pytest.fixture
def launch(tmp_path):
    made = Launch(tmp_path)
    yield made
    if made.lock:
        made.lock.close()
    for child in made.children:
        child.kill()
        child.wait()


@pytest.mark.decision("end-leftovers", "true")
@pytest.mark.parametrize(("kind", "code", "signal"), [("plain", -15, "TERM"), ("deaf", -9, "KILL")])
def test_a_trainer_of_a_dead_supervisor_is_ended(launch, monkeypatch, kind, code, signal):
    monkeypatch.setattr(leftovers, "GRACE_S", 60.0 if kind == "plain" else 0.2)
    monkeypatch.setattr(leftovers, "KILLED_S", 60.0)
    child = launch.start(kind)
    mine, said = launch.found(child)
    assert (len(mine), said) == (1, "")
    name = f"pid {child.pid} (rank 3 of {launch.run})"
    assert list(leftovers.end(mine)) == [f"{name} ended after SIG{signal}"]
    assert child.wait(60) == code


def take_lock(it: Launch) -> None:
    """Locks the launch, as an adopting supervisor does."""
    it.lock = (it.run.parent / rundir.LOCK).open("w")
    fcntl.flock(it.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


ALIVE = [
    ("lock", take_lock, "has the lock of"),
    (rundir.SUPERVISOR, lambda it: it.write(rundir.SUPERVISOR, rundir.identity()), "is alive"),
    (rundir.PLAN_STATE, lambda it: rundir.write_json(
        it.run.parent / rundir.PLAN_STATE, {"supervisor": rundir.identity()}), "is alive"),
    ("child", lambda it: it.write(rundir.SUPERVISOR, DEAD | {"child": rundir.identity()}),
     "is alive"),
    (rundir.RUN, lambda it: it.write(rundir.RUN, {"environment": {environ.TOKEN: "other"}}),
     "its token is not that of"),
    ("host", lambda it: it.write(rundir.SUPERVISOR, DEAD | {"host": "elsewhere"}), "not known"),
    ("mode", lambda it: it.run.chmod(0o777), "every user can write into"),
]  # fmt: skip


@pytest.mark.decision("end-leftovers", "lie")
@pytest.mark.parametrize(("change", "text"), [row[1:] for row in ALIVE], ids=[r[0] for r in ALIVE])
def test_a_source_that_contradicts_protects_the_process_also_after_it_was_listed(
    launch, monkeypatch, change, text
):
    monkeypatch.setattr(leftovers, "GRACE_S", 0.1)
    monkeypatch.setattr(leftovers, "KILLED_S", 0.1)
    child = launch.start()
    listed, _ = launch.found(child)
    change(launch)
    mine, said = launch.found(child)
    # There is no sentence on the trainer of a run that was adopted.
    assert (mine, change is take_lock if not said else text in said) == ([], True), said
    (sentence,) = leftovers.end(listed)
    assert text in sentence
    assert child.poll() is None


ABSENT = {
    "token": lambda it: None,
    "run.json": lambda it: (it.run / rundir.RUN).unlink(),
    "supervisor.json": lambda it: (it.run / rundir.SUPERVISOR).unlink(),
    "plan_state.json": lambda it: (it.run.parent / rundir.PLAN_STATE).unlink(),
}


@pytest.mark.decision("end-leftovers", "absent")
@pytest.mark.parametrize("missing", ABSENT)
def test_without_one_of_the_sources_nothing_is_ended(launch, missing):
    child = launch.start(token="" if missing == "token" else TOKEN)
    ABSENT[missing](launch)
    mine, said = launch.found(child)
    assert (mine, f"pid {child.pid} gets no signal: " in said) == ([], True), said


def test_the_command_needs_a_confirmation(launch, capsys, monkeypatch):
    child = launch.start()
    only = launch.folder / "proc"  # the command must not find other trainers
    only.mkdir()
    (only / str(child.pid)).symlink_to(f"/proc/{child.pid}")
    monkeypatch.setattr(leftovers, "PROC", only)
    named = ["--root", str(launch.folder / "none"), "check", "cpu_smoke", "--end-leftovers"]
    assert main(named) == 2
    assert "nothing was ended; add --yes" in capsys.readouterr().err
    assert child.poll() is None
    main([*named, "--yes"])
    assert f"pid {child.pid} (rank 3 of {launch.run}) ended after SIGTERM" in (
        capsys.readouterr().err.replace("\n", " ")
    )
    assert child.wait(60) == -15
