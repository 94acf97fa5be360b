"""Sweeps: their phases, the test whether variants differ, and runs that are not compared."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from console import actions, plan
from console.launch_options import LaunchOptions
from console.plans.sweep import Run, Variant, compare, p_value
from trainers.contract.errors import UsageError

PLAN: dict[str, Any] = {
    "name": "buckets",
    "phases": [{
        "name": "bucket", "set": {"train.steps": 60}, "rounds": 9,
        "variants": {"mb25": {"flags": {"NSA_DDP_BUCKET_MB": 25}},
                     "mb50": {"flags": {"NSA_DDP_BUCKET_MB": 50}}},
    }],
}  # fmt: skip
FACTS: dict[str, Any] = {
    "parameters": 1, "tokens_per_step": 256, "versions": {"torch": "2"}, "cuda": None,
    "device": {"type": "cpu"}, "threads_per_rank": 1, "strategy": "ddp", "comm_backend": "gloo",
    "comm_hook": "none", "backend": {"win": "banded"},
}  # fmt: skip


def variant(name: str, figures: list[float], changes: dict[str, str], **more: Any) -> Variant:
    facts = FACTS | {"ddp.bucket_mb": 25, "optim.lr": 1.0} | changes | more
    runs = (Run(f"{name}-{i}", x, x, 50, facts) for i, x in enumerate(figures))
    return Variant(name, changes, tuple(runs))


def test_the_phases_of_a_sweep_are_interleaved_and_every_second_round_is_reversed() -> None:
    phases = plan.parse(PLAN, "p").phases
    assert [phase.name for phase in phases[:5]] == [
        "bucket-1-mb25", "bucket-1-mb50", "bucket-2-mb50", "bucket-2-mb25", "bucket-3-mb25",
    ]  # fmt: skip
    assert len(phases) == 18
    assert {phase.sweep for phase in phases} == {"bucket"}
    assert phases[1].variant == "mb50"
    assert phases[1].flags == {"NSA_DDP_BUCKET_MB": "50"}
    stored = json.loads(json.dumps(plan.Plan("x", phases).as_dict()))
    assert plan.parse(stored, "plan.json").phases == phases


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rounds": 8}, "'rounds' cannot be 8"),
        ({"variants": {"a": {}}}, "must name 2 to 5 variants"),
        ({"variants": {"a": {}, "b": {}, "c": {}}}, "cannot show a difference"),
        ({"variants": {"a": {"steps": 1}, "b": {}}}, "there is no key 'steps'"),
        ({"variants": [1]}, "must be key: value lines"),
        ({"variants": {"a": {}, "B!": {}}}, "must be lower-case letters"),
        ({"variants": {False: {}, True: {}}}, "YAML reads on, off, yes and no as booleans"),
    ],
)
def test_a_sweep_that_cannot_decide_or_be_read_is_refused(change: Any, words: str) -> None:
    raw = {"name": "x", "phases": [PLAN["phases"][0] | change]}
    with pytest.raises(UsageError, match=words):
        plan.parse(raw, "p")


def test_a_difference_in_every_round_is_significant_and_noise_is_not() -> None:
    load = [1, 1, 0.6, 1, 1, 0.5, 1, 1, 0.9, 1, 1, 1]
    slow = [100.0 * factor for factor in load]
    fast = [value * 1.15 for value in slow]
    found = compare("bucket", [variant("a", slow, {}), variant("b", fast, {"ddp.bucket_mb": "50"})])
    assert found.best == ("b",)
    assert found.answer.startswith("b is at least 1")
    mixed = [100.0, 101, 99, 100, 70, 100, 101, 99]
    same = compare("bucket", [variant("a", mixed, {}), variant("b", mixed[::-1], {})])
    assert same.answer == "no difference"
    lines = list(same.lines())
    assert lines[0] == "bucket: no difference (a difference needs p ≤ 0.005)"
    assert "(8 runs: 70 to 101); last" in lines[1]
    assert "(8 runs: 70 to 101); p = 1 against a; last" in lines[2]


def test_two_fast_variants_and_a_slow_one_are_told_apart() -> None:
    noise = random.Random(3)
    three = [
        variant(name, [speed * noise.uniform(0.99, 1.01) for _ in range(11)], {"ddp.bucket_mb": x})
        for name, speed, x in (("a", 100, "1"), ("b", 130, "2"), ("c", 130, "3"))
    ]
    found = compare("bucket", three)
    assert set(found.best) == {"b", "c"}
    assert "no difference between" in found.answer
    assert found.answer.endswith("faster than a")


@given(st.lists(st.tuples(st.floats(1, 1e6), st.floats(1, 1e6)), min_size=2, max_size=8))
@settings(max_examples=60, deadline=None)
def test_a_p_value_is_that_of_the_exchanged_variants(pairs: list[tuple[float, float]]) -> None:
    first, second = [a for a, _ in pairs], [b for _, b in pairs]
    found = p_value(first, second)
    assert 2 ** (1 - len(pairs)) <= found <= 1
    assert found == p_value(second, first)
    assert p_value(first, first) == 1


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"optim.lr": 2.0}, "optim.lr is 1.0 in a-0 and 2.0 in b-0"),
        ({"backend": {"win": "flash"}}, "backend is {'win': 'banded'} in a-0"),
        ({"versions": {"torch": "3"}}, "versions is"),
    ],
)
def test_variants_that_differ_in_more_than_the_variable_are_not_compared(
    more: Any, words: str
) -> None:
    figures = [1.0] * 8
    other = variant("b", figures, {"ddp.bucket_mb": "50"}, **more)
    found = compare("bucket", [variant("a", figures, {"ddp.bucket_mb": "25"}), other])
    assert found.answer.startswith("not compared: ")
    assert words in found.refusal


def test_variants_that_were_all_trained_with_the_same_value_are_not_compared() -> None:
    """For example, an operator has set the flag for all later phases."""
    first, other = (variant(x, [1.0] * 8, {"ddp.bucket_mb": x}) for x in ("25", "50"))
    runs = tuple(replace(run, facts={**run.facts, "ddp.bucket_mb": 25}) for run in other.runs)
    first = replace(first, runs=runs)
    found = compare("bucket", [first, replace(other, runs=runs)])
    assert found.refusal == "ddp.bucket_mb is 25 in all runs, although the variants differ in it"


def test_a_flag_that_only_one_variant_sets_is_compared() -> None:
    figures, changes = [1.0] * 8, {"NCCL_PROTO": "Simple"}
    found = compare("proto", [variant("a", figures, changes), variant("b", figures, {})])
    assert found.answer == "no difference"


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"flags": {"NSA_DDP_BUCKET_MB": "25"}}, "NSA_DDP_BUCKET_MB"),
        ({"sets": {"ddp.bucket_mb": "25"}}, "ddp.bucket_mb"),
    ],
)
def test_a_value_of_all_phases_replaces_no_value_in_which_variants_differ(
    given: Any, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runbooks export NSA_DDP_BUCKET_MB=25, and all runs of the sweep would train with it."""
    path = tmp_path / "buckets.yaml"
    path.write_text(yaml.safe_dump(PLAN))
    options = LaunchOptions(str(path), phase="bucket", root=tmp_path)
    with pytest.raises(UsageError, match=f"the variants of bucket differ in {word}, and the shell"):
        actions.prepare(replace(options, **given))
    assert len(actions.prepare(replace(options, flags={"NSA_LR": "0.5"})).phases) == 18
    monkeypatch.setenv("NSA_DDP_BUCKET_MB", "25")
    with pytest.raises(UsageError, match="differ in NSA_DDP_BUCKET_MB"):
        actions.prepare(options)


@pytest.mark.parametrize(
    ("key", "values", "facts"),
    [
        ("attention.no_flash", ("0", "1"), {"backend": {"win": "math"}}),
        ("train.batch_size", ("1", "8"), {"backend": {"win": "banded, heads folded"}}),
        ("OMP_NUM_THREADS", ("1", "32"), {"backend": {"win": "banded, heads folded"}}),
        ("train.strategy", ("ddp", "fsdp"), {"strategy": "fsdp", "comm_hook": "bf16"}),
    ],
)
def test_a_variable_may_change_the_facts_that_depend_on_it(
    key: str, values: tuple[str, str], facts: Any
) -> None:
    first, other = (variant(value, [1.0] * 8, {key: value}) for value in values)
    changed = tuple(replace(run, facts={**run.facts, **facts}) for run in other.runs)
    assert not compare("x", [first, replace(other, runs=changed)]).refusal


def test_the_value_of_a_setting_is_that_of_set_and_not_of_a_flag(tmp_path: Path) -> None:
    path = tmp_path / "buckets.yaml"

    def prepared(by: str, key: str, more: Any, **options: Any) -> actions.Prepared:
        variants = {f"mb{value}": {by: {key: value}} for value in (25, 50)}
        phase = PLAN["phases"][0] | {"variants": variants}
        phase["set"] = phase["set"] | more.get("set", {})
        path.write_text(yaml.safe_dump(PLAN | {"phases": [more | phase]}))
        return actions.prepare(LaunchOptions(str(path), root=tmp_path, **options))

    inherited = {"flags": {"NSA_DDP_BUCKET_MB": 25}}
    assert prepared("set", "ddp.bucket_mb", inherited).ok
    with pytest.raises(UsageError, match=r"the variants of bucket differ in ddp\.bucket_mb"):
        prepared("set", "ddp.bucket_mb", inherited, sets={"ddp.bucket_mb": "10"})
    found = prepared("flags", "NSA_DDP_BUCKET_MB", {"set": {"ddp.bucket_mb": 10}})
    text = next(check.text for check in found.checks if check.result == "fail")
    assert text.startswith("ddp.bucket_mb is 10 in all variants of bucket")


def test_the_variant_that_is_slower_for_certain_is_named_whatever_its_rank() -> None:
    even = [100 + 0.01 * i for i in range(12)]
    uneven = [105.0, 70, 103, 71, 100, 72, 97, 73, 95, 74, 93, 75]
    three = [variant("a", even, {}), variant("b", [x * 0.99 for x in even], {}),
             variant("c", uneven, {})]  # fmt: skip
    found = compare("x", three)
    assert (found.best, [v.name for v in found.variants]) == (("a", "c"), ["a", "b", "c"])
    assert found.answer.endswith("faster than b")


def test_a_missing_fact_is_not_agreement() -> None:
    bare = Variant("a", {}, tuple(Run(str(i), 1.0, 1.0, 50, {}) for i in range(8)))
    assert "has no backend" in compare("x", [bare, bare]).refusal
