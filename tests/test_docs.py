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

from benchmarks.__main__ import NAMES
from console import action_table
from console.cli import build_parser, main
from console.diagnose import causes, rules, truth
from console.plans import catalog, gates, preflight
from console.sources import reducer
from docs import pictures
from docs.keys import as_markdown
from tests.console.test_resume import ended
from trainers import command_line, schema
from trainers.contract import flags, heartbeat, pulse, rundir

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*DOCUMENTS, ROOT / "nsa/README.md"]
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


def anchors(path: Path) -> set[str]:
    """Returns the anchors that GitHub makes from the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_links_and_pictures_lead_somewhere(path):
    for name, _, anchor in (t.partition("#") for t in re.findall(r"\]\(([^)]+)", path.read_text())):
        if name.startswith("http"):
            continue
        target = path.parent / name if name else path
        assert target.exists(), name
        assert not anchor or anchor in anchors(target), f"{name}#{anchor}"


def test_files_and_functions_that_the_page_for_developers_names_exist():
    text = (ROOT / "docs/extend.md").read_text()
    paths = set(re.findall(r"`((?:console|trainers|tests|benchmarks)/[\w/.]+)`", text))
    assert len(paths) > 20
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []
    source = "".join(path.read_text() for name in ("console", "trainers", "tests", "benchmarks")
                     for path in (ROOT / name).rglob("*.py"))  # fmt: skip
    names = set(re.findall(r"`([A-Z]{2,}(?:_[A-Z]+)*|[A-Z][a-z]\w+|test_\w+)`", text)) - {"NAME"}
    assert len(names) > 20
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", source)] == []


def test_the_guide_or_the_readme_links_every_page():
    text = (ROOT / "README.md").read_text() + (ROOT / "docs/guide.md").read_text()
    linked = set(re.findall(r"\]\((?:docs/|nsa/)?([\w-]+\.md)", text))
    assert {path.name for path in DOCUMENTS} <= linked | {"README.md"}


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
    ("Requests", {action.name for action in action_table.TABLE if action.mailboxes}),
    ("Events and alerts", event_kinds()),
])  # fmt: skip
def test_the_first_table_of_a_section_has_a_row_for_each_name(section, names):
    text = (ROOT / "docs/run-directory.md").read_text().partition(f"\n## {section}\n")[2]
    table = re.findall(r"^\|.*\|$", text[text.index("\n|") :].partition("\n\n")[0], re.M)
    cells = " ".join(row.split("|")[1] for row in table)
    assert set(re.findall(r"`(.+?)`", cells)) - {"kind"} == names


def test_the_page_on_gates_has_each_gate_and_names_those_that_fail_without_all_records():
    assert first_cells("gates", "gate") == set(gates.RULES)
    text = " ".join((ROOT / "docs/gates.md").read_text().split())
    text = text.partition("records break a bound of ")[2]
    certain, _, rest = text.partition(", the gate fails")
    tails = rest.partition(". For ")[2].partition(", the pulse of a killed")[0]
    for named, field in ((certain, "certain"), (tails, "tails")):
        wanted = {name for name, rule in gates.RULES.items() if getattr(rule, field)}
        assert set(re.findall(r"`(.+?)`", named)) == wanted, field


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_a_page_calls_only_the_name_of_a_gate_a_gate(path):
    named = re.findall(r"gates? `(\w+)`(?:\s+and\s+`(\w+)`)?", path.read_text())
    assert {name for pair in named for name in pair if name} <= set(gates.RULES)


def test_the_run_directory_document_names_every_file_of_the_contract():
    text = (ROOT / "docs/run-directory.md").read_text()
    for name in (
        rundir.PLAN, rundir.PLAN_STATE, rundir.LOCK, rundir.RUN, rundir.ENV, rundir.SUPERVISOR,
        rundir.EVENTS, rundir.GATES, rundir.METRICS, rundir.REQUESTS, rundir.VERDICTS,
        rundir.CHECKPOINTS, rundir.LATEST, rundir.HALT, rundir.LIVE_STATUS, rundir.TORCHRUN_LOG,
        rundir.TRAINING_LOCK,
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


def first_cells(page: str, heading: str) -> set[str]:
    """Returns the names in the first cells of the table with this first heading."""
    table = (ROOT / f"docs/{page}.md").read_text().partition(f"\n| {heading} | ")[2]
    rows = table.partition("\n\n")[0].rstrip().split("\n")[2:]
    return {name for row in rows for name in re.findall(r"`(.+?)`", row.split("|")[1])}


def test_the_pages_have_a_row_for_each_cause_truth_check_and_row_of_the_preflight():
    unnamed = {"transport", "exited-early", "slowest-rank", "all-ranks"}
    assert first_cells("verdicts", "cause") == {each.name for each in causes.CAUSES} | unnamed
    assert first_cells("watch-rules", "rule") == {rule.name for rule in truth.ROWS}
    others = re.search(r"The rows (.+?) pass or give", (ROOT / "docs/plans.md").read_text())
    assert others
    named = first_cells("plans", "row") | set(re.findall(r"`(.+?)`", others[1]))
    assert named == {*preflight.ROWS, *preflight.MEASURED, "config PHASE"}


def test_the_table_of_figures_has_each_figure_that_a_long_record_keeps():
    named = {
        name.partition("[")[0] for name in first_cells("run-directory", "figures of `progress`")
    }
    kept = {"sel_*" if name.startswith("sel_") else name for name in heartbeat.FIGURES}
    assert named == kept
    assert reducer.UNITS.keys() <= heartbeat.FIGURES


@functools.cache
def registries() -> dict[str, set[str]]:
    """Returns the names of each kind of thing, and in "" all other names that a page may have."""
    of_a_run = (ROOT / "docs/run-directory.md").read_text()
    return {
        "plan": set(catalog.files()),
        "phase": {p.sweep or p.name for x in catalog.files() for p in catalog.load(x).phases},
        "gate": set(gates.RULES),
        "rule": {rule.name for rule in rules.TABLE},
        "row": {*preflight.ROWS, *preflight.MEASURED, "config PHASE"},
        "setting": set(schema.keys()),
        "cause": first_cells("verdicts", "cause"),
        "": {*re.findall(r"`(.+?)`", of_a_run), *re.findall(r"[\w.-]+", of_a_run), *flags.FLAGS,
             *(action.key for action in action_table.TABLE)},
    }  # fmt: skip


def runbook_cells() -> list[str]:
    """Returns the last cell of each table row in docs/runbooks.md."""
    return [row.strip("| ").split(" | ")[-1] for row in re.findall(r"^\|.*\|$", RUNBOOKS, re.M)]


def exists(word: str) -> bool:
    """Returns whether a word in backticks is a flag, a command, a file, or in a registry."""
    name, _, value = word.partition("=")
    words = shlex.split(word)
    if name in flags.FLAGS:
        return not value or flags.parse(name, value) is not None
    if words[0] == "nsa-console":  # another test parses all commands
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


def test_the_guide_names_the_command_that_continues_a_lost_run(tmp_path, capsys):
    dead = rundir.identity() | {"pid": 1 << 22, "start_ticks": 1}
    phase = {"name": "sanity", "state": "running", "result": "", "dir": "0-sanity"}
    launch = ended(tmp_path, state="running", supervisor=dead, phases=[phase])
    record = {"v": 1, **dead, "state": "running", "attempt": 1, "workers": []}
    rundir.write_json(launch / "0-sanity" / rundir.SUPERVISOR, record)
    assert main(["status", str(launch)]) == 5
    shown = capsys.readouterr().out
    row = re.search(r"^\| LOST \|.*\|$", (ROOT / "docs/guide.md").read_text(), re.M)
    assert row
    for text in ("LOST", "R, or nsa-console adopt, starts a supervisor"):
        assert text in shown
    assert "| `R` or `nsa-console adopt latest`" in row[0]
    assert main(["resume", str(launch), "--dry-run"]) == 4


def test_the_guide_has_a_row_for_each_bad_end_of_a_launch():
    table = (ROOT / "docs/guide.md").read_text().partition("\n| state | ")[2].partition("\n\n")[0]
    states = " ".join(re.findall(r"^\| (.+?) \|", table, re.M))
    for name in first_cells("json", "`state`") - {"halted"}:
        assert name.upper() in states


def test_the_words_page_has_every_phase_of_a_rank():
    words = set(re.findall(r"`(.+?)`", (ROOT / "docs/words.md").read_text()))
    assert set(pulse.PHASES) - words == set()


def test_the_benchmarks_are_listed_and_chosen_by_name():
    for words, code, text in (("--help", 0, ", ".join(NAMES)), ("nothing", 2, "invalid choice")):
        command = [sys.executable, "-m", "benchmarks", words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=ROOT)
        said = " ".join((done.stdout + done.stderr).split())
        assert (done.returncode, text in said) == (code, True)
    assert "eight measurements" in (ROOT / "README.md").read_text()
    assert len(NAMES) == 8


@pytest.mark.parametrize(("words", "code"), [(["--help"], 0), (["anything"], 2)])
def test_the_pictures_are_not_made_by_a_question(words, code, monkeypatch, capsys):
    monkeypatch.setattr(pictures, "capture", lambda *_: pytest.fail("makes pictures"))
    monkeypatch.setattr(sys, "argv", ["pictures", *words])
    with pytest.raises(SystemExit) as left:
        pictures.main()
    assert left.value.code == code
    assert "usage:" in "".join(capsys.readouterr())
