"""`python -m trainers.fwe_smoke` measures how fast FineWeb-Edu is read, without training.

It prints the tokens per second, and two percentiles of the time of a fetch. The exit code is 0, 12
if the data are missing, damaged or late, or 13 for a wrong option. For 12 and 13, a sentence on
stderr says why.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from trainers import failures, settings
from trainers.command_line import Parser
from trainers.contract import values
from trainers.rejected_settings import VOCABULARIES
from trainers.run_records import percentile_ms
from trainers.schema import Settings


def main(argv: Sequence[str] | None = None) -> int:
    """Fetches batches like a training of one rank. Returns the exit code."""
    return failures.command("trainers.fwe_smoke", lambda: _fetch(argv))


def _fetch(argv: Sequence[str] | None) -> str:
    parser = Parser(prog="trainers.fwe_smoke", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--seq-len", default=1024, help="tokens per sequence (default 1024)")
    add("--batch", default=1, help="sequences per batch (default 1)")
    add("--batches", default=20, help="batches to fetch (default 20)")
    add("--timeout", default=60.0, help="longest wait in seconds (default 60)")
    add("--tokenizer", choices=sorted(VOCABULARIES), default="byte", help="default: byte")
    add("--local-path", default="", help="folder that mirrors the dataset (default: the hub)")
    arguments = parser.parse_args(argv)
    batches = values.read(arguments.batches, int, 1, 1 << 20, "--batches")
    wanted: dict[str, Any] = {
        "data.source": "fineweb_edu", "data.path": arguments.local_path,
        "data.seq_len": arguments.seq_len, "train.batch_size": arguments.batch,
        "data.timeout_s": arguments.timeout, "data.tokenizer": arguments.tokenizer,
        "model.vocab_size": min(VOCABULARIES[arguments.tokenizer]),
    }  # fmt: skip
    origins = {
        "data.path": "--local-path", "data.seq_len": "--seq-len", "train.batch_size": "--batch",
        "data.timeout_s": "--timeout",
    }  # fmt: skip
    chosen = settings.resolve(None, {}, wanted, origins=origins).settings
    return "; ".join(check(chosen, batches))


def check(chosen: Settings, batches: int) -> list[str]:
    """Returns the source's description with the speed of `batches` batches, then its notes.

    Raises DataError.
    """
    import torch

    from trainers.loader import Loader, open_source

    began = time.perf_counter()
    source = open_source(chosen)
    loader = Loader(source, chosen, rank=0, world=1, device=torch.device("cpu"))
    try:
        loader.wait_for_first()
        first_s = time.perf_counter() - began
        fetches_s = []
        for _ in range(batches):
            before = time.perf_counter()
            loader.fetch()
            fetches_s.append(time.perf_counter() - before)
    finally:
        loader.close()
    tokens = batches * chosen.train.batch_size * chosen.data.seq_len
    p50_ms, p95_ms = (percentile_ms(fetches_s, percent) for percent in (50, 95))
    text = (
        f"{source.about}: {tokens / (time.perf_counter() - began - first_s):,.0f} tokens/s "
        f"({chosen.data.tokenizer}), fetch p50 {p50_ms:.2f} ms, p95 {p95_ms:.2f} ms, first "
        f"batch after {first_s:.1f} s, {batches} batches of {chosen.train.batch_size} × "
        f"{chosen.data.seq_len}"
    )
    return [text, *source.notes]


if __name__ == "__main__":
    sys.exit(main())
