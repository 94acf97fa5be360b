"""Starts real runs for the tests of the trainers, waits for them, and reads their records."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "tiny_cpu.yaml"

SMALL = {
    "model.dim": 32, "model.n_layers": 1, "model.n_heads": 2, "model.n_kv_groups": 1,
    "model.d_k": 16, "model.d_v": 16, "model.mlp_hidden": 64, "model.nsa.window": 8,
    "data.seq_len": 32, "data.recall_span": 16, "data.recall_distance": 16, "train.batch_size": 4,
    "train.warmup_steps": 2,
}  # fmt: skip
"""Settings of a model whose step takes milliseconds, for tests that need no larger model."""


def environment(tmp_path: Path, **flags: str) -> dict[str, str]:
    """Returns the variables of a child: a home in `tmp_path`, one thread, no hub; then `flags`."""
    folders = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    home = tmp_path / "home"
    home.mkdir(exist_ok=True)
    return {
        "PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": os.pathsep.join(folders),
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **flags,
    }  # fmt: skip


def python(
    tmp_path: Path, *words: object, cwd: Path = ROOT, **flags: str
) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments and the variables of `environment`; returns the result."""
    return subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, cwd=cwd,
        env=environment(tmp_path, **flags), timeout=300,
    )  # fmt: skip


class Recorded:
    """The files of a training."""

    def __init__(self, path: Path):
        self.path = path

    def records(self, rank: int = 0, *messages: str) -> list[dict[str, Any]]:
        """Returns the records of a rank, or only those with one of these `messages` as `msg`."""
        return heartbeats(self.path, rank, *messages)

    def metrics(self) -> dict[str, Any]:
        return json.loads((self.path / "metrics.json").read_text())


class Run(Recorded):
    """One training in its own processes."""

    def __init__(
        self, tmp_path: Path, settings: Mapping[str, Any], nproc: int = 2, config: Path = CONFIG,
        broken: str = "", flags: Mapping[str, str] | None = None, name: str = "run",
        program: str = "trainers.ddp",
    ):  # fmt: skip
        super().__init__(tmp_path / name)
        self.nproc = nproc
        program = "tests.trainers.ablated" if broken else program
        sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
        self.command = [
            sys.executable, *(torchrun if nproc > 1 else []), "-m", program,
            "--config", str(config), "--run-dir", str(self.path), *sets,
            *([broken] if broken else []),
        ]  # fmt: skip
        self.log = tmp_path / f"{name}.log"
        with self.log.open("wb") as stream:
            self.process = subprocess.Popen(
                self.command, stdout=stream, stderr=subprocess.STDOUT, cwd=ROOT,
                env=environment(tmp_path, **(flags or {})), start_new_session=True,
            )  # fmt: skip
        # A failed test leaves no training behind: `end` ends the process, and torchrun its ranks.
        weakref.finalize(self, end, self.process)

    def wait(self, timeout_s: float = 300) -> int:
        """Returns the exit code; if the run takes too long, ends it and raises AssertionError."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            end(self.process)
            raise AssertionError(f"the run did not end in {timeout_s} s:\n{self.text()}") from None

    def done(self, timeout_s: float = 300) -> Run:
        """Returns the run after its successful end."""
        assert self.wait(timeout_s) == 0, self.text()
        return self

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def until(self, what: Callable[[], Any], timeout_s: float = 300) -> Any:
        """Returns the first true result of `what`, which must come before the end of the run."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if found := what():
                return found
            assert self.process.poll() is None, f"the run ended first:\n{self.text()}"
            time.sleep(0.02)
        raise AssertionError(f"this was not true within {timeout_s} s:\n{self.text()}")

    def until_step(self, step: int) -> None:
        """Waits until every rank has reported progress at `step` or later."""
        for rank in range(self.nproc):
            self.until(lambda rank=rank: last_step(self.records(rank, "progress")) >= step)

    def pids(self) -> list[int]:
        return [self.records(rank)[0]["pid"] for rank in range(self.nproc)]


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a training that still runs; torchrun kills its ranks after 30 s."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def heartbeats(run: Path, rank: int, *messages: str) -> list[dict[str, Any]]:
    path = run / f"heartbeat_rank{rank}.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    records = [json.loads(line) for line in lines]
    return [record for record in records if not messages or record["msg"] in messages]


def latest_checkpoint(run: Path) -> Path | None:
    """Returns the checkpoint that the file `latest` names; None without this file or checkpoint."""
    file = run / "checkpoints" / "latest"
    path = file.with_name(file.read_text().strip()) if file.exists() else file
    return path if path.is_dir() else None


def last_step(records: Iterable[dict[str, Any]]) -> int:
    return max((record["step"] for record in records), default=0)


def small(**changes: Any) -> dict[str, Any]:
    """Returns `SMALL` with some keys changed; a name may have `__` in place of a dot."""
    return SMALL | {key.replace("__", "."): value for key, value in changes.items()}
