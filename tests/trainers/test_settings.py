"""Settings and command line: precedence, origins, includes, and a sentence for each error."""

from __future__ import annotations

import contextlib
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.mounts import tmpfs
from tests.trainers.runs import CONFIG, python
from trainers import command_line, entry, settings
from trainers.contract import dumps, environ, flags
from trainers.contract.errors import UsageError
from trainers.schema import keys


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


def test_options_are_settings_with_their_own_origin_and_set_overrides_them():
    arguments = command_line.parse(
        ["--dataset", "recall", "--steps", "7", "--set", "train.steps=9", "--resume"],
        "trainers.ddp", {"CONFIG": str(CONFIG)},
    )  # fmt: skip
    plain = settings.resolve(
        arguments.config, {}, arguments.overrides, "trainers.fsdp", arguments.origins
    ).as_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert set(plain) == set(keys()) > set(command_line.OPTIONS.values())
    assert all(key.help.endswith(".") or name.startswith("model.") for name, key in keys().items())
    assert plain["data.source"] == {"value": "recall", "origin": "--dataset"}
    assert plain["train.steps"] == {"value": 9, "origin": "--set"}
    assert plain["checkpoint.resume"] == {"value": "auto", "origin": "--resume"}
    assert plain["train.strategy"] == {"value": "fsdp", "origin": "entry trainers.fsdp"}
    other = settings.resolve(CONFIG, {}, {"train.strategy": "ddp"}, "trainers.fsdp").as_dict()
    assert other["train.strategy"]["value"] == "ddp"


@pytest.mark.parametrize("flag", flags.FLAGS.values(), ids=lambda flag: flag.name)
def test_a_flag_takes_type_limits_and_help_from_its_key_and_sets_it(flag):
    """Besides its key, a flag of this project needs only one row in `flags.OWN`."""
    examples = {bool: "1", int: "2", float: flag.default, str: "0:1"}
    text = (
        "raise@2" if flag.name == "NSA_DRILL" else examples.get(flag.key.kind) or flag.key.kind[1]
    )
    value = flags.parse(flag.name, text)
    assert flags.parse(flag.name, flags.format_value(value)) == value
    assert flag.key.help.endswith(".")
    if flag.key.kind is not str:
        with pytest.raises(UsageError, match=flag.name):
            flags.parse(flag.name, "no such value")
    if flag.key.kind is float:
        for wrong in ("nan", "inf", "1e400", str(flag.key.high * 2)):
            with pytest.raises(UsageError, match=f"{flag.name} cannot be '{re.escape(wrong)}'"):
                flags.parse(flag.name, wrong)
    if flag.setting:
        assert keys()[flag.setting] is flag.key
        resolved = settings.resolve(None, {flag.name: text})
        assert resolved.origins[flag.setting] == f"flag {flag.name}"
        assert resolved.as_dict()[flag.setting]["value"] == value


WRONG = {
    "unknown_key": ({}, {"train.stepz": 1}, "train.stepz", "did you mean 'train.steps'"),
    "unknown_flag": ({"NSA_LRR": "1"}, {}, "NSA_LRR", "did you mean 'NSA_LR'"),
    "flag_value": ({"NSA_LR": "fast"}, {}, "NSA_LR", "a number"),
    "below_a_bound": ({}, {"train.batch_size": "0"}, "train.batch_size", "from 1 to 2^20"),
    "not_finite": ({}, {"train.lr": "nan"}, "train.lr", "a number"),
    "a_decay_of_one": ({}, {"optim.beta2": 1}, "optim.beta2", "from 0 to 0.999999"),
    "not_a_choice": ({}, {"train.precision": "fp8"}, "train.precision", "fp32, bf16"),
    "not_a_bool": ({}, {"ddp.find_unused": "maybe"}, "ddp.find_unused", "true or false"),
    "model_rule": ({}, {"model.d_k": "31"}, "d_k", "even"),
    "no_heads": ({}, {"model.n_heads": 0}, "model.n_heads", "a whole number from 1 to 2^20"),
    "too_few_blocks": ({}, {"model.nsa.n_select": 2}, "model.nsa: n_select", "at least 3"),
    "gaps": ({}, {"model.nsa.block_stride": 5}, "model.nsa: block_stride", "exceed block_size"),
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
    "recall_within_window": (
        {}, {"data.source": "recall", "model.nsa.window": "64"}, "model.nsa.window", "window",
    ),
    "right_bytes_of_text": (
        {}, {"data.source": "text", "train.stop_at_bytes_right": "0.9"},
        "train.stop_at_bytes_right", "recall",
    ),
    "compiled_documents": (
        {}, {"data.documents": "separate", "data.source": "text", "train.compile": 1},
        "train.compile", "would compile anew",
    ),
    "export_of_an_ablation": (
        {"NSA_FORCE_BRANCH": "win"}, {"checkpoint.export": "exported"},
        "checkpoint.export=exported", "cannot describe",
    ),
    "documents_of_noise": ({}, {"data.documents": "separate"}, "data.source", "have no documents"),
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


def test_an_included_config_is_weaker_relative_to_its_file_and_named_as_origin(tmp_path):
    (tmp_path / "sub").mkdir()
    base, middle, top = tmp_path / "base.yaml", tmp_path / "sub/middle.yaml", tmp_path / "top.yaml"
    base.write_text("nsa: {w: 16}\nmodel: {vocab_size: 256}\ntrain: {steps: 7, seed: 3}\n")
    middle.write_text("include: ../base.yaml\nmodel: {nsa: {window: 8}}\ntrain: {steps: 8}\n")
    top.write_text("include: sub/middle.yaml\ntrain: {steps: 9}\n")
    found = settings.resolve(top, {}).as_dict()
    assert found["train.steps"] == {"value": 9, "origin": f"config {top}"}
    assert found["model.nsa.window"] == {"value": 8, "origin": f"config {tmp_path}/sub/middle.yaml"}
    assert found["train.seed"] == {"value": 3, "origin": f"config {tmp_path}/sub/../base.yaml"}


@pytest.mark.parametrize(
    ("yaml", "words"),
    [
        ("include: c.yaml", "name each other"),
        ("include: 0.yaml", "more than 5 follow each other"),
        ("include: none.yaml", "there is no such file"),
        ("include: wrong.yaml", "wrong.yaml: there is no setting 'train.stepz'"),
    ],
)
def test_a_wrong_include_is_a_usage_error_with_its_file(tmp_path, yaml, words):
    path = tmp_path / "c.yaml"
    path.write_text(yaml)
    (tmp_path / "wrong.yaml").write_text("train: {stepz: 1}")
    for depth in range(5):
        (tmp_path / f"{depth}.yaml").write_text(f"include: {depth + 1}.yaml")
    with pytest.raises(UsageError) as caught:
        settings.resolve(path, {})
    assert words in str(caught.value)
    assert str(tmp_path) in str(caught.value)


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
    """A value of any type is accepted, or raises UsageError."""
    overrides = dict(settings.flatten(tree))
    with contextlib.suppress(UsageError):
        assert json.dumps(settings.resolve(None, {}, overrides).as_dict())


def test_check_prints_every_setting_with_its_origin_and_loads_no_torch(tmp_path):
    program = (
        "import sys; from trainers.entry import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules; sys.exit(code)"
    )
    words = ("-c", program, "--config", CONFIG, "--check", "--set", "train.lr=1")
    done = python(tmp_path, *words, NSA_ACCUM="2")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["train.lr"] == {"value": 1.0, "origin": "--set"}
    assert printed["model.dim"]["origin"] == f"config {CONFIG}"
    assert printed["train.accumulate"] == {"value": 2, "origin": "flag NSA_ACCUM"}


@pytest.mark.parametrize(
    ("words", "variables", "says"),
    [
        (["--config", "/no/such.yaml"], {}, "there is no regular file"),
        (["--confg", "x"], {}, "--help shows the options"),
        (["--set", "train.lr"], {}, "has no value"),
        (["--set", "ddp.static_graph=1", "--set", "train.accumulate=2"], {}, "is rejected"),
        (["--steps", "nan"], {}, "--steps: train.steps cannot be 'nan'"),
        (["--run-dir", "/proc/nope"], {}, "cannot create the directory"),
        (["--resume"], {}, "name it with --run-dir"),
        (["--ddp", "1"], {}, "needs torchrun"),
        (["--ddp", "0"], {"WORLD_SIZE": "2", "RANK": "0"}, "for one process"),
        ([], {"RANK": "x"}, "the variable RANK cannot be 'x'; it takes a whole number from 0"),
        (
            ["--steps", "x"],
            {"NSA_CONSOLE_RUN_DIR": "r", "NSA_CONSOLE_RUN_ID": "p", "RANK": "y"},
            "the variable RANK cannot be 'y'",
        ),
    ],
)
def test_a_wrong_start_exits_with_13_and_one_sentence_and_leaves_nothing(
    tmp_path, words, variables, says, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(environ, "snapshot", lambda: variables)
    monkeypatch.setattr(dumps, "ignore", lambda: None)
    assert entry.main(words) == 13
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["extra"], 13, "unrecognized arguments"),
        (["--ddp", "1"], 13, "torchrun -m {module} "),
        (["--set", "checkpoint.resume=/no/such"], 15, "has no verified checkpoint"),
    ],
    ids=["arguments", "ranks", "training"],
)
def test_an_error_names_the_module_that_was_started(tmp_path, words, code, says):
    module = "trainers.fsdp"
    start = ("-m", module, "--config", CONFIG, "--run-dir", tmp_path / "run")
    done = python(tmp_path, *start, *words)
    assert done.returncode == code, done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"{module}: ")
    assert says.format(module=module) in done.stderr


def test_a_wrong_start_inside_a_run_is_in_its_heartbeat_and_metrics(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    variables = {"NSA_CONSOLE_RUN_DIR": str(run), "NSA_CONSOLE_RUN_ID": "p-1/0-x"}
    words = ("-m", "trainers.ddp", "--set", "train.stepz=1")
    done = python(tmp_path, *words, cwd=tmp_path, **variables)
    assert done.returncode == 13
    records = [json.loads(x) for x in (run / "heartbeat_rank0.jsonl").read_text().splitlines()]
    assert [record["msg"] for record in records] == ["error", "exit"]
    assert "train.stepz" in records[0]["error"]
    assert records[0]["exit_code"] == 13
    assert "train.stepz" in (run / "logs/attempt1/rank0.log").read_text()
    metrics = json.loads((run / "metrics.json").read_text())
    assert (metrics["steps_done"], metrics["exit_code"]) == (0, 13)


def test_a_start_by_hand_that_is_rejected_changes_no_record_of_the_run_there(tmp_path):
    """The environment names the directory, so the run in it may have ended or be alive."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "heartbeat_rank0.jsonl").write_text("{}\n")
    (run / "metrics.json").write_text('{"steps_done": 7}')
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    words = ("-m", "trainers.ddp")
    done = python(tmp_path, *words, cwd=tmp_path, NSA_CONSOLE_RUN_DIR=str(run))
    assert done.returncode == 13
    assert "already contains a run" in done.stderr
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


def test_a_full_disk_does_not_change_the_exit_code(tmp_path):
    with tmpfs(tmp_path, 1) as run:
        (run / "fill").write_bytes(bytes(1 << 20))
        variables = {"NSA_CONSOLE_RUN_DIR": str(run), "NSA_CONSOLE_RUN_ID": "p-1/0-x"}
        words = ("-m", "trainers.ddp", "--set", "train.stepz=1")
        done = python(tmp_path, *words, cwd=tmp_path, **variables)
    assert done.returncode == 13


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


@pytest.mark.parametrize(("written", "uses_flash"), [
    ("true", True), ("1", True), ("'true'", True), ("false", False), ("0", False),
    ("'False'", False),
])  # fmt: skip
def test_each_spelling_of_a_boolean_has_its_meaning_under_a_name_of_other_systems(
    written, uses_flash, tmp_path
):
    path = tmp_path / "foreign.yaml"
    path.write_text(f"runtime: {{use_flash: {written}, gradient_checkpointing: {written}}}\n")
    found = settings.resolve(path, {}).settings
    assert found.attention.no_flash is not uses_flash
    assert found.train.recompute == ("all" if uses_flash else "none")
