"""The package `nsa` in another program: the examples of its README, and its public names."""

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import nsa

ROOT = Path(__file__).parents[2]
ALONE = """
import importlib.util, pathlib, sys
sys.path = [path for path in sys.path if path != {root!r}]
import nsa, nsa.directory, nsa.generate
assert pathlib.Path(nsa.__file__).is_relative_to({site!r}), nsa.__file__
assert not any(importlib.util.find_spec(name) for name in ("console", "trainers"))
assert "transformers" not in sys.modules
"""


def example(number: int = 0) -> str:
    text = (ROOT / "nsa/README.md").read_text()
    return text.split("```python\n")[number + 1].partition("```")[0]


@pytest.mark.parametrize(("number", "longest"), [(0, 15), (1, 10), (2, 10)])
def test_the_examples_of_the_readme_run(number, longest, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    statements = [line for line in example(number).splitlines() if line]
    assert longest - 5 < len(statements) <= longest
    exec(compile(example(number), "README.md", "exec"), {})


def test_the_readme_has_the_versions_that_the_package_requires():
    project = tomllib.loads((ROOT / "nsa/pyproject.toml").read_text())["project"]
    for requirement in project["dependencies"]:
        name, _, versions = requirement.partition(">=")
        assert f"{name} ≥ {versions.partition(',')[0]}" in (ROOT / "nsa/README.md").read_text()


def test_the_wheel_of_nsa_works_without_the_console_and_the_trainers(tmp_path):
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    alone, site = ["--no-deps", "--no-index"], tmp_path / "site"
    build = [*pip, "wheel", *alone, "--no-build-isolation", "-w", tmp_path, ROOT / "nsa"]
    subprocess.run(build, check=True, timeout=300)
    (wheel,) = tmp_path.glob("nsa_attention-*.whl")
    subprocess.run([*pip, "install", *alone, "--target", site, wheel], check=True, timeout=300)
    assert (site / "nsa/py.typed").exists()
    assert {path.name.partition("-")[0] for path in site.iterdir()} == {"nsa", "nsa_attention"}
    program = tmp_path / "example.py"
    program.write_text(ALONE.format(root=str(ROOT), site=str(site)) + example())
    done = subprocess.run(
        [sys.executable, program], cwd=tmp_path, env={"PYTHONPATH": str(site)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_all_public_names_are_importable_and_no_others():
    for name in nsa.__all__:
        home = importlib.import_module(getattr(nsa, name).__module__)
        assert getattr(home, name) is getattr(nsa, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        nsa.nothing  # noqa: B018  # pyright: ignore
