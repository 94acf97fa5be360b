"""The package as another program uses it: the example of its README, and its public names."""

import importlib
from pathlib import Path

import pytest

import nsa


def test_the_example_of_the_readme_runs():
    text = Path(nsa.__file__).with_name("README.md").read_text()
    example = text.partition("```python\n")[2].partition("```")[0]
    statements = [line for line in example.splitlines() if line]
    assert 10 < len(statements) <= 15
    exec(compile(example, "README.md", "exec"), {})


def test_all_public_names_are_importable_and_no_others():
    for name in nsa.__all__:
        home = importlib.import_module(getattr(nsa, name).__module__)
        assert getattr(home, name) is getattr(nsa, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        nsa.nothing  # noqa: B018  # pyright: ignore
