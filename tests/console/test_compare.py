"""`nsa-console compare`: the winner of a sweep, or the reason why there is no comparison."""

from __future__ import annotations

import json
import shutil

import pytest

from console import plan
from tests.console.plans.test_sweep import FACTS, PLAN
from tests.console.sources import directory
from tests.console.test_cli_output import DOCUMENTED
from tests.console.test_go import PASSED, said
from trainers.contract import rundir

STEPS = 40
BOUNDS = {"steps_done": STEPS, "loss_finite": True, "no_stall": True}


def measured(path, phase, step_s):
    """Writes a completed run of one phase; its fastest steps took `step_s`."""
    passed = [PASSED[0] | {"value": STEPS, "bound": f"≥ {STEPS}"}, *PASSED[1:]]
    run = directory.completed(
        path, BOUNDS, passed, STEPS,
        lambda step: {"loss": 1.0, "steps_dt_s": [step_s + (step % 5) / 1000]},
        settings={"ddp.bucket_mb": {"value": int(phase.flags["NSA_DDP_BUCKET_MB"])}}, flags={},
    )  # fmt: skip
    directory.document(run / rundir.ENV, FACTS)


@pytest.fixture
def launch(tmp_path):
    """A completed launch of the sweep. With the larger bucket, steps are about a sixth shorter."""
    planned = plan.parse(PLAN, "p")
    path = directory.launch(tmp_path)
    document = json.loads(json.dumps(planned.as_dict()))
    for entry in document["phases"]:
        entry["gates"] = BOUNDS
    directory.change(path / rundir.PLAN, **document)
    for index, phase in enumerate(planned.phases):
        measured(path / f"{index}-{phase.name}", phase, 0.05 if phase.variant == "mb50" else 0.06)
    directory.end(path)
    return path


def test_the_faster_variant_is_named_with_its_figures_and_routes(launch, capsys):
    code, out = said(capsys, "compare", launch)
    assert code == 0, out
    answer = "bucket: mb50 is at least 20.0% faster than mb25 (a difference needs p ≤ 0.005)\n"
    assert out.startswith(answer)
    assert "(9 runs: 4,267 to 4,267); p = 0.0039 against mb50; last 35 steps" in out
    assert "win:banded, hook none" in out
    (found,) = json.loads(said(capsys, "compare", launch, "--json")[1])
    assert set(found) == next(names for name, _, names in DOCUMENTED if name == "compare LAUNCH")
    assert found["best"] == ["mb50"]
    assert found["p_values"] == [["mb50", "mb25", 2**-8]]


def test_the_set_of_the_variants_overrides_a_flag_of_the_plan(launch, capsys):
    entries = (rundir.read_json(launch / rundir.PLAN) or {})["phases"]
    for entry in entries:
        entry["set"] = {"ddp.bucket_mb": entry["flags"]["NSA_DDP_BUCKET_MB"]}
        entry["flags"] = {"NSA_DDP_BUCKET_MB": "25"}
    directory.change(launch / rundir.PLAN, phases=entries)
    code, out = said(capsys, "compare", launch)
    assert (code, out.startswith("bucket: mb50 is at least")) == (0, True), out


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("gone", "run.json cannot be read"), ("crashed", "it is crashed"),
        ("few", "too few; a run of a sweep needs at least 30 steps"),
        ("tokens", "has no valid tokens_per_step"),
        ("rounds", "only a part of the rounds"),
        ("hook", "comm_hook is 'none' in"), ("gates", "gate loss_finite is not in gates.json"),
        ("code", "git is {'sha': 'abc', 'dirty': False, 'diff': ''} in 0-bucket-1-mb25 and {'sha'"),
    ],
)  # fmt: skip
def test_a_run_that_does_not_count_leaves_no_comparison(launch, capsys, what, words):
    run = launch / "3-bucket-2-mb25"
    if what == "gone":
        shutil.rmtree(run)
    elif what == "few":
        path = rundir.heartbeat(run, 0)
        path.write_text(path.read_text().replace("steps_dt_s", "other"))
    elif what == "tokens":
        directory.document(run / rundir.ENV, FACTS | {"tokens_per_step": "inf"})
    elif what == "rounds":
        planned = rundir.read_json(launch / rundir.PLAN) or {}
        directory.change(launch / rundir.PLAN, phases=planned["phases"][:6])
    elif what == "hook":
        directory.document(run / rundir.ENV, FACTS | {"comm_hook": "bf16"})
    elif what == "code":  # run.json of each run has the commit of the launch
        for each in launch.glob("[0-9]*-*"):
            git = {"sha": "def" if each == run else "abc", "dirty": False, "diff": ""}
            directory.change(each / rundir.SUPERVISOR, git=git)
    elif what == "gates":
        directory.document(run / rundir.GATES, {"v": 1, "gates": []})
    else:
        directory.change(run / rundir.SUPERVISOR, state="crashed")
    code, out = said(capsys, "compare", launch)
    assert code == 1
    assert words in out


def test_a_launch_without_a_sweep_is_told_so(tmp_path, capsys):
    code, out = said(capsys, "compare", directory.launch(tmp_path))
    assert code == 2
    assert "has no sweep: no phase with 'variants'" in out
