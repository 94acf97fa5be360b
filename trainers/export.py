"""`python -m trainers.export RUN_OR_CHECKPOINT TARGET` writes a checkpoint for other programs.

A target that ends in `.safetensors` is a file with the weights. Any other target is a directory
with the weights and their configuration, which `nsa.load_model` and `nsa.hf` read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from trainers import failures, manifest
from trainers.command_line import RUN_OR_CHECKPOINT, Parser
from trainers.failures import CheckpointError


def main(argv: Sequence[str] | None = None) -> int:
    """Verifies and exports a checkpoint. Returns an exit code of docs/run-directory.md."""
    return failures.command("trainers.export", lambda: _export(argv))


def _export(argv: Sequence[str] | None) -> str:
    parser = Parser(prog="trainers.export", description=__doc__, allow_abbrev=False)
    parser.add_argument("source", type=Path, help=RUN_OR_CHECKPOINT)
    parser.add_argument("target", type=Path, help="file or directory to write")
    arguments = parser.parse_args(argv)
    source, _ = manifest.choose(arguments.source)
    export(source, arguments.target)
    return f"{source} -> {arguments.target}"


def export(checkpoint: Path, target: Path) -> None:
    """Writes weights and settings of a checkpoint to a safetensors file or a directory.

    A file is written atomically. Raises CheckpointError.
    """
    from safetensors.torch import save

    from nsa.directory import save_model
    from trainers.checkpoint import load_model, load_weights
    from trainers.contract import rundir

    record = manifest.read(checkpoint)
    facts = {
        "step": str(record.step), "tokens_total": str(record.tokens_total),
        "settings": json.dumps(dict(record.settings)),
    }  # fmt: skip
    try:
        if target.suffix == ".safetensors":
            rundir.write_atomic(target, save(load_weights(checkpoint), facts))
            return
        save_model(load_model(checkpoint, record.settings), target, facts)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint}: {error}; export to a .safetensors file") from error
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {error.strerror or error}") from error


if __name__ == "__main__":
    sys.exit(main())
