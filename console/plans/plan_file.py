"""Reads a plan from its YAML file and the files that it extends; `console.plan` has the keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from console.plan import NAME, Plan, parse
from trainers.contract import yamlfile

PLANS = Path(__file__).resolve().parents[2] / "configs" / "plans"


def load(path: Path) -> Plan:
    """Returns the plan in a YAML file; a plan without a name gets the stem of the file.

    A plan is merged into the plan that it extends. Phases of the same name are merged, new phases
    follow, and a null removes an entry. Raises UsageError with a message that names a file.
    """
    document: dict[str, Any] = {}
    for _, each in yamlfile.load_chain(path, "extends", _files):
        base = {key: document[key] for key in document if key not in ("name", "about")}
        document = _merged(base, each)
    return parse({"name": path.stem} | document, str(path))


def _files(path: Path, name: str) -> Iterator[Path]:
    """Yields the paths where the plan `name`, which the plan at `path` extends, may be."""
    if NAME.fullmatch(name):
        yield from (path.with_name(f"{name}.yaml"), PLANS / f"{name}.yaml")


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `base` with the values of `over`; mappings and lists of phases are merged."""
    found = {**base, **over}
    for key in base.keys() & over.keys():
        old, new = base[key], over[key]
        if isinstance(old, dict) and isinstance(new, dict):
            found[key] = _merged(old, new)
        elif key == "phases" and isinstance(old, list) and isinstance(new, list):
            names = [each.get("name") if isinstance(each, dict) else None for each in old]
            found[key] = list(old)
            for each in new:
                name = each.get("name") if isinstance(each, dict) else None
                if name is not None and name in names:
                    place = names.index(name)
                    found[key][place] = _merged(old[place], each)
                else:
                    found[key].append(each)
    return found
