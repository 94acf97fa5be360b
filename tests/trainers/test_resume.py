"""Rank 0 decides what is resumed: ranks that see other files go on alike, or fail alike."""

from __future__ import annotations

import os
import shutil

import pytest

from tests.trainers.ranks import together
from tests.trainers.runs import CONFIG, small
from tests.trainers.test_checkpoint import made, saved
from trainers import build, settings
from trainers.contract import environ
from trainers.report import Report


def resume(rank, parallel, member, wish="auto"):
    """Returns the step that was resumed and one weight, or 0 for a start at step 1."""
    resolved = settings.resolve(CONFIG, {}, small(checkpoint__resume=wish))
    parts = made(7 + rank, parallel)
    found = build.resume(resolved.settings, member, Report(resolved, member), parts)
    return (found.step, parts.model.embed.weight[0, 0].item()) if found else (0, 0.0)


SUPERVISED = {environ.RUN_ID: "r", environ.ATTEMPT: "2"}


@pytest.mark.parametrize(("wish", "variables"), [("auto", {}), ("", SUPERVISED)])
def test_ranks_that_list_other_checkpoints_resume_what_rank_0_chooses(tmp_path, wish, variables):
    whole, bare = tmp_path / "whole", tmp_path / "bare"
    parts = made(1)
    saved(whole, parts, 3)
    weight = parts.model.embed.weight[0, 0].item()

    def work(rank, parallel, member):
        return resume(rank, parallel, member, wish)

    assert together([whole, bare], work, variables) == [(3, weight)] * 2
    assert together([bare, whole], work, variables) == [(0, 0.0)] * 2


def elsewhere(tmp_path, rank: int):
    """Returns the view of one host: the same names, other files."""
    host = tmp_path / f"host{rank}"
    (host / "run").mkdir(parents=True)
    return host


HARMS = {
    "missing": (lambda run: shutil.rmtree(run / "checkpoints"), "no readable manifest.json"),
    "another": (lambda run: saved(run, made(2), 3), "another checkpoint than on rank 0"),
    "a file is missing": (
        lambda run: (run / "checkpoints/step_00000003/__0_0.distcp").unlink(), "cannot be read",
    ),
}  # fmt: skip


@pytest.mark.parametrize("harm", HARMS)
def test_a_rank_that_cannot_read_what_rank_0_chose_ends_all_with_15(tmp_path, harm):
    hosts = [elsewhere(tmp_path, rank) for rank in range(2)]
    saved(hosts[0] / "run", made(1), 3)
    shutil.copytree(hosts[0] / "run", hosts[1] / "run", dirs_exist_ok=True)
    change, sentence = HARMS[harm]
    change(hosts[1] / "run")

    def work(rank, parallel, member):
        os.chdir(hosts[rank])
        member.run = member.run.relative_to(hosts[rank])
        return resume(rank, parallel, member)

    mine, theirs = together([host / "run" for host in hosts], work)
    assert mine == theirs
    assert mine[:2] == ("CheckpointError", 15)
    assert sentence in mine[2]
    assert mine[2].startswith("rank 1: ")


def test_checkpoints_that_cannot_be_listed_are_not_taken_for_none(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").write_text("in the way")
    mine, theirs = together([run, run], resume)
    assert mine == theirs
    assert mine[:2] == ("CheckpointError", 15)
    assert "Not a directory" in mine[2]


def test_ranks_with_other_settings_are_refused_with_what_differs(tmp_path):
    def work(rank, parallel, member):
        del member
        changes = small(train__lr=0.002 if rank else 0.001, data__path="/" * (rank + 1))
        resolved = settings.resolve(CONFIG, {}, changes | {"data.source": "text"})
        return build.refuse_other_settings(resolved.settings, parallel)

    mine, theirs = together([tmp_path / "run"] * 2, work)
    assert mine == theirs
    assert mine[:2] == ("UsageError", 13)
    assert mine[2] == "rank 1 has other settings than rank 0: train.lr is 0.002 instead of 0.001"
