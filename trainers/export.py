"""`python -m trainers.export RUN_OR_CHECKPOINT FILE.safetensors` writes the weights as one file."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from trainers import failures, manifest
from trainers.command_line import Parser
from trainers.failures import CheckpointError


def main(argv: Sequence[str] | None = None) -> int:
    """Verifies and exports a checkpoint. Returns an exit code of docs/run-directory.md."""
    return failures.command("trainers.export", lambda: _export(argv))


def _export(argv: Sequence[str] | None) -> str:
    parser = Parser(prog="trainers.export", description=__doc__, allow_abbrev=False)
    parser.add_argument("source", type=Path, help="a run directory, or one of its checkpoints")
    parser.add_argument("target", type=Path, help="the file to write")
    arguments = parser.parse_args(argv)
    source, _ = manifest.choose(arguments.source)
    export(source, arguments.target)
    return f"{source} -> {arguments.target}"


def export(checkpoint: Path, target: Path) -> None:
    """Writes weights and settings of a checkpoint atomically to one safetensors file.

    Raises CheckpointError.
    """
    from safetensors.torch import save

    from trainers.checkpoint import load_weights
    from trainers.contract import rundir

    record = manifest.read(checkpoint)
    facts = {
        "step": str(record.step), "tokens_total": str(record.tokens_total),
        "settings": json.dumps(dict(record.settings)),
    }  # fmt: skip
    weights = save(load_weights(checkpoint), facts)
    try:
        rundir.write_atomic(target, weights)
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {error.strerror or error}") from error


if __name__ == "__main__":
    sys.exit(main())
