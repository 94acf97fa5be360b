"""The runbooks' command lines and YAML: each is accepted, or refused with what to use instead."""

from __future__ import annotations

import shlex
from dataclasses import asdict

import pytest

from console import actions
from console.diagnose import rules
from console.plans import catalog, gates
from trainers import command_line, settings
from trainers.contract.errors import UsageError

PRODUCTION = "CONFIG=configs/m7c_125m_2xa100_production.yaml"
TUNED = "CONFIG=configs/m7c_125m_2xa100_production_tuned.yaml"
MANDATORY = (
    "NSA_PREFILL_BATCHED=1 NSA_DISABLE_AUX_STATS=1 NSA_DDP_STATIC_GRAPH=1 NSA_DDP_FIND_UNUSED=0 "
    "NSA_DDP_BUCKET_MB=25"
)
QUIET = "NSA_TB_DISABLE=1 NSA_DISABLE_CSV_LOGS=1"
DDP, FSDP = "torchrun --nproc_per_node=2 trainers.ddp", "torchrun --nproc_per_node=2 trainers.fsdp"
TUNED_LINE = f"{MANDATORY} {TUNED} {DDP} --dataset fineweb_edu --steps 300 --precision bf16"
RUNS = [
    TUNED_LINE,
    f"NSA_TB_DISABLE=0 NSA_DISABLE_CSV_LOGS=1 {DDP} --dataset fineweb_edu --steps 300 "
    "--precision bf16",
    f"{PRODUCTION} NSA_PREFILL_BATCHED=1 NSA_SEL_RANGES_V2=1 NSA_DDP_COMPRESS=bf16 "
    f"NSA_DDP_BUCKET_MB=50 NCCL_ALGO=Ring NCCL_PROTO=Simple {DDP} --dataset synthetic --ddp 1 "
    "--steps 300",
    *(
        f"NSA_PREFILL_BATCHED=1 NSA_DDP_BUCKET_MB={mb} {DDP} --dataset synthetic --ddp 1 "
        "--steps 200"
        for mb in (25, 50, 100)
    ),
    f"NSA_PREFILL_BATCHED=1 NSA_SDPA_AUDIT=1 {PRODUCTION} {DDP} --dataset synthetic --ddp 1 "
    "--steps 50",
    f"NSA_SDPA_FLASH_ONLY=1 {PRODUCTION} {DDP} --dataset synthetic --ddp 1 --steps 50",
    f"NSA_SDPA_NO_FLASH=1 {PRODUCTION} {DDP} --dataset synthetic --ddp 1 --steps 50",
    f"NSA_PREFILL_BATCHED=1 NSA_NVTX=1 NSA_TB_DISABLE=1 NSA_DISABLE_AUX_STATS=1 {DDP} "
    "--dataset synthetic --ddp 1 --steps 100",
    f"{PRODUCTION} NSA_PREFILL_BATCHED=1 python trainers.ddp --dataset synthetic --ddp 0 "
    "--steps 300",
    f"NSA_PREFILL_BATCHED=1 NSA_OPT_FUSED=1 {DDP} --dataset synthetic --ddp 1 --steps 200",
    f"NSA_PREFILL_BATCHED=1 {DDP} --dataset synthetic --ddp 1 --steps 1200",
    f"{DDP} --dataset fineweb_edu --ddp 1 --steps 200 --loader-timeout 120",
    f"NSA_USE_FA2=1 NCCL_P2P_DISABLE=0 NCCL_IB_DISABLE=0 NSA_MEM_DUMP_EVERY=100 {PRODUCTION} "
    f"{FSDP} --dataset synthetic",
]
STATIC = [
    f"{MANDATORY} {QUIET} {PRODUCTION} {DDP} --dataset fineweb_edu --steps 300 --precision bf16",
    f"{MANDATORY} {PRODUCTION} {DDP} --dataset fineweb_edu --precision bf16 --steps 1000",
]


def resolved(line: str) -> settings.Settings:
    """Returns the settings of a command line, with train.device=cuda."""
    words = shlex.split(line)
    place = next(i for i, word in enumerate(words) if "=" not in word)
    variables = dict(word.split("=", 1) for word in words[:place])
    module = next(i for i, word in enumerate(words) if word.startswith("trainers."))
    ranks = {"RANK": "0", "WORLD_SIZE": "2"} if words[place] == "torchrun" else {}
    found = command_line.parse(words[module + 1 :], words[module], variables | ranks)
    environment = {k: v for k, v in variables.items() if k != "CONFIG"}
    overrides = {"train.device": "cuda", **found.overrides}
    config = catalog.project_file(str(found.config)) if found.config else None
    return settings.resolve(config, environment, overrides, words[module]).settings


@pytest.mark.parametrize("line", RUNS)
def test_a_command_line_of_the_runbooks_is_accepted(line):
    assert resolved(line).train.steps


@pytest.mark.parametrize("line", STATIC)
def test_a_static_graph_with_accumulation_is_refused_with_what_to_use_instead(line):
    with pytest.raises(UsageError) as error:
        resolved(line)
    text = str(error.value)
    assert "NSA_DDP_STATIC_GRAPH=0" in text
    assert "NSA_ACCUM=1" in text
    assert "configs/m7c_125m_2xa100_production_tuned.yaml" in text
    assert resolved(line.replace("STATIC_GRAPH=1", "STATIC_GRAPH=0")).train.accumulate == 2
    assert resolved(f"NSA_ACCUM=1 {line} --batch-size 2").tokens_per_step == 4096
    assert resolved(line.replace(PRODUCTION, TUNED)).tokens_per_step == 4096


def test_the_plan_trains_with_the_runbooks_settings(tmp_path):
    """The phase smoke of m7c_2xa100 differs from the runbooks' line only in data.timeout_s."""
    options = actions.LaunchOptions("m7c_2xa100", root=tmp_path, assume_gpus="2xA100")
    prepared = actions.prepare(options)
    smoke = next(phase for phase in prepared.phases if phase["phase"] == "smoke")
    planned = {key: entry["value"] for key, entry in smoke["settings"].items()}
    line = dict(settings.flatten(asdict(resolved(f"{QUIET} {TUNED_LINE}"))))
    assert {key for key in line if planned[key] != line[key]} == {"data.timeout_s"}
    words = smoke["argv"]
    assert words[words.index("--nproc-per-node") + 1] == "2"
    assert words[words.index("-m", words.index("--nproc-per-node")) + 1] == "trainers.ddp"
    production = prepared.phases[-1]["settings"]
    wanted = {"train.steps": 50_000, "checkpoint.every": 5000, "report.disable_csv": True,
              "report.disable_tb": False, "train.precision": "bf16"}  # fmt: skip
    assert {key: production[key]["value"] for key in wanted} == wanted


@pytest.mark.parametrize(
    ("plan", "assumed"),
    [("m7c_2xa100", "2xA100"), ("m7c_1xa100", "1xA100"), ("m7c_1xh200", "1xH200"),
     ("ddp_validation", "2xA100"), ("fsdp_validation", "2xA100"), ("cpu_validation", ""),
     ("cpu_smoke", "")],
)  # fmt: skip
def test_every_shipped_plan_passes_its_preflight(plan, assumed, tmp_path):
    prepared = actions.prepare(actions.LaunchOptions(plan, root=tmp_path, assume_gpus=assumed))
    assert [check for check in prepared.checks if check.result == "fail"] == []
    assert all(phase.proves and phase.gates for phase in prepared.plan.phases)
    assert all(phase.expects.parameters for phase in prepared.plan.phases) or plan == "cpu_smoke"


@pytest.mark.parametrize(
    ("plan", "hours"), [("m7c_2xa100", 20), ("m7c_1xa100", None), ("m7c_1xh200", None)]
)
def test_the_production_phase_has_the_runbooks_criteria_and_duration(plan, hours):
    production = catalog.load(plan).phases[-1]
    wanted = {"entropy_above", "collapse_below", "gpu_mem_growth_below_mib", "fetch_below_s"}
    assert (production.expects.hours, wanted - production.gates.keys()) == (hours, set())
    early = wanted - {"gpu_mem_growth_below_mib"}
    assert {gates.demand(production.gates[name]).at for name in early} == {(500, 5000)}


@pytest.mark.parametrize("plan", catalog.files())
def test_a_plan_warns_of_a_drop_of_the_throughput_as_early_as_by_default(plan):
    """The action has a bound of its own, so a plan that halts needs no lower threshold."""
    of_plan = {rule.name: rule for rule in rules.with_plan(catalog.load(plan).watch, {})}
    drop, usual = of_plan[rules.THROUGHPUT_DROP], rules.RULES[rules.THROUGHPUT_DROP]
    assert (drop.threshold, drop.severe) == (usual.threshold, 0.1)


@pytest.mark.parametrize("plan", catalog.files())
def test_a_rule_that_may_halt_a_single_rank_has_its_second_source(plan):
    found = catalog.load(plan)
    actions_of = {name: rule.action for name, rule in found.watch.rules.items()}
    if {"zero_gradient", "gate_collapse"} & {n for n, a in actions_of.items() if a in rules.STRONG}:
        alone = [phase for phase in found.phases if phase.nproc == 1]
        assert [phase.name for phase in alone if phase.flags.get("NSA_DISABLE_CSV_LOGS")] == []


def test_every_plan_file_is_among_those():
    named = {"m7c_2xa100", "m7c_1xa100", "m7c_1xh200", "ddp_validation", "fsdp_validation",
             "cpu_validation", "cpu_smoke"}  # fmt: skip
    assert set(catalog.files()) == named


RUNBOOK = """model:
  dim: 768, n_layers: 12, n_heads: 12
nsa:
  l: 32, d: 16, l_sel: 64, n_sel: 16, w: 512
train:
  steps: 50000
  seq_len: 2048
  batch_size: 1  # Per GPU
  lr: 2.0e-4
  save_every: 5000
  out_dir: artifacts/m7c_125m_2xa100_prod
runtime:
  precision: bf16
  gradient_checkpointing: false  # Initially off
  use_flash: true
"""


def test_the_runbooks_yaml_is_read_or_refused_in_one_short_sentence(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(RUNBOOK)
    with pytest.raises(UsageError, match=r"write one per line, or all of them in \{ \}"):
        settings.resolve(path, {})
    lines = [
        f"  {{{line.strip()}}}" if line.count(": ") > 1 and "#" not in line else line
        for line in RUNBOOK.splitlines()
    ]
    path.write_text("\n".join(lines))
    found = settings.resolve(path, {}).settings
    assert (found.model.dim, found.model.nsa.window, found.checkpoint.every) == (768, 512, 5000)
    assert (found.attention.no_flash, found.train.recompute) == (False, "none")
    path.write_text("\n".join([*lines, "  use_flush: 1", "  xyzzy: 1"]))
    with pytest.raises(UsageError) as error:
        settings.resolve(path, {})
    assert str(error.value) == (
        f"{path}: there is no setting 'runtime.use_flush'; did you mean 'runtime.use_flash'?; "
        "there is no setting 'runtime.xyzzy'"
    )
