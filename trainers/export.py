"""`python -m trainers.export RUN_OR_CHECKPOINT FILE.safetensors`: the weights as one plain file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from trainers import failures, manifest
from trainers.failures import CheckpointError


def main(words: Sequence[str] | None = None) -> int:
    """Verifies, exports, and returns the exit code: 0, or 15 with one sentence."""
    parser = argparse.ArgumentParser(prog="trainers.export", description=__doc__)
    parser.add_argument("source", type=Path, help="a run directory, or one of its checkpoints")
    parser.add_argument("target", type=Path, help="the file to write")
    arguments = parser.parse_args(words)
    try:
        source, _ = manifest.choose(arguments.source)
        export(source, arguments.target)
    except (CheckpointError, OSError) as error:
        sys.stderr.write(f"trainers.export: {error}\n")
        return failures.CHECKPOINT
    sys.stdout.write(f"{source} -> {arguments.target}\n")
    return failures.DONE


def export(checkpoint: Path, target: Path) -> None:
    """Writes weights and settings of a checkpoint to one safetensors file, replaced as a whole."""
    from safetensors.torch import save

    from trainers.checkpoint import load_weights
    from trainers.contract import rundir

    record = manifest.read(checkpoint)
    facts = {
        "step": str(record.step), "tokens_total": str(record.tokens_total),
        "settings": json.dumps(dict(record.settings)),
    }  # fmt: skip
    rundir.write_atomic(target, save(load_weights(checkpoint), facts))


if __name__ == "__main__":
    sys.exit(main())
