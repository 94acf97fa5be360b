"""Checkpoints: bitwise, and whole or not there whenever the process is killed."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time

import pytest
import torch

from nsa.model import Transformer
from tests.trainers.runs import CONFIG, ROOT, environment, small
from trainers import checkpoint, optim, settings
from trainers.data import Synthetic
from trainers.failures import CheckpointError
from trainers.parallel import Single

RESOLVED = settings.resolve(CONFIG, {}, small()).settings
ALONE = Single(torch.device("cpu"))


def made(seed: int) -> tuple[Transformer, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = Transformer(RESOLVED.model)
    return model, optim.build(model, RESOLVED.optim)


def steps(model, optimizer, first: int, last: int) -> list[torch.Tensor]:
    """Takes a few steps with a draw from the generator in each."""
    drawn = []
    for step in range(first, last):
        tokens = Synthetic(32, 0).read(step * 4, 4, 0, 1)[0].long()
        loss = torch.nn.functional.cross_entropy(
            model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        drawn.append(torch.rand(2))
    return drawn


def test_a_loaded_run_goes_on_bitwise(tmp_path):
    model, optimizer = made(1)
    steps(model, optimizer, 0, 3)
    position = checkpoint.Position(3, 384, 12, "f")
    path = checkpoint.save(tmp_path, ALONE, model, optimizer, position, {"a.b": 1})
    drawn = steps(model, optimizer, 3, 6)
    other, other_optimizer = made(2)
    assert checkpoint.load(path, other, other_optimizer) == position
    drawn_again = steps(other, other_optimizer, 3, 6)
    for mine, theirs in zip(drawn, drawn_again, strict=True):
        assert torch.equal(mine, theirs)
    for (name, mine), theirs in zip(model.state_dict().items(), other.state_dict().values(),
                                    strict=True):  # fmt: skip
        assert torch.equal(mine, theirs), name


def test_saving_the_same_step_again_replaces_it_and_leaves_nothing_else(tmp_path):
    model, optimizer = made(1)
    for tokens in (1, 2):
        checkpoint.save(
            tmp_path, ALONE, model, optimizer, checkpoint.Position(7, tokens, 0, ""), {}
        )
    folder = tmp_path / "checkpoints"
    assert sorted(p.name for p in folder.iterdir()) == ["latest", "step_00000007"]
    assert checkpoint.load(folder / "step_00000007", *made(2)).tokens_total == 2


@pytest.mark.parametrize("harm", ["truncated", "empty", "missing", "other model"])
def test_a_broken_checkpoint_is_told_in_a_sentence(tmp_path, harm):
    model, optimizer = made(1)
    path = checkpoint.save(tmp_path, ALONE, model, optimizer, checkpoint.Position(1, 1, 1, ""), {})
    file = path / checkpoint.STATE
    if harm == "missing":
        file.unlink()
    elif harm == "other model":
        torch.save({"model": {"x": torch.ones(1)}}, file)
    else:
        os.truncate(file, file.stat().st_size // 2 if harm == "truncated" else 0)
    with pytest.raises(CheckpointError, match="step_00000001"):
        checkpoint.load(path, *made(2))


SAVES_FOR_EVER = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.trainers.test_checkpoint import ALONE, checkpoint, made
model, optimizer = made(1)
step = 0
while True:
    step += 1
    position = checkpoint.Position(step, step, step, "")
    checkpoint.save(Path(sys.argv[1]), ALONE, model, optimizer, position, {{}})
"""


def test_a_save_killed_at_any_moment_leaves_the_former_checkpoint_whole(tmp_path):
    """SIGKILL at random moments of saving: `latest` always names a checkpoint that loads."""
    runs = [tmp_path / str(number) for number in range(3)]
    program = SAVES_FOR_EVER.format(root=str(ROOT))
    children = [
        subprocess.Popen([sys.executable, "-c", program, str(run)], env=environment(tmp_path))
        for run in runs
    ]
    try:
        for child, run in zip(children, runs, strict=True):
            end = time.monotonic() + 60
            while checkpoint.latest(run) is None:
                assert time.monotonic() < end
                time.sleep(0.01)
            time.sleep(random.uniform(0, 0.2))
            child.kill()
            child.wait()
            latest = checkpoint.latest(run)
            assert latest is not None
            whole = sorted((run / "checkpoints").glob("step_*"))
            assert latest in whole[-2:]
            for path in whole[-5:]:
                step = int(path.name.removeprefix("step_"))
                assert checkpoint.load(path, *made(2)).step == step
    finally:
        for child in children:
            child.kill()
            child.wait()


def test_what_a_killed_save_left_is_cleared_by_the_next(tmp_path):
    model, optimizer = made(1)
    left = tmp_path / "checkpoints" / ".step_00000001.tmp-1"
    left.mkdir(parents=True)
    (left / checkpoint.STATE).write_bytes(b"half")
    checkpoint.save(tmp_path, ALONE, model, optimizer, checkpoint.Position(2, 2, 2, ""), {})
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["latest", "step_00000002"]
