"""Documents are tested like code: their commands, links, pictures and tables."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from console import action_table
from console.cli import build_parser
from console.plans import gates
from docs.keys import as_markdown
from trainers.contract import rundir

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
    assert as_markdown() in (ROOT / "docs/keys.md").read_text()


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


def test_the_run_directory_document_names_every_file_of_the_contract():
    text = (ROOT / "docs/run-directory.md").read_text()
    for name in (
        rundir.PLAN, rundir.PLAN_STATE, rundir.LOCK, rundir.RUN, rundir.ENV, rundir.SUPERVISOR,
        rundir.EVENTS, rundir.GATES, rundir.METRICS, rundir.REQUESTS, rundir.VERDICTS,
        rundir.CHECKPOINTS, rundir.LATEST, rundir.HALT, rundir.LIVE_STATUS, rundir.TORCHRUN_LOG,
    ):  # fmt: skip
        assert name in text, name
