"""`trainers.generate` and `trainers.load`: they read a checkpoint, or name its damage."""

import json
import shutil

import pytest
import torch

from nsa.generate import generate
from nsa.model import Transformer
from tests.trainers.runs import CONFIG, python, small
from tests.trainers.test_tokenizer import bytewise
from trainers import checkpoint, load, manifest, optim, settings, tokenizer
from trainers.checkpoint import Parts
from trainers.failures import CheckpointError
from trainers.generate import main
from trainers.guard import Spikes
from trainers.manifest import MANIFEST, Manifest
from trainers.parallel import Single
from trainers.precision import LossScale, weights_dtype
from trainers.saver import Saver

MISSING = "missing"
CHANGES = small(model__init_std=0.5, attention__uniform_gate=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Returns a run directory with a checkpoint of a random model, and the model."""
    return checkpointed(tmp_path_factory.mktemp("run"), CHANGES)


def checkpointed(path, changes, infinite=False):
    """Saves a checkpoint of a random model. Returns the run directory and the model."""
    path.mkdir(exist_ok=True)
    resolved = settings.resolve(CONFIG, {}, changes)
    torch.manual_seed(0)
    model = Transformer(resolved.settings.model, resolved.settings.attention)
    model = model.to(weights_dtype(resolved.settings.train.precision))
    if infinite:
        torch.nn.init.constant_(next(model.parameters()), torch.inf)
    optimizer = optim.build(model, resolved.settings.optim)
    values = {key: entry["value"] for key, entry in resolved.as_dict().items()}
    cpu = torch.device("cpu")
    scale = LossScale(resolved.settings.scaler, False, cpu)
    parts = Parts(Single(cpu), model, optimizer, scale, Spikes(0.0, cpu))
    saver = Saver(path, parts, resolved.settings.checkpoint)
    saver.save(Manifest(3, 384, {"position": 12}, settings=values))
    return path, model


def test_a_checkpoint_is_loaded_whole_or_its_damage_is_named(run, tmp_path, monkeypatch):
    path, model = run
    whole = path / "checkpoints" / "step_00000003"
    count = sum(each.numel() for each in model.parameters())
    assert f"step 3: {count:,} weights and" in load.load(whole)
    folder = shutil.copytree(whole, tmp_path / "step_00000003")
    verified = manifest.verify(folder)
    (folder / MANIFEST).rename(folder / "aside")
    assert checkpoint.load_model(folder, verified.settings), "the manifest is not read again"
    (folder / "aside").rename(folder / MANIFEST)
    (shard,) = folder.glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="is damaged"):
        load.load(folder)
    monkeypatch.setattr(manifest, "verify", manifest.read)  # so only the load finds the damage
    with pytest.raises(CheckpointError, match="cannot be read"):
        load.load(folder)
    bad, _ = checkpointed(tmp_path / "bad", CHANGES, infinite=True)
    with pytest.raises(CheckpointError, match="a weight that is not finite, in "):
        load.load(bad / "checkpoints" / "step_00000003")


def test_greedy_text_is_that_of_whole_forwards_and_a_seed_decides_what_is_drawn(run, tmp_path):
    path, model = run
    tokens = torch.tensor([list(b"import os")])
    for _ in range(40):
        tokens = torch.cat((tokens, model(tokens)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(generate(model, tokens[:, :9], 40), tokens[:, 9:])
    drawn = [
        generate(model, tokens, 20, 1.0, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    words = ("-m", "trainers.generate", path, "--prompt", "import os", "--tokens", 40)
    done = python(tmp_path, *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("import os")
    assert all(c.isprintable() or c == "\n" for c in done.stdout)


def test_a_checkpoint_of_gpt2_tokens_generates_text_or_says_what_is_missing(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    path, _ = checkpointed(
        tmp_path / "run", small(data__source="text", data__tokenizer="gpt2",
                                model__vocab_size=50304)
    )  # fmt: skip
    words = [str(path), "--prompt", "aä", "--tokens", "3"]
    assert main(words) == 12
    assert "files of the gpt2 tokenizer are missing" in capsys.readouterr().err
    monkeypatch.setattr(tokenizer, "build", lambda name, end: bytewise())
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("aä")
    (file,) = path.glob("checkpoints/*/manifest.json")
    record = json.loads(file.read_text())
    for name in ("byte", "x", None, [1]):
        changed = record["settings"] | {"data.tokenizer": name}
        file.write_text(json.dumps(record | {"settings": changed}))
        assert main(words) == 15
        assert "50304 tokens, which does not fit its tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("nowhere", "--prompt", "x"), 15, "nowhere has no verified checkpoint"),
        (("nowhere", "--prompt", ""), 13, "--prompt is empty"),
        (("nowhere",), 13, "--prompt"),
        (("nowhere", "--prompt", "x", "--tokens", 10**11), 13, "a whole number from 1 to 2^20"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(words, code, says, capsys):
    assert main([str(word) for word in words]) == code
    said = capsys.readouterr().err
    assert says in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"model.nsa.windw": 3},
        {"model.n_heads": "many"},
        {"attention.flash_only": True, "attention.no_flash": True},
        *({f"model.{key}": MISSING} for key in ("dim", "n_layers")),
    ],
    ids=str,
)
def test_a_manifest_that_describes_no_such_model_is_one_sentence(run, changes, tmp_path):
    path, _ = run
    copy = tmp_path / "step_00000003"
    shutil.copytree(path / "checkpoints" / copy.name, copy)
    record = json.loads((copy / MANIFEST).read_text())
    changed = {k: v for k, v in (record["settings"] | changes).items() if v != MISSING}
    for settings_of_it in (changed, {}):
        (copy / MANIFEST).write_text(json.dumps(record | {"settings": settings_of_it}))
        with pytest.raises(CheckpointError, match="does not describe its model") as caught:
            checkpoint.load_model(copy, manifest.read(copy).settings)
        assert len(str(caught.value).splitlines()) == 1
