"""Trainings on text, recall and random bytes, with the plan `cpu_smoke` and its config.

On text the loss falls. Recall is learned only with attention. Nothing is learned from random bytes.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

from tests.trainers.runs import ROOT, Recorded, Run

RECALL_STEPS, BROKEN_STEPS, LEAK_STEPS = 600, 130, 300


LEAK_TOKENS = 16_384
NO_STATS = {"NSA_DISABLE_AUX_STATS": "1"}
RECALL = {"data.source": "recall", "train.stop_at_bytes_right": 0.9, "checkpoint.at_end": False}


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """Runs the plan. Returns the exit code, the status and the launch directory."""
    root = tmp_path_factory.mktemp("smoke")
    done = subprocess.run(
        [sys.executable, "-m", "console", "--root", str(root), "launch", "cpu_smoke", "--wait",
         "--json"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout), next((root / "cpu_smoke").iterdir())


# One process with the batch size of two ranks, so that a step has as much data as in the plan.
ALONE = RECALL | {"train.steps": BROKEN_STEPS, "train.batch_size": 16}
RANDOM = {
    "data.source": "synthetic", "train.steps": LEAK_STEPS, "report.log_every": 1,
    "checkpoint.at_end": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory, smoke):
    """Returns the phase `recall` of the plan, and two runs with broken models."""
    folder = tmp_path_factory.mktemp("learning")
    broken = Run(folder, ALONE, 1, broken="no_attention", name="no_attention")
    leaking = Run(
        folder, RANDOM | {"train.steps": 120}, 1, broken="sees_the_next_byte", name="leak",
        flags=NO_STATS,
    )  # fmt: skip
    assert leaking.wait(300) == 12
    recall = Recorded(smoke[2] / "2-recall")
    return {"recall": recall, "no_attention": broken.done(300), "leak": leaking}


@pytest.fixture(scope="module")
def more_runs(tmp_path_factory, runs):
    """Adds the runs that only slow tests need; they run at the same time."""
    folder = tmp_path_factory.mktemp("more")
    started = {
        "without_selected": Run(
            folder, ALONE | {"train.steps": 100}, 1, broken="without_selected", name="unselected"
        ),
        "random": Run(folder, RANDOM, 1, name="random", flags=NO_STATS),
    }
    return runs | {name: run.done(300) for name, run in started.items()}


def rights(run: Recorded) -> list[float]:
    return [record["bytes_right"] for record in run.records(0, "progress")]


def test_the_smoke_plan_passes_all_gates(smoke):
    code, state, _ = smoke
    assert code == state["exit_code"] == 0
    assert [(p["name"], p["state"], p["result"]) for p in state["launch"]["phases"]] == [
        (name, "completed", "pass") for name in ("sanity", "plumbing", "recall")
    ]


def test_recall_is_learned_and_the_run_stops_there(runs):
    metrics = runs["recall"].metrics()
    assert metrics["reason"] == "bytes_right reached"
    assert metrics["bytes_right"] >= 0.9
    assert metrics["steps_done"] < RECALL_STEPS
    assert runs["recall"].records(1, "progress")[-1]["bytes_right"] == metrics["bytes_right"]


def test_recall_is_not_learned_without_attention(runs):
    assert runs["no_attention"].metrics()["steps_done"] == BROKEN_STEPS
    assert runs["recall"].metrics()["steps_done"] < BROKEN_STEPS
    assert max(rights(runs["no_attention"])) < 0.1


@pytest.mark.slow
def test_the_selected_branch_is_what_recalls(more_runs):
    """When the whole layer copies 90 % of the bytes, a layer without the branch is far behind."""
    step, unselected = more_runs["recall"].metrics()["steps_done"], more_runs["without_selected"]
    assert unselected.metrics()["steps_done"] >= step
    without = {r["step"]: r["bytes_right"] for r in unselected.records(0, "progress")}
    assert max(right for at, right in without.items() if at <= step) < 0.9 - 0.15


def lowest_mean(run: Recorded) -> float:
    """Returns the lowest mean loss of consecutive steps that have `LEAK_TOKENS` tokens or more."""
    records = run.records(0, "progress")
    wide = -(-LEAK_TOKENS // records[0]["tokens_total"])
    losses = [record["loss"] for record in records]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return min(sum(losses[i : i + wide]) / wide for i in range(len(losses) - wide + 1))


CHANCE = math.log(256) - 0.02


def test_the_guard_ends_a_run_whose_model_sees_the_next_byte(runs):
    assert lowest_mean(runs["leak"]) < CHANCE
    assert runs["leak"].metrics()["exit_code"] == 12
    assert "the model sees what it has to predict" in runs["leak"].metrics()["reason"]


@pytest.mark.slow
def test_nothing_is_learned_from_random_bytes(more_runs):
    """A correct run passes the guard for 300 steps."""
    assert lowest_mean(more_runs["random"]) > CHANCE
    assert more_runs["random"].metrics()["steps_done"] == LEAK_STEPS
