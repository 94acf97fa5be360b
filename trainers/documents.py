"""Files of documents: which there are, what is held out, and how each format is read.

A file is read as pieces `(cursor, data, ends)`: bytes exactly as stored, whether a document ends
with them, and where to begin to read the same piece again. No format walks a file to a cursor but
gzip, which must.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from trainers.failures import DataError
from trainers.schema import DataSettings

CHUNK_BYTES = 1 << 16
ROWS = 256
READ_ERRORS = (OSError, EOFError, ValueError, zlib.error, pa.ArrowException)
"""Exceptions of readers for a file that is gone, cut short or garbage."""

STANDARD_LIBRARY = (
    "asyncio", "collections", "concurrent", "ctypes", "curses", "dbm", "email", "html", "http",
    "importlib", "json", "logging", "multiprocessing", "unittest", "urllib", "wsgiref", "xml",
)  # fmt: skip
"""Packages whose sources are the default text: on every machine, about 4 MB."""

Piece = tuple[int, bytes, bool]
Reader = Callable[[str, int, str], Iterator[Piece]]


@dataclass(frozen=True, slots=True)
class Documents:
    """Files in reading order, one training's part of them."""

    about: str
    files: tuple[str, ...]
    """Paths, or `hf://` addresses with their revision."""
    digest: str
    """Names and sizes of all files, training's and held out."""
    keep: Callable[[bytes], bool]
    """Whether a document is in this part; always true where whole files are held out."""
    reader: Reader
    text_key: str

    def read(self, file: str, cursor: int) -> Iterator[Piece]:
        """Yields the pieces of a file from `cursor` on. Raises DataError that names the file."""
        try:
            for piece in self.reader(file, cursor, self.text_key):
                if self.keep(piece[1]):
                    yield piece
        except READ_ERRORS as error:
            raise DataError(
                f"{file} cannot be read: {error or type(error).__name__}; mend the file or take it "
                "away, then begin a new run"
            ) from error


def find(data: DataSettings, seed: int, held_out: bool, scratch: Path) -> Documents:
    """Returns the files that the settings name, shuffled by the seed.

    Of `text`, a share of the files is held out; of the others, a share of the documents, by their
    content, so that no copy of a held-out document is trained on. Raises DataError when there is
    nothing to read. `scratch` is a directory for temporary files.
    """
    source = data.source
    if source == "fineweb_edu":
        from trainers import hub

        about, names, contents = hub.resolve(data, scratch)
    else:
        root, paths = _list_files(data)
        about = f"{source} of {root if data.path else 'the Python standard library'}"
        names = [str(path) for path in paths]
        contents = [content(name, root) for name in names]
    digest = hashlib.sha256(os.fsencode("\0".join(contents))).hexdigest()
    keep = _always
    if source == "text":
        names = _part_of_files(names, contents, data.held_out, held_out)
    else:
        keep = _part_of_documents(data.held_out, held_out)
    if not names or (held_out and not data.held_out):
        raise DataError(
            f"nothing of {about} is held out (data.held_out={data.held_out:g}); "
            "raise data.held_out, or give more files"
        )
    random.Random(seed).shuffle(names)
    part = "held-out part of " if held_out else ""
    return Documents(
        f"{part}{about} ({len(names)} files)", tuple(names), f"{len(contents)}:{digest[:16]}", keep,
        READERS[source], data.text_key,
    )  # fmt: skip


def content(file: str, root: Path | str) -> str:
    """Returns what stands for a file's content in the fingerprint: name below `root` and size."""
    path = Path(file)
    return f"{path.relative_to(root).as_posix()} {path.stat().st_size}"


def _list_files(data: DataSettings) -> tuple[Path, list[Path]]:
    """Returns the folder and the sorted files below it that hold a byte."""
    root, pattern = Path(data.path), data.pattern
    folders = [root]
    if not data.path:
        root, pattern = Path(sysconfig.get_path("stdlib")), "**/*.py"
        folders = [root / name for name in STANDARD_LIBRARY]
    suffixes = SUFFIXES[data.source]
    try:
        files = [
            file
            for folder in folders
            for file in sorted(folder.glob(pattern))
            if not any(part.startswith(".") for part in file.relative_to(root).parts)
            and file.name.endswith(suffixes)
            and file.is_file()
            and file.stat().st_size
        ]
    except (OSError, ValueError, NotImplementedError) as error:
        raise DataError(
            f"the files {pattern!r} below {root} cannot be listed: {error}; give another "
            "data.pattern or data.path"
        ) from None
    if not files:
        ending = f" and ends in {' or '.join(suffixes)}" if suffixes != ("",) else ""
        raise DataError(
            f"no file below {root} that matches {pattern!r}{ending} holds a byte; give "
            "another data.path"
        )
    return root, files


def _part_of_files(
    names: Sequence[str], keys: Sequence[str], share: float, held_out: bool
) -> list[str]:
    """Returns the files with the lowest hashes, or the others: `share` of them, at least one."""
    order = sorted(range(len(names)), key=lambda i: hashlib.sha256(os.fsencode(keys[i])).digest())
    count = min(max(1, round(share * len(names))), len(names) - 1) if share else 0
    return [names[i] for i in (order[:count] if held_out else order[count:])]


def _part_of_documents(share: float, held_out: bool) -> Callable[[bytes], bool]:
    border = round(share * (1 << 32))
    if not border:
        return _always
    return lambda document: (zlib.crc32(document) < border) == held_out


def _always(_document: bytes) -> bool:
    return True


def _text(file: str, cursor: int, _key: str) -> Iterator[Piece]:
    """Yields a file in pieces that end with a line, so that no character is cut."""
    with Path(file).open("rb") as stream:
        stream.seek(cursor)
        ends = False
        while not ends:
            data = stream.read(CHUNK_BYTES)
            ends = len(data) < CHUNK_BYTES
            data += b"" if ends else stream.readline()
            yield cursor, data, ends
            cursor += len(data)


def _jsonl(file: str, cursor: int, key: str) -> Iterator[Piece]:
    with _opened(file) as stream:
        stream.seek(cursor)
        for line in stream:
            if not line.isspace():
                try:
                    text = json.loads(line)[key]
                    data = text.encode("utf-8", "surrogatepass")
                except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                    raise ValueError(
                        f"at byte {cursor} there is no line of JSON with a text under {key!r} "
                        f"({type(error).__name__}: {error})"
                    ) from None
                yield cursor, data, True
            cursor += len(line)


def _opened(file: str) -> Any:
    """Returns a binary stream that can seek."""
    if file.startswith("hf://"):
        from datasets.utils.file_utils import xopen

        return xopen(file, "rb")
    return gzip.open(file, "rb") if file.endswith(".gz") else Path(file).open("rb")


def _parquet(file: str, cursor: int, key: str) -> Iterator[Piece]:
    """Yields one column's rows; the cursor is the number of the row in the file."""
    with (
        _opened(file) as stream,
        parquet.ParquetFile(stream, page_checksum_verification=True) as table,
    ):
        if key not in table.schema_arrow.names:
            raise ValueError(
                f"it has no column {key!r}, only {', '.join(table.schema_arrow.names)}"
            )
        first = 0
        for group in range(table.num_row_groups):
            rows = table.metadata.row_group(group).num_rows
            if first + rows > cursor:
                yield from _rows(table, group, first, cursor, key)
            first += rows


def _rows(table: Any, group: int, first: int, cursor: int, key: str) -> Iterator[Piece]:
    for batch in table.iter_batches(batch_size=ROWS, row_groups=[group], columns=[key]):
        if first + len(batch) > cursor:
            begin = max(cursor - first, 0)
            documents = batch.column(0).slice(begin).cast(pa.large_binary()).to_pylist()
            for row, document in enumerate(documents, first + begin):
                if document is not None:
                    yield row, document, True
        first += len(batch)


READERS: dict[str, Reader] = {
    "text": _text, "jsonl": _jsonl, "parquet": _parquet, "fineweb_edu": _parquet,
}  # fmt: skip
SUFFIXES: dict[str, tuple[str, ...]] = {
    "text": ("",), "jsonl": (".jsonl", ".jsonl.gz"), "parquet": (".parquet",),
}  # fmt: skip
"""Of which files each source takes the matching ones of its folder."""
