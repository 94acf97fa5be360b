"""Rank 0 chooses the checkpoint; the other ranks resume this checkpoint, or all ranks fail."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace

import pytest
import torch

from tests.trainers.ranks import together
from tests.trainers.runs import CONFIG, small
from tests.trainers.test_checkpoint import at, made, saved
from trainers import build, failures, optim, settings
from trainers.contract import environ
from trainers.contract.errors import UsageError
from trainers.run_records import Report
from trainers.saver import Saver
from trainers.schema import CheckpointSettings


def resume(rank, parallel, member, wish="auto"):
    """Resumes; returns the checkpoint's step and one weight, or zeros without a checkpoint."""
    resolved = settings.resolve(CONFIG, {}, small(checkpoint__resume=wish))
    parts = made(7 + rank, parallel)
    found = build.resume(resolved.settings, member, Report(resolved, member), parts, "source=x")
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
    """Returns the folder of one host; the names in it are the same on each host."""
    host = tmp_path / f"host{rank}"
    (host / "run").mkdir(parents=True)
    return host


HARMS = {
    "missing": (lambda run: shutil.rmtree(run / "checkpoints"), "no readable manifest.json"),
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


def test_a_lack_of_gpu_memory_in_a_resume_is_no_damage_of_the_checkpoint(tmp_path, monkeypatch):
    """The state of AdamW, twice the size of the weights, is allocated before it is loaded."""

    def is_full(_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    run = tmp_path / "run"
    saved(run, made(1), 3)
    monkeypatch.setattr(optim, "empty_state", is_full)
    ends = together([run, run], resume)
    assert [end[:2] for end in ends] == [("OutOfMemoryError", failures.OUT_OF_MEMORY)] * 2, ends


def test_checkpoints_that_cannot_be_listed_are_not_taken_for_none(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").write_text("in the way")
    mine, theirs = together([run, run], resume)
    assert mine == theirs
    assert mine[:2] == ("CheckpointError", 15)
    assert "Not a directory" in mine[2]


VALUES = {
    key: entry["value"] for key, entry in settings.resolve(CONFIG, {}, small()).as_dict().items()
}
CHANGES = [
    ({"train.batch_size": 2}, ""),  # the same sequences per step on two ranks
    ({"train.batch_size": 1, "train.accumulate": 2, "attention.sel_ranges": 1}, ""),
    ({"train.steps": 300, "eval.every": 3, "model.init_std": 0.5, "optim.fused": 0}, ""),
    ({"model.nsa.window": 16}, "model.nsa.window was 8 and is 16"),
    ({"model.rope_base": 500}, "model.rope_base was 10000.0 and is 500.0"),
    ({"model.nsa.gate": "softmax"}, "model.nsa.gate was 'sigmoid' and is 'softmax'"),
    ({"attention.uniform_gate": 1}, "attention.uniform_gate was False and is True"),
    ({"train.precision": "bf16"}, "train.precision was 'fp32' and is 'bf16'"),
    ({"train.batch_size": 4}, "sequences per step was 4 and is 8"),
    ({"train.lr": 0.1}, "train.lr was 0.0025 and is 0.1"),
    ({"train.min_lr_ratio": 0.5}, "end of the schedule was 'none' and is 100"),
    ({"optim.beta1": 0.5}, "optim.beta1 was 0.9 and is 0.5"),
    ({"train.seed": 1}, "data stream, seed was '1337' and is '1'"),
]
GROUP = {"train.precision": "precision", "train.batch_size": "batch", "train.seed": "data",
         "train.lr": "schedule", "train.min_lr_ratio": "schedule",
         "optim.beta1": "schedule"}  # fmt: skip


def test_a_resume_with_other_settings_names_each_and_takes_only_what_is_allowed(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    about = {"fingerprint": "source=x seed=1337", "position": 12}
    Saver(run, made(1), CheckpointSettings()).save(replace(at(3), settings=VALUES, data=about))

    def attempt(parallel, member, changes):
        resolved = settings.resolve(CONFIG, {}, small(train__batch_size=2) | changes)
        seed, said = resolved.settings.train.seed, []
        member.log = said.append
        try:
            report, parts = Report(resolved, member), made(2, parallel)
            found = build.resume(resolved.settings, member, report, parts, f"source=x seed={seed}")
        except UsageError as error:
            return str(error)
        return found.step, found.data, [text for text in said if "from the beginning" in text]

    def work(rank, parallel, member):
        return [
            attempt(parallel, member, changes | {"checkpoint.resume": "auto"} | allow)
            for changes, _ in CHANGES
            for allow in ({}, {"checkpoint.allow_change": GROUP.get(min(changes), "all")})
        ]

    mine, theirs = together([run, run], work)
    assert mine == theirs
    for (change, sentence), plain, allowed in zip(CHANGES, mine[::2], mine[1::2], strict=True):
        group = GROUP.get(min(change))
        if not sentence:
            assert plain == allowed == (3, about, [])
            continue
        assert sentence in plain
        assert (f"--allow-change {group}" in plain) == (group is not None)
        if group is None:
            assert sentence in allowed
        elif group == "data":
            assert allowed[:2] == (3, {})
            (note,) = allowed[2]
            assert sentence in note
        else:
            assert allowed == (3, about, [])
