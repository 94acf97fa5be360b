"""Writes the files of a run with random records, and changes values inside documents."""

from __future__ import annotations

import gzip
import math
import random
from pathlib import Path

from console.sources import record_files
from console.sources.run_records import RunRecords
from tests.console.sources import directory
from tests.console.sources.snapshots import Observer
from trainers.contract import rundir


def is_used(run: Path) -> bool:
    """Returns whether a reader starts at the snapshot of the run."""
    return RunRecords(run, "recent").has_snapshot


class Writer:
    """Writes files like those of a run of two ranks, with garbage and restarts."""

    def __init__(self, run: Path, rng: random.Random):
        self.run, self.rng = run, rng
        self.ts, self.mono, self.attempt, self.steps, self.written = 1e9, 1.0, 1, 0, {}

    def write(self) -> None:
        self.ts += self.rng.choice((0.1, 1.0, 1.0, 7.0, 61.0))
        kinds = (self.beat, self.beat, self.beat, self.sample, self.sample, self.event,
                 self.garbage, self.again, self.part, self.word)  # fmt: skip
        self.rng.choice(kinds)()

    def beat(self, msg: str = "progress", **more) -> None:
        self.mono += 1.0
        self.steps += msg == "progress"
        for rank in self.rng.sample((0, 1), self.rng.choice((1, 2, 2))):
            key = (rank, self.attempt)
            number = self.written[key] = self.written.get(key, 0) + 1
            loss = self.rng.choice((2.0 / self.steps if self.steps else 2.0, 1.5, "nan"))
            record = {"n": number, "mono": self.mono, "ts": self.ts, "attempt": self.attempt}
            figures = {} if msg != "progress" else {
                "loss": loss, "grad_norm": self.rng.random(), "steps_dt_s": [self.rng.random()],
                "gate_entropy_mean": self.rng.random(), "gpu_mem_reserved": self.rng.random(),
                "bytes_right": self.rng.random(), "toks_per_s": self.rng.random(),
                "gate_collapse_frac": self.rng.random(),
                "dt_fetch_s": self.rng.random(), "comm_hook": self.rng.choice(("bf16", "none")),
            }  # fmt: skip
            directory.beat(self.run, rank, self.steps, msg, **(record | figures | more))

    def word(self) -> None:
        msg = self.rng.choice(("checkpoint", "error", "halt", "exit", "loader_ready"))
        self.beat(msg, reason=f"reason {self.ts}", error=f"{msg} {self.ts}", exit_code=0)

    def sample(self) -> None:
        pulse = {"phase": self.rng.choice(("forward", "forward", "save")), "step": self.steps}
        ranks = [{"rank": rank, "rss_mib": self.rng.random() * 100, "pulse": pulse}
                 for rank in (0, 1)]  # fmt: skip
        gpus = [{"index": 0, "util_pct": self.rng.random(), "state": "ok", "name": "x"}]
        directory.sample(
            self.run, ts=self.ts, attempt=self.attempt, ranks=ranks, gpus=gpus, host="here"
        )

    def event(self) -> None:
        kind = self.rng.choice(("alert", "clear", "ack", "state"))
        name = self.rng.choice(("stall", "disk", "no-supervisor"))
        more = {"state": "running", "why": "so"} if kind == "state" else {"alert": name}
        directory.event(self.run, kind, level="warn", text=f"{self.ts}", attempt=self.attempt,
                        ts=self.ts, **more)  # fmt: skip

    def garbage(self) -> None:
        name = self.rng.choice(("heartbeat_rank0.jsonl", "events.jsonl", "samples_here.jsonl"))
        with (self.run / name).open("ab") as stream:
            stream.write(self.rng.choice((b"{}\n", b"\xff\xfe\n", b"\0\0\n", b'{"v": 1', b"\n")))

    def again(self) -> None:
        """Sometimes begins the next attempt, from a checkpoint."""
        if self.rng.random() < 0.3:
            self.attempt += 1
            self.steps = self.rng.randint(0, self.steps)
            directory.change(self.run / rundir.SUPERVISOR, attempt=self.attempt)
            self.beat("resume")

    def part(self) -> None:
        """Sometimes renames the sample file to a part, and may compress the part."""
        path = self.run / "samples_here.jsonl"
        if not path.exists() or self.rng.random() < 0.5:
            return
        part = record_files.part(path, len(record_files.parts(path)) + 1)
        path.rename(part)
        if self.rng.random() < 0.7:
            part.with_name(part.name + record_files.GZIP).write_bytes(
                gzip.compress(part.read_bytes())
            )
            part.unlink()


def prepared(run: Path) -> Path:
    writer, observer = Writer(run, random.Random(3)), Observer(run)
    for _ in range(60):
        writer.beat()
        writer.sample()
    writer.event()
    observer.save()
    assert is_used(run)
    return run


def places(held, at=()):
    """Yields every place in a document."""
    yield at
    inner = list(enumerate(held)) if isinstance(held, list) else []
    for key, value in held.items() if isinstance(held, dict) else inner:
        yield from places(value, (*at, key))


def put(held, at, value):
    for key in at[:-1]:
        held = held[key]
    held[at[-1]] = value


HOSTILE = (
    None, -1, 2**70, 10**400, 1.5, math.inf, "x", "nan", True, [], {}, [1], {"a": 1}, [[1, 2, 3]],
    [[1, 1], [2, 10**400]],
)  # fmt: skip
