"""Measures how many byte tokens the loader returns per CPU-second, for each format of files.

The CPU-seconds are those of the whole process, including the thread that reads. Each measurement
starts after the first batch, with the files in the page cache.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import torch
from pyarrow import parquet

from benchmarks.common import median, publish, quantile, table
from trainers import settings
from trainers.loader import Loader, open_source

ROUNDS, BATCHES, BATCH_TOKENS = 9, 60, 1 << 14
DOCUMENTS, DOCUMENT_BYTES, FILES = 1500, 4000, 4
BUDGET = 10e6


def write(folder: Path) -> Iterator[tuple[str, Path]]:
    """Writes the same documents in each format. Yields each source with its folder."""
    words = [f"word{i}" for i in range(3000)]
    generator = random.Random(0)
    texts = [" ".join(generator.choices(words, k=DOCUMENT_BYTES // 8)) for _ in range(DOCUMENTS)]
    for name in ("text", "jsonl", "jsonl.gz", "parquet"):
        (folder / name).mkdir()
        for part in range(FILES):
            mine = texts[part::FILES]
            file = folder / name / f"{part}.{name}"
            lines = "".join(json.dumps({"text": text}) + "\n" for text in mine).encode()
            if name == "parquet":
                parquet.write_table(pa.table({"text": mine}), file, row_group_size=100)
            elif name == "text":
                file.write_text("\n".join(mine))
            else:
                file.write_bytes(gzip.compress(lines) if name == "jsonl.gz" else lines)
        yield name, folder / name


def measure(source: str, path: Path, world: int, seq_len: int) -> float:
    """Returns tokens of all ranks per CPU-second; this process is one of `world` ranks."""
    torch.set_num_threads(1)
    chosen = settings.resolve(
        None, {},
        {
            "data.source": source.partition(".")[0], "data.path": str(path),
            "data.seq_len": seq_len, "train.batch_size": BATCH_TOKENS // seq_len,
        },
    ).settings  # fmt: skip
    loader = Loader(open_source(chosen), chosen, 0, world, torch.device("cpu"))
    loader.wait_for_first()
    began = time.process_time()
    loader.fetch(BATCHES)
    took = time.process_time() - began
    loader.close()
    return BATCHES * BATCH_TOKENS * world / took


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()  # no options, only --help
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for source, path in write(Path(directory)):
            for world, seq_len in ((1, 2048), (8, 2048), (1, 128)):
                rates = [measure(source, path, world, seq_len) for _ in range(ROUNDS)]
                rows.append(
                    (
                        source,
                        world,
                        seq_len,
                        f"{median(rates) / 1e6:.1f}",
                        f"{quantile(rates, 0.25) / 1e6:.1f} to {quantile(rates, 0.75) / 1e6:.1f}",
                        f"≥ {BUDGET / 1e6:g}",
                    )
                )
    publish(
        "loader",
        "What the loader delivers per CPU-second",
        table(("source", "ranks", "sequence", "million byte tokens", "quartiles", "budget"), rows),
        f"Medians of {ROUNDS} rounds of {BATCHES} batches of {BATCH_TOKENS} tokens per rank, of "
        f"documents of about {DOCUMENT_BYTES} bytes. The tokens are those of all ranks: each rank "
        "reads the stream of all ranks, and one of 8 ranks trains on an eighth of the tokens.",
    )


if __name__ == "__main__":
    main()
