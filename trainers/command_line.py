"""The command line of the trainers; most options set one key of the settings."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from trainers import changes
from trainers.contract import environ
from trainers.contract.errors import UsageError
from trainers.schema import keys

ALONE = {"checkpoint.resume": "auto", "checkpoint.allow_change": changes.ALL}
"""The value that a key gets if its option is given without a value."""
OPTIONS: Mapping[str, str] = {
    "--dataset": "data.source",
    "--local-path": "data.path",
    "--steps": "train.steps",
    "--seq-len": "data.seq_len",
    "--batch-size": "train.batch_size",
    "--precision": "train.precision",
    "--loader-timeout": "data.timeout_s",
    "--resume": "checkpoint.resume",
    "--from": "checkpoint.from_step",
    "--allow-change": "checkpoint.allow_change",
    "--skip-data": "data.skip",
    "--save": "checkpoint.export",
}
"""The key that each option sets."""
RUN_OR_CHECKPOINT = "run directory (its newest verified checkpoint is used) or checkpoint directory"


@dataclass(frozen=True, slots=True)
class Arguments:
    """The parsed command line of a trainer."""

    config: Path | None
    run_dir: Path | None
    check: bool
    overrides: Mapping[str, str]
    origins: Mapping[str, str]
    """The option that set a key of `overrides`; keys from `--set` are missing."""


class Parser(argparse.ArgumentParser):
    """A parser that raises UsageError with one sentence."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; python -m {self.prog} --help shows the options")


def parse(argv: Sequence[str] | None, program: str, variables: Mapping[str, str]) -> Arguments:
    """Returns the arguments in `argv`; without --config, `$CONFIG` is used. Raises UsageError."""
    found = _parser(program).parse_args(argv)
    sets = dict(_override(text) for text in found.set)
    origins = {k: o for o, k in OPTIONS.items() if getattr(found, k) is not None and k not in sets}
    overrides = {key: getattr(found, key) for key in origins} | sets
    _check_ranks(found.ddp, program, variables)
    config = found.config or (Path(name) if (name := variables.get(environ.CONFIG)) else None)
    return Arguments(config, found.run_dir, found.check, overrides, origins)


def _parser(program: str) -> argparse.ArgumentParser:
    about = "Trains with the settings of a YAML file; flags override it, options override flags."
    parser = Parser(prog=program, allow_abbrev=False, description=about)
    add = parser.add_argument
    config_help = f"YAML file of settings (default: ${environ.CONFIG}, else the built-in toy model)"
    add("--config", type=Path, metavar="FILE", help=config_help)
    set_help = "override one setting, such as train.steps=10; repeatable; overrides other options"
    add("--set", action="append", default=[], metavar="KEY=VALUE", help=set_help)
    run_help = "run directory (default artifacts/<config>/<UTC time>; see report.out_dir)"
    add("--run-dir", type=Path, metavar="DIR", help=run_help)
    check_help = "print all settings with their origins as JSON and exit"
    add("--check", action="store_true", help=check_help)
    for option, name in OPTIONS.items():
        key = keys()[name]
        text = f"{key.help} ({name}, default {'empty' if key.default == '' else key.default})"
        optional: dict[str, Any] = {"nargs": "?", "const": ALONE[name]} if name in ALONE else {}
        metavar = "|".join(key.kind) if isinstance(key.kind, tuple) else "VALUE"
        add(option, metavar=metavar, dest=name, help=text, **optional)
    ddp_help = "1: require torchrun, 0: require one process, -1: allow both (default)"
    add("--ddp", choices=("-1", "0", "1"), default="-1", help=ddp_help)
    return parser


def _override(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise UsageError(f"--set {text!r} has no value; write --set KEY=VALUE")
    return key, value


def _check_ranks(ddp: str, program: str, variables: Mapping[str, str]) -> None:
    world, *_ = [
        environ.integer(variables, name, 1) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK")
    ]
    if ddp == "1" and "RANK" not in variables:
        raise UsageError(f"--ddp 1 needs torchrun; start it with torchrun -m {program} …")
    if ddp == "0" and world > 1:
        raise UsageError(f"--ddp 0 is for one process, but torchrun started {world}; omit --ddp 0")
