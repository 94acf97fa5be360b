"""Lists files of documents, separates the held-out part, and reads the documents of each format.

A file is read in pieces `(cursor, data, ends)`. `cursor` is the place of the piece in its file, and
`data` its text as bytes. `ends` is True if a document ends with the piece. To continue at a cursor,
a reader skips the earlier part of the file. But it must decompress a gzip file from the start, and
read a parquet file from the start of a row group.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import sysconfig
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from trainers.contract import data_access
from trainers.failures import DataError, reason
from trainers.schema import DataSettings

CHUNK_BYTES = 1 << 16
HUB = "hf://"
REPAIR = (
    "check the file and the disk, then resume; a resume without this file needs --allow-change data"
)
ROWS = 256
READ_ERRORS = (OSError, EOFError, ValueError, zlib.error, pa.ArrowException)
"""Exceptions of the readers for a missing, truncated or damaged file."""

STANDARD_LIBRARY = (
    "asyncio", "collections", "concurrent", "ctypes", "curses", "dbm", "email", "html", "http",
    "importlib", "json", "logging", "multiprocessing", "unittest", "urllib", "wsgiref", "xml",
)  # fmt: skip
"""Packages of Python whose sources are the default text, about 4 MB."""

Piece = tuple[int, bytes, bool]
Reader = Callable[[str, int, str], Iterator[Piece]]


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents of the training part or of the held-out part, in shuffled files."""

    about: str
    files: tuple[str, ...]
    """Paths, or `hf://` addresses with their revision."""
    digest: str
    """Number of all files of both parts, and a hash of their entries in the fingerprint."""
    keep: Callable[[bytes], bool] | None
    """Returns whether a document is in this part; None if whole files are held out."""
    reader: Reader
    text_key: str
    notes: tuple[str, ...] = ()
    """Sentences for the operator about the selected files."""

    def read(self, file: str, cursor: int) -> Iterator[Piece]:
        """Yields the pieces of this part in a file, from `cursor` on. Raises DataError."""
        try:
            for piece in self.reader(file, cursor, self.text_key):
                if self.keep is None or self.keep(piece[1]):
                    yield piece
        except READ_ERRORS as error:
            advice = "check the network and HF_TOKEN" if file.startswith(HUB) else REPAIR
            raise DataError(f"{file} cannot be read: {reason(error)}; {advice}") from error


def find(data: DataSettings, seed: int, held_out: bool) -> Documents:
    """Returns the documents that the settings select, in files that are shuffled by the seed.

    For the source `text`, a fraction of the files is held out. For other sources, a fraction of the
    documents is held out; a hash of the content decides, so that no copy of a held-out document is
    trained on. This part has one document of each of `data.lanes` files in turn, and is one file,
    so that an evaluation reads documents of many files, and none twice before all are read. Raises
    DataError.
    """
    source = data.source
    if source == "fineweb_edu":
        from trainers import hub

        about, names, contents = hub.resolve(data)
        unread = ""
    else:
        root, names, contents, unread = _list_files(data)
        about = f"{source} of {root if data.path else 'the Python standard library'}"
    digest = hashlib.sha256(os.fsencode("\0".join(contents))).hexdigest()
    border, every, much = round(data.held_out * (1 << 32)), names, ""
    if source == "text":
        names = _part_of_files(every, contents, data.held_out, held_out)
        much = "" if held_out else _much_is_held_out(every, contents, names, data.held_out)
    if not names or (held_out and not data.held_out):
        raise DataError(
            f"nothing of {about} is held out (data.held_out={data.held_out:g}); "
            "raise data.held_out, or use more files"
        )
    random.Random(seed).shuffle(names)
    part = "held-out part of " if held_out else ""
    count = f"{len(names)} of {len(every)}" if len(names) < len(every) else len(names)
    docs = Documents(
        f"{part}{about} ({count} files)", tuple(names), f"{len(contents)}:{digest[:16]}",
        None if source == "text" else lambda text: (zlib.crc32(text) < border) == held_out,
        READERS[source], data.text_key, tuple(filter(None, (unread, much))),
    )  # fmt: skip
    return _in_turn(docs, data.lanes) if held_out else docs


def _in_turn(docs: Documents, count: int) -> Documents:
    """Returns the documents as one file: one document of each of `count` files in turn."""

    def read(*_place: object) -> Iterator[Piece]:
        parts = deque(
            (piece for file in docs.files[i::count] for piece in docs.read(file, 0))
            for i in range(count)
        )
        while parts:
            piece = next(parts[0], None)
            if piece is None:
                parts.popleft()
                continue
            yield piece
            if piece[2]:
                parts.rotate(-1)

    return replace(docs, files=(docs.about,), keep=None, reader=read)


def _list_files(data: DataSettings) -> tuple[Path, list[str], list[str], str]:
    """Returns the data folder, its selected files, their entries in the fingerprint, and a note.

    The note names linked folders that are not read; it is "" if there are none.
    """
    root, pattern = Path(data.path), data.pattern
    folders = [root]
    if not data.path:
        root, pattern = Path(sysconfig.get_path("stdlib")), "**/*.py"
        folders = [root / name for name in STANDARD_LIBRARY]
    try:
        files = [
            str(file)
            for folder in folders
            for file in sorted(folder.glob(pattern))
            if data_access.is_read(file, root, data.source)
        ]
        contents = [data_access.fingerprint(file, root) for file in files]
        unread = data_access.unread_folders(root, pattern) if data.path else ""
    except (OSError, ValueError, NotImplementedError) as error:
        raise DataError(
            f"cannot list the files {pattern!r} below {root}: {error}; change data.pattern or "
            "data.path"
        ) from None
    if not files:
        raise DataError(
            f"no file with content below {root} matches {pattern!r} and is one of {data.source}; "
            "change data.path" + (unread and f"; {unread}")
        )
    return root, files, contents, unread


def _part_of_files(
    names: Sequence[str], keys: Sequence[str], fraction: float, held_out: bool
) -> list[str]:
    """Returns the held-out files (those with the lowest hashes), or all others.

    At least one file is held out, if `fraction` is above 0 and there are at least two files.
    """
    order = sorted(range(len(names)), key=lambda i: hashlib.sha256(os.fsencode(keys[i])).digest())
    count = min(max(1, round(fraction * len(names))), len(names) - 1) if fraction else 0
    return [names[i] for i in (order[:count] if held_out else order[count:])]


def _much_is_held_out(
    names: Sequence[str], keys: Sequence[str], trained: Sequence[str], fraction: float
) -> str:
    """Returns a note if the files that are not trained on have far more text than `fraction`.

    Returns "" if they have not.
    """
    sizes = {name: int(key.rpartition(" ")[2]) for name, key in zip(names, keys, strict=True)}
    held = sizes.keys() - set(trained)
    share = sum(map(sizes.__getitem__, held)) / sum(sizes.values())
    if share <= fraction + 0.1:
        return ""
    return (
        f"data.held_out={fraction:g} holds out {100 * share:.1f} % of the text (the largest such "
        f"file: {max(held, key=sizes.__getitem__)}), because it holds out whole files; set "
        "data.held_out=0 (and eval.every=0), or divide the text into more files"
    )


def _text(file: str, cursor: int, _key: str) -> Iterator[Piece]:
    """Yields a file in pieces of whole lines, so that no character is split."""
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
                        f"the line at byte {cursor} is not a JSON object with text under {key!r} "
                        f"({type(error).__name__}: {error})"
                    ) from None
                yield cursor, data, True
            cursor += len(line)


def _opened(file: str) -> Any:
    """Returns a seekable binary stream."""
    if file.startswith(HUB):
        from datasets.utils.file_utils import xopen

        return xopen(file, "rb")
    return gzip.open(file, "rb") if file.endswith(".gz") else Path(file).open("rb")


def _parquet(file: str, cursor: int, key: str) -> Iterator[Piece]:
    """Yields the rows of one column that are not null; the cursor is the row number in the file."""
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
            if first + rows <= cursor:
                first += rows
                continue
            for batch in table.iter_batches(batch_size=ROWS, row_groups=[group], columns=[key]):
                documents = batch.column(0).cast(pa.large_binary()).to_pylist()
                for row, document in enumerate(documents, first):
                    if row >= cursor and document is not None:
                        yield row, document, True
                first += len(batch)


READERS: dict[str, Reader] = {
    "text": _text, "jsonl": _jsonl, "parquet": _parquet, "fineweb_edu": _parquet,
}  # fmt: skip
