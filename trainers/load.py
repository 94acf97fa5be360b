"""`python -m trainers.load CHECKPOINT` verifies a checkpoint and loads all of it on the CPU.

If the plan sets `load`, the supervisor starts this command for new checkpoints, also while the
training continues. So the command has the lowest priority.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from trainers import failures, manifest
from trainers.command_line import Parser
from trainers.failures import CheckpointError

NICE, FIRST_TO_KILL = 19, "1000"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what was loaded. Returns an exit code of docs/run-directory.md."""
    with contextlib.suppress(OSError):
        os.nice(NICE)
        # If memory runs out, the kernel kills this process before a rank.
        Path("/proc/self/oom_score_adj").write_text(FIRST_TO_KILL, encoding="ascii")
    parser = Parser(prog="trainers.load", description=__doc__, allow_abbrev=False)
    parser.add_argument("checkpoint", type=Path, help="checkpoint directory, not a run directory")
    return failures.command("trainers.load", lambda: load(parser.parse_args(argv).checkpoint))


def load(path: Path) -> str:
    """Reads every file and tensor of a checkpoint; returns a sentence.

    Raises CheckpointError, also for a weight that is not finite.
    """
    found = manifest.verify(path)
    import torch

    from trainers import checkpoint

    torch.set_num_threads(1)
    weights = list(checkpoint.load_model(path, found.settings).named_parameters())
    if bad := next((name for name, each in weights if not torch.isfinite(each).all()), ""):
        raise CheckpointError(f"{path} has a weight that is not finite, in {bad}")
    sections = ("optimizer", checkpoint.LOSS_SCALE, checkpoint.SPIKES, checkpoint.RANDOM)
    others = sum(len(checkpoint.load_weights(path, section)) for section in sections)
    count = sum(each.numel() for _, each in weights)
    return f"step {found.step}: {count:,} weights and {others} other tensors are loaded"


if __name__ == "__main__":
    sys.exit(main())
