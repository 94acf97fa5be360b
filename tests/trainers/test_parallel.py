"""DDP, FSDP2, accumulation and recomputation match one process; a resume matches a whole run."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import random
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.trainers.files import write
from tests.trainers.ranks import sharded, together
from tests.trainers.runs import CONFIG, Run, small
from trainers import build, manifest, settings
from trainers.failures import COLLECTIVE, CollectiveError
from trainers.parallel import Ddp, Group, Single
from trainers.precision import autocast

CPU = torch.device("cpu")
STEPS = 20
WHOLE = small(
    train__steps=STEPS, train__batch_size=8, report__log_every=1, model__n_layers=2,
    data__source="recall", checkpoint__at_end=False,
)  # fmt: skip
WAYS = {
    "recompute": (1, {"train.recompute": "all"}),
    "accumulate": (1, {"train.batch_size": 2, "train.accumulate": 4}),
    "ddp": (2, {"train.batch_size": 4}),
    "ddp, recompute, accumulate": (
        2, {"train.batch_size": 2, "train.accumulate": 2, "train.recompute": "1:2"},
    ),
    "fsdp": (2, {"train.batch_size": 4, "train.strategy": "fsdp"}),
    "fsdp, recompute, accumulate": (
        2, {"train.batch_size": 2, "train.accumulate": 2, "train.recompute": "all",
            "train.strategy": "fsdp", "fsdp.sharding": "grad_op"},
    ),
    "hsdp": (2, {"train.batch_size": 4, "train.strategy": "fsdp", "fsdp.replicas": 2}),
}  # fmt: skip
QUICK = {("fsdp, recompute, accumulate", "fp64")}
"""The comparison of `make test`; the other comparisons are marked as slow."""


def figures(run: Run) -> list[tuple[float, ...]]:
    names = ("loss", "grad_norm", "bytes_right", "tokens_total")
    return [tuple(r[name] for name in names) for r in run.records(0, "progress")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Returns a function that trains in one process and returns its figures, once a precision."""
    folder = tmp_path_factory.mktemp("alone")

    @functools.cache
    def train(precision):
        changes = WHOLE | {"train.precision": precision}
        return figures(Run(folder, changes, nproc=1, name=precision).done())

    return train


@pytest.mark.parametrize(
    ("way", "precision"),
    [
        pytest.param(way, precision, marks=() if (way, precision) in QUICK else pytest.mark.slow)
        for way in WAYS
        for precision in ("fp64", "fp32")
    ],
)
def test_every_way_to_share_the_work_gives_the_same_losses_and_norms(
    tmp_path, alone, precision, way
):
    nproc, changes = WAYS[way]
    run = Run(tmp_path, WHOLE | {"train.precision": precision} | changes, nproc=nproc).done()
    for step, (mine, theirs) in enumerate(zip(alone(precision), figures(run), strict=True), 1):
        close = 1e-9 if precision == "fp64" else 1e-5 if step == 1 else 1e-3
        assert theirs[:2] == pytest.approx(mine[:2], rel=close)
        assert theirs[3] == mine[3]
        if precision == "fp64":
            assert theirs[2] == mine[2]
    env = json.loads((run.path / "env.json").read_text())
    assert env["strategy"] == (changes.get("train.strategy", "ddp") if nproc > 1 else "single")
    twins = {path.name for path in run.path.iterdir() if "_fsdp" in path.name}
    sizes = {"opt_state_fsdp_mb.txt", "opt_state_fsdp_mb_rank1.txt"}
    files = {"fallback_counters_fsdp.csv", "dtypes_report_fsdp.txt", "k_stats_fsdp.csv"} | sizes
    assert twins == (files if env["strategy"] == "fsdp" else set())


def test_weights_depend_on_seed_and_name_only_and_shards_gather_in_the_forwards_type(tmp_path):
    """The weights are compared between one process, DDP and FSDP2.

    With deterministic algorithms, torch fills unset memory with NaN, so unset weights are found.
    """

    def compare(parallel, precision):
        changes = small(
            train__precision=precision, train__strategy="fsdp", model__nsa__compress="mlp",
        )  # fmt: skip
        resolved = settings.resolve(CONFIG, {}, changes).settings
        shards = sharded(parallel, resolved)
        torch.use_deterministic_algorithms(True)
        whole, drawn = build.make_model(resolved, Single(parallel.device))[0], torch.rand(3)
        copy, _ = build.make_model(resolved, parallel)
        plain, model = build.make_model(resolved, shards)
        torch.use_deterministic_algorithms(False)
        assert torch.equal(drawn, torch.rand(3))
        assert isinstance(parallel, Ddp)
        mine, theirs = (dict(each.named_parameters()) for each in (plain, whole))
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name].full_tensor(), theirs[name]) for name in mine)
        assert all(torch.equal(p, theirs[name]) for name, p in copy.named_parameters())
        rows = mine["head.weight"].to_local().shape[0]
        assert rows * parallel.world == 256
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in theirs.values()))
        if parallel.world > 2:
            return digest.hexdigest()
        tokens = torch.arange(64).reshape(2, 32)
        with autocast(precision, parallel.device):
            got, right = model(tokens), whole(tokens)
        got.float().sum().backward()
        assert mine["embed.weight"].grad.dtype == torch.promote_types(torch.float32, got.dtype)
        return digest.hexdigest(), (got - right).abs().max().item()

    def work(rank, parallel, member):
        del rank, member
        cases = ["fp64", "fp32", "bf16"]
        return [compare(parallel, case) for case in (cases if parallel.world == 2 else cases[1:2])]

    on_two = together([tmp_path / "a", tmp_path / "b"], work)
    assert on_two[0] == on_two[1]
    far = [far for _, far in on_two[0]]
    assert far[:2] == [0.0, 0.0]
    assert 0 < far[2] < 0.02
    on_four = together([tmp_path / str(rank) for rank in range(4)], work)
    assert on_four == [[on_two[0][1][0]]] * 4


RESUMED = small(
    train__steps=40, report__log_every=1, model__n_layers=2, data__source="text",
    checkpoint__every=20, train__min_lr_ratio=0.1, checkpoint__background="on",
    optim__skip_spikes_sigma=6, eval__every=10, eval__batches=1,
)  # fmt: skip


def parquet(folder: Path, longest: int = 400) -> dict[str, Any]:
    """Writes files of documents, and returns the settings that read them."""
    draw = random.Random(0)
    for part in range(3):
        texts = [draw.randbytes(draw.randrange(longest)).hex() for _ in range(90)]
        write(folder / f"{part}.parquet", texts)
    return {"data.source": "parquet", "data.path": str(folder), "data.lanes": 2}


@pytest.fixture(
    scope="module",
    params=[
        ("ddp", "text"),
        pytest.param(("fsdp", "text"), marks=pytest.mark.slow),
        pytest.param(("ddp", "parquet"), marks=pytest.mark.slow),
        pytest.param(("fsdp", "parquet"), marks=pytest.mark.slow),
    ],
    ids="-".join,
)
def killed(request, tmp_path_factory):
    """Returns four values: folder, settings, a whole run, and a run killed after a checkpoint."""
    strategy, source = request.param
    folder = tmp_path_factory.mktemp(strategy)
    changes = RESUMED | {"train.strategy": strategy}
    if source == "parquet":
        changes |= parquet(folder / "data")
    whole = Run(folder, changes, name="whole").done()
    # The slow steps after step 20 leave time for the kill before the next checkpoint.
    run = Run(folder, changes, name="killed", broken="slow_after_20")
    run.until(lambda: manifest.newest_first(run.path))
    for pid in run.pids():
        os.kill(pid, signal.SIGKILL)
    run.wait()
    return folder, changes, whole, run


def test_a_killed_run_goes_on_bitwise_from_its_checkpoint(killed):
    folder, changes, whole, run = killed
    again = Run(folder, changes | {"checkpoint.resume": "auto"}, name="killed").done()
    resumed = [r for r in again.records(0, "progress") if r["attempt"] == 2]
    expected = [r for r in whole.records(0, "progress") if r["step"] > 20]
    assert len(resumed) == 20
    for name in ("step", "loss", "grad_norm", "lr", "tokens_total"):
        assert [r[name] for r in resumed] == [r[name] for r in expected]
    assert run.records(0, "resume")[-1]["step"] == 20
    assert again.metrics()["first_loss"] == whole.metrics()["first_loss"]
    mine, theirs = (
        manifest.verify(path)
        for path in (manifest.newest_first(again.path)[0], manifest.newest_first(whole.path)[0])
    )
    assert mine.data == theirs.data
    assert mine.tokens_total == theirs.tokens_total


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_another_number_of_ranks_goes_on_in_the_same_stream(killed, ranks):
    folder, changes, whole, run = killed
    batch = {1: 8, 3: 4}[ranks]
    other = resumed_on(ranks, batch, folder, changes, run.path, 20)
    assert position(other) == 20 * 8 + 20 * batch * ranks
    first = other.records(0, "progress")[0]
    assert first["step"] == 21
    if ranks == 1:
        assert_step_equal(other, whole, 21)
        back = resumed_on(2, 4, folder, changes, other.path, 24)
        assert position(back) == 40 * 8
        assert_step_equal(back, whole, 25, close=1e-4)


ALL = RESUMED | {
    "train.steps": 190, "train.precision": "fp16", "scaler.init_scale": 2**32,
    "scaler.growth_interval": 30, "optim.skip_spikes_sigma": 0.5, "checkpoint.every": 40,
    "train.lr": 0.01,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("strategy", "nproc"), [("ddp", 1), ("ddp", 2), ("fsdp", 2)])
def test_kills_at_drawn_moments_change_no_figure_of_any_step(tmp_path, strategy, nproc):
    """The runs have spikes, overflows, separate documents, evaluations and background saves."""
    packed = {"data.documents": "separate", "data.held_out": 0.2}
    changes = ALL | parquet(tmp_path / "data", 40) | packed | {"train.strategy": strategy}
    whole = Run(tmp_path, changes, nproc=nproc, name="whole").done(600)
    draw = random.Random(f"{strategy}{nproc}")
    for _ in range(3):
        run = Run(tmp_path, changes | {"checkpoint.resume": "auto"}, nproc=nproc, name="killed")
        known = manifest.newest_first(run.path)[:1]
        run.until(lambda path=run.path, old=known: manifest.newest_first(path)[:1] != old, 300)
        time.sleep(draw.uniform(0, 2))
        for rank in range(nproc):
            with contextlib.suppress(ProcessLookupError):
                os.kill(run.records(rank, "boot")[-1]["pid"], signal.SIGKILL)
        run.wait()
    last = Run(tmp_path, changes | {"checkpoint.resume": "auto"}, nproc=nproc, name="killed")
    last.done(600)
    names = ("loss", "grad_norm", "lr", "tokens_total", "skipped_steps", "batch_crc32")
    for message, fields in (("progress", names), ("eval", ("loss",))):
        right = {record["step"]: record for record in whole.records(0, message)}
        for record in last.records(0, message):
            assert {name: record[name] for name in fields} == {
                name: right[record["step"]][name] for name in fields
            }
    end = whole.records(0, "progress")[-1]
    assert 0 < end["spike_steps"] < 100
    assert end["overflow_steps"] > 0
    assert len({record["step"] for record in last.records(0, "resume")}) > 1
    fingerprint = manifest.verify(manifest.newest_first(last.path)[0]).data["fingerprint"]
    assert fingerprint.endswith("documents=separate")


def resumed_on(ranks: int, batch: int, folder: Path, changes: dict, path: Path, step: int) -> Run:
    """Resumes a run at `step` on this number of ranks, and waits for the end."""
    more = {
        "checkpoint.resume": str(path), "checkpoint.from_step": step, "train.batch_size": batch,
        "checkpoint.every": 4, "checkpoint.keep_every": 4, "checkpoint.allow_change": "batch",
    }  # fmt: skip
    return Run(folder, changes | more, nproc=ranks, name=f"step{step}on{ranks}").done()


def position(run: Run) -> int:
    return manifest.verify(manifest.newest_first(run.path)[0]).data["position"]


def assert_step_equal(run: Run, whole: Run, step: int, close: float = 1e-5) -> None:
    """Compares the losses of a step; they are close if no sequence was lost or repeated."""
    mine, theirs = (
        next(r for r in each.records(0, "progress") if r["step"] == step) for each in (run, whole)
    )
    assert mine["loss"] == pytest.approx(theirs["loss"], rel=close)
    assert mine["tokens_total"] == theirs["tokens_total"]


def test_ranks_that_cannot_join_exit_with_the_code_of_collectives(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    member = SimpleNamespace(rank=1, world=2)
    with pytest.raises(
        CollectiveError, match=r"rank 1 of 2 cannot join the process group: .*env://"
    ):
        Group(CPU, member, settings.resolve(None, {}, {"ddp.timeout_min": 0.1}).settings)
    assert CollectiveError.exit_code == COLLECTIVE
