"""Documents are tested like code: their commands, links, pictures and tables."""

from __future__ import annotations

import ast
import functools
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from console import action_table
from console.cli import build_parser, main
from console.diagnose import rules
from console.plans import catalog, gates, preflight
from docs.keys import as_markdown
from trainers import command_line, schema
from trainers.contract import flags, pulse, rundir

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"nsa-console ((?!\w+ RUN|\w+ PLAN)[a-z][^`\n#]*)")

SAFE = ("flags", "plans", "check cpu_smoke", "launch cpu_smoke --dry-run", "runs")


def commands() -> list[str]:
    found = sorted({c.strip() for path in DOCUMENTS for c in COMMAND.findall(path.read_text())})
    assert len(found) >= 10
    return found


@pytest.mark.parametrize("command", commands())
def test_every_command_in_the_documents_is_one(command):
    words = shlex.split(command)
    if words[0] in ("PLAN", "RUN"):
        pytest.skip("a placeholder")
    parsed = build_parser().parse_args(words)
    assert callable(parsed.command)


@pytest.mark.parametrize("command", SAFE)
def test_commands_that_only_look_run(command, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "console", "--root", str(tmp_path), *command.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_links_and_pictures_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)", path.read_text()):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target


def test_pictures_are_of_the_product_that_is_there():
    for picture in (ROOT / "docs/pictures").glob("*.svg"):
        assert "nsa-console" in picture.read_text()


@pytest.mark.parametrize("target", re.findall(r"make (\w+)", (ROOT / "README.md").read_text()))
def test_make_targets_exist(target):
    if target not in ("sure",):
        assert f"\n{target}:" in (ROOT / "Makefile").read_text()


def test_the_keys_in_the_documents_are_those_of_the_table():
    assert as_markdown() == (ROOT / "docs/keys.md").read_text()
    *first, last = (f"`{key}`" for key in action_table.KEYS)
    named = f"**Actions on the screen.** {', '.join(first)} and {last} are actions."
    assert named in (ROOT / "docs/guide.md").read_text()


def event_kinds() -> set[str]:
    """Returns the kinds of all events that the supervisor writes."""
    kinds = set()
    for path in (ROOT / "console/supervisor").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("event"):
                words = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
                kinds |= set([word for word in words if isinstance(word, str)][:1])
    return kinds


@pytest.mark.parametrize(("section", "names"), [
    ("Gates", set(gates.RULES)),
    ("Requests", {action.name for action in action_table.TABLE if action.mailboxes}),
    ("Events and alerts", event_kinds()),
])  # fmt: skip
def test_the_first_table_of_a_section_has_a_row_for_each_name(section, names):
    text = (ROOT / "docs/run-directory.md").read_text().partition(f"\n## {section}\n")[2]
    table = re.findall(r"^\|.*\|$", text[text.index("\n|") :].partition("\n\n")[0], re.M)
    cells = " ".join(row.split("|")[1] for row in table)
    assert set(re.findall(r"`(.+?)`", cells)) - {"kind"} == names


def test_the_run_directory_document_names_the_gates_that_fail_without_all_records():
    text = (ROOT / "docs/run-directory.md").read_text().partition("records break a\nbound of ")[2]
    certain, _, rest = text.partition(", the gate fails")
    tails = rest.partition(". For ")[2].partition(", the pulse of a killed")[0]
    for named, field in ((certain, "certain"), (tails, "tails")):
        wanted = {name for name, rule in gates.RULES.items() if getattr(rule, field)}
        assert set(re.findall(r"`(.+?)`", named)) == wanted, field


def test_the_run_directory_document_names_every_file_of_the_contract():
    text = (ROOT / "docs/run-directory.md").read_text()
    for name in (
        rundir.PLAN, rundir.PLAN_STATE, rundir.LOCK, rundir.RUN, rundir.ENV, rundir.SUPERVISOR,
        rundir.EVENTS, rundir.GATES, rundir.METRICS, rundir.REQUESTS, rundir.VERDICTS,
        rundir.CHECKPOINTS, rundir.LATEST, rundir.HALT, rundir.LIVE_STATUS, rundir.TORCHRUN_LOG,
    ):  # fmt: skip
        assert name in text, name


RUNBOOKS = (ROOT / "docs/runbooks.md").read_text()
RUNBOOK_VARIABLES = set(re.findall(r"\w+", """
    NSA_ACCUM NSA_DDP_BUCKET_MB NSA_DDP_COMPRESS NSA_DDP_DISABLE_GC NSA_DDP_FIND_UNUSED
    NSA_DDP_SAFE_MODE NSA_DDP_STATIC_GRAPH NSA_DISABLE_AUX_STATS NSA_DISABLE_CSV_LOGS NSA_LR
    NSA_MEM_DUMP_EVERY NSA_NVTX NSA_OPT_FUSED NSA_PREFILL_BATCHED NSA_SCALER_BACKOFF_FACTOR
    NSA_SCALER_GROWTH_FACTOR NSA_SCALER_GROWTH_INTERVAL NSA_SCALER_INIT_SCALE NSA_SDPA_AUDIT
    NSA_SDPA_FLASH_ONLY NSA_SDPA_NO_FLASH NSA_SEL_RANGES_V2 NSA_TB_DISABLE NSA_USE_FA2
    CUDA_VISIBLE_DEVICES NCCL_ALGO NCCL_DEBUG NCCL_IB_DISABLE NCCL_P2P_DISABLE NCCL_PROTO
    PYTORCH_CUDA_ALLOC_CONF
"""))  # fmt: skip
KINDS = ("plan", "phase", "gate", "rule", "row", "setting", "cause")
NAMED = re.compile(rf"\b({'|'.join(KINDS)})s? ((?:`[^`]+`(?:, | and )?)+)")


@functools.cache
def registries() -> dict[str, set[str]]:
    """Returns the names of each kind of thing, and in "" all other names that a page may have."""
    guide, of_a_run = ((ROOT / f"docs/{x}.md").read_text() for x in ("guide", "run-directory"))
    causes = guide.partition("| cause |")[2].partition("\n\n")[0].split("\n")
    return {
        "plan": set(catalog.files()),
        "phase": {p.sweep or p.name for x in catalog.files() for p in catalog.load(x).phases},
        "gate": set(gates.RULES),
        "rule": {rule.name for rule in rules.TABLE},
        "row": {*preflight.ROWS, *preflight.MEASURED, "config PHASE"},
        "setting": set(schema.keys()),
        "cause": set(re.findall(r"`([a-z-]+)`", " ".join(row[:30] for row in causes))),
        "": {*re.findall(r"`(.+?)`", of_a_run), *re.findall(r"[\w.-]+", of_a_run), *flags.FLAGS,
             *(action.key for action in action_table.TABLE)},
    }  # fmt: skip


def runbook_cells() -> list[str]:
    """Returns the last cell of each row of all tables of docs/runbooks.md: what is here."""
    return [row.strip("| ").split(" | ")[-1] for row in re.findall(r"^\|.*\|$", RUNBOOKS, re.M)]


def exists(word: str) -> bool:
    """Returns whether a word in backticks is a command, a file, or in one of the registries."""
    name, _, value = word.partition("=")
    words = shlex.split(word)
    if name in flags.FLAGS:
        return not value or flags.parse(name, value) is not None
    if words[0] == "nsa-console":  # the test of all commands parses it
        return words[1] != "launch" or words[2] in catalog.files()
    if words[0] in ("torchrun", "python"):
        program = words.index("-m") + 1
        module = words[program]
        if module in ("trainers.ddp", "trainers.fsdp"):
            ranks = {"RANK": "0", "WORLD_SIZE": "2"} if words[0] == "torchrun" else {}
            command_line.parse(words[program + 1 :], module, ranks)
        paths = [each for each in words if each.startswith(("tests/", "configs/"))]
        paths += [f"{module.replace('.', '/')}.py"] if module != "pytest" else []
        return all((ROOT / path).exists() for path in paths)
    return any(name in names for names in registries().values()) or (ROOT / name).exists()


def test_every_variable_of_the_runbooks_is_a_flag(capsys):
    assert main(["flags"]) == 0
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line[:1] == " "}
    table = RUNBOOKS.partition("\n## Environment variables\n")[2].partition("\n\nA launch uses")[0]
    cells = " ".join(row.split(" | ")[0] for row in re.findall(r"^\|.*\|$", table, re.M))
    named = {word.partition("=")[0] for word in re.findall(r"`(.+?)`", cells)}
    assert named == RUNBOOK_VARIABLES
    assert named <= listed


def test_every_plan_gate_rule_and_command_of_the_runbooks_page_exists():
    words = {word for cell in runbook_cells() for word in re.findall(r"`(.+?)`", cell)}
    assert len(words) > 140
    assert [word for word in sorted(words) if not exists(word)] == []
    found = [(kind, word) for cell in runbook_cells() for kind, text in NAMED.findall(cell)
             for word in re.findall(r"`(.+?)`", text)]  # fmt: skip
    assert [each for each in found if each[1] not in registries()[each[0]]] == []
    assert {kind for kind, _ in found} == set(KINDS)


@pytest.mark.parametrize("plan", ["m7c_2xa100", "ddp_validation", "fsdp_validation"])
def test_the_runbooks_page_has_every_phase_and_gate_of_the_plans(plan):
    text = " ".join(runbook_cells())
    for phase in catalog.load(plan).phases:
        for name in (phase.sweep or phase.name, *phase.gates):
            assert f"`{name}`" in text, name


def test_the_words_page_has_every_phase_of_a_rank():
    words = set(re.findall(r"`(.+?)`", (ROOT / "docs/words.md").read_text()))
    assert set(pulse.PHASES) - words == set()
