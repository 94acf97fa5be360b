"""The export of a checkpoint to a directory."""

import json

import pytest
import torch
from safetensors import safe_open

import nsa
from tests.trainers.runs import small
from tests.trainers.test_generate import checkpointed
from trainers import checkpoint, export, manifest


@pytest.mark.parametrize("changes", [
    {}, {"model__attention": "dense", "train__precision": "fp64"},
], ids=["usual", "dense fp64"])  # fmt: skip
def test_a_directory_is_bitwise_the_model_of_the_checkpoint(changes, tmp_path):
    run, model = checkpointed(tmp_path / "run", small(**changes))
    assert export.main([str(run), str(tmp_path / "a.directory")]) == 0
    found = nsa.load_model(tmp_path / "a.directory")
    mine, theirs = model.state_dict(), found.state_dict()
    assert found.config == model.config
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert {x.dtype for x in theirs.values()} == {x.dtype for x in mine.values()}
    # `trainers.generate` uses `checkpoint.load_model`.
    path, _ = manifest.choose(run)
    read = checkpoint.load_model(path, manifest.read(path).settings).state_dict()
    assert all(torch.equal(mine[name], read[name]) for name in mine)
    with safe_open(tmp_path / "a.directory/model.safetensors", "pt") as file:
        assert file.metadata()["step"] == "3"
        assert "train.precision" in json.loads(file.metadata()["settings"])


@pytest.mark.parametrize(("changes", "target", "says"), [
    ({"attention__uniform_gate": True}, "new", "a directory cannot describe"),
    ({}, "run/checkpoints/latest", "cannot write"),
])  # fmt: skip
def test_what_cannot_be_exported_is_one_sentence(changes, target, says, tmp_path, capsys):
    run, _ = checkpointed(tmp_path / "run", small(**changes))
    assert export.main([str(run), str(tmp_path / target)]) == 15
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert not (tmp_path / "new").exists()
