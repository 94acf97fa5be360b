"""Text files as one endless packed stream of bytes, through `datasets`, exactly as on disk.

The stock `text` builder opens files in text mode: CR LF becomes LF and bytes that are no UTF-8
raise. The builder here is like it, a shard a file, streaming and resumable, and reads bytes.
"""

from __future__ import annotations

import hashlib
import random
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from datasets.builder import Key
from torch import Tensor

from trainers.data import stack
from trainers.failures import DataError
from trainers.settings import DataSettings

CHUNK_BYTES = 1 << 16

STANDARD_LIBRARY = (
    "asyncio", "collections", "concurrent", "ctypes", "curses", "dbm", "email", "html", "http",
    "importlib", "json", "logging", "multiprocessing", "unittest", "urllib", "wsgiref", "xml",
)  # fmt: skip
"""Packages whose sources are the default text: on every machine, about 4 MB."""


@dataclass
class BytesConfig(datasets.BuilderConfig):
    """`files` are paths, one a shard."""

    files: Sequence[str] = ()


class Bytes(datasets.GeneratorBasedBuilder):
    """Files as rows of at most `CHUNK_BYTES` bytes."""

    BUILDER_CONFIG_CLASS = BytesConfig

    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo(features=datasets.Features({"data": datasets.Value("binary")}))

    def _split_generators(self, dl_manager: object) -> list[datasets.SplitGenerator]:
        del dl_manager
        files = list(self.config.files)  # pyright: ignore[reportAttributeAccessIssue]
        return [datasets.SplitGenerator(name="train", gen_kwargs={"files": files})]

    def _generate_examples(self, **kwargs: Any) -> Iterator[tuple[Key, dict[str, Any]]]:
        for shard, file in enumerate(kwargs["files"]):
            with Path(file).open("rb") as stream:
                number = 0
                while chunk := stream.read(CHUNK_BYTES):
                    yield Key(shard, number), {"data": chunk}
                    number += 1


def stream_bytes(files: Sequence[Path], scratch: Path) -> datasets.IterableDataset:
    """Returns the files' bytes as a streaming dataset; nothing stays in `scratch` or elsewhere."""
    with tempfile.TemporaryDirectory(prefix=".datasets-", dir=scratch) as cache:
        builder = Bytes(cache_dir=cache, files=[str(file) for file in files])
        return builder.as_streaming_dataset(split="train")  # pyright: ignore[reportReturnType]


class Lane:
    """One endless stream of bytes, cut into sequences of S + 1 that overlap by one."""

    def __init__(self, dataset: datasets.IterableDataset, seq_len: int, about: str):
        self._dataset, self._seq_len, self._about = dataset, seq_len, about
        self._chunks = self._endless()
        self._data, self._at = b"", 0

    def take(self) -> bytes:
        """Returns the next S + 1 bytes; the last of them comes again as the next first."""
        while len(self._data) - self._at <= self._seq_len:
            self._data, self._at = self._data[self._at :] + next(self._chunks), 0
        begin, self._at = self._at, self._at + self._seq_len
        return self._data[begin : self._at + 1]

    def _endless(self) -> Iterator[bytes]:
        while True:
            size = 0
            for row in self._dataset:
                size += len(row["data"])
                yield row["data"]
            if not size:
                raise DataError(f"{self._about} holds not one byte any more; give a data.path")


class TextFiles:
    """The files below a folder, again and again, in `lanes` streams side by side.

    The files lie in an order that follows from the seed; lane j holds every `lanes`-th from the
    j-th on, and sequence i is the next one of lane i % lanes: neighbours in a batch come from
    different files. Within a lane every byte but the very first is predicted once. Each rank walks
    all lanes and keeps its share.
    """

    def __init__(self, data: DataSettings, seed: int, scratch: Path):
        self.seq_len = self.scored = data.seq_len
        self.files = list_files(data)
        self.about = (
            f"text of {data.path or 'the Python standard library'} ({len(self.files)} files)"
        )
        random.Random(seed).shuffle(self.files)
        count = min(data.lanes, len(self.files))
        self.fingerprint = _fingerprint(self.files, f"{seed} {self.seq_len} {count}")
        stream = stream_bytes(self.files, scratch)
        self._lanes = [
            Lane(stream.shard(count, index, contiguous=False), self.seq_len, self.about)
            for index in range(count)
        ]
        self._next = 0

    def read(self, first: int, count: int, rank: int, world: int) -> tuple[Tensor, None]:
        """Returns the share `[B, S + 1]`; sequences before `first` are walked over."""
        if first < self._next:
            raise ValueError(f"the stream is at sequence {self._next}, {first} has passed")
        mine = []
        for index in range(self._next, first + count):
            sequence = self._lanes[index % len(self._lanes)].take()
            if index >= first and index % world == rank:
                mine.append(sequence)
        self._next = first + count
        return stack(mine, self.seq_len + 1), None


def list_files(data: DataSettings) -> list[Path]:
    """Returns the sorted files that the settings name. Raises DataError when there are none."""
    if data.path:
        folders, pattern, where = [Path(data.path)], data.pattern, data.path
    else:
        library = Path(sysconfig.get_path("stdlib"))
        folders, pattern, where = [library / name for name in STANDARD_LIBRARY], "**/*.py", library
    files = [
        file
        for folder in folders
        for file in sorted(folder.glob(pattern))
        if not any(part.startswith(".") for part in file.relative_to(folder).parts)
        and file.is_file()
        and file.stat().st_size
    ]
    if not files:
        raise DataError(
            f"no file below {where} that matches {pattern!r} holds a byte; give another data.path"
        )
    return files


def _fingerprint(files: Sequence[Path], how: str) -> str:
    digest = hashlib.sha256(how.encode())
    for file in files:
        digest.update(f"\0{file.name} {file.stat().st_size}".encode())
    return f"text {digest.hexdigest()[:16]}"
