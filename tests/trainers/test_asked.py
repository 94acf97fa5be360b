"""Checkpoints, profiles, exports, audits and scalars, which requests and settings select."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors import safe_open

from tests.trainers.runs import CONFIG, Run, python, small
from trainers import manifest
from trainers.profiling import Profiler
from trainers.schema import ReportSettings


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """Returns a run of two ranks after requests for a checkpoint, a profile and a halt."""
    folder = tmp_path_factory.mktemp("asked")
    changes = small(
        train__steps=100_000, report__log_every=1, checkpoint__background="on",
        checkpoint__export=folder / "model", report__profile="2:4",
    )  # fmt: skip
    run = Run(folder, changes, flags={"NSA_SDPA_AUDIT": "1", "NSA_SEL_RANGES_V2": "1"})
    run.until_step(5)
    (run.path / ".CHECKPOINT").touch()
    run.until(lambda: run.records(0, "checkpoint"))
    (run.path / ".PROFILE").touch()
    run.until(lambda: all(len(run.records(rank, "profile")) >= 2 for rank in range(2)))
    (run.path / ".HALT").touch()
    return run.done()


def test_a_checkpoint_is_written_when_asked_for_once(asked):
    saved, final = asked.records(0, "checkpoint")
    assert manifest.verify(asked.path / "checkpoints" / saved["path"]).step == saved["step"]
    assert final["step"] == asked.metrics()["steps_done"]


def test_profiles_cover_the_steps_of_the_flag_and_of_the_request(asked):
    first, second = asked.records(0, "profile")[:2]
    assert first["path"] == "profiles/steps2-3_rank0.json"
    for record in (first, second):
        trace = json.loads((asked.path / record["path"]).read_text())
        names = {event.get("name") for event in trace["traceEvents"]}
        assert "aten::scaled_dot_product_attention" in names
    assert len(asked.records(1, "profile")) == 2


def test_the_audit_tells_the_kernels_that_the_first_step_called_in_each_branch(asked):
    (audit,) = asked.records(0, "sdpa_audit")
    assert audit["step"] == 1
    assert audit["called"]["sel.ranges_v2"] == {"flash": 1}
    assert audit["called"]["cmp.masked"] == {"flash": 1}
    assert {branch.partition(".")[0] for branch in audit["called"]} == {"cmp", "sel", "win"}
    assert not asked.records(1, "sdpa_audit")


def test_the_audit_of_the_first_step_precedes_a_longer_profile(tmp_path):
    changes = small(train__steps=3, report__profile="1:4")
    run = Run(tmp_path, changes, nproc=1, flags={"NSA_SDPA_AUDIT": "1"}).done()
    (audit,) = run.records(0, "sdpa_audit")
    assert [sum(kernels.values()) for kernels in audit["called"].values()] == [1, 1, 1]
    (profile,) = run.records(0, "profile")
    assert profile["path"] == "profiles/steps2-3_rank0.json"


def test_a_request_during_a_profile_makes_this_profile_longer(tmp_path):
    member: Any = SimpleNamespace(run=tmp_path, rank=1)
    report: Any = SimpleNamespace(steps_done=0, record_event=lambda *_, **__: None)
    profiler = Profiler(member, report, ReportSettings(profile="9:11"))
    for step in range(1, 16):
        profiler.begin(step)
        profiler.end(step)
        if step in (2, 4, 9):
            profiler.request(step)
    profiler.close()
    traces = sorted(path.name for path in (tmp_path / "profiles").iterdir())
    assert traces == ["steps3-7_rank1.json", "steps9-12_rank1.json"]


def test_a_training_waits_at_its_end_for_the_slow_files_of_its_environment(tmp_path):
    """The only step ends while `inventory.environment` still sleeps."""
    program = (
        "import sys, time\nfrom trainers import entry, inventory\nfound = inventory.environment\n"
        "inventory.environment = lambda: time.sleep(4) or found()\n"
        "entry.exit_now(entry.main(sys.argv[1:]))\n"
    )
    words = ["--config", CONFIG, "--run-dir", tmp_path / "run"]
    for key, value in small(train__steps=1).items():
        words += ["--set", f"{key}={value}"]
    assert python(tmp_path, "-c", program, *words).returncode == 0
    assert "python: " in (tmp_path / "run" / "collect_env.txt").read_text()


def test_scalars_are_there_for_tensorboard(asked):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(asked.path / "tb"))
    events.Reload()
    told = {e.step: e.value for e in events.Scalars("train/loss")}
    for record in asked.records(0, "progress")[:10]:
        assert told[record["step"]] == pytest.approx(record["loss"], rel=1e-6)
        assert record["bits_per_byte"] == pytest.approx(record["loss"] / 0.693147, rel=1e-5)


def test_the_final_weights_are_exported(asked):
    with safe_open(asked.path.parent / "model" / "model.safetensors", "pt") as file:
        assert file.metadata()["step"] == str(asked.metrics()["steps_done"])
