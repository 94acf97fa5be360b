"""Look at a checkpoint: continue a text with it. python -m trainers.generate RUN --prompt TEXT"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from trainers import failures
from trainers.command_line import Parser
from trainers.contract.errors import UsageError


def main(words: Sequence[str] | None = None) -> int:
    """Writes the prompt and what follows. Returns the exit code of docs/run-directory.md."""
    return failures.command("trainers.generate", lambda: _continue(_parse(words)))


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="trainers.generate", description=__doc__, allow_abbrev=False)
    parser.add_argument("checkpoint", type=Path, help="run directory or one of its checkpoints")
    parser.add_argument("--prompt", required=True, help="text that is continued")
    parser.add_argument("--tokens", type=int, default=200, help="bytes to add")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest byte")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(words)
    if not arguments.prompt:
        raise UsageError("--prompt is empty; give at least one character to continue")
    if arguments.tokens < 1 or not 0 <= arguments.temperature < float("inf"):
        raise UsageError("--tokens is at least 1 and --temperature at least 0; change them")
    return arguments


def _continue(arguments: argparse.Namespace) -> str:
    import torch

    from nsa.generate import generate
    from trainers import checkpoint, manifest

    path, _ = manifest.choose(arguments.checkpoint)
    model = checkpoint.load_model(path)
    prompt = torch.tensor([list(arguments.prompt.encode())])
    generator = torch.Generator().manual_seed(arguments.seed)
    added = generate(model, prompt, arguments.tokens, arguments.temperature, generator)
    text = arguments.prompt + bytes(added[0].tolist()).decode(errors="replace")
    # A model may write escape sequences, which are not for the terminal.
    return "".join(c if c.isprintable() or c == "\n" else "�" for c in text)


if __name__ == "__main__":
    sys.exit(main())
