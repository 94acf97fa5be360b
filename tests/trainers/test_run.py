"""Whole runs: their records, files, halts and exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
import torch

from nsa.config import flops_per_token, parameter_count
from tests.trainers.ranks import named, own_port
from tests.trainers.runs import (
    CONFIG,
    ROOT,
    Run,
    environment,
    heartbeats,
    last_step,
    latest_checkpoint,
    python,
    small,
)
from trainers import checkpoint, failures, manifest, precision, settings
from trainers.contract import heartbeat
from trainers.contract.errors import UsageError
from trainers.contract.member import Member
from trainers.run_records import Report

STEPS = 12


@pytest.fixture(scope="module")
def text_run(tmp_path_factory):
    """Returns a run of two ranks on text, with statistics, CSV files and a flag."""
    changes = small(
        data__source="text", train__steps=STEPS, report__log_every=4, eval__every=6,
        eval__batches=2,
    )  # fmt: skip
    return Run(tmp_path_factory.mktemp("text"), changes, flags={"NSA_LR": "0.002"}).done()


PROGRESS = {
    "loss", "lr", "grad_norm", "toks_per_s", "toks_per_s_rank", "tokens_total", "mfu",
    "steps_dt_s", "dt_fetch_s", "dt_forward_s", "dt_backward_s", "dt_optimizer_s", "fetch_p50_ms",
    "fetch_p95_ms", "rss_mib", "skipped_steps", "dropped_records", "batch_crc32",
    "gate_entropy_mean", "gate_entropy_min", "gate_entropy_layers", "gate_max_gate",
    "gate_collapse_frac", "gate_branch_shares",
}  # fmt: skip


def test_every_rank_reports_the_first_five_steps_and_every_log_step(text_run):
    for rank in range(2):
        records = text_run.records(rank)
        assert [r["msg"] for r in records[:2]] == ["boot", "loader_ready"]
        assert [r["msg"] for r in records[-2:]] == ["checkpoint", "exit"]
        for message in ("step_start", "progress", "step_end"):
            steps = [r["step"] for r in text_run.records(rank, message)]
            assert steps == [1, 2, 3, 4, 5, 8, 12]
        assert {r["rank"] for r in records} == {rank}
        assert {r["world"] for r in records} == {2}


def test_the_first_five_steps_after_a_resume_have_records_too(tmp_path):
    changes = small(train__steps=5100, report__log_every=10)
    report = Report(settings.resolve(CONFIG, {}, changes), Member(tmp_path, {}))
    report.resume(5000, 0, None)
    for step in range(5001, 5030):
        assert report.due(step) == (step <= 5005 or step % 10 == 0), step
        report.end(step, 1.0)


def test_progress_carries_every_figure_and_the_figures_agree_with_each_other(text_run):
    for rank in range(2):
        progress = text_run.records(rank, "progress")
        assert sum(len(r["steps_dt_s"]) for r in progress) == STEPS
        for record in progress:
            assert set(record) >= PROGRESS
            assert record["mfu"] is record["mfu_exact"] is None
            assert record["tokens_total"] == record["step"] * 2 * 4 * 32
            steps = len(record["steps_dt_s"])
            rate = steps * 2 * 4 * 32 / sum(record["steps_dt_s"])
            assert record["toks_per_s"] == pytest.approx(rate, rel=0.01)
            assert record["toks_per_s_rank"] == pytest.approx(rate / 2, rel=0.01)
            parts = [record[f"dt_{p}_s"] for p in ("fetch", "forward", "backward", "optimizer")]
            assert 0 < sum(parts) <= sum(record["steps_dt_s"]) / steps * 1.5
            assert len(record["gate_branch_shares"]) == 3
    both = zip(text_run.records(0, "progress"), text_run.records(1, "progress"), strict=True)
    for mine, theirs in both:
        assert (mine["loss"], mine["grad_norm"]) == (theirs["loss"], theirs["grad_norm"])
        assert mine["batch_crc32"] != theirs["batch_crc32"]


def test_speed_and_step_time_of_a_log_line_are_of_the_same_steps(text_run):
    found = re.findall(r"([\d,]+) tok/s  ([\d.]+) s/step", text_run.text())
    assert len(found) == len(text_run.records(0, "progress"))
    for rate, step_s in found:
        assert float(step_s) == pytest.approx(2 * 4 * 32 / float(rate.replace(",", "")), abs=6e-4)


def test_a_record_holds_the_times_of_the_most_steps_between_two_records(text_run):
    record = text_run.records(1, "progress")[-1]
    most = settings.keys()["report.log_every"].high
    record |= {
        "steps_dt_s": [99.999999] * int(most), "gate_entropy_layers": [0.123456] * 48,
        "mfu": 0.4123456789012345, "mfu_exact": 0.2123456789012345, "gpu_mem_reserved": 123456.5,
        "gpu_mem_alloc": 123456.5, "tokens_total": 10**13, "overflow_steps": 1000,
    }  # fmt: skip
    assert "cut" not in json.loads(heartbeat.encode(record))
    with pytest.raises(UsageError, match="200"):
        settings.resolve(CONFIG, {}, {"report.log_every": int(most) + 1})


def test_both_formulas_of_the_mfu_differ_by_what_the_attention_leaves_out(tmp_path):
    config = CONFIG.with_name("m7c_125m.yaml")
    resolved = settings.resolve(config, {}, {"data.seq_len": 32_768, "train.precision": "bf16"})
    report = Report(resolved, Member(tmp_path, {"WORLD_SIZE": "2"}))
    report.peak_flops = precision.peak_flops("NVIDIA H100 80GB HBM3", "bf16")
    found = report._mfu(100_000)
    model = resolved.settings.model
    for name, causal in (("mfu", False), ("mfu_exact", True)):
        flops = flops_per_token(model, 32_768, causal) * 100_000
        assert found[name] == pytest.approx(flops / (2 * 989.5e12))
    assert found["mfu"] / found["mfu_exact"] == pytest.approx(5.33, rel=0.01)


def test_the_peak_for_the_mfu_is_that_of_the_products():
    peak = partial(precision.peak_flops, "NVIDIA A100-SXM4-80GB")
    assert (peak("bf16"), peak("fp32")) == (312e12, 19.5e12)
    assert (peak("fp32", tf32=True), peak("bf16", tf32=True)) == (156e12, 312e12)
    assert peak("fp64") is precision.peak_flops("another", "bf16") is None


CARDS = {
    "NVIDIA L4": 121, "NVIDIA L40": 181, "NVIDIA L40S": 362, "NVIDIA H100 80GB HBM3": 989.5,
    "NVIDIA H100 PCIe": 756, "NVIDIA H100 NVL": 835.5, "NVIDIA H200": 989.5,
    "NVIDIA H200 NVL": 835.5, "NVIDIA GeForce RTX 4090": 165.2, "NVIDIA A10G": 70,
}  # fmt: skip
OTHER_CARDS = (
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A100-SXM4-40GB MIG 3g.20gb", "NVIDIA GH200 480GB",
    "NVIDIA H20", "NVIDIA A10", "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090 Laptop GPU",
)  # fmt: skip


def test_a_card_has_the_peak_of_its_own_name_or_none():
    found = {name: precision.peak_flops(name, "bf16") for name in (*CARDS, *OTHER_CARDS)}
    assert found == {name: peak * 1e12 for name, peak in CARDS.items()} | dict.fromkeys(OTHER_CARDS)


def test_held_out_text_is_evaluated_alike_on_every_rank(text_run):
    mine, theirs = (text_run.records(rank, "eval") for rank in range(2))
    assert [r["step"] for r in mine] == [6, 12]
    assert [r["loss"] for r in mine] == [r["loss"] for r in theirs]
    assert mine[0]["loss"] > mine[1]["loss"]
    assert mine[0]["tokens"] == 2 * 2 * 4 * 32
    assert mine[0]["bits_per_byte"] == pytest.approx(mine[0]["loss"] / 0.6931472)


def test_csv_env_and_metrics_are_the_same_numbers(text_run):
    lines = (text_run.path / "training.csv").read_text().splitlines()
    header, rows = lines[0].split(","), [line.split(",") for line in lines[1:]]
    progress = text_run.records(0, "progress")
    assert [float(row[header.index("loss")]) for row in rows] == [r["loss"] for r in progress]
    env = json.loads((text_run.path / "env.json").read_text())
    model = settings.resolve(CONFIG, {}, small()).settings.model
    assert env["parameters"] == env["parameters_counted"] == parameter_count(model)
    assert env["settings"]["train.lr"] == {"value": 0.002, "origin": "flag NSA_LR"}
    assert (env["strategy"], env["comm_backend"], env["world"]) == ("ddp", "gloo", 2)
    assert set(env["mfu_formula"]) == {"mfu", "mfu_exact"}
    missing = f"not available: the peak FLOP/s of {env['device']['name']} with fp32 is not known"
    assert env["mfu_missing"] == missing
    assert missing in (text_run.path.parent / "run.log").read_text()
    assert env["backend"] == {
        "cmp": "masked", "sel": "causal, heads folded", "win": "banded, heads folded",
    }  # fmt: skip
    metrics = text_run.metrics()
    assert (metrics["steps_done"], metrics["reason"], metrics["exit_code"]) == (STEPS, "done", 0)
    assert metrics["loss"] == progress[-1]["loss"] < metrics["first_loss"]


def test_a_run_has_the_files_that_the_scripts_of_the_runbooks_read(text_run):
    """The bucket sweep averages column 4 of the last 50 rows of training.csv."""
    rows = [line.split(",") for line in (text_run.path / "training.csv").read_text().splitlines()]
    assert rows[0][:4] == ["step", "loss", "lr", "toks_per_s"]
    progress = text_run.records(0, "progress")
    assert [float(row[3]) for row in rows[1:]] == [r["toks_per_s"] for r in progress]
    held_out = text_run.records(0, "eval")
    header, *values = (text_run.path / "val.csv").read_text().splitlines()
    assert header == "step,val_loss,ppl"
    assert [line.split(",")[:2] for line in values] == [
        [str(r["step"]), str(r["loss"])] for r in held_out
    ]
    header, *values = (text_run.path / "k_stats.csv").read_text().splitlines()
    assert header.startswith("step,sel_entropy,")
    assert [float(line.split(",")[1]) for line in values] == [r["sel_entropy"] for r in progress]
    counters = (text_run.path / "fallback_counters.csv").read_text().splitlines()
    assert counters == ["step,fb_total", *(f"{r['step']},0" for r in progress)]
    dtypes = (text_run.path / "dtypes_report.txt").read_text()
    env = json.loads((text_run.path / "env.json").read_text())
    assert f"torch.float32: {env['parameters']} (100.00%)" in dtypes
    state_mib = float((text_run.path / "opt_state_mb.txt").read_text())
    assert state_mib == pytest.approx(env["parameters"] * 8 / 2**20, abs=0.01)
    assert "torch==" in (text_run.path / "collect_env.txt").read_text()
    assert text_run.text().count("memory dumps (mem_*): not on CPU") == 1


def test_nothing_is_written_outside_the_run_directory(text_run):
    assert not [p for p in (text_run.path.parent / "home").rglob("*") if p.is_file()]
    names = {path.name for path in text_run.path.iterdir()}
    assert names == {
        "heartbeat_rank0.jsonl", "heartbeat_rank1.jsonl", "stackdump_rank0.txt",
        "stackdump_rank1.txt", "pulse_rank0", "pulse_rank1", "training.csv", "env.json",
        "metrics.json", "checkpoints", "tb", "val.csv", "k_stats.csv", "fallback_counters.csv",
        "dtypes_report.txt", "opt_state_mb.txt", "collect_env.txt", "training.lock",
    }  # fmt: skip


def test_a_trainer_logs_config_parameters_and_tokens_before_step_1(text_run, tmp_path):
    lines = text_run.text().splitlines()
    parameters = json.loads((text_run.path / "env.json").read_text())["parameters_counted"]
    summary = f"config {CONFIG}; {parameters:,} parameters, S 32, 256 tokens per step"
    assert summary in lines[: next(n for n, line in enumerate(lines) if "step 1/" in line)]
    toy = ("-m", "trainers.ddp", "--steps", 1, "--run-dir", tmp_path / "toy")
    done = python(tmp_path, *toy)
    assert done.returncode == 0
    assert "training the built-in toy model; " in done.stdout.splitlines()[0]


@pytest.mark.parametrize(
    ("how", "flags"),
    [
        pytest.param(
            ".HALT",
            {"NSA_DDP_STATIC_GRAPH": "1", "NSA_DISABLE_CSV_LOGS": "1"},
            marks=pytest.mark.slow,  # the main job of tests/e2e halts by .HALT
        ),
        ("SIGTERM", {"NSA_DDP_COMPRESS": "fp16", "NSA_DDP_BUCKET_MB": "1", "NSA_ACCUM": "2"}),
    ],
)
def test_a_halt_stops_both_ranks_at_the_same_step_with_a_checkpoint(tmp_path, how, flags):
    """The runs have checkpoint.at_end=false, a static graph or compressed gradients, and a dump."""
    changes = small(train__steps=100_000, report__log_every=5, checkpoint__at_end=False)
    run = Run(tmp_path, changes, flags=flags)
    run.until_step(10)
    for pid in run.pids():
        os.kill(pid, signal.SIGUSR1)
    run.until(lambda: b"end of dump 1" in (run.path / "stackdump_rank1.txt").read_bytes())
    seen = run.records(1, "progress")[-1]["step"]
    asked = time.time()
    if how == ".HALT":
        (run.path / ".HALT").touch()
    else:
        os.kill(run.pids()[1], signal.SIGTERM)
    assert run.wait() == 0, run.text()
    halts = [run.records(rank, "halt")[-1] for rank in range(2)]
    assert halts[0]["step"] == halts[1]["step"] > seen
    assert {halt["reason"] for halt in halts} == {how}
    assert halts[0]["ts"] - asked < 60
    metrics = run.metrics()
    assert (metrics["steps_done"], metrics["reason"]) == (halts[0]["step"], how)
    assert metrics["exit_code"] == 0
    path = latest_checkpoint(run.path)
    assert path is not None
    assert manifest.verify(path).step == halts[0]["step"]
    assert run.records(1)[-1]["reason"] == how
    assert (run.path / "training.csv").exists() == ("NSA_DISABLE_CSV_LOGS" not in flags)
    env = json.loads((run.path / "env.json").read_text())
    assert env["comm_hook"] == flags.get("NSA_DDP_COMPRESS", "none")


def test_a_halt_does_not_wait_for_an_evaluation_and_saves_its_step_once(tmp_path):
    changes = small(
        train__steps=100_000, report__log_every=1, eval__every=1, eval__batches=1,
        checkpoint__every=1,
    )  # fmt: skip
    run = Run(tmp_path, changes, nproc=1)
    run.until_step(5)
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.wait() == 0, run.text()
    step = run.records(0, "halt")[-1]["step"]
    kinds = [r["msg"] for r in run.records(0, "eval", "checkpoint") if r["step"] == step]
    assert kinds == ["checkpoint"]


def test_a_rank_with_nan_makes_all_skip_and_the_run_ends_with_10(tmp_path):
    run = Run(
        tmp_path, small(train__steps=50, train__max_nonfinite_steps=3, report__log_every=1),
        broken="nan_from_step_3",
    )  # fmt: skip
    assert run.wait() != 0
    for rank in range(2):
        progress = run.records(rank, "progress")
        assert [r["skipped_steps"] for r in progress] == [0, 0, 1, 2, 3]
        assert [r["loss"] == "nan" for r in progress] == [False, False, True, True, True]
        error = run.records(rank, "error")[-1]
        assert (error["exit_code"], error["step"]) == (10, 5)
        assert "3 steps in a row" in error["error"]
        assert "no final checkpoint is saved" in error["error"]
        assert run.records(rank)[-1]["exit_code"] == 10
    assert run.metrics()["exit_code"] == 10
    assert latest_checkpoint(run.path) is None
    assert "Traceback (most recent call last):\n  File" not in run.text().split("trainers.ddp:")[0]


@pytest.mark.parametrize("fused", [True, False])
def test_a_skipped_step_leaves_the_weights_and_training_goes_on(tmp_path, fused):
    run = Run(
        tmp_path, small(train__steps=6, report__log_every=1, optim__fused=fused,
                        train__precision="fp32" if fused else "bf16"), nproc=1,
        broken="nan_at_step_3",
    ).done()  # fmt: skip
    losses = [record["loss"] for record in run.records(0, "progress")]
    assert [loss == "nan" for loss in losses] == [False, False, True, False, False, False]
    assert run.metrics()["skipped_steps"] == 1
    path = latest_checkpoint(run.path)
    assert path is not None
    weights = checkpoint.load_weights(path)
    assert all(torch.isfinite(weight).all() for weight in weights.values())
    averages = checkpoint.load_weights(path, "optimizer")
    steps = {float(value) for name, value in averages.items() if name.endswith(".step")}
    assert steps == {5.0}


@pytest.mark.slow
def test_a_compiled_model_is_evaluated(tmp_path):
    changes = small(
        train__compile=True, train__steps=4, eval__every=2, eval__batches=1,
        checkpoint__at_end=False,
    )  # fmt: skip
    run = Run(tmp_path, changes, nproc=1, broken="compile_without_code").done()
    losses = [record["loss"] for record in run.records(0, "eval")]
    assert losses == pytest.approx([5.55, 5.55], abs=0.3)


@pytest.fixture
def port():
    with own_port() as kept:
        yield kept


def test_a_rank_whose_peer_dies_ends_with_14_and_says_so(tmp_path, port):
    words = [part for k, v in small(train__steps=100_000).items() for part in ("--set", f"{k}={v}")]
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    ranks = []
    for rank, log in enumerate(logs):
        variables = named(rank, 2, port)
        command = [sys.executable, "-m", "trainers.ddp", "--run-dir", str(tmp_path / "run"), *words]
        with log.open("wb") as stream:
            ranks.append(subprocess.Popen(
                command, cwd=ROOT, env=environment(tmp_path, **variables), stderr=stream,
                stdout=stream,
            ))  # fmt: skip
    end = time.monotonic() + 150
    # When rank 1 has a record of step 3, rank 0 has ended a step.
    while last_step(heartbeats(tmp_path / "run", 1, "progress")) < 3:
        assert time.monotonic() < end, logs[1].read_text()
        time.sleep(0.05)
    ranks[1].kill()
    ranks[1].wait()
    assert ranks[0].wait(300) == 14, logs[0].read_text()
    assert "Traceback" not in logs[0].read_text()
    error = heartbeats(tmp_path / "run", 0, "error")[-1]
    assert error["error"].startswith("a collective failed: ")
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["exit_code"] == 14
    assert metrics["steps_done"] >= 1


def test_an_error_of_nccl_does_not_claim_that_another_rank_has_exited():
    error = RuntimeError("NCCL error: invalid usage")
    assert failures.classify(error) == (14, "a collective failed: NCCL error: invalid usage")


def test_out_of_memory_is_11_for_the_host_and_for_the_device():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    device = torch.OutOfMemoryError("CUDA out of memory")
    assert [failures.classify(e)[0] for e in (caught.value, MemoryError(), device)] == [11] * 3
