"""Reads a plan from its YAML file and the files that it extends; `console.plan` has the keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from console.plan import NAME, Plan, parse
from trainers.contract import yamlfile
from trainers.contract.errors import UsageError, did_you_mean
from trainers.contract.jsonl import entries, mapping
from trainers.settings import flatten

REMOVABLE = ("flags", "set", "gates", "env", "rules", "variants")
"""The mappings in which a null removes an entry."""
PLANS = Path(__file__).resolve().parents[2] / "configs" / "plans"


def load(path: Path) -> Plan:
    """Returns the plan in a YAML file; a plan without a name gets the stem of the file.

    A plan is merged into the plan that it extends. Phases of the same name are merged, new phases
    follow, and a null removes an entry. Raises UsageError with a message that names a file.
    """
    document: dict[str, Any] = {}
    for file, own in yamlfile.load_chain(path, "extends", _files):
        base = {key: document[key] for key in document if key not in ("name", "about")}
        _complete(own)
        _check(own, base, str(file))
        document = _merged(base, own)
    return parse({"name": path.stem} | document, str(path))


def _complete(own: dict[str, Any]) -> None:
    """Completes `restart` and the program in a file; `_merged` then overrides those of the base."""
    if isinstance(own.get("restart"), str):
        own["restart"] = {"when": own["restart"]}
    for part in (own, *entries(own, "phases")):
        for key, other in (("script", "module"), ("module", "script")):
            if part.get(key):
                part.setdefault(other, None)


def _files(path: Path, name: str) -> Iterator[Path]:
    """Yields the paths where the plan `name`, which the plan at `path` extends, may be."""
    if NAME.fullmatch(name):
        file = f"{name.removesuffix('.yaml')}.yaml"
        yield from (path.with_name(file), PLANS / file)


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


def _check(own: dict[str, Any], base: dict[str, Any], where: str) -> None:
    """Raises UsageError if a part of the file `own` is wrong, or if two phases have one name."""
    names = [each["name"] for each in entries(own, "phases") if each.get("name") is not None]
    if len({*map(str, names)}) != len(names):
        raise UsageError(f"{where}: two phases have the same name; give each its own")
    _check_part(own, (base,), where)
    _check_part(mapping(own, "watch"), (mapping(base, "watch"),), f"{where}: watch")
    extended = _named(base)
    for name, phase in _named(own).items():
        old, at = extended.get(name, {}), f"{where}: phase {name!r}"
        _check_part(phase, (old, own, base), at)
        for variant, raw in mapping(phase, "variants").items():
            same = mapping(mapping(old, "variants"), variant)
            if isinstance(raw, dict):
                _check_part(raw, (same, old, phase, own, base), f"{at}: variant {variant!r}")


def _check_part(raw: Mapping[str, Any], changed: Sequence[Mapping[str, Any]], where: str) -> None:
    """Raises UsageError if a null of `raw` names no entry in `changed`.

    Also raises UsageError for two programs, and for a section in `set`.
    """
    if raw.get("script") and raw.get("module"):
        raise UsageError(f"{where}: 'script' and 'module' exclude each other; remove one of them")
    for name, value in mapping(raw, "set").items():
        if isinstance(value, dict):
            key, inner = next(flatten({name: value}))
            advice = f"remove the empty {key!r}" if inner == {} else f"write '{key}: {inner}'"
            raise UsageError(f"{where}: set: {name!r} is a section; {advice}")
    for key in REMOVABLE:
        known = {str(name) for each in changed for name in mapping(each, key)}
        for name, value in mapping(raw, key).items():
            if value is None and str(name) not in known:
                raise UsageError(
                    f"{where}: {key}: '{name}' has no value, and there is no such entry to remove "
                    f"(quote a value with a comma){did_you_mean(str(name), known)}"
                )


def _named(document: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the phases of a plan file by name."""
    return {str(each["name"]): each for each in entries(document, "phases") if "name" in each}
