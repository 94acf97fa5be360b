"""The measured rows of the preflight: real processes, planted faults, and missing measurements."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
import yaml

from console import actions, plan
from console.actions import LaunchOptions
from console.cli import main
from console.plans import preflight
from console.plans.case import Case
from trainers.contract import rundir

SMALL = {
    "model.dim": 32, "model.n_layers": 1, "model.n_heads": 2, "model.n_kv_groups": 1,
    "model.d_k": 16, "model.d_v": 16, "model.mlp_hidden": 64, "model.nsa.window": 8,
    "data.seq_len": 64, "data.source": "synthetic",
}  # fmt: skip
LEAK = """
import os, pathlib, sys
if any("device_probe" in word for word in sys.orig_argv):
    pathlib.Path(__file__).with_name("order").write_text(os.environ["CUDA_DEVICE_ORDER"])
    import torch
    from nsa import functional
    true = functional.attend_window
    def leaking(q, k, v, *more):
        out, rows = true(q, k, v, *more), torch.tensor([*range(49, q.shape[2] - 1, 50)]).long()
        later = v[:, :, rows + 1].repeat_interleave(q.shape[1] // v.shape[1], 1)
        return out.index_add(2, rows, later / 32)
    functional.attend_window = leaking
"""


def written(folder: Path, **more: object) -> str:
    phase = {"name": "one", "config": "configs/tiny_cpu.yaml", "nproc": 2, "set": SMALL}
    path = folder / "mine.yaml"
    env = {"OMP_NUM_THREADS": 1}
    path.write_text(yaml.safe_dump({"name": "mine", "env": env, "phases": [phase]} | more))
    return str(path)


def test_a_leak_is_refused_by_its_row_and_the_other_rows_are_measured(tmp_path, monkeypatch):
    """The specification of the launch has the measured bandwidth."""
    (tmp_path / "sitecustomize.py").write_text(LEAK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    named = written(tmp_path, preflight={"measure": True})
    said: list[str] = []
    prepared = actions.prepare(LaunchOptions(named, root=tmp_path / "artifacts"), said.append)
    rows = {check.name: check for check in prepared.checks}
    failed = [name for name, check in rows.items() if check.result == "fail"]
    assert failed == ["causality"], rows
    assert "output 49 of 64 changes with the tokens after" in rows["causality"].text
    assert "GB/s for 16 MiB over 2 ranks (gloo)" in rows["all-reduce"].text
    assert "TFLOP/s by rank" in rows["matmul"].text
    assert rows["first batch"].text.startswith("synthetic random bytes: ")
    assert rows["parity"].result == "pass"
    assert said == [f"the preflight measures {', '.join(preflight.MEASURED)}, at most 300 s"]
    assert (tmp_path / "order").read_text() == "PCI_BUS_ID"
    measured = prepared.spec.host["measured"]
    assert (measured["allreduce_ranks"], measured["allreduce_gb_s"] > 0) == (2, True)
    assert prepared.spec.as_dict(0.0)["host"]["measured"] == measured
    with pytest.raises(actions.RefusedError, match="output 49 of 64"):
        actions.begin(prepared, "test")
    assert not prepared.directory.exists()


def bare(root: Path, gpus: int = 0, measure: bool = True, assumed: str = "") -> Case:
    phase = {"name": "one", "module": "trainers.ddp"}
    given = plan.parse({"name": "mine", "gpus": gpus, "phases": [phase]}, "test")
    settings = ({"train.steps": {"value": 1, "origin": "plan"}},)
    return Case(given, root / "launch", settings=settings, measure=measure, assumed=assumed)


@pytest.mark.parametrize(
    ("gpus", "measure", "assumed", "refused", "result", "text"),
    [(0, False, "", False, "pass", "use check PLAN --measure"),
     (1, False, "", False, "unknown", "use check PLAN --measure"),
     (1, True, "1xA100", False, "unknown", "the GPUs are assumed"),
     (1, True, "", True, "unknown", "another check failed")],
)  # fmt: skip
def test_what_is_not_measured_is_said_with_the_reason(
    tmp_path, gpus, measure, assumed, refused, result, text
):
    (found,) = preflight.measure(bare(tmp_path, gpus, measure, assumed), refused, None)
    assert (found.name, found.result) == ("measured", result)
    assert found.text == f"{', '.join(preflight.MEASURED)} are not measured: {text}"


def test_no_command_measures_a_plan_of_foreign_programs(tmp_path):
    case = dataclasses.replace(bare(tmp_path, measure=False), settings=({},))
    (found,) = preflight.measure(case, False, None)
    assert found.text.endswith("not measured: all programs are foreign")


STUB = "import json, os, sys, time\nsay = lambda **it: print(json.dumps(it), flush=True)\n"
PASSED = "say(row='matmul', result='pass', text='fast', figures={'matmul_tflops': [1]})\n"


@pytest.mark.parametrize(
    ("program", "results", "text"),
    [(f"{PASSED}say(row='all-reduce')\ntime.sleep(600)", ("pass", "fail", "unknown"),
      "no answer within 10 s"),
     (f"{PASSED}say(row='all-reduce')\nos.abort()", ("pass", "fail", "unknown"), "exited with -6"),
     ("raise SystemExit('no driver')", ("unknown", "unknown", "unknown"), "with 1: no driver"),
     (f"print('[1]')\nsay(row=7)\nsay(row='matmul', result=[], text=3)\n{PASSED}"
      "say(row='all-reduce', result='pass', text='a\\x1b[2J' + 'b' * 9999, figures=5)",
      ("pass", "pass", "unknown"), "exited with 0")],
)  # fmt: skip
def test_a_row_that_hangs_or_crashes_fails_and_later_rows_are_not_measured(
    tmp_path, monkeypatch, program, results, text
):
    (tmp_path / "stub_probe.py").write_text(STUB + program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(preflight, "MODULE", "stub_probe")
    monkeypatch.setattr(preflight, "MEASURE_S", 10.0 if "600" in program else 100.0)
    found = preflight.measure(bare(tmp_path), False, None)
    assert tuple(check.result for check in found[:3]) == results
    assert text in found[2].text
    assert all(len(check.text) <= 700 and check.text.isprintable() for check in found)


def test_processes_that_the_measurement_started_end_with_it(tmp_path, monkeypatch):
    left, begun = tmp_path / "pid", tmp_path / "begun"
    program = f"""if os.fork() == 0:
    open({str(begun)!r}, "w").write(str(os.getpid()))
    os.rename({str(begun)!r}, {str(left)!r})
    time.sleep(600)
while not os.path.exists({str(left)!r}): time.sleep(0.01)
"""
    (tmp_path / "stub_probe.py").write_text(f"{STUB}{program}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(preflight, "MODULE", "stub_probe")
    preflight.measure(bare(tmp_path), False, None)
    pid = int(left.read_text())
    until = time.monotonic() + 60
    while rundir.start_ticks(pid) is not None and time.monotonic() < until:
        time.sleep(0.02)
    assert rundir.start_ticks(pid) is None


def test_a_dry_run_measures_nothing(tmp_path, capsys):
    named = written(tmp_path, preflight={"measure": True})
    assert main(["--root", str(tmp_path), "launch", named, "--dry-run"]) == 0
    assert "parity are not measured: use check PLAN --measure" in capsys.readouterr().out
