"""`python -m trainers.generate RUN_OR_CHECKPOINT --prompt TEXT` continues a text."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from trainers import failures
from trainers.command_line import RUN_OR_CHECKPOINT, Parser
from trainers.contract import values
from trainers.contract.errors import UsageError
from trainers.failures import CheckpointError
from trainers.rejected_settings import VOCABULARIES

COLDEST = 1e-6
"""Smallest temperature for a draw; logits divided by a smaller one may overflow."""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the prompt and its continuation. Returns an exit code of docs/run-directory.md."""
    return failures.command("trainers.generate", lambda: _continue(argv))


def _continue(argv: Sequence[str] | None) -> str:
    parser = Parser(prog="trainers.generate", description=__doc__, allow_abbrev=False)
    parser.add_argument("checkpoint", type=Path, help=RUN_OR_CHECKPOINT)
    add = parser.add_argument
    add("--prompt", required=True, help="text to continue")
    add("--tokens", default=200, help="tokens to add (default 200)")
    add("--temperature", default=0.0, help="0: the likeliest token (default)")
    add("--seed", default=0, help="seed of the generator (default 0)")
    arguments = parser.parse_args(argv)
    if not arguments.prompt:
        raise UsageError("--prompt is empty; pass at least one character")
    count = values.read(arguments.tokens, int, 1, 1 << 20, "--tokens")
    temperature = values.read(arguments.temperature, float, 0, 1e6, "--temperature")
    seed = values.read(arguments.seed, int, 0, (1 << 63) - 1, "--seed")

    import torch

    from nsa.generate import generate
    from trainers import checkpoint, manifest, tokenizer

    path, _ = manifest.choose(arguments.checkpoint)
    saved = manifest.read(path).settings
    model = checkpoint.load_model(path, saved)
    name = str(saved.get("data.tokenizer", "byte"))
    if model.config.vocab_size not in VOCABULARIES.get(name, ()):
        raise CheckpointError(
            f"{path} has a vocabulary of {model.config.vocab_size} tokens, which does not fit its "
            f"tokenizer {name!r:.80}"
        )
    words = tokenizer.build(name, b"")
    encoded = words.encode(arguments.prompt.encode(errors="replace"))
    prompt = torch.frombuffer(bytearray(encoded), dtype=words.kind).long()[None]
    generator = torch.Generator().manual_seed(seed)
    drawn = temperature if temperature >= COLDEST else 0.0
    added = generate(model, prompt, count, drawn, generator)
    text = arguments.prompt + words.decode(added[0].tolist()).decode(errors="replace")
    # A model may generate escape sequences, which must not reach the terminal.
    return "".join(c if c.isprintable() or c == "\n" else "�" for c in text)


if __name__ == "__main__":
    sys.exit(main())
