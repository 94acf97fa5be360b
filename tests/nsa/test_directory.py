"""A model as a directory: loading is bitwise, and damage is reported in one sentence."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import nsa
from tests.nsa.cases import model_config


def saved(path, dtype=torch.float32, **changes):
    torch.manual_seed(0)
    model = nsa.Transformer(model_config(n_layers=2, **changes)).to(dtype)
    nsa.save_model(model, path, {"step": "7"})
    return model


@pytest.mark.parametrize("changes", [
    {}, {"attention": "dense"}, {"compress": "mean", "gate_hidden": 3},
    {"dtype": torch.bfloat16}, {"dtype": torch.float64},
])  # fmt: skip
def test_a_model_is_bitwise_the_same_after_a_round_trip(changes, tmp_path):
    model = saved(tmp_path / "new" / "model", **changes)
    state = torch.get_rng_state()
    again = nsa.load_model(tmp_path / "new" / "model")
    assert torch.equal(torch.get_rng_state(), state)
    assert again.config == model.config
    assert again.state_dict().keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        found = again.state_dict()[name]
        assert found.dtype == weight.dtype
        assert torch.equal(found, weight), name
    assert all(weight.requires_grad for weight in again.parameters())
    tokens = torch.randint(64, (1, 20))
    assert torch.equal(again(tokens), model(tokens))
    with safe_open(tmp_path / "new" / "model" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "7"}


@pytest.mark.parametrize("part", ["model", "block"])
def test_a_compiled_model_is_saved_under_the_names_of_the_plain_model(part, tmp_path):
    model = nsa.Transformer(model_config(n_layers=2))
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    if part == "model":
        model = torch.compile(model, backend="eager")
    else:
        model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    nsa.save_model(model, tmp_path)
    again = nsa.load_model(tmp_path).state_dict()
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], weight) for name, weight in weights.items())


def change(path, **fields):
    """Changes fields of the configuration; the value None removes a field."""
    found = json.loads((path / "config.json").read_text())
    fields = found["model"] | fields
    found["model"] = {name: value for name, value in fields.items() if value is not None}
    (path / "config.json").write_text(json.dumps(found))


def truncate(path):
    (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-40])


HARMS = {
    "config.json": lambda path: (path / "config.json").unlink(),
    "model.safetensors": lambda path: (path / "model.safetensors").unlink(),
    "Expecting value": lambda path: (path / "config.json").write_text("not JSON"),
    "does not have the model_type 'nsa'": lambda path: (path / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 64}'
    ),
    "ModelConfig must be a mapping; got None": lambda path: (path / "config.json").write_text(
        '{"model_type": "nsa"}'
    ),
    "unexpected keyword argument 'depth'": lambda path: change(path, depth=3),
    "missing 1 required keyword-only argument: 'dim'": lambda path: change(path, dim=None),
    "NSAConfig must be a mapping; got 'junk'": lambda path: change(path, nsa="junk"),
    "dim must be a positive int; got '16'": lambda path: change(path, dim="16"),
    "n_layers must be a positive int; got -1": lambda path: change(path, n_layers=-1),
    "rope_base must be a positive float; got nan": lambda path: change(
        path, rope_base=float("nan")
    ),
    "attention must be one of": lambda path: change(path, attention="linear"),
    r"n_heads \(3\) must be a multiple": lambda path: change(path, n_heads=3),
    "window must be a positive int": lambda path: change(path, nsa={"window": 0}),
    "describes": lambda path: change(path, n_layers=10**9),
    "size mismatch for": lambda path: change(path, mlp_hidden=17, vocab_size=61),
    "MetadataIncompleteBuffer|invalid|incomplete": truncate,
}


@pytest.mark.parametrize("says", HARMS)
def test_a_damaged_or_foreign_directory_is_refused_in_one_sentence(says, tmp_path):
    saved(tmp_path / "model")
    HARMS[says](tmp_path / "model")
    with pytest.raises(ValueError, match=says) as caught:
        nsa.load_model(tmp_path / "model")
    assert str(caught.value).startswith(f"{tmp_path / 'model'} cannot be loaded as a model: ")
    assert "\n" not in str(caught.value)


def test_a_directory_that_was_not_written_to_its_end_is_refused(tmp_path):
    """After the failed write, no old configuration is left beside new weights."""
    saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(OSError, match="directory"):
        saved(tmp_path)
    with pytest.raises(ValueError, match=r"config\.json"):
        nsa.load_model(tmp_path)


def test_a_configuration_that_cannot_be_written_leaves_the_earlier_model(tmp_path):
    saved(tmp_path)
    names = "config.json", "model.safetensors"
    before = [(tmp_path / name).read_bytes() for name in names]
    (tmp_path / ".config.json.new").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        saved(tmp_path)
    assert [(tmp_path / name).read_bytes() for name in names] == before


def test_both_files_are_on_the_disk_before_the_configuration_is_in_place(tmp_path, monkeypatch):
    """An empty config.json after a power failure would also prevent a further export."""
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append((
        Path(os.readlink(f"/proc/self/fd/{fd}")).name, os.fstat(fd).st_size > 0,
        (tmp_path / "config.json").exists(),
    )))  # fmt: skip
    saved(tmp_path)
    assert sorted(synced) == [
        (".config.json.new", True, False), (".model.safetensors.new", True, False),
    ]  # fmt: skip


def test_a_model_of_another_kind_is_not_overwritten(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_text("theirs")
    with pytest.raises(FileExistsError, match="of another kind; name another directory"):
        saved(tmp_path)
    assert (tmp_path / "model.safetensors").read_text() == "theirs"
