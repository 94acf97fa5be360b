"""The words on the command line of a trainer: options are settings by another name."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from trainers.contract import environ
from trainers.contract.errors import UsageError

OPTIONS: tuple[tuple[str, str, str], ...] = (
    ("--dataset", "data.source", "where tokens come from"),
    ("--local-path", "data.path", "folder of the data"),
    ("--steps", "train.steps", "optimizer steps"),
    ("--seq-len", "data.seq_len", "predicted tokens per sequence"),
    ("--batch-size", "train.batch_size", "sequences per rank and micro-batch"),
    ("--precision", "train.precision", "fp32, bf16, fp16 or fp64"),
    ("--loader-timeout", "data.timeout_s", "seconds to wait for a batch"),
    ("--from", "checkpoint.from_step", "resume from the checkpoint of this step"),
    ("--skip-data", "data.skip", "pass over the data of steps A:B"),
    ("--save", "checkpoint.export", "write the final weights to this safetensors file"),
)
"""Option, setting, help."""


@dataclass(frozen=True, slots=True)
class Words:
    """What the command line says."""

    config: Path | None
    run_dir: Path | None
    check: bool
    overrides: Mapping[str, str]
    origins: Mapping[str, str]
    """Which option set a key of `overrides`."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, like everything else here."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; python -m {self.prog} --help shows the options")


def parse(words: Sequence[str] | None, program: str, variables: Mapping[str, str]) -> Words:
    """Returns what the words and `CONFIG` say. Raises UsageError."""
    found = _parser(program).parse_args(words)
    overrides: dict[str, str] = {}
    origins: dict[str, str] = {}
    said = [(option, key, getattr(found, _name(option))) for option, key, _ in OPTIONS]
    for option, key, value in [*said, ("--resume", "checkpoint.resume", found.resume)]:
        if value is not None:
            overrides[key], origins[key] = value, option
    overrides |= dict(_override(word) for word in found.set)
    _check_ranks(found.ddp, variables)
    config = found.config or (Path(named) if (named := variables.get(environ.CONFIG)) else None)
    return Words(config, found.run_dir, found.check, overrides, origins)


def _parser(program: str) -> argparse.ArgumentParser:
    parser = Parser(prog=program, allow_abbrev=False, description="Train; see docs/guide.md.")
    config_help = f"YAML file of settings (default: what ${environ.CONFIG} names, if set)"
    parser.add_argument("--config", type=Path, help=config_help)
    set_help = "override one setting, e.g. train.steps=10; may be repeated; the last word"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=set_help)
    run_help = "run directory (default artifacts/<config>/<UTC time>)"
    parser.add_argument("--run-dir", type=Path, help=run_help)
    check_help = "print all settings with their origins as JSON and stop"
    parser.add_argument("--check", action="store_true", help=check_help)
    for option, key, text in OPTIONS:
        parser.add_argument(option, metavar="X", dest=_name(option), help=f"{text} ({key})")
    resume_help = "go on from this run's newest good checkpoint, or from a directory's"
    parser.add_argument("--resume", nargs="?", const="auto", metavar="DIR", help=resume_help)
    ddp_help = "1: insist on torchrun, 0: on one process, -1: either"
    parser.add_argument("--ddp", choices=("-1", "0", "1"), default="-1", help=ddp_help)
    return parser


def _name(option: str) -> str:
    return option.strip("-").replace("-", "_") + "_word"


def _override(word: str) -> tuple[str, str]:
    key, separator, value = word.partition("=")
    if not separator or not key:
        raise UsageError(f"--set {word!r} has no value; write --set KEY=VALUE")
    return key, value


def _check_ranks(ddp: str, variables: Mapping[str, str]) -> None:
    world = int(variables.get("WORLD_SIZE", "1"))
    if ddp == "1" and "RANK" not in variables:
        raise UsageError("--ddp 1 needs torchrun; start it with torchrun -m trainers.ddp …")
    if ddp == "0" and world > 1:
        raise UsageError(f"--ddp 0 is for one process, torchrun started {world}; leave one out")
