"""The package `nsa` in another program: the examples of its README, and its public names."""

import importlib
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import nsa

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "nsa/pyproject.toml").read_text())["project"]
ALONE = """
import importlib.util, pathlib, sys
sys.path = [path for path in sys.path if path != {root!r}]
sys.modules |= dict.fromkeys({absent!r})
import nsa, nsa.directory, nsa.generate
assert pathlib.Path(nsa.__file__).is_relative_to({site!r}), nsa.__file__
assert not any(importlib.util.find_spec(name) for name in ("console", "trainers"))
shape = dict(dim=8, n_layers=1, n_heads=1, n_kv_groups=1, d_k=4, d_v=4, mlp_hidden=8)
nsa.save_model(nsa.Transformer(nsa.ModelConfig(**shape)), "exported")
nsa.load_model("exported")
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
    for requirement in map(Requirement, PROJECT["dependencies"]):
        least = next(x.version for x in requirement.specifier if x.operator == ">=")
        assert f"{requirement.name} ≥ {least}" in (ROOT / "nsa/README.md").read_text()


def installed_for(requirements: list[str]) -> set[str]:
    """Returns the names of the distributions that pip installs for these requirements."""
    waiting, found = list(map(Requirement, requirements)), set()
    while waiting:
        each = waiting.pop()
        key = canonicalize_name(each.name), frozenset(each.extras)
        if key not in found:
            found.add(key)
            waiting += [
                other for other in map(Requirement, metadata.requires(each.name) or ())
                if other.marker is None
                or any(other.marker.evaluate({"extra": extra}) for extra in ("", *each.extras))
            ]  # fmt: skip
    return {name for name, _ in found}


def test_the_wheel_of_nsa_works_with_its_requirements_alone(tmp_path):
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    alone, site = ["--no-deps", "--no-index"], tmp_path / "site"
    build = [*pip, "wheel", *alone, "--no-build-isolation", "-w", tmp_path, ROOT / "nsa"]
    subprocess.run(build, check=True, timeout=300)
    (wheel,) = tmp_path.glob("nsa_attention-*.whl")
    subprocess.run([*pip, "install", *alone, "--target", site, wheel], check=True, timeout=300)
    assert (site / "nsa/py.typed").exists()
    assert {path.name.partition("-")[0] for path in site.iterdir()} == {"nsa", "nsa_attention"}
    program = tmp_path / "example.py"
    required = installed_for(PROJECT["dependencies"])
    absent = [
        module for module, names in metadata.packages_distributions().items()
        if module != "nsa" and not required & set(map(canonicalize_name, names))
    ]  # fmt: skip
    assert {"transformers", "yaml"} <= set(absent)
    beginning = ALONE.format(root=str(ROOT), site=str(site), absent=absent)
    program.write_text(beginning + example())
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
