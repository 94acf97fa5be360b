"""The cost of the loop compared with a bare PyTorch loop: `python -m benchmarks.trainer`.

The runs of two loops take turns: the loop of the trainers, with heartbeats, pulse and guards, and a
short PyTorch loop that only trains. Both train a dense model of the same shape on random bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import ROOT, median, publish, table
from trainers.contract import environ

SHAPE = {
    "model.dim": 256, "model.n_layers": 4, "model.n_heads": 4, "model.n_kv_groups": 4,
    "model.d_k": 64, "model.d_v": 64, "model.mlp_hidden": 704, "model.attention": "dense",
    "data.source": "synthetic", "data.seq_len": 256, "train.batch_size": 4,
    "checkpoint.at_end": False, "report.log_every": 20, "report.disable_tb": True,
    "report.disable_aux_stats": True,
}  # fmt: skip


def bare(sets: Sequence[str], steps: int) -> None:
    """Trains with the simplest loop, and prints the CPU and wall seconds of `steps` steps."""
    import torch
    import torch.nn.functional as F
    from torch import distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from nsa.model import Transformer
    from trainers import optim, settings
    from trainers.allocator import keep_freed_memory

    keep_freed_memory()  # as our loop does: the loop is measured, not the allocator
    chosen = settings.resolve(None, {}, dict(word.split("=", 1) for word in sets)).settings
    world = int(environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(chosen.train.seed)
    model = Transformer(chosen.model)
    if world > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = optim.build(model, chosen.optim)
    generator, length = random.Random(0), chosen.data.seq_len + 1

    def batch() -> torch.Tensor:
        rows = bytearray(generator.randbytes(chosen.train.batch_size * length))
        return torch.frombuffer(rows, dtype=torch.uint8).view(-1, length).long()

    for step in range(steps + 1):
        if step == 1:
            began, wall = time.process_time(), time.perf_counter()
        tokens = batch()
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    tell([time.process_time() - began, time.perf_counter() - wall])
    if world > 1:
        dist.destroy_process_group()


def ours(sets: Sequence[str], steps: int) -> None:
    """Trains with the project's loop, and prints the CPU and wall seconds of `steps` steps."""
    from trainers import entry, loop

    began: list[float] = []
    plain = loop.fetch

    def fetch(t: loop.Training, step: int) -> object:
        if step in (2, steps + 2):
            began.extend((time.process_time(), time.perf_counter()))
        return plain(t, step)

    loop.fetch = fetch  # pyright: ignore[reportAttributeAccessIssue]
    with tempfile.TemporaryDirectory() as folder:
        words = [part for word in sets for part in ("--set", word)]
        run = Path(environ.get("BENCH_RUN", folder)) / "run"
        code = entry.main([*words, "--set", f"train.steps={steps + 2}", "--run-dir", str(run)])
    if code:
        sys.exit(code)
    tell([began[2] - began[0], began[3] - began[1]])
    entry.exit_now(code)


def tell(figures: list[float]) -> None:
    """Prints a line in one write, because the ranks share the standard output."""
    sys.stdout.flush()
    os.write(1, f"{json.dumps(figures)}\n".encode())


def measure(kind: str, nproc: int, steps: int) -> tuple[float, float]:
    """Returns two values per step: CPU seconds summed over ranks, and mean wall seconds."""
    sets = [f"{key}={value}" for key, value in SHAPE.items()]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, *(torchrun if nproc > 1 else []), "-m", "benchmarks.trainer",
             "--kind", kind, "--steps", str(steps), *sets],
            cwd=ROOT, capture_output=True, text=True, check=True,
            env=environ.snapshot() | {"OMP_NUM_THREADS": "1", "BENCH_RUN": folder},
        )  # fmt: skip
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(found) == nproc, done.stdout + done.stderr
    cpu, wall = zip(*found, strict=True)
    return sum(cpu) / steps, statistics.mean(wall) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=("bare", "ours"))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("sets", nargs="*")
    options = parser.parse_args()
    if options.kind:
        {"bare": bare, "ours": ours}[options.kind](options.sets, options.steps)
        return
    rows = []
    for nproc, budget in ((1, "≥ 0.97"), (2, "≥ 0.95")):
        ratios, walls, absolute = [], [], []
        for _ in range(options.pairs):
            plain, mine = (measure(kind, nproc, options.steps) for kind in ("bare", "ours"))
            ratios.append(plain[0] / mine[0])
            walls.append(plain[1] / mine[1])
            absolute.append(mine[0])
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        rows.append((
            f"{nproc} rank{'s' if nproc > 1 else ''}", f"{median(ratios):.3f}", spread,
            f"{median(walls):.3f}", f"{median(absolute) * 1e3:.1f}", budget,
        ))  # fmt: skip
    publish(
        "trainer",
        "Cost of the loop compared with a bare PyTorch loop",
        table(
            ("ranks", "speed of ours / bare, CPU s", "range", "wall", "CPU ms a step", "budget"),
            rows,
        ),
        f"Medians of {options.pairs} interleaved pairs of {options.steps} steps each; the dense "
        "model of 3.2 M parameters, 4 × 256 bytes a rank and step, fp32, one thread a rank.",
    )


if __name__ == "__main__":
    main()
