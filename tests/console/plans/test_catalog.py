"""Finding plans, and the preflight of a launch."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from console import actions
from console.actions import LaunchOptions
from console.plans import catalog, config_checks, gpu_checks, host_checks
from tests.console.plans.test_preflight import bare
from tests.mounts import tmpfs
from trainers.contract.errors import RefusedError, UsageError
from trainers.contract.flags import FLAGS

PHASES = [{"name": "one", "script": __file__}]


def written(folder: Path, **document) -> str:
    path = folder / "mine.yaml"
    path.write_text(json.dumps({"name": "mine", "phases": PHASES} | document))  # no YAML aliases
    return str(path)


def row(name: str, path: str, **more):
    """Returns one row of the preflight of a plan's launch."""
    prepared = actions.prepare(LaunchOptions(path, root=Path(path).parent / "artifacts", **more))
    return next(check for check in prepared.checks if check.name == name)


def test_the_projects_plans_are_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "cpu_smoke" in [plan.name for plan in catalog.plans()[0]]
    assert catalog.is_plan("cpu_smoke")
    assert not catalog.is_plan("latest")
    assert catalog.project_file("configs/plans/cpu_smoke.yaml").is_file()


def test_a_plan_of_the_working_directory_hides_the_projects(tmp_path, monkeypatch):
    folder = tmp_path / "configs" / "plans"
    folder.mkdir(parents=True)
    (folder / "cpu_smoke.yaml").write_text(json.dumps({"phases": PHASES}))
    monkeypatch.chdir(tmp_path)
    assert [phase.name for phase in catalog.load("cpu_smoke").phases] == ["one"]


@pytest.mark.parametrize(
    ("name", "selects"), [("cpu_smoke", "cpu_smoke.yaml"), ("huge", "no file")]
)
def test_the_name_of_a_listed_plan_is_that_of_its_file(tmp_path, monkeypatch, name, selects):
    """Otherwise the list of plans would have an entry that launches another plan, or none."""
    folder = tmp_path / "configs" / "plans"
    folder.mkdir(parents=True)
    (folder / "big.yaml").write_text(json.dumps({"name": name, "phases": PHASES}))
    monkeypatch.chdir(tmp_path)
    listed, wrong = catalog.plans()
    assert {plan.name for plan in listed} == catalog.files().keys() - {"big"}
    assert len(wrong) == 1
    assert wrong[0].startswith(f"configs/plans/big.yaml: the name {name!r} selects ")
    assert wrong[0].endswith(f"{selects}, not this file; remove 'name:', or rename the file")


@pytest.mark.parametrize(("file", "text"), [("mine", "name: cpu_smoke\n"), ("cpu_smoke", "")])
def test_a_plan_of_another_folder_cannot_have_the_name_of_a_listed_plan(tmp_path, file, text):
    """Otherwise a second launch of the plan would launch the listed plan."""
    path = tmp_path / f"{file}.yaml"
    path.write_text(f"{text}phases: [{{name: one}}]\n")
    with pytest.raises(UsageError, match=r"'cpu_smoke' selects .*cpu_smoke\.yaml, not this file"):
        catalog.load(str(path))
    assert catalog.load(str(catalog.PROJECT / catalog.FOLDER / "cpu_smoke.yaml"))


def test_a_plan_that_an_editor_has_locked_does_not_concern_other_plans(tmp_path, monkeypatch):
    """Emacs makes a link without a target while a file has changes; macOS copies `._` files."""
    folder = tmp_path / "configs" / "plans"
    folder.mkdir(parents=True)
    (folder / ".#big.yaml").symlink_to("ann@host.1:2")
    (folder / "gone.yaml").symlink_to("nowhere")
    (folder / "._big.yaml").write_bytes(b"\0")
    monkeypatch.chdir(tmp_path)
    assert catalog.load(written(tmp_path)).name == "mine"
    assert catalog.files().keys().isdisjoint((".#big", "gone", "._big"))


def test_a_link_to_a_listed_plan_is_a_plan_with_the_name_of_the_link(tmp_path, monkeypatch):
    folder = tmp_path / "configs" / "plans"
    folder.mkdir(parents=True)
    (folder / "big.yaml").write_text(json.dumps({"phases": PHASES}))
    (tmp_path / "link.yaml").symlink_to(folder / "big.yaml")
    monkeypatch.chdir(tmp_path)
    assert catalog.load("link.yaml").name == "link"


@pytest.mark.parametrize(
    ("name", "text"),
    [("cpu_smok", "did you mean 'cpu_smoke'"), ("nowhere.yaml", "known:"), ("zzz", "known:")],
)
def test_an_unknown_plan_gets_a_suggestion(name, text):
    with pytest.raises(UsageError, match=text):
        catalog.load(name)


def test_an_unknown_gate_names_file_and_phase(tmp_path):
    phases = [PHASES[0] | {"gates": {"steps_don": 1}}]
    with pytest.raises(UsageError, match=r"mine\.yaml: phase 'one'.*did you mean 'steps_done'"):
        catalog.load(written(tmp_path, phases=phases))


def test_a_gate_on_scaling_needs_an_earlier_phase_of_one_rank_with_a_gate_on_its_speed(tmp_path):
    speed = {"toks_per_s_50_above": 1}
    toy = {"config": "configs/tiny_cpu.yaml", "set": {"train.steps": 60}, "nproc": 1}
    one, fast = {**toy, "name": "one"}, {**toy, "name": "fast", "gates": speed}
    two = {**toy, "name": "two", "nproc": 2}
    both = {**two, "gates": {"scaling_above": 0.5}}
    wrong = {"there is none": [both, fast], "'one' has no gate toks_per_s_50": [fast, one, both]}
    for says, phases in wrong.items():
        path = written(tmp_path, phases=phases)
        with pytest.raises(UsageError, match=f"phase 'two': the gate scaling_above needs .*{says}"):
            catalog.load(path)
    accepted = {**two, "gates": {"scaling_above": {"bound": 0.5, "override": "Not this time."}}}
    assert catalog.load(written(tmp_path, phases=[accepted]))
    path = written(tmp_path, phases=[fast, both])
    for choice, result in (({}, "pass"), ({"phase": "two"}, "unknown"), ({"nproc": 2}, "unknown")):
        found = row("config two", path, **choice)
        assert found.result == result, found.text
        assert result == "pass" or found.text.endswith("with nproc 1, and there is none")


def test_a_plan_without_gpus_trains_on_the_cpu_also_where_there_is_one(tmp_path):
    for plan in (each for each in catalog.plans()[0] if each.gpus == 0):
        prepared = actions.prepare(LaunchOptions(plan=plan.name, root=tmp_path))
        for phase in prepared.phases:
            assert phase["settings"]["train.device"]["value"] == "cpu", phase["run"]


def test_more_processes_than_cores_only_warns(tmp_path):
    many = bare(tmp_path, nproc=900)
    assert (host_checks.cores(many)[0], host_checks.memory(many)[0]) == ("unknown", "fail")


@pytest.mark.parametrize("program", [{"script": "nowhere.py"}, {"module": "nowhere.x"}])
def test_a_missing_program_is_refused_by_name(tmp_path, program):
    result, text = config_checks.program(bare(tmp_path, **{"script": ""} | program))
    assert (result, "nowhere" in text) == ("fail", True)


@pytest.fixture
def unwritable(tmp_path):
    """A folder that this user cannot write, even if this user is root."""
    if os.geteuid() == 0:
        with tmpfs(tmp_path, 1, "ro") as folder:
            yield folder
    else:
        (tmp_path / "closed").mkdir(mode=0o500)
        yield tmp_path / "closed"


def test_a_directory_that_cannot_be_written_is_refused(tmp_path, unwritable):
    result, text = config_checks.directory(bare(unwritable))
    assert (result, text.startswith(f"{unwritable} is ")) == ("fail", True)
    assert "--root or --run-dir" in text


def test_a_rule_that_restarts_needs_a_policy(tmp_path):
    text = "name: x\nphases: [{name: one}]\nwatch: {rules: {non_finite: {action: restart}}}\n"
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match="'restart' is never"):
        catalog.load(str(path))
    path.write_text(f"{text}restart: crash\n")
    assert catalog.load(str(path)).restart.when == "crash"


def test_a_phase_of_our_trainers_has_its_settings_in_set_and_not_in_args(tmp_path):
    """The preflight, the gates and the watch rules would use other settings than the training."""
    phase = {"name": "one", "args": ["--steps", "200"]}
    says = r"phase 'one': 'args' is only for a foreign program; use 'set' .*{train\.steps: 200}"
    with pytest.raises(UsageError, match=says):
        catalog.load(written(tmp_path, phases=[phase]))
    assert catalog.load(written(tmp_path, phases=[PHASES[0] | phase])).phases[0].args


def test_a_threshold_that_is_a_share_is_no_percentage(tmp_path):
    """`watchdog --help` prints 95 %, and no share of memory reaches 90."""
    for threshold in (90, 1):
        rules = {"memory_ceiling": {"threshold": threshold, "action": "halt"}}
        with pytest.raises(UsageError, match=r"'memory_ceiling' is a share below 1: 0\.9 for 90 %"):
            catalog.load(written(tmp_path, watch={"rules": rules}))
    rules = {"memory_ceiling": {"threshold": 0.9}, "late": {"threshold": 3}}
    assert catalog.load(written(tmp_path, watch={"rules": rules}))


END = "; launch --flag NAME=VALUE sets a flag that `nsa-console flags` lists"
SHELL_CASES = [
    ({"NSA_LR": "3e-4", "NCCL_DEBUG": "INFO", "NCCL_FOO": "1", "CUDA_DEVICE_ORDER": "x"}, "unknown",
     "handed to the training: NSA_LR; not handed to the training: CUDA_DEVICE_ORDER, NCCL_DEBUG, "
     f"NCCL_FOO{END}"),
    ({"CUDA_HOME": "/x", "NCCL_VERSION": "2.29", "CUDA_VISIBLE_DEVICES": "0",
      "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, "pass",
     "handed to the training: CUDA_VISIBLE_DEVICES"),
    ({"CONFIG": "configs/tiny_cpu.yaml"}, "unknown", f"not handed to the training: CONFIG{END}"),
]  # fmt: skip


@pytest.fixture
def empty_shell(monkeypatch):
    """A shell without `CONFIG`, without flags, and without variables of libraries."""
    flagged = (n for n in os.environ if n in FLAGS or n.startswith(host_checks.LIBRARIES))
    for name in ["CONFIG", *flagged]:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(("variables", "result", "text"), SHELL_CASES)
def test_the_variables_of_the_shell_are_named_as_passed_or_not(
    tmp_path, empty_shell, variables, result, text
):
    for name, value in variables.items():
        empty_shell.setenv(name, value)
    found = row("shell", written(tmp_path))
    assert (found.result, found.text) == (result, text)


def test_a_variable_that_the_plan_overrides_with_its_set_is_reported(tmp_path, empty_shell):
    empty_shell.setenv("NSA_ACCUM", "4")
    plan = written(tmp_path, phases=[{"name": "one", "set": {"train.accumulate": 2}}])
    found = row("shell", plan)
    says = "NSA_ACCUM has no effect where the plan or --set sets train.accumulate"
    assert (found.result, says in found.text) == ("unknown", True), found.text


def test_a_variable_that_the_plan_or_an_option_sets_is_not_reported(tmp_path, empty_shell):
    empty_shell.setenv("NCCL_DEBUG", "INFO")
    empty_shell.setenv("OMP_NUM_THREADS", "4")
    phases = [PHASES[0] | {"flags": {"NCCL_DEBUG": "WARN"}}]
    plan = written(tmp_path, phases=phases, env={"OMP_NUM_THREADS": 1})
    found = row("shell", plan)
    assert (found.result, found.text) == ("pass", "no flag comes from the shell")


GPU_PLAN = {"name": "mine", "gpus": 2, "nproc": 2, "phases": [{"name": "one"}]}


def test_a_plan_for_gpus_trains_on_cuda_and_is_refused_where_torch_has_none(tmp_path):
    options = LaunchOptions(plan=written(tmp_path, **GPU_PLAN), root=tmp_path)
    prepared = actions.prepare(options)
    assert prepared.phases[0]["settings"]["train.device"]["value"] == "cuda"
    assert "train.device=cuda" in prepared.phases[0]["argv"]
    found = {check.name: check for check in prepared.checks}
    if gpu_checks.torch_cuda() is None:
        assert found["torch"].result == "fail"
        assert "is built without CUDA, and the plan mine needs GPUs" in found["torch"].text
    device = row("device", options.plan, sets={"train.device": "cpu"})
    assert (device.result, "trains on cpu (train.device, --set)" in device.text) == ("fail", True)
    with pytest.raises(RefusedError, match="built without CUDA"):
        actions.begin(prepared, "tester")


@pytest.mark.skipif(gpu_checks.torch_cuda() is not None, reason="torch has CUDA")
def test_a_phase_on_cuda_is_refused_where_torch_has_none_in_a_plan_without_gpus(tmp_path):
    plan = written(tmp_path, phases=[{"name": "one"}])
    device = row("device", plan, sets={"train.device": "cuda"})
    assert (device.result, "the phase 'one' trains on cuda" in device.text) == ("fail", True)


def test_assumed_gpus_are_checked_for_and_never_launched(tmp_path):
    path = written(tmp_path, **GPU_PLAN)
    prepared = actions.prepare(LaunchOptions(plan=path, root=tmp_path, assume_gpus="2xA100"))
    assert prepared.ok
    found = {check.name: check for check in prepared.checks}
    assert (found["gpus"].result, found["torch"].result) == ("unknown", "unknown")
    with pytest.raises(UsageError, match="nothing was launched"):
        actions.begin(prepared, "tester")
    few = actions.prepare(LaunchOptions(plan=path, root=tmp_path, assume_gpus="1xH100"))
    assert "needs 2 GPUs, but this machine has 1" in "".join(c.text for c in few.checks)
    for wrong in ("2xA99", "A100", "0xA100", "-1xA100"):
        with pytest.raises(UsageError, match="is not NxNAME"):
            actions.prepare(LaunchOptions(plan=path, root=tmp_path, assume_gpus=wrong))


EXPECTS = {"parameters": 450_712, "seq_len": 128, "tokens_per_step": 1024}


def expected(folder, sets=None, **document):
    phase = {"name": "one", "config": "configs/tiny_cpu.yaml"}
    path = written(folder, **{"phases": [phase], "expects": EXPECTS} | document)
    return row("config one", path, sets=sets or {})


def test_a_config_that_the_plan_does_not_mean_is_refused(tmp_path):
    found = expected(tmp_path)
    assert (found.result, found.text.endswith("of 5.2 MiB, as the plan expects")) == ("pass", True)
    production = [{"name": "one"}]
    toy = expected(tmp_path, phases=production, expects={"parameters": 81_894_576})
    assert toy.result == "fail"
    assert "parameters is 450,712, and the plan expects 81,894,576" in toy.text
    assert "no config, so it trains the built-in toy" in toy.text
    halved = expected(tmp_path, phases=[{"name": "one", "set": {"data.seq_len": 64}}])
    assert (halved.result, "seq_len is 64" in halved.text) == ("fail", True)
    assert "tokens_per_step is 512, and the plan expects 1,024" in halved.text


@pytest.mark.parametrize("steps", [49, 50])
def test_a_phase_has_the_steps_that_its_gates_need(tmp_path, steps):
    """With 49 steps, a gate over the last 50 steps would stay unknown and end the plan."""
    phase = {"name": "one", "config": "configs/tiny_cpu.yaml", "set": {"train.steps": steps},
             "gates": {"loss_finite": True, "toks_per_s_50_above": 1}}  # fmt: skip
    found = expected(tmp_path, phases=[phase])
    text = "train.steps is 49 ({}), and toks_per_s_50_above needs 50 steps"
    assert (found.result == "pass", text.format("plan") in found.text) == (steps == 50, steps == 49)
    by_hand = expected(tmp_path, {"train.steps": "49"}, phases=[phase])
    assert (by_hand.result, text.format("--set") in by_hand.text) == ("unknown", True)
    phase["gates"]["toks_per_s_50_above"] = {"bound": 1, "override": "only a trial"}
    assert expected(tmp_path, phases=[phase]).result == "pass"


def test_gates_on_the_attention_gate_need_its_statistics(tmp_path):
    """NSA_DISABLE_AUX_STATS=1, which the runbooks call mandatory, makes entropy_above unknown."""
    bounds = {"entropy_above": 0.5, "collapse_below": {"bound": 1, "override": "why"}}
    phase = {"name": "one", "config": "configs/tiny_cpu.yaml", "gates": bounds}
    without = expected(tmp_path, phases=[phase | {"flags": {"NSA_DISABLE_AUX_STATS": "1"}}])
    assert (without.result, without.text) == (
        "fail", "report.disable_aux_stats is true (flag NSA_DISABLE_AUX_STATS), and entropy_above "
        "needs false; correct report.disable_aux_stats, or remove the gates",
    )  # fmt: skip
    by_hand = expected(tmp_path, {"report.disable_aux_stats": "true"}, phases=[phase])
    assert (by_hand.result, "and entropy_above needs false" in by_hand.text) == ("unknown", True)
    assert expected(tmp_path, phases=[phase]).result == "pass"


SAVES = {"checkpoint.every": 20, "checkpoint.at_end": False}
IMPOSSIBLE = [
    ({}, {"steps_done": 300}, "train.steps is 60 (plan), and steps_done needs 300 steps"),
    ({}, {"fetch_below_s": {"bound": 5, "at": [100, 500]}}, "and fetch_below_s needs 500 steps"),
    ({"model.attention": "dense"}, {"entropy_above": 0.5, "collapse_below": 1},
     "model.attention is dense (plan), and entropy_above needs nsa, collapse_below needs nsa"),
    ({"data.source": "text"}, {"bytes_right": 0.9}, "and bytes_right needs recall"),
    ({}, {"comm_hook_active": True}, "ddp.compress is none (default), and comm_hook_active needs"),
    ({"train.strategy": "fsdp"}, {"comm_hook_active": True}, "comm_hook_active needs ddp"),
    ({"train.device": "cpu"}, {"gpu_mem_below_mib": 1}, "and gpu_mem_below_mib needs cuda"),
    (SAVES, {"checkpoints_at_least": 4}, "20 (plan), and checkpoints_at_least needs 4 checkpoints"),
    (SAVES | {"checkpoint.at_end": True}, {"checkpoints_at_least": 4}, "needs 4 checkpoints"),
]  # fmt: skip


@pytest.mark.parametrize(("sets", "bounds", "text"), IMPOSSIBLE)
def test_a_gate_that_cannot_pass_is_refused_before_the_launch(tmp_path, sets, bounds, text):
    """An operator can save further checkpoints, so too few of them are only a warning."""
    phase = {"name": "one", "config": "configs/tiny_cpu.yaml", "gates": bounds,
             "set": {"train.steps": 60} | sets}  # fmt: skip
    found = expected(tmp_path, phases=[phase], expects={})
    result = "unknown" if sets.keys() & SAVES else "fail"
    assert (found.result, text in found.text) == (result, True), found.text
    overridden = {name: {"bound": bound, "override": "why"} for name, bound in bounds.items()
                  if not isinstance(bound, dict)}  # fmt: skip
    assert expected(tmp_path, phases=[phase | {"gates": overridden}], expects={}).result == "pass"


def test_one_rank_has_no_communication_hook(tmp_path):
    phase = {"name": "one", "nproc": 1, "config": "configs/tiny_cpu.yaml",
             "set": {"ddp.compress": "fp16"}, "gates": {"comm_hook_active": True}}  # fmt: skip
    found = expected(tmp_path, phases=[phase], expects={})
    assert (found.result, found.text) == (
        "fail", "nproc is 1 (plan or --nproc), and comm_hook_active needs 2 or more ranks; correct "
        "nproc, or remove the gates",
    )  # fmt: skip
    assert expected(tmp_path, phases=[phase | {"nproc": 2}], expects={}).result == "pass"


def test_gates_that_can_pass_are_accepted(tmp_path):
    sets = {"train.steps": 100, "data.source": "recall", "checkpoint.every": 50}
    bounds = {"steps_done": 100, "fetch_below_s": {"bound": 5, "at": 100}, "bytes_right": 0.9,
              "loss_falls": True, "entropy_above": 0.5, "checkpoints_at_least": 2}  # fmt: skip
    phase = {"name": "one", "config": "configs/tiny_cpu.yaml", "set": sets, "gates": bounds}
    assert expected(tmp_path, phases=[phase]).result == "pass"


def test_a_gate_that_set_makes_impossible_hides_no_wrong_config(tmp_path):
    phase = {"name": "one", "config": "configs/tiny_cpu.yaml", "gates": {"steps_done": 60}}
    by_hand = expected(tmp_path, {"train.steps": "59"}, phases=[phase])
    assert (by_hand.result, "steps_done needs 60 steps" in by_hand.text) == ("unknown", True)
    wrong = {**EXPECTS, "parameters": 9}
    found = expected(tmp_path, {"train.steps": "59"}, phases=[phase], expects=wrong)
    assert (found.result, "the plan expects 9" in found.text) == ("fail", True)


def test_a_difference_that_set_makes_is_a_warning(tmp_path):
    found = expected(tmp_path, {"data.seq_len": "112"})
    assert (found.result, "seq_len is 112" in found.text) == ("unknown", True)
    both = expected(tmp_path, {"train.batch_size": "4"}, expects={**EXPECTS, "parameters": 9})
    assert both.result == "fail"
