"""The code of the project changes while a launch runs from it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from console.supervisor.run import CODE_CHANGED, REPLACED
from tests.launches import ROOT, STUB, Begin, Started, write_plan
from trainers.contract import rundir

TRAINER = """
import itertools, pathlib, sys, time
from trainers.contract.member import join
run = join()
for step in itertools.count(1):
    if run.step(step, loss=1.0) or pathlib.Path({go!r}).exists():
        break
    time.sleep(0.02)
"""


class Tree:
    """A repository with a copy of the project, from which launches are started."""

    def __init__(self, path: Path, begin: Begin):
        self.path, self.go, self._begin = path, path.with_name("go"), begin
        for name in ("console", "trainers", "nsa", "configs"):
            shutil.copytree(ROOT / name, path / name)
        (path / "trainers" / "ddp.py").write_text(TRAINER.format(go=str(self.go)))
        (path / ".gitignore").write_text("__pycache__/\n")
        self._git("init", "-q")
        self.commit()

    def _git(self, *words: str) -> str:
        git = ["git", "-C", str(self.path), "-c", "user.name=x", "-c", "user.email=x@x"]
        return subprocess.check_output([*git, *words], text=True).strip()

    def commit(self) -> str:
        """Commits all files; returns the commit."""
        self._git("add", ".")
        self._git("commit", "-qm", "x")
        return self._git("rev-parse", "HEAD")

    def launch(self, *phases: dict[str, object], **plan: object) -> Started:
        """Launches a plan of these phases with the code of the tree."""
        file = write_plan(self.path.parent, phases=list(phases), nproc=1, **plan)
        shell = os.environ | {"PYTHONPATH": f"{self.path}:{STUB['PYTHONPATH']}"}
        words = ["--root", self.path.parent / "artifacts", "launch", file, "--json"]
        done = subprocess.run(
            [sys.executable, "-P", "-m", "console", *words], env=shell, text=True, check=False,
            capture_output=True, cwd=self.path.parent,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return self._begin.adopt(json.loads(done.stdout)["path"])


@pytest.fixture
def tree(tmp_path, begin):
    return Tree(tmp_path / "tree", begin)


def ours(name: str) -> dict[str, object]:
    return {"name": name, "module": "trainers.ddp", "config": "configs/tiny_cpu.yaml"}


def test_an_update_of_the_code_does_not_reach_the_working_processes_of_a_launch(tree):
    """Each working process has the code of its owner; no module is loaded from the new files."""
    started = tree.launch(ours("one"), ours("two"))
    started.wait_steps(3)
    for path in tree.path.rglob("*.py"):
        path.write_text("raise ImportError('of another version')")
    child = started.child()
    os.kill(child, signal.SIGKILL)
    started.wait(lambda: started.child() != child and started.alerts(REPLACED))
    assert started.ask("note", text="still works")["ok"]
    assert started.ask("set-flag", name="NSA_LR", value="0.001")["ok"]
    assert started.ask("stop")["ok"]
    assert started.wait_over()["phases"][0]["state"] == "stopped"
    assert "ImportError" not in (started.path / rundir.SUPERVISOR_LOG).read_text()
    assert not [event for event in started.events() if "the report" in event["text"]]
    assert (started.path / "report.md").exists()


def test_a_phase_that_starts_with_other_code_than_the_launch_says_so(tree):
    started = tree.launch(ours("one"), ours("two"), between="ask")
    tree.go.touch()
    started.wait(lambda: started.plan_state.get("state") == "waiting")
    tree.go.unlink()
    first = started.state()["git"]["sha"]
    (tree.path / "nsa" / "new.py").touch()
    second = tree.commit()
    assert started.ask("proceed")["ok"]
    alert = started.wait(lambda: started.alerts(CODE_CHANGED, 1))[0]
    words = "the code changed since the launch or the last attempt"
    assert alert["text"] == f"{words}: commit {first[:12]} → commit {second[:12]}"
    tree.go.touch()
    assert started.wait_over()["why"] == "all phases are done"
    assert not started.alerts(CODE_CHANGED)
    report = (started.path / "report.md").read_text()
    for commit, name in ((first, "0-one"), (second, "1-two")):
        assert re.search(rf"^\| git \| sha {commit}, dirty False[^|]*\| {name} \|$", report, re.M)


def test_a_phase_whose_config_needs_newer_code_says_that_resume_uses_it(tree):
    started = tree.launch(ours("one"), ours("two"), between="ask")
    tree.go.touch()
    started.wait(lambda: started.plan_state.get("state") == "waiting")
    config = tree.path / "configs" / "tiny_cpu.yaml"
    config.write_text(config.read_text().replace("train:\n", "train:\n  newkey: 1\n"))
    answer = started.ask("proceed")
    assert (answer["ok"], "there is no setting 'train.newkey'" in answer["text"]) == (False, True)
    update = "; if the code was updated since the launch, resume uses the new code"
    assert started.wait_over()["why"].endswith(update)
