"""The trainer on a CUDA device: records, resume, precision, profiles, and a GPU out of memory."""

from __future__ import annotations

import json

import pytest

from tests.trainers.ranks import named, own_port
from tests.trainers.runs import Run, latest_checkpoint, small

pytestmark = pytest.mark.gpu

EXACT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # products are then the same in each process
}


def train(tmp_path, name="run", nproc=1, flags=None, program="trainers.ddp", **changes):
    settings = {"train__device": "cuda", "train__steps": 20, "report__log_every": 1} | changes
    return Run(tmp_path, small(**settings), nproc=nproc, name=name, flags=flags, program=program)


def train_in_group(tmp_path, name="run", **changes):
    """Trains one rank that has joined a process group over NCCL."""
    with own_port() as port:
        flags = EXACT | named(0, 1, port)
        return train(
            tmp_path, name, flags=flags, program="tests.gpu.group_of_one", **changes
        ).done(240)  # fmt: skip


def progress(run):
    return run.records(0, "progress")


def test_records_have_the_memory_and_the_phases_of_the_device(tmp_path):
    run = train(tmp_path, report__sdpa_audit=True, report__memory_every=10).done()
    records = progress(run)
    assert [record["step"] for record in records] == list(range(1, 21))
    for record in records:
        assert 0 < record["gpu_mem_alloc"] <= record["gpu_mem_reserved"]
        assert record["loss"] == pytest.approx(5.5, abs=0.6)
    environment = json.loads((run.path / "env.json").read_text())
    assert environment["device"]["type"] == "cuda"
    assert environment["cuda"]
    for phase in ("forward", "backward", "optimizer"):
        assert 0 < records[-1][f"dt_{phase}_s"] < 5
    audits = run.records(0, "sdpa_audit")
    assert len(audits) == 1, audits
    dumps = {path.name for path in run.path.glob("mem_*_rank0.*")}
    when = ("boot", "step1", "pre_step10", "post_step10", "pre_step20", "post_step20")
    assert dumps == {f"mem_{each}_rank0.{kind}" for each in when for kind in ("txt", "json")}
    statistics = json.loads((run.path / "mem_step1_rank0.json").read_text())
    assert statistics["reserved_bytes.all.current"] > 0
    assert "CUDA memory summary" in (run.path / "mem_step1_rank0.txt").read_text()
    assert "<nvidia_smi_log>" in (run.path / "nvidia_smi.xml").read_text()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_resumed_run_is_bitwise_the_run_that_was_not_interrupted(tmp_path, precision):
    whole = train(tmp_path, "whole", flags=EXACT, train__precision=precision).done()
    first = train(
        tmp_path, "first", flags=EXACT, train__precision=precision, checkpoint__every=10,
        checkpoint__at_end=False,
    ).done()  # fmt: skip
    rest = train(
        tmp_path, "rest", flags=EXACT, train__precision=precision, checkpoint__from_step=10,
        checkpoint__resume=first.path,
    ).done()  # fmt: skip
    assert_continues(whole, rest)


def assert_continues(whole, rest):
    """Checks that a run that was resumed after step 10 has the losses of a whole run."""
    right, again = (
        {record["step"]: record["loss"] for record in progress(run)} for run in (whole, rest)
    )
    assert min(again) == 11
    assert again == {step: right[step] for step in again}


@pytest.mark.parametrize(
    "changes",
    [
        {"train__precision": "bf16", "train__compile": True},
        {"train__precision": "fp16", "train__accumulate": 2},
        {"train__tf32": True, "train__recompute": "all"},
        {"attention__use_fa2": True, "train__precision": "bf16"},
        {"attention__no_flash": True, "train__precision": "bf16"},
        {"attention__flash_only": True, "train__precision": "bf16"},
        {"report__nvtx": True, "report__profile": "5:7"},
        {"checkpoint__every": 5, "checkpoint__background": "on", "eval__every": 5},
    ],
    ids=lambda changes: ",".join(changes),
)  # fmt: skip
def test_a_short_training_completes(tmp_path, changes):
    run = train(tmp_path, train__steps=12, **changes).done(240)
    assert run.metrics()["steps_done"] == 12
    assert latest_checkpoint(run.path)


BF16 = {"train__precision": "bf16"}
FP16 = {"train__precision": "fp16"}
FSDP = {"train__strategy": "fsdp"}


@pytest.mark.parametrize(
    "changes",
    [
        BF16 | {"ddp__static_graph": True},
        BF16 | {"ddp__compress": "bf16"},
        FP16 | {"ddp__compress": "fp16", "train__accumulate": 2},
        BF16 | FSDP | {"train__accumulate": 2},
        FP16 | FSDP,
        BF16 | FSDP | {"train__compile": True},
    ],
    ids=lambda changes: ",".join(map(str, changes.values())),
)  # fmt: skip
def test_a_rank_in_a_group_over_nccl_trains_as_one_without(tmp_path, changes):
    alone = train(tmp_path, "alone", flags=EXACT, train__steps=12, **changes).done(240)
    grouped = train_in_group(tmp_path, train__steps=12, **changes)
    (ready,) = grouped.records(0, "loader_ready")
    assert ready["comm_hook"] == changes.get("ddp__compress", "none")
    right = {record["step"]: record["loss"] for record in progress(alone)}
    found = {record["step"]: record["loss"] for record in progress(grouped)}
    assert found == pytest.approx(right, rel=1e-2)
    assert latest_checkpoint(grouped.path)


def test_shards_on_a_gpu_are_saved_in_the_background_and_resumed_bitwise(tmp_path):
    changes = BF16 | FSDP | {"checkpoint__background": "on"}
    whole = train_in_group(tmp_path, "whole", **changes)
    first = train_in_group(
        tmp_path, "first", checkpoint__every=10, checkpoint__at_end=False, **changes
    )
    rest = train_in_group(
        tmp_path, "rest", checkpoint__from_step=10, checkpoint__resume=first.path, **changes
    )
    assert_continues(whole, rest)


@pytest.mark.parametrize("changes", [BF16, FP16, BF16 | {"train__accumulate": 2}], ids=str)
def test_the_host_waits_for_the_gpu_only_in_steps_with_a_record(tmp_path, changes):
    """With the same number of records, 40 steps wait for the GPU as often as 20 steps."""
    waits = []
    for steps in (20, 40):
        run = train(
            tmp_path, f"of {steps}", program="tests.gpu.sync_warned", train__steps=steps,
            report__log_every=steps, checkpoint__at_end=False, **changes,
        ).done(240)  # fmt: skip
        waits.append(run.text().count("called a synchronizing CUDA operation"))
    assert 0 < waits[0] == waits[1], run.text()[-6000:]


def test_two_ranks_on_one_device_are_refused_with_a_sentence(tmp_path):
    import torch

    count = torch.cuda.device_count()
    run = train(tmp_path, nproc=count + 1)
    assert run.wait() != 0
    assert f"local rank {count} has no GPU, {count} are visible" in run.text()


def test_a_full_device_is_said_with_the_allocator_s_summary(tmp_path):
    run = train(tmp_path, data__seq_len=8192, train__batch_size=16384, data__recall_span=16)
    assert run.wait(240) != 0
    ends = [record for record in run.records(0) if record.get("error")]
    assert any("out of memory" in json.dumps(record).lower() for record in ends), run.text()[-3000:]
    assert "PyTorch CUDA memory summary" in (run.path / "oom_rank0.txt").read_text()
