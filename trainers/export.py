"""`python -m trainers.export RUN_OR_CHECKPOINT TARGET` writes a checkpoint for other programs.

The target is a directory with the weights and their configuration, which `nsa.load_model` and
`nsa.hf` read.
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
    parser.add_argument("target", type=Path, help="directory to write")
    arguments = parser.parse_args(argv)
    source, _ = manifest.choose(arguments.source)
    export(source, arguments.target)
    return f"{source} -> {arguments.target}"


def export(checkpoint: Path, target: Path) -> None:
    """Writes the model and the settings of a checkpoint to a directory. Raises CheckpointError."""
    from nsa.directory import save_model
    from trainers.checkpoint import load_model

    record = manifest.read(checkpoint)
    facts = {
        "step": str(record.step), "tokens_total": str(record.tokens_total),
        "settings": json.dumps(dict(record.settings)),
    }  # fmt: skip
    try:
        save_model(load_model(checkpoint, record.settings), target, facts)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {error.strerror or error}") from error


if __name__ == "__main__":
    sys.exit(main())
