"""Checkpoints: they restore a training bitwise, and a kill during a save damages none."""

from __future__ import annotations

import enum
import multiprocessing
import os
import pickle
import random
import sys
import time
import types
from dataclasses import replace
from pathlib import Path, PosixPath

import pytest
import torch
from torch.distributed.tensor import DTensor

from nsa.model import Transformer
from tests.trainers.ranks import sharded, together
from tests.trainers.runs import CONFIG, latest_checkpoint, small
from trainers import build, checkpoint, manifest, optim, settings
from trainers.checkpoint import Parts
from trainers.failures import CheckpointError
from trainers.guard import Spikes
from trainers.initial_weights import set_whole
from trainers.loader import Synthetic
from trainers.manifest import Manifest
from trainers.parallel import Group, Single
from trainers.precision import LossScale
from trainers.saver import Saver
from trainers.schema import CheckpointSettings

RESOLVED = settings.resolve(CONFIG, {}, small()).settings
CPU = torch.device("cpu")
ALONE = Single(CPU)


def made(seed: int, parallel: Single = ALONE) -> Parts:
    torch.manual_seed(seed)
    model = Transformer(RESOLVED.model)
    scale = LossScale(RESOLVED.scaler, True, CPU)
    return Parts(parallel, model, optim.build(model, RESOLVED.optim), scale, Spikes(6.0, CPU))


def at(step: int) -> Manifest:
    return Manifest(step, step * 128, {"sequences": step * 4}, settings={"a.b": 1})


def saved(run: Path, parts: Parts, *steps: int, **changes) -> list[Path]:
    run.mkdir(exist_ok=True)
    saver = Saver(run, parts, CheckpointSettings(**changes))
    return [saver.save(at(step)) for step in steps]


def train(parts: Parts, first: int, last: int) -> list[torch.Tensor]:
    """Trains the steps `first` to `last` - 1. Returns random numbers drawn in each step."""
    drawn = []
    source = Synthetic(RESOLVED.data, 0)
    source.position = first * 4
    for step in range(first, last):
        tokens = source.read(4, 0, 1)[0].long()
        loss = torch.nn.functional.cross_entropy(
            parts.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        )
        loss.backward()
        parts.optimizer.step()
        parts.optimizer.zero_grad()
        nonfinite = torch.tensor(float(step % 2))
        parts.loss_scale.update(nonfinite)
        parts.spikes.detect(torch.rand(()), nonfinite)
        drawn.append(torch.rand(2))
    return drawn


def test_a_loaded_run_goes_on_bitwise(tmp_path):
    parts, other = made(1), made(2)
    train(parts, 0, 3)
    (path,) = saved(tmp_path, parts, 3)
    drawn = train(parts, 3, 6)
    assert manifest.verify(path).tokens_total == 384
    checkpoint.load(path, other)
    drawn_again = train(other, 3, 6)
    for mine, theirs in zip(drawn, drawn_again, strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(parts.loss_scale.scale, other.loss_scale.scale)
    assert torch.equal(parts.spikes.norms, other.spikes.norms)
    assert parts.spikes.seen == other.spikes.seen == 3
    mine, theirs = parts.model.state_dict(), other.model.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def made_sharded(seed: int, parallel: Group, sharding: str = "full") -> Parts:
    """Returns parts of FSDP2 with random weights and a random state of AdamW."""
    changes = small(train__seed=seed, fsdp__sharding=sharding)
    resolved = settings.resolve(CONFIG, {}, changes).settings
    shards = sharded(parallel, resolved)
    plain, model = build.make_model(resolved, shards)
    optimizer = optim.build(plain, resolved.optim)
    scale = LossScale(resolved.scaler, True, CPU)
    parts = Parts(shards, model, optimizer, scale, Spikes(6.0, CPU))
    draw = torch.Generator().manual_seed(seed)
    for averages in parts.state()["optimizer"].values():
        for average in averages.values():
            set_whole(average, torch.rand(average.shape, generator=draw))
    return parts


def whole(parts: Parts) -> dict[str, torch.Tensor]:
    """Returns all weights and the state of AdamW as whole tensors."""
    state = parts.state()
    found = state["model"] | {
        f"{name}.{key}": x for name, own in state["optimizer"].items() for key, x in own.items()
    }
    return {k: x.full_tensor() if isinstance(x, DTensor) else x for k, x in found.items()}


@pytest.mark.parametrize("sharding", ["full", "grad_op"])
def test_a_sharded_checkpoint_loads_sharded_and_whole(tmp_path, sharding):
    """With `grad_op`, the forward of an evaluation leaves the parameters unsharded."""
    run = tmp_path / "run"
    run.mkdir()

    def work(rank, parallel, member):
        del rank, member
        parts, other = (made_sharded(seed, parallel, sharding) for seed in (1, 2))
        with torch.no_grad():
            parts.model(torch.randint(64, (1, 8)))
        path = Saver(run, parts, CheckpointSettings()).save(at(3))
        checkpoint.load(path, other)
        alone = made(2)
        checkpoint.load(path, alone)
        mine, theirs, third = whole(parts), whole(other), whole(alone)
        assert mine.keys() == theirs.keys() == third.keys()
        for name in mine:
            assert torch.equal(mine[name], theirs[name])
            assert torch.equal(mine[name], third[name])
        return len(mine)

    assert together([run, run], work) == [len(whole(made(1)))] * 2


def test_saving_the_same_step_again_replaces_it_and_leaves_nothing_else(tmp_path):
    saved(tmp_path, made(1), 7)
    (path,) = saved(tmp_path, made(2), 7)
    assert sorted(p.name for p in path.parent.iterdir()) == ["latest", "step_00000007"]
    weights = checkpoint.load_weights(path)
    assert torch.equal(weights["embed.weight"], made(2).model.state_dict()["embed.weight"])


def test_the_last_few_and_every_so_many_steps_stay(tmp_path):
    saved(tmp_path, made(1), *range(1, 9), keep_last=2, keep_every=3)
    steps = [manifest.step_of(path) for path in manifest.newest_first(tmp_path)]
    assert steps == [8, 7, 6, 3]


def test_a_checkpoint_that_was_just_written_stays_beside_damaged_ones_of_later_steps(tmp_path):
    good, *bad = saved(tmp_path, made(1), 10, 20, 30)
    for path in bad:
        (path / manifest.MANIFEST).write_text("damaged")
    assert manifest.choose(tmp_path)[0] == good
    newest = saved(tmp_path, made(1), 11, 12, 13, keep_last=2)[1:]
    assert manifest.newest_first(tmp_path) == [*bad[::-1], *newest[::-1]]
    assert manifest.choose(tmp_path)[0] == newest[-1]


HARMS = {
    "truncated": lambda file: os.truncate(file, file.stat().st_size // 2),
    "zeroed": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "bit flipped": lambda file: file.write_bytes(flipped(file.read_bytes())),
    "missing": lambda file: file.unlink(),
    "a link": lambda file: file.rename(file.with_name("x")) and file.symlink_to("x"),
}


def flipped(data: bytes) -> bytes:
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("name", ["__0_0.distcp", "manifest.json"])
def test_a_damaged_checkpoint_is_told_and_the_one_before_is_taken(tmp_path, harm, name):
    good, bad = saved(tmp_path, made(1), 1, 2)
    HARMS[harm](bad / name)
    if (harm, name) == ("bit flipped", "manifest.json"):
        text = (bad / name).read_text().replace('"step": 2', '"step": "2"')
        (bad / name).write_text(text)
    path, skipped = manifest.choose(tmp_path)
    assert path == good
    assert len(skipped) == 1
    assert str(bad) in str(skipped[0])
    for named, step in ((tmp_path, 2), (bad, 0), (good, 2)):
        with pytest.raises(CheckpointError, match=f"{named} has no verified checkpoint"):
            manifest.choose(named, step)
    assert manifest.choose(good, 1) == (good, [])


def test_a_checkpoint_whose_name_contradicts_its_manifest_is_skipped(tmp_path):
    good, other = saved(tmp_path, made(1), 1, 2)
    renamed = other.rename(other.with_name(manifest.name_of(9)))
    path, (error,) = manifest.choose(tmp_path)
    assert path == good
    assert str(error) == f"{renamed} contradicts its manifest.json, whose step is 2"
    copied = renamed.rename(tmp_path / "best")
    assert manifest.choose(copied) == (copied, [])


class Evil:
    def __reduce__(self):
        return os.system, ("touch pwned",)


def test_an_index_that_wants_to_run_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (path,) = saved(tmp_path / "run", made(1), 1)
    (path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match="system: not allowed"):
        checkpoint.load(path, made(2))
    assert not (tmp_path / "pwned").exists()


def test_an_index_may_come_from_another_version_of_python(tmp_path, monkeypatch):
    """Up to 3.11.3, an enum's member is a call of getattr; in 3.13, paths are in `_local`."""
    local = types.ModuleType("pathlib._local")
    monkeypatch.setattr(local, "PosixPath", PosixPath, raising=False)
    monkeypatch.setitem(sys.modules, local.__name__, local)
    monkeypatch.setattr(PosixPath, "__module__", local.__name__)
    monkeypatch.setattr(
        enum.Enum, "__reduce_ex__", lambda member, _: (getattr, (type(member), member.name))
    )
    (path,) = saved(tmp_path, parts := made(1), 1)
    monkeypatch.undo()
    index = (path / ".metadata").read_bytes()
    assert b"getattr" in index
    assert b"pathlib._local" in index
    checkpoint.load(path, other := made(2))
    mine, theirs = parts.model.state_dict(), other.model.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_getattr_in_an_index_gives_only_members_of_the_enum(tmp_path):
    (path,) = saved(tmp_path, made(1), 1)
    (path / ".metadata").write_bytes(b"cbuiltins\ngetattr\n(ctorch\nSize\nV__init__\ntR.")
    with pytest.raises(CheckpointError, match="__init__"):
        checkpoint.load(path, made(2))


def save_for_ever(run: Path) -> None:
    former = manifest.newest_first(run)[:1]
    first = (manifest.step_of(former[0]) or 0) + 1 if former else 1
    saved(run, made(1), *range(first, first + 100_000))


def test_a_save_killed_at_any_moment_leaves_a_checkpoint_that_verifies(tmp_path):
    """After each of ten SIGKILLs at random moments, the newest checkpoint is whole."""
    fork = multiprocessing.get_context("fork")
    run = tmp_path / "run"
    for _ in range(10):
        former = manifest.newest_first(run)[:1]
        child = fork.Process(target=save_for_ever, args=(run,))
        child.start()
        try:
            end = time.monotonic() + 60
            while manifest.newest_first(run)[:1] == former:
                assert time.monotonic() < end
                time.sleep(0.005)
            time.sleep(random.uniform(0, 0.2))
        finally:
            child.kill()
            child.join()
        path, skipped = manifest.choose(run)
        assert not skipped
        checkpoint.load(path, made(2))
        held = manifest.newest_first(run)
        named = latest_checkpoint(run)  # `latest` is written after the checkpoint
        assert named in held[:2] or (named is None and len(held) == 1)


@pytest.mark.parametrize("left", [".step_00000001.tmp", ".step_00000001.old"])
def test_what_a_killed_save_left_is_cleared_or_put_back_by_the_next(tmp_path, left):
    (path,) = saved(tmp_path, made(1), 1)
    path.rename(path.with_name(left))
    path.with_name(".latest.tmp-1-0").touch()
    saved(tmp_path, made(1), 2)
    names = sorted(path.name for path in path.parent.iterdir())
    assert names == ["latest", *(["step_00000001"] if left.endswith("old") else []),
                     "step_00000002"]  # fmt: skip


@pytest.mark.parametrize(("precision", "scale"), [("fp32", 1.0), ("fp16", 65536.0)])
def test_a_change_of_the_precision_starts_with_the_scale_of_the_new_precision(
    precision, scale, tmp_path
):
    first, other = made(1), made(2)
    without = LossScale(RESOLVED.scaler, False, CPU)
    if precision == "fp16":
        first = replace(first, loss_scale=without)
    else:
        other = replace(other, loss_scale=without)
    (path,) = saved(tmp_path / "run", first, 1)
    checkpoint.load(path, other)
    assert other.loss_scale.scale.item() == scale
    assert len(checkpoint.load_weights(path, checkpoint.LOSS_SCALE)) == 2 * first.loss_scale.active
