"""The YAML loader: safe tags only, bounded size and depth, no aliases, no duplicate keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from trainers.contract.errors import UsageError

MAX_BYTES = 256 << 10
MAX_DEPTH = 16
MOST_FILES = 5
TEXTS = re.compile(r"[-+]?0[0-7_]+|.*:.*")
"""Numbers of YAML 1.1 that stay text: 010 would be 8 (octal), and 1:30 would be 90 (base 60)."""


def load(path: Path) -> dict[str, Any]:
    """Returns the mapping in a YAML file. Raises UsageError; its message names the file."""
    try:
        if not path.is_file():
            raise UsageError(f"there is no regular file {path}; give the path of a YAML file")
        with path.open("rb") as file:  # of a checkpoint, only the first bytes are read
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise UsageError(f"{path} has more than {MAX_BYTES} bytes; give the path of a YAML file")
    return parse(data, str(path))


def load_chain(
    path: Path, key: str, places: Callable[[Path, str], Iterable[Path]]
) -> list[tuple[Path, dict[str, Any]]]:
    """Returns the file `path` and the files that it builds on, with their content; `path` is last.

    A file may name another file, on which it builds, as the value of `key`. `places` returns the
    paths at which this other file may be. Raises UsageError.
    """
    found: list[tuple[Path, dict[str, Any]]] = []
    while True:
        document = load(path)
        name = document.pop(key, None)
        found.insert(0, (path, document))
        if name is None:
            return found
        seen = {each.resolve() for each, _ in found}
        others = places(path, name) if isinstance(name, str) and name else ()
        others = [each for each in others if each.resolve() not in seen and each.is_file()]
        if not others or len(found) == MOST_FILES:
            raise UsageError(
                f"{path}: {key} {name!r}: there is no such file, or the files name each other, or "
                f"more than {MOST_FILES} follow each other"
            )
        path = others[0]


def parse(data: bytes | str, name: str) -> dict[str, Any]:
    """Returns the mapping in YAML text. Raises UsageError; its message begins with `name`."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Rejects duplicate keys, deep nesting and, to limit the size of the data, aliases."""

        def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
            tag = super().resolve(kind, value, implicit)
            is_number = tag.endswith((":int", ":float"))
            return self.DEFAULT_SCALAR_TAG if is_number and TEXTS.fullmatch(value) else tag

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise yaml.YAMLError("aliases (*name) are not allowed here; write the value out")
            self.depth = getattr(self, "depth", 0) + 1
            if self.depth > MAX_DEPTH:
                raise yaml.YAMLError(f"nested deeper than {MAX_DEPTH} levels")
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            for key, _ in node.value:
                name = str(key.value)
                if name in seen:
                    line = key.start_mark.line + 1
                    raise yaml.YAMLError(f"the key {name!r} occurs twice (line {line})")
                seen.add(name)
            return super().construct_mapping(node, deep)

    try:
        document = yaml.load(data, Loader)
    except (yaml.YAMLError, RecursionError, ValueError, LookupError, AttributeError) as error:
        raise UsageError(f"{name}{_problem(error)}") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise UsageError(f"{name} is a {type(document).__name__}; it must be key: value lines")
    return document


def _problem(error: Exception) -> str:
    """Returns the line in which an error was found, if it is known, and what is wrong there."""
    where = getattr(error, "problem_mark", None)
    line = f" line {where.line + 1}" if where is not None else ""
    what = getattr(error, "problem", None) or str(error).splitlines()[0]
    if what.startswith("mapping values are not allowed"):
        what = "several values in one line; write one per line, or all of them in { }"
    elif isinstance(error, LookupError | AttributeError):  # from PyYAML's conversions by tag
        what = "a value does not fit its !!tag"
    return f"{line} is not valid YAML: {what}"
