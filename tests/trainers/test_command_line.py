"""The command line of the trainers: options, CONFIG, --ddp, --resume."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.trainers.runs import CONFIG, ROOT, environment
from trainers import command_line, settings
from trainers.contract.errors import UsageError


def test_every_option_names_a_setting():
    known = settings.types()
    assert {key for _, key, _ in command_line.OPTIONS} <= known.keys()


def test_options_are_settings_with_their_own_origin_and_set_has_the_last_word():
    said = command_line.parse(
        ["--dataset", "recall", "--steps", "7", "--precision", "bf16", "--loader-timeout", "5",
         "--set", "train.steps=9", "--resume"], "trainers.ddp", {"CONFIG": str(CONFIG)},
    )  # fmt: skip
    resolved = settings.resolve(said.config, {}, said.overrides, "trainers.ddp", said.origins)
    found = resolved.as_dict()
    assert said.config == CONFIG
    assert found["data.source"] == {"value": "recall", "origin": "--dataset"}
    assert found["train.precision"] == {"value": "bf16", "origin": "--precision"}
    assert found["train.steps"]["value"] == 9
    assert found["data.timeout_s"]["value"] == 5.0
    assert found["checkpoint.resume"] == {"value": "auto", "origin": "--resume"}


@pytest.mark.parametrize(
    ("line", "variables", "sentence"),
    [
        (["--ddp", "1"], {}, "needs torchrun"),
        (["--ddp", "0"], {"WORLD_SIZE": "2", "RANK": "0"}, "for one process"),
        (["--ddp", "2"], {}, "invalid choice"),
        (["--step", "3"], {}, "unrecognized arguments"),
        (["--steps"], {}, "expected one argument"),
        (["--set", "train.steps"], {}, "has no value"),
    ],
)
def test_wrong_words_are_refused_in_a_sentence(line, variables, sentence):
    with pytest.raises(UsageError, match=sentence):
        command_line.parse(line, "trainers.ddp", variables)


def test_the_fsdp_entry_point_sets_the_strategy_and_says_so():
    found = settings.resolve(CONFIG, {}, {}, "trainers.fsdp").as_dict()
    assert found["train.strategy"] == {"value": "fsdp", "origin": "entry trainers.fsdp"}
    found = settings.resolve(CONFIG, {}, {"train.strategy": "ddp"}, "trainers.fsdp").as_dict()
    assert found["train.strategy"]["value"] == "ddp"


def test_resume_without_a_directory_and_an_unknown_option_end_with_13(tmp_path):
    for line, sentence in (
        (["--resume"], "name it with --run-dir"),
        (["--stepz", "4"], "--help shows the options"),
        (["--steps", "nan"], "--steps: train.steps cannot be 'nan'"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "trainers.fsdp", *line], capture_output=True, text=True,
            cwd=tmp_path, env=environment(tmp_path, PYTHONPATH=str(ROOT)),
        )  # fmt: skip
        assert done.returncode == 13
        assert sentence in done.stderr
        assert "Traceback" not in done.stderr
        assert not (tmp_path / "artifacts").exists()


def test_check_prints_settings_and_where_they_come_from(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "trainers.ddp", "--check", "--steps", "3"],
        capture_output=True, text=True, cwd=tmp_path,
        env=environment(tmp_path, CONFIG=str(CONFIG), NSA_LR="0.5"),
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found["train.lr"] == {"value": 0.5, "origin": "flag NSA_LR"}
    assert found["train.steps"] == {"value": 3, "origin": "--steps"}
    assert found["model.dim"]["origin"] == f"config {CONFIG}"
