"""Rules for imports, for reads of the environment, and for packages that stay unloaded."""

from __future__ import annotations

import ast
import math
import subprocess
import sys
from pathlib import Path

import pytest

from console.status_text import clock
from tests.console.sources import directory

ROOT = Path(__file__).parents[1]
PRODUCT = sorted(p for room in ("console", "nsa", "trainers") for p in (ROOT / room).rglob("*.py"))
STDLIB = sys.stdlib_module_names
FLOORS = (
    "plan", "access", "model", "status_text", "rank_end", "run_state",
    "settings_file", "action_table", "sources", "diagnose", "plans", "supervisor", "targets",
    "actions", "bundle", "tui", "commands", "cli",
)  # fmt: skip


def imports(path: Path) -> set[str]:
    """Returns every module that a file imports, at whatever depth."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def tops(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports(path)} - {"__future__"}


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


@pytest.mark.parametrize("path", PRODUCT, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_keep_to_their_room(path):
    relative = path.relative_to(ROOT)
    used = tops(path) - STDLIB
    if relative.parts[:2] == ("trainers", "contract"):
        allowed = {"trainers", "yaml"} if relative.name == "yamlfile.py" else {"trainers"}
        assert used <= allowed
        # The table of flags reads types, limits and help of the settings, which need no torch.
        ours = ("trainers.contract", *(("trainers.schema",) * (relative.name == "flags.py")))
        assert all(name.startswith(ours) for name in imports(path) if "trainers" in name)
    elif room(path) == "nsa":
        own = {"hf.py": "transformers", "directory.py": "safetensors"}.get(relative.name, "torch")
        assert used <= {"nsa", "torch", own}
        if relative.name in ("config.py", "backends.py"):
            assert used <= {"nsa"}
    elif room(path) == "trainers":
        libraries = {
            "torch", "datasets", "huggingface_hub", "pyarrow", "safetensors", "tiktoken", "yaml",
        }  # fmt: skip
        assert used <= {"trainers", "nsa"} | libraries
    else:
        assert used <= {"console", "trainers", "nsa", "textual", "rich", "psutil", "pynvml"}
        for name in imports(path):
            if name.startswith("trainers"):
                without_torch = ("trainers.contract", "trainers.settings", "trainers.manifest")
                assert name.startswith(without_torch) or name == "trainers"
            if name.startswith("nsa"):
                assert name.startswith("nsa.config") or name == "nsa"


def module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_modules_import_each_other_in_a_cycle():
    """Imports inside functions, and imports that only types need, count too."""
    graph = {module(path): imports(path) for path in PRODUCT}
    reachable: dict[str, set[str]] = {}
    for name in graph:
        found, left = set[str](), [name]
        while left:
            new = (graph[left.pop()] & graph.keys()) - found
            found |= new
            left += new
        reachable[name] = found
    cycles = {
        frozenset(other for other in graph if other in found and name in reachable[other])
        for name, found in reachable.items() if name in found
    }  # fmt: skip
    assert not cycles


def floor(name: str) -> int | None:
    parts = name.split(".")
    return FLOORS.index(parts[1]) if len(parts) > 1 and parts[1] in FLOORS else None


@pytest.mark.parametrize(
    "path", [p for p in PRODUCT if room(p) == "console"], ids=lambda p: str(p.relative_to(ROOT))
)
def test_inside_the_console_an_import_never_climbs(path):
    relative = path.relative_to(ROOT).with_suffix("")
    mine = floor(".".join(relative.parts))
    if mine is None:
        return
    for name in imports(path):
        if name.startswith("console."):
            other = floor(name)
            assert other is None or other <= mine, f"{name} is above {relative}"


def test_the_environment_is_read_in_one_module():
    readers = set()
    for path in PRODUCT:
        for node in ast.walk(ast.parse(path.read_text())):
            named = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
            if named and isinstance(node.value, ast.Name) and node.value.id == "os":
                readers.add(str(path.relative_to(ROOT)))
    assert readers == {"trainers/contract/environ.py"}


def test_a_time_becomes_a_date_in_one_function():
    """A time in a record may be any number; `clock` also accepts a number that is no date."""
    converters = set()
    for path in PRODUCT:
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else ""
            if name in ("localtime", "gmtime", "fromtimestamp", "utcfromtimestamp", "ctime"):
                converters.add(str(path.relative_to(ROOT)))
    own_clock = {"console/actions.py", "console/commands/diagnose.py",
                 "console/supervisor/__main__.py", "trainers/entry.py"}  # fmt: skip
    assert converters == {"console/status_text.py", *own_clock}
    assert [clock(ts, "%Y", utc=True) for ts in (-1e20, math.nan, 1e20, math.inf)] == [
        "1970", "1970", "4147", "4147",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import trainers.contract.member, console.plan", ("torch", "yaml", "numpy")),
        ("import nsa, nsa.config; nsa.NSAConfig", ("torch", "numpy")),
        ("import trainers.settings", ("torch", "numpy", "datasets")),
        ("import console.cli", ("torch", "numpy", "pandas", "textual", "yaml", "psutil")),
        ("import console.supervisor.__main__", ("torch", "numpy", "pandas", "textual")),
        (
            "import console.tui.app",
            ("torch", "numpy", "pandas", "datasets", "console.diagnose"),
        ),
        (
            "import sys; sys.argv = ['x', 'status', '--json', 'latest']\n"
            "from console.cli import main\nassert main() == 0",
            ("torch", "numpy", "pandas", "textual", "rich", "yaml", "psutil"),
        ),
    ],
)
def test_what_is_cheap_stays_cheap(statement, absent, tmp_path):
    """A separate process executes the statement and prints the loaded packages of `absent`."""
    directory.run(directory.launch(tmp_path / "artifacts") / "0-first")
    program = f"{statement}\nimport sys\nprint([m for m in {absent!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )
    assert done.stdout.strip().endswith("[]"), done.stdout + done.stderr


def test_nobody_imports_the_console_but_itself():
    for path in PRODUCT:
        if room(path) != "console":
            assert "console" not in tops(path), path
