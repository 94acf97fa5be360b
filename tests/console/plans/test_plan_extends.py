"""Plans that extend another plan, and keys that a plan sets for all its phases."""

from __future__ import annotations

import json

import pytest

from console import plan
from console.plans import plan_file
from trainers.contract.errors import UsageError

BASE = """
name: base
about: The first.
nproc: 2
env: {OMP_NUM_THREADS: 1}
set: {train.steps: 9, train.lr: 1}
gates: {no_stall: true}
expects: {parameters: 5000000000}
watch: {startup_s: 9, grace_s: 8}
phases:
  - {name: one, set: {train.lr: 2}, gates: {steps_done: 9}}
  - {name: two, gates: {no_stall: null}, expects: {seq_len: 7}}
  - {name: foreign, script: x.py}
"""
CHILD = """
name: child
extends: base
nproc: 1
watch: {grace_s: 7}
set: {train.seed: 3}
phases:
  - {name: two, flags: {NSA_LR: 0.5}, set: {train.steps: 4}}
  - {name: three}
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "child.yaml").write_text(CHILD)
    return tmp_path


def test_the_keys_of_a_plan_hold_for_its_phases_which_override_single_entries(folder):
    one, two, foreign = plan_file.load(folder / "base.yaml").phases
    assert dict(one.set) == {"train.steps": 9, "train.lr": 2}
    assert dict(one.gates) == {"no_stall": True, "steps_done": 9}
    assert dict(two.gates) == {}
    assert (two.expects.parameters, two.expects.seq_len) == (5_000_000_000, 7)
    assert dict(foreign.set) == {}, "a foreign program does not know our settings"


def test_a_null_removes_an_entry_of_every_mapping(folder):
    rules = "watch: {rules: {late: {for_s: 2}, stall: {for_s: 3}}}"
    (folder / "middle.yaml").write_text(f"extends: base\nenv: {{NCCL_DEBUG: WARN}}\n{rules}\n")
    (folder / "child.yaml").write_text(
        "extends: middle\nenv: {NCCL_DEBUG: null}\nwatch: {rules: {late: null}}\nphases:\n"
        "  - {name: mb, rounds: 11, variants: {a: {set: {train.lr: null}}, b: {}}}\n"
    )
    found = plan_file.load(folder / "child.yaml")
    assert dict(found.env) == {"OMP_NUM_THREADS": "1"}
    assert [*found.watch.rules] == ["stall"]
    assert dict(found.phases[-1].set) == {"train.steps": 9, "train.lr": 1}


def test_a_null_removes_the_sweep_of_a_phase(folder):
    sweep = "{name: mb, rounds: 11, variants: {a: {}, b: {}}}"
    (folder / "middle.yaml").write_text(f"extends: base\nphases:\n  - {sweep}\n")
    child = "extends: middle\nphases:\n  - {{name: mb, {}}}\n"
    for words in ("variants: null", "variants: null, rounds: null"):
        (folder / "child.yaml").write_text(child.format(words))
        assert [phase.name for phase in plan_file.load(folder / "child.yaml").phases][-1:] == ["mb"]
    (folder / "middle.yaml").write_text("extends: base\nphases:\n  - {name: mb, rounds: 11}\n")
    with pytest.raises(UsageError, match="'variants' must name 2 to"):
        plan_file.load(folder / "middle.yaml")


def test_a_plan_that_extends_another_changes_only_what_it_names(folder):
    found = plan_file.load(folder / "child.yaml")
    assert (found.name, found.about) == ("child", "")
    assert [phase.name for phase in found.phases] == ["one", "two", "foreign", "three"]
    one, two, _, three = found.phases
    assert (one.nproc, dict(found.env)) == (1, {"OMP_NUM_THREADS": "1"})
    assert (found.watch.startup_s, found.watch.grace_s) == (9, 7)
    assert dict(one.set) == {"train.steps": 9, "train.lr": 2, "train.seed": 3}
    assert dict(two.set) == {"train.steps": 4, "train.lr": 1, "train.seed": 3}
    assert (dict(two.flags), two.expects.seq_len) == ({"NSA_LR": "0.5"}, 7)
    assert dict(three.gates) == {"no_stall": True}


def test_what_a_launch_stores_is_read_back_as_the_same_plan(folder):
    found = plan_file.load(folder / "child.yaml")
    assert plan.parse(json.loads(json.dumps(found.as_dict())), "plan.json") == found


WRONG = [
    ("extends: nowhere\n", "there is no such file"),
    ("extends: child\n", "the files name each other"),
    ("extends: [base]\n", "there is no such file"),
    ("phases: [{name: a}]\nexpects: {sequence: 1}\n", "no key 'sequence'; did you mean 'seq_len'"),
]


@pytest.mark.parametrize(("text", "said"), WRONG)
def test_what_cannot_be_extended_or_expected_gets_one_sentence(folder, text, said):
    (folder / "base.yaml").write_text(f"name: base\n{text}")
    with pytest.raises(UsageError, match=said) as error:
        plan_file.load(folder / "base.yaml")
    assert "\n" not in str(error.value)


def test_a_plan_without_a_name_has_that_of_its_file_and_a_phase_needs_one(folder):
    (folder / "night.yaml").write_text("extends: child\ngates: {no_stall: true}\n")
    assert plan_file.load(folder / "night.yaml").name == "night"
    (folder / "night.yaml").write_text("phases: [{nproc: 1}]\n")
    with pytest.raises(UsageError, match="phase 1: 'name' is missing"):
        plan_file.load(folder / "night.yaml")


def test_a_plan_can_extend_the_projects_plan_of_its_own_name(tmp_path):
    (tmp_path / "cpu_smoke.yaml").write_text("name: cpu_smoke\nextends: cpu_smoke\nnproc: 1\n")
    found = plan_file.load(tmp_path / "cpu_smoke.yaml")
    assert [phase.nproc for phase in found.phases] == [1, 1, 1]


def test_a_plan_that_extends_a_sweep_can_leave_a_variant_out(folder):
    sweep = "{name: mb, rounds: 11, variants: {a: {}, b: {}, c: {}}}"
    (folder / "base.yaml").write_text(f"name: base\nphases: [{sweep}]\n")
    assert len(plan_file.load(folder / "base.yaml").phases) == 33
    fewer = "{name: mb, rounds: 11, set: {train.steps: 3}, variants: {b: null}}"
    (folder / "child.yaml").write_text(f"name: child\nextends: base\nphases: [{fewer}]\n")
    found = plan_file.load(folder / "child.yaml").phases
    assert [phase.name for phase in found[:2]] == ["mb-1-a", "mb-1-c"]
    assert len(found) == 22
    assert all(dict(phase.set) == {"train.steps": 3} for phase in found)


ENTRY = "has no value, and there is no such entry to remove"
NULLS = [
    ("set: {train.steps: 50,000}", f"phase 'a': set: '000' {ENTRY} (quote a value with a comma)"),
    ("set: {train.lr: 0,001}", f"set: '001' {ENTRY}"),
    ("gates: {steps_done: 50,000}", f"gates: '000' {ENTRY}"),
    ("flags: {NCCL_ALGO: Ring,Tree}", f"flags: 'Tree' {ENTRY}"),
    ("flags: {NSA_LRR: null}", "did you mean 'NSA_LR'"),
    ("flags: {OMP_NUM_THREADS: null}", f"flags: 'OMP_NUM_THREADS' {ENTRY}"),
    ("gates: {no_stal: null}", "did you mean 'no_stall'"),
    ("rounds: 9, variants: {x: null, y: {}, z: {}}", f"variants: 'x' {ENTRY}"),
    (
        "rounds: 9, variants: {x: {flags: {NSA_LT: null}}, y: {}}",
        "variant 'x': flags: 'NSA_LT' has",
    ),
]


@pytest.mark.parametrize(("text", "said"), NULLS)
def test_a_null_that_removes_nothing_is_refused(tmp_path, text, said):
    """YAML reads `{train.steps: 50,000}` as 50 steps and a null for the key 000."""
    top = "env: {OMP_NUM_THREADS: 1}\nflags: {NSA_LR: 1}\ngates: {no_stall: true}\n"
    (tmp_path / "x.yaml").write_text(f"{top}phases:\n  - {{name: a, {text}}}\n")
    with pytest.raises(UsageError) as caught:
        plan_file.load(tmp_path / "x.yaml")
    assert said in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path / 'x.yaml'}: phase 'a': ")


@pytest.mark.parametrize("text", ["env: {NCCL_DEBUG: null}", "watch: {rules: {lat: null}}"])
def test_a_null_at_the_top_removes_an_entry_of_the_base(folder, text):
    (folder / "child.yaml").write_text(f"extends: base\n{text}\n")
    with pytest.raises(UsageError, match=f"child.yaml: (env|watch: rules): .* {ENTRY}"):
        plan_file.load(folder / "child.yaml")


def test_a_null_of_a_variant_removes_an_entry_of_its_phase_or_of_the_plan(folder):
    phase = "name: s, rounds: 9, flags: {NCCL_ALGO: Ring}, set: {train.lr: 1}"
    nulls = "{flags: {NCCL_ALGO: null, NCCL_PROTO: null}, set: {train.lr: null}}"
    (folder / "x.yaml").write_text(
        "flags: {NCCL_PROTO: Simple}\nphases:\n"
        f"  - {{{phase}, variants: {{ring: {{}}, auto: {nulls}}}}}\n"
    )
    ring, auto = plan_file.load(folder / "x.yaml").phases[:2]
    assert (ring.flags, ring.set) == (
        {"NCCL_PROTO": "Simple", "NCCL_ALGO": "Ring"}, {"train.lr": 1},
    )  # fmt: skip
    assert (auto.flags, auto.set) == ({}, {})


def written(folder, base: str, child: str = "{}"):
    """Returns the plan of a file that extends a file with the text `base`."""
    (folder / "b.yaml").write_text(f"{base}\n")
    (folder / "c.yaml").write_text(f"extends: b\n{child}\n")
    return plan_file.load(folder / "c.yaml")


def test_the_short_form_of_restart_is_merged_like_the_long_form(tmp_path):
    short, numbers = "phases: [{name: a}]\nrestart: crash", "restart: {attempts: 10}"
    assert written(tmp_path, short, numbers).restart == plan.Restart("crash", 10)
    long = "phases: [{name: a}]\nrestart: {when: stall, attempts: 9}"
    assert written(tmp_path, long, "restart: crash").restart == plan.Restart("crash", 9)
    with pytest.raises(UsageError, match=r"c\.yaml: restart: 'when' is missing; add when: crash"):
        written(tmp_path, "phases: [{name: a}]", numbers)


TOP, PHASE = "{}\nphases: [{{name: a}}]", "phases: [{{name: a, {}}}]"


@pytest.mark.parametrize("form", [TOP, PHASE])
def test_the_program_of_a_plan_replaces_that_of_its_base(tmp_path, form):
    def program(base: str, child: str) -> tuple[str, str]:
        (phase,) = written(tmp_path, form.format(base), form.format(child)).phases
        return phase.script, phase.module

    assert program("script: x.py", "module: trainers.fsdp") == ("", "trainers.fsdp")
    assert program("module: trainers.fsdp", "script: x.py") == ("x.py", "trainers.ddp")
    assert program("script: x.py", "nproc: 2") == ("x.py", "trainers.ddp")
    with pytest.raises(UsageError, match=r"c\.yaml: .*'script' and 'module' exclude each other"):
        program("nproc: 2", "script: x.py, module: y" if form == PHASE else "script: x\nmodule: y")


def test_two_phases_of_one_name_in_one_file_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"c\.yaml: two phases have the same name"):
        written(tmp_path, "phases: [{name: a}]", "phases: [{name: a}, {name: a, nproc: 2}]")


def test_a_plan_can_name_its_base_with_the_ending(tmp_path):
    (tmp_path / "x.yaml").write_text("extends: cpu_smoke.yaml\n")
    assert len(plan_file.load(tmp_path / "x.yaml").phases) == 3


@pytest.mark.parametrize(
    "text", ["set: {train: {steps: 60}}", "phases: [{name: a, set: {train: {steps: 60}}}]"]
)
def test_a_section_of_settings_is_refused_with_the_dotted_name(tmp_path, text):
    with pytest.raises(UsageError, match=r"c\.yaml: .*set: .*; write 'train.steps: 60'"):
        written(tmp_path, "phases: [{name: a}]", text)


@pytest.mark.parametrize(("value", "key"), [("{}", "train"), ("{ema: {}}", "train.ema")])
def test_an_empty_section_of_settings_is_refused(tmp_path, value, key):
    with pytest.raises(UsageError, match=f"set: 'train' is a section; remove the empty '{key}'"):
        written(tmp_path, "phases: [{name: a}]", f"set: {{train: {value}}}")
