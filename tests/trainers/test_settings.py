"""Settings: precedence, origins, and what a wrong one is told. No torch anywhere here."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainers.runs import CONFIG, ROOT, environment
from trainers import settings
from trainers.contract import flags
from trainers.contract.errors import UsageError


def test_defaults_then_yaml_then_flags_then_command_line_win(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("train: {lr: 0.5, steps: 7, accumulate: 3, batch_size: 2}\n")
    resolved = settings.resolve(
        config, {"NSA_LR": "0.25", "NSA_ACCUM": "4"}, {"train.accumulate": "5"}
    )
    train, origins = resolved.settings.train, resolved.origins
    assert (train.lr, train.steps, train.accumulate) == (0.25, 7, 5)
    assert origins["train.lr"] == "flag NSA_LR"
    assert origins["train.steps"] == f"config {config}"
    assert origins["train.accumulate"] == "--set"
    assert origins["train.seed"] == "default"


def test_every_value_is_told_with_its_origin_as_plain_data():
    plain = settings.resolve(CONFIG, {}, {"train.steps": 3}).as_dict()
    assert set(plain) == set(settings.types())
    assert plain["train.steps"] == {"value": 3, "origin": "--set"}
    assert json.loads(json.dumps(plain)) == plain


def test_every_flag_with_a_setting_sets_a_key_that_exists():
    known = settings.types()
    examples = {"bool": "1", "int": "2", "float": "1.0", "choice": None, "str": "0:1",
                "drill": "raise@2"}  # fmt: skip
    named = [flag for flag in flags.TABLE if flag.setting]
    assert named
    for flag in named:
        assert flag.setting in known, flag.name
        text = examples[flag.kind] or flag.choices[0]
        resolved = settings.resolve(None, {flag.name: text})
        assert resolved.origins[flag.setting] == f"flag {flag.name}"
        assert resolved.as_dict()[flag.setting]["value"] == flags.parse(flag.name, text)


WRONG = {
    "unknown_key": ({}, {"train.stepz": 1}, "train.stepz", "did you mean 'train.steps'"),
    "unknown_flag": ({"NSA_LRR": "1"}, {}, "NSA_LRR", "did you mean 'NSA_LR'"),
    "flag_value": ({"NSA_LR": "fast"}, {}, "NSA_LR", "a number"),
    "flag_reaches_a_bound": ({"NSA_DDP_BUCKET_MB": "9999999"}, {}, "NSA_DDP_BUCKET_MB", "whole"),
    "not_an_integer": ({}, {"train.steps": "1.5"}, "train.steps", "a whole number"),
    "below_a_bound": ({}, {"train.batch_size": "0"}, "train.batch_size", "at least 1"),
    "not_finite": ({}, {"train.lr": "nan"}, "train.lr", "a number"),
    "flag_not_finite": ({"NSA_LR": "1e400"}, {}, "NSA_LR", "a number"),
    "too_large_for_a_float": ({}, {"train.lr": 10**400}, "train.lr", "a number"),
    "not_a_choice": ({}, {"train.precision": "fp8"}, "train.precision", "fp32, bf16"),
    "not_a_bool": ({}, {"ddp.find_unused": "maybe"}, "ddp.find_unused", "true or false"),
    "model_rule": ({}, {"model.d_k": "31"}, "d_k", "even"),
    "no_heads": ({}, {"model.n_heads": 0}, "model.n_heads", "a whole number of at least 1"),
    "no_groups": ({}, {"model.n_kv_groups": 0}, "model.n_kv_groups", "of at least 1"),
    "half_layers": ({}, {"model.n_layers": 2.0}, "model.n_layers", "a whole number"),
    "a_layer_that_is_true": ({}, {"model.n_layers": True}, "model.n_layers", "a whole number"),
    "negative_eps": ({}, {"model.norm_eps": -1.0}, "model.norm_eps", "a number"),
    "nan_of_the_model": ({}, {"model.init_std": math.nan}, "model.init_std", "a number"),
    "no_attention": ({}, {"model.attention": "flash"}, "model.attention", "nsa or dense"),
    "no_window": ({}, {"model.nsa.window": 0}, "model.nsa.window", "of at least 1"),
    "too_few_blocks": ({}, {"model.nsa.n_select": 2}, "model.nsa: n_select", "at least 3"),
    "gaps": ({}, {"model.nsa.block_stride": 5}, "model.nsa: block_stride", "exceed block_size"),
    "no_phi": ({}, {"model.nsa.compress": "max"}, "model.nsa.compress", "mlp or mean"),
    "no_gate": ({}, {"model.nsa.gate": None}, "model.nsa.gate", "sigmoid or softmax"),
    "no_branch": ({}, {"attention.force_branch": "slc"}, "force_branch", "none, cmp, sel, win"),
    "switches_that_contradict": (
        {}, {"attention.flash_only": 1, "attention.no_flash": 1}, "settings: attention:", "exclude",
    ),
    "vocabulary": ({}, {"model.vocab_size": "257"}, "model.vocab_size", "exactly 256"),
    "gpt2_vocabulary": ({}, {"data.source": "text", "data.tokenizer": "gpt2"}, "256", "50304"),
    "gpt2_of_noise": (
        {}, {"data.tokenizer": "gpt2", "model.vocab_size": "50304"}, "synthetic", "tokenizer=byte",
    ),
    "no_default_folder": ({}, {"data.source": "parquet"}, "data.path", "no default folder"),
    "static_graph": (
        {"NSA_DDP_STATIC_GRAPH": "1", "NSA_ACCUM": "2"}, {}, "NSA_DDP_STATIC_GRAPH", "no_sync",
    ),
    "bf16_on_gloo": ({"NSA_DDP_COMPRESS": "bf16"}, {"train.device": "cpu"}, "NCCL", "fp16"),
    "recall_too_long": (
        {}, {"data.source": "recall", "data.seq_len": "64"}, "data.seq_len", "lengthen",
    ),
    "recall_too_far": (
        {}, {"data.source": "recall", "data.recall_distance_max": "100"}, "=100", "lengthen",
    ),
    "recall_within_window": (
        {}, {"data.source": "recall", "model.nsa.window": "64"}, "model.nsa.window", "window",
    ),
    "right_bytes_of_text": (
        {}, {"data.source": "text", "train.stop_at_bytes_right": "0.9"},
        "train.stop_at_bytes_right", "recall",
    ),
    "no_folder": (
        {}, {"data.source": "text", "data.path": "/no/such"}, "/no/such", "there is no such folder",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_gets_one_sentence_that_names_it(case):
    variables, overrides, *words = WRONG[case]
    with pytest.raises(UsageError) as caught:
        settings.resolve(None, variables, overrides)
    sentence = str(caught.value)
    assert "\n" not in sentence
    for word in words:
        assert word in sentence


@pytest.mark.parametrize(
    ("yaml", "words"),
    [
        ("train: {stepz: 1}", ("c.yaml", "train.stepz", "train.steps")),
        ("trian: {steps: 1}", ("c.yaml", "trian")),
        ("train: 3", ("c.yaml", "'train'", "section")),
        ("train: {steps: many}", ("c.yaml", "train.steps", "a whole number")),
        ("train: {steps: [1]}", ("c.yaml", "train.steps")),
        ("train: {steps: {}}", ("c.yaml", "train.steps", "a whole number")),
        ("train: {steps: {a: 1}}", ("c.yaml", "train.steps")),
        ("model: {nsa: {windw: 3}}", ("c.yaml", "model.nsa.windw", "model.nsa.window")),
        ("model: {n_kv_groups: 3}", ("c.yaml", "n_kv_groups")),
        ("a: [", ("c.yaml", "line 1")),
    ],
)
def test_a_wrong_config_names_file_and_key(tmp_path, yaml, words):
    path = tmp_path / "c.yaml"
    path.write_text(yaml)
    with pytest.raises(UsageError) as caught:
        settings.resolve(path, {})
    for word in words:
        assert word in str(caught.value)


def test_an_empty_section_sets_nothing(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("train: {}\nmodel: {nsa:}\ndata:\n")
    assert set(settings.resolve(path, {}).origins.values()) == {"default", "entry trainers.ddp"}


def test_yaml_numbers_that_yaml_reads_as_words_still_count(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("train: {lr: 1e-3}")
    assert settings.resolve(path, {}).settings.train.lr == 1e-3


@given(st.dictionaries(st.text(max_size=12), st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["lr", "steps", "nsa", "dim", "x"]), inner, max_size=3),
), max_size=3).map(lambda tree: {"train": tree, "model": tree}) | st.dictionaries(
    st.sampled_from(["train", "model", "data", "x"]),
    st.dictionaries(st.sampled_from(["lr", "steps", "nsa", "dim", "path"]), st.none()
    | st.booleans() | st.integers() | st.floats() | st.text(max_size=5), max_size=3)))  # fmt: skip
def test_whatever_a_config_holds_it_resolves_or_is_refused(tree):
    """No value of any type gets past as anything else than a UsageError."""
    overrides = dict(settings.flatten(tree))
    with contextlib.suppress(UsageError):
        assert json.dumps(settings.resolve(None, {}, overrides).as_dict())


def test_check_prints_every_setting_with_its_origin_and_loads_no_torch(tmp_path):
    program = (
        "import sys; from trainers.entry import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "--config", str(CONFIG), "--check", "--set", "train.lr=1"],
        capture_output=True, text=True, cwd=ROOT, env=environment(tmp_path, NSA_ACCUM="2"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["train.lr"] == {"value": 1.0, "origin": "--set"}
    assert printed["train.accumulate"] == {"value": 2, "origin": "flag NSA_ACCUM"}


@pytest.mark.parametrize(
    "words",
    [
        ["--config", "/no/such.yaml"],
        ["--confg", "x"],
        ["--set", "train.lr"],
        ["--set", "train.stepz=1"],
        ["--set", "ddp.static_graph=1", "--set", "train.accumulate=2"],
        ["--run-dir", "/proc/nope"],
        ["--config", "/dev/zero"],
        ["extra"],
    ],
    ids=" ".join,
)
def test_a_wrong_start_is_told_in_one_sentence_at_once_and_leaves_nothing(tmp_path, words):
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "trainers.ddp", *words],
        capture_output=True, text=True, cwd=tmp_path, env=environment(tmp_path),
    )  # fmt: skip
    assert time.monotonic() - began < 2.0
    assert done.returncode == 13, done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_a_wrong_start_inside_a_run_is_in_its_heartbeat_and_metrics(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    variables = {"NSA_CONSOLE_RUN_DIR": str(run), "NSA_CONSOLE_RUN_ID": "p-1/0-x"}
    done = subprocess.run(
        [sys.executable, "-m", "trainers.ddp", "--set", "train.stepz=1"],
        capture_output=True, text=True, cwd=tmp_path, env=environment(tmp_path, **variables),
    )  # fmt: skip
    assert done.returncode == 13
    records = [json.loads(x) for x in (run / "heartbeat_rank0.jsonl").read_text().splitlines()]
    assert [record["msg"] for record in records] == ["error", "exit"]
    assert "train.stepz" in records[0]["error"]
    assert records[0]["exit_code"] == 13
    assert "train.stepz" in (run / "logs/attempt1/rank0.log").read_text()
    metrics = json.loads((run / "metrics.json").read_text())
    assert (metrics["steps_done"], metrics["exit_code"]) == (0, 13)


def test_a_configuration_may_use_the_names_of_other_systems(tmp_path):
    path = tmp_path / "foreign.yaml"
    path.write_text(
        "nsa: {l: 8, d: 4, l_sel: 16, n_sel: 4, w: 16, phi: avg}\n"
        "runtime: {precision: bf16, gradient_checkpointing: true}\n"
        "train: {seq_len: 64, accumulate_grad_batches: 2, save_every: 7, out_dir: artifacts/x}\n"
    )
    found = settings.resolve(path, {}).settings
    assert (found.model.nsa.block_size, found.model.nsa.window) == (8, 16)
    assert found.model.nsa.compress == "mean"
    assert (found.train.recompute, found.train.precision) == ("all", "bf16")
    assert (found.data.seq_len, found.train.accumulate, found.checkpoint.every) == (64, 2, 7)
    path.write_text("nsa: {l_slc: 8}\n")
    with pytest.raises(UsageError, match=r"did you mean 'nsa\.l_sel'"):
        settings.resolve(path, {})
