"""A wrong flag or a wrong plan is rejected with one sentence."""

from __future__ import annotations

import contextlib
import os
from datetime import date
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console import plan
from console.plans import plan_file
from trainers.contract import flags, yamlfile
from trainers.contract.errors import UsageError

PLANS = sorted((Path(__file__).parents[3] / "configs/plans").glob("*.yaml"))
MINIMAL = {"name": "p", "phases": [{"name": "a"}]}


@pytest.mark.parametrize("path", PLANS, ids=lambda p: p.stem)
def test_every_shipped_plan_loads_and_is_named_like_its_file(path):
    assert plan_file.load(path).name == path.stem


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"phasess": []}, "did you mean 'phases'"),
        ({"name": "Bad Name"}, "lower-case"),
        ({"phases": []}, "at least one phase"),
        ({"phases": [{"name": "a"}, {"name": "a"}]}, "same name"),
        ({"phases": [{"nam": "a"}]}, "did you mean 'name'"),
        ({"phases": [{"name": "a", "nproc": 0}]}, "nproc"),
        ({"phases": [{"name": "a", "flags": {"NSA_LRR": 1}}]}, "did you mean 'NSA_LR'"),
        ({"phases": [{"name": "a", "flags": {"NSA_LR": "fast"}}]}, "a number"),
        ({"env": {"NCCL_ALGO": ["Ring"]}}, "env: NCCL_ALGO cannot be ['Ring']; write one text"),
        ({"phases": [{"name": "a", "flags": {"NCCL_ALGO": {"x": 1}}}]}, "write one text"),
        ({"phases": [{"name": "a" * 49}]}, "or '-', and have at most 48 characters"),
        ({"between": "maybe"}, "go or ask"),
        ({"watch": {"stall_floor": 3}}, "did you mean 'stall_floor_s'"),
        ({"watch": {"stall_floor_s": -1}}, "seconds"),
        ({"watch": {"rules": {"disk": {"for_s": "soon"}}}}, "'for_s' cannot be 'soon'; it takes"),
        (
            {"restart": {"when": "always"}},
            "'when' cannot be 'always'; it takes one of never, crash, stall",
        ),
        (
            {"restart": {"when": "crash", "backoff_s": 601}},
            "it takes a number from 0 to 600 seconds",
        ),
        ({"about": ["x"]}, "'about' cannot be ['x']; it takes a text"),
        ({"phases": [{"name": "a", "args": "x"}]}, "'args' must be a list"),
        ({"phases": [{"name": "a", "args": ["--amp", False]}]}, "quote no, off, null, dates"),
        (
            {"phases": [{"name": "a", "args": [date(2024, 1, 1)]}]},
            "quote no, off, null, dates and braces",
        ),
        (
            {"checkpoints": {"backup": ["rclone", {"checkpoint": None}]}},
            "quote no, off, null, dates and braces",
        ),
        ({"env": ["A"]}, "key: value"),
        ({"phases": [{"name": "a", "args": ["x\0y"]}]}, r"control character '\x00'"),
        ({"phases": [{"name": "a", "set": {"k": "\x1b[2J"}}]}, r"control character '\x1b'"),
        ({"about": "half \ud800"}, "control character"),
    ],
)
def test_a_wrong_plan_is_refused_with_one_sentence(change, words):
    with pytest.raises(UsageError) as caught:
        plan.parse(MINIMAL | change, "p.yaml")
    message = str(caught.value)
    assert words in message
    assert message.startswith("p.yaml")
    assert "\n" not in message


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["name", "phases", "flags", "set", "gates", "watch", "rules",
                                       "restart", "when", "args", "nproc", "env", "gpus", "x"]),
                      inner, max_size=4),
    max_leaves=12,
))  # fmt: skip
def test_any_document_is_a_plan_or_a_usage_error(document):
    if isinstance(document, dict):
        for given_too in ({}, MINIMAL):
            with contextlib.suppress(UsageError):
                plan.parse(document | given_too, "p.yaml")


@given(st.text(max_size=300))
def test_any_text_is_a_mapping_or_a_usage_error(text):
    with contextlib.suppress(UsageError):
        assert isinstance(yamlfile.parse(text, "x.yaml"), dict)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: &x [1]\nb: *x\n", "aliases"),
        ("a: 1\na: 2\n", "twice"),
        ("a: " + "[" * 40 + "]" * 40, "deeper"),
        ("!!python/object/apply:os.system ['true']", "constructor"),
        ("- 1\n- 2\n", "key: value"),
        ("a: [1\n", "line"),
        ("? [1, 2]\n: 3\n", "YAML"),
        ("a: !!bool x", "a value does not fit its !!tag"),
        ("a: !!timestamp x", "a value does not fit its !!tag"),
        ('a: !!int ""', "a value does not fit its !!tag"),
    ],
)
def test_yaml_tricks_are_refused_by_name(text, words):
    with pytest.raises(UsageError) as caught:
        yamlfile.parse(text, "x.yaml")
    assert words in str(caught.value)


def test_a_checkpoint_in_place_of_a_yaml_file_is_refused_without_reading_it(tmp_path):
    path = tmp_path / "weights.pt"
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(UsageError, match=r"weights.pt has more than 262144 bytes; give the path"):
        yamlfile.load(path)


def test_numbers_that_only_yaml_1_1_knows_stay_text():
    """Otherwise a phase that may take 1:30 hours would get 90, and `nproc: 010` would be 8."""
    texts = ["010", "-07", "000", "1:30", "20:22", "1:30.5"]
    assert yamlfile.parse(f"a: [{', '.join(texts)}]", "x.yaml") == {"a": texts}
    numbers = yamlfile.parse("a: [0, 10, -1, 0.5, 007.5, 0x10, 1_000, 1.0e+3]", "x.yaml")
    assert numbers == {"a": [0, 10, -1, 0.5, 7.5, 16, 1000, 1000.0]}


def test_a_flag_in_the_environment_that_no_table_knows_is_an_error():
    with pytest.raises(UsageError, match="did you mean 'NSA_DISABLE_AUX_STATS'"):
        flags.from_environment({"NSA_DISABLE_AUX_STAT": "1"})
    assert flags.from_environment({"HOME": "/x", "NSA_LR": "3e-4"}) == {"NSA_LR": 3e-4}


def test_null_is_not_given():
    phase = {"name": "a", "nproc": None, "config": None}
    loaded = plan.parse({"name": "p", "phases": [phase], "watch": None}, "p")
    assert (loaded.phases[0], loaded.watch) == (plan.Phase("a"), plan.Watch())


def test_only_the_trainers_are_programs_of_this_project():
    """`trainers.generate` knows no settings, so the console must not check or add any."""
    modules = ("trainers.ddp", "trainers.fsdp", "trainers.generate", "mine.train")
    raw = [{"name": module, "module": module} for module in modules]
    phases = plan.parse({"name": "p", "gpus": 1, "phases": raw}, "p").phases
    assert [phase.is_ours for phase in phases] == [True, True, False, False]
    assert [dict(phase.set) for phase in phases] == [{"train.device": "cuda"}] * 2 + [{}] * 2
