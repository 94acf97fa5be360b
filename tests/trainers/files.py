"""Files of documents for the tests of the data; some of the files are damaged."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from trainers.schema import DataSettings
from trainers.stream import Stream

FORMATS = ("jsonl", "jsonl.gz", "parquet")


def write(path: Path, texts: list[str], rows: int = 7) -> None:
    """Writes documents in the format that the ending of `path` names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        table = pa.table({"id": list(range(len(texts))), "text": pa.array(texts, pa.string())})
        pq.write_table(table, path, row_group_size=rows, write_page_checksum=True)
        return
    lines = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts))
    data = lines.encode() + b"\n"
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def spoil(path: Path, how: str) -> None:
    """Writes a file into the folder `path` and damages it as `how` says; `gone` damages nothing."""
    ending = how.partition(" ")[0]
    file = path / f"bad.{ending}"
    write(file, [os.urandom(500).hex() for _ in range(50)])
    data = bytearray(file.read_bytes())
    if how.endswith("cut"):
        file.write_bytes(data[: len(data) // 2])
    elif how.endswith("flipped"):
        middle = len(data) // 2
        data[middle : middle + 400] = bytes(400)
        file.write_bytes(data)
    elif how.endswith("noise"):
        file.write_bytes(os.urandom(3000))
    elif how.endswith("number"):
        file.write_bytes(b'{"text": "fine"}\n{"text": 3}\n')
    elif how.endswith("key"):
        file.write_bytes(b'{"text": "fine"}\n{"body": "x"}\n')
    elif how.endswith("column"):
        pq.write_table(pa.table({"body": ["x"]}), file)


def stream_of(path: Path, source: str = "text", seed: int = 0, part: bool = False, **changes):
    changes = {"seq_len": 100, "lanes": 3, "held_out": 0.0} | changes
    data = DataSettings(source=source.partition(".")[0], path=str(path), **changes)  # type: ignore[arg-type]
    return Stream(data, seed, held_out=part)


def text_from(rows: torch.Tensor) -> bytes:
    """Returns the bytes from which the sequences of one lane were cut, without the last byte."""
    assert torch.equal(rows[:-1, -1], rows[1:, 0]), "every token is predicted once"
    return bytes(rows[:, :-1].flatten().tolist())
