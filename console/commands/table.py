"""The table of commands; commands such as `halt` are made from the table of actions."""

from __future__ import annotations

import argparse
import contextlib
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from console import action_table
from console.action_table import ACTIONS, Action, clause

ANSWER_S = 15.0
LONGEST_S = 86_400.0
LEGACY = "Legacy run directories are accepted; missing files are skipped.\n"
RULES = (
    "Rules, and when each raises its alert. With --halt, two kinds can halt the run:\n"
    "those with *, and those to which the plan gives halt, stop or restart.\n"
    "docs/watch-rules.md lists the conditions of a halt.\n"
)

# --- types of options --------------------------------------------------------------------------


def word(text: str) -> str:
    """Returns `text`, which must not be blank or contain characters below U+0020."""
    if not text.strip() or any(ord(character) < 32 for character in text):
        raise argparse.ArgumentTypeError(f"{text!r} is empty or contains control characters")
    return text


def path(text: str) -> Path:
    """Returns `text` as a path; the conditions are those of `word`."""
    return Path(word(text))


def seconds(text: str) -> float:
    """Returns a time span in seconds, which must be above 0 and at most `LONGEST_S`."""
    value = float(text)
    if not 0 < value <= LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text} must be above 0 and at most {LONGEST_S:g} s")
    return value


def at_least(least: int, what: str) -> Callable[[str], int]:
    """Returns a function that converts text to an integer of at least `least`."""

    def convert(text: str) -> int:
        with contextlib.suppress(ValueError):
            if (value := int(text)) >= least:
                return value
        raise argparse.ArgumentTypeError(f"{text} is not {what}")

    return convert


def regex(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from None


def log_name(text: str) -> int | str:
    """Returns the number of a rank, or "sup" or "torchrun"."""
    return text if text in ("sup", "torchrun") else at_least(0, "a rank; ranks count from 0")(text)


# --- rows ----------------------------------------------------------------------------------------

Option = tuple[tuple[str, ...], dict[str, Any]]


def option(*names: str, **more: Any) -> Option:
    """Returns the arguments of one call of `add_argument`."""
    return names, more


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand. `target` is the `module.function` in `console.commands` that executes it.

    `exits_by_run` says that the exit code can depend on the state of a run.
    """

    name: str
    about: str
    examples: tuple[str, ...]
    options: tuple[Option, ...] = ()
    more: str | Callable[[], str] = ""
    target: str = ""
    exits_by_run: bool = False

    def __call__(self, options: argparse.Namespace) -> int:
        module, function = self.target.split(".")
        return getattr(import_module(f"console.commands.{module}"), function)(options)


JSON = option("--json", action="store_true", help="print JSON, one document per line")
TIMEOUT = option(
    "--timeout", type=seconds, default=ANSWER_S, metavar="SECONDS",
    help="longest wait for the answer, in seconds (default: %(default)s)",
)  # fmt: skip
WAIT = option("--wait", action="store_true", help="wait until the launch has ended")
WAITS = "With --wait, the exit code is that of the launch, and --json prints its status.\n"
DRY_RUN = option(
    "--dry-run", action="store_true", help="print checks, commands and environment; start nothing"
)
ASSUME = option(
    "--assume-gpus", type=word, metavar="NxNAME",
    help="check for these GPUs, e.g. 2xA100, instead of those of this machine",
)  # fmt: skip


def _run(metavar: str = "RUN", also: str = "") -> Option:
    of_phase = "; of one phase: PLAN-TIME/PHASE" if metavar != "LAUNCH" else ""
    where = f"directory, id (PLAN-TIME{of_phase}), unique beginning of PLAN-TIME, or latest (the "
    where += "newest launch)"
    return option("run", type=word, metavar=metavar, help=also + where)


def _listed(heading: str, rows: Iterable[tuple[str, str]]) -> str:
    """Returns a table as help text: the name of each row, with its wrapped text to the right."""
    wrapped = (
        textwrap.fill(f"{name}{text}", 79, subsequent_indent=" " * len(name)) for name, text in rows
    )
    return "\n".join((heading, *wrapped)) + "\n"


def _actions() -> str:
    """Returns help on the actions that are sent as requests; brackets mark optional arguments."""
    rows = []
    for action in action_table.TABLE:
        words = ((a, f"{a.name}={'…' if a.metavar else 'true'}") for a in action.args)
        given = (word if a.required else f"[{word}]" for a, word in words)
        if action.mailboxes:
            told = "; ".join(f"{a.name}: {a.help}" for a in action.args if not a.required)
            text = f"{action.help} {told}." if told else action.help
            rows.append((f"  {' '.join((action.name, *given)):<25} ", text))
    return _listed("actions:", rows)


def _rules() -> str:
    """Returns the table of watch rules as help."""
    from console.diagnose.rules import HALTING, TABLE

    rows = []
    for rule in TABLE:
        text = f"{rule.help}: {rule.bound(rule.threshold)}"
        text += f" for at least {rule.for_s:g} s" if rule.for_s else ""
        text += "" if rule.severe is None else f"; halts at {rule.bound(rule.severe)}"
        rows.append((f" {'*' if rule.name in HALTING else ' '}{rule.name:<19} ", text))
    return _listed(RULES, rows) + LEGACY


QUERIES: tuple[Command, ...] = (
    Command("runs", "List launches, and runs that were started without the console, newest first.",
            ("runs", "runs --limit 5 --json"), (
        option("--limit", type=at_least(1, "a whole number of at least 1"), default=50,
               metavar="N", help="largest number of lines (default: %(default)s)"),
    ), target="query.runs"),
    Command("status", "Print the state, ranks, alerts and gates of a run.",
            ("status latest", "status latest --json"), (
        _run(),
        option("--all", action="store_true", help="print all figures, not only the main ones"),
    ), target="query.status", exits_by_run=True),
    Command("watch", "Follow a run or launch until it ends.",
            ("watch latest", "watch latest --plain", "watch cpu_smoke-20261121-060500 --json"), (
        _run(),
        option("--plain", action="store_true", help="print one sentence per change, no screen"),
        option("--until-waiting", action="store_true",
               help="like --plain; also return when the launch waits for `do RUN proceed`"),
    ), "The screen opens, except with --plain, --json or --until-waiting. --json prints\n"
       "the status once, at the end.\n",
       "screen.watch", exits_by_run=True),
    Command("diagnose", "Print why a run makes no progress, with the evidence and the next step.",
            ("diagnose latest", "diagnose runs/by_hand --json"), (_run(),),
       "If the supervisor has detected a stall, the command prints its verdict. If the\n"
       "supervisor has not, and ranks of the live run make no progress, the command\n"
       "collects the evidence itself, in 2 to 8 s.\n"
       "  + evidence for the verdict\n"
       "  - evidence against the verdict: it names only other ranks\n"
       "  ? evidence that is not available\n"
       "For a live run, the exit code says only whether ranks are stalled: 0 if they\n"
       "are not, 1 if they are or if this is unknown. For an ended run, it is that of\n"
       "`status`.\n"
       + LEGACY, "diagnose.diagnose", exits_by_run=True),
    Command("bundle", "Write an archive of a run for a bug report; recognised secrets are removed.",
            ("bundle latest", "bundle latest --output run.tar.gz"), (
        _run(),
        option("--output", type=path, metavar="FILE",
               help="new file with the ending .tar.gz (default: bundle-ID-TIME.tar.gz in the "
               "working directory)"),
    ), "Read the archive before you publish it: only secrets of known forms are removed.\n"
       "Its MANIFEST.json lists the files, and what was cut off or left out.\n" + LEGACY,
       "diagnose.bundle"),
    Command("watchdog", "Evaluate the watch rules on a run until it ends.", (
        "watchdog latest", "watchdog runs/by_hand --halt --interval 30",
    ), (
        _run(),
        option("--halt", action="store_true",
               help="halt the run if a rule requires it (see below)"),
        option("--interval", type=seconds, default=1.0, metavar="SECONDS",
               help="time between two polls, in seconds (default: %(default)s)"),
    ), _rules, "watchdog.watchdog", exits_by_run=True),
    Command("check", "Print go or no go for a plan, or for the records of a run.",
            ("check cpu_smoke", "check m7c_2xa100 --assume-gpus 2xA100", "check latest"),
            (_run("PLAN|RUN", "name or YAML file of a plan; or a run: "),
             ASSUME,
             option("--measure", action="store_true",
                    help="also measure the devices, load the first batch and test the attention "
                         "of a plan; at most 5 minutes"),
             option("--end-leftovers", action="store_true",
                    help="before the check, list the trainers that no supervisor watches; with "
                         "--yes, end those whose supervisor is dead"),
             option("--yes", action="store_true", help="confirm --end-leftovers"),
             option("--full", action="store_true",
                    help="read every record of the run instead of the sums in its snapshot; "
                         "may take minutes")),
            "A plan is go if no check of its preflight failed. A run is go if it completed,\n"
            "every gate passed or has an override, and its records confirm this. A live run\n"
            "is not go yet: the exit code is at least 1.\n",
            "query.check", exits_by_run=True),
    Command("compare", "Compare the variants of the sweeps in a launch.",
            ("compare latest", "compare latest --json"), (_run("LAUNCH"),),
            "A sweep is a phase of the plan with variants and rounds, see docs/plans.md.\n",
            "query.compare"),
    Command("report", "Print the report of a launch or run as Markdown.",
            ("report latest", "report latest --output report.md"), (
        _run(),
        option("--output", type=path, metavar="FILE",
               help="write the report to FILE, e.g. a.md, and its charts, if any, to a-loss.svg "
               "and a-speed.svg"),
    ), "At the end of a launch, the supervisor writes report.md into its directory.\n" + LEGACY,
       "query.report"),
    Command("logs", "Print the logs of the newest attempt of a run, merged or of one rank.", (
        "logs latest", "logs latest --rank 0 -f", "logs latest --grep 'Error|warn' --attempt 1",
    ), (
        _run(),
        option("--rank", type=log_name, metavar="R",
               help="print only one log; R is the number of a rank, sup (the supervisor) or "
               "torchrun"),
        option("--attempt", type=at_least(1, "an attempt; attempts count from 1"), metavar="N",
               help="print the logs of this attempt (default: the newest); the lines of sup are "
               "those of all attempts"),
        option("--grep", type=regex, metavar="RE",
               help="print only the lines that match this regular expression"),
        option("-f", "--follow", action="store_true",
               help="also print new lines until the run ends"),
    ), target="query.logs"),
    Command("flags", "List all flags, the environment variables that configure a training.",
            ("flags",), target="query.flags"),
    Command("plans", "List all plans.", ("plans", "plans --json"), target="query.plans"),
)  # fmt: skip

LAUNCH = Command(
    "launch", "Launch a plan or a config.", (
        "launch cpu_smoke",
        "launch cpu_smoke --phase recall --wait",
        "launch cpu_smoke --flag NSA_LR=0.0005 --dry-run",
        "launch --config configs/tiny_cpu.yaml --nproc 2 --wait",
        "launch --config configs/m7c_125m.yaml --trainer fsdp --dry-run",
    ), (
        option("plan", nargs="?", type=word, metavar="PLAN",
               help="name of a plan from `plans`, or its YAML file"),
        option("--config", type=path, metavar="FILE",
               help="YAML file of settings, instead of PLAN; the launch has one phase"),
        option("--trainer", choices=("ddp", "fsdp"),
               help="trainer of --config (default: ddp)"),
        option("--phase", type=word, help="launch only this phase (default: all phases)"),
        option("--flag", action="append", default=[], metavar="NAME=VALUE",
               help="flag of every phase, see `flags`; may be repeated"),
        option("--set", action="append", default=[], metavar="KEY=VALUE",
               help="setting of every phase, e.g. train.steps=20; may be repeated"),
        option("--nproc", type=int, metavar="N",
               help="processes of every phase, 1-1024 (default: those of the plan; 1 with "
               "--config)"),
        option("--devices", type=word, metavar="LIST",
               help="GPUs of the launch, e.g. 0,1; sets CUDA_VISIBLE_DEVICES"),
        option("--run-dir", type=path, metavar="DIR",
               help="directory of the launch (default: a new one below --root)"),
        option("--between", choices=("go", "ask"), default="",
               help="when a phase has passed: go starts the next phase, ask waits for `do RUN "
               "proceed` (default: the value of `between` in the plan)"),
        option("--digest", type=word, metavar="SHA256",
               help="digest that the plan must have; --dry-run --json prints the digest of a "
               "plan"),
        WAIT, ASSUME, DRY_RUN,
    ), "Exactly one of PLAN and --config is needed. --assume-gpus needs --dry-run.\n" + WAITS,
    "control.launch", exits_by_run=True,
)  # fmt: skip
DRILL = Command(
    "drill", "Practise a fault: launch a small run with this fault, and score your reaction.",
    ("drill", "drill stop", "drill sleep --rank 0 --plain --wait 60"), (
        option("fault", nargs="?", type=word, metavar="FAULT",
               help="name of a fault (default: list all faults)"),
        option("--rank", type=at_least(0, "a rank; ranks count from 0"), metavar="R",
               help="rank that has the fault (default: the last rank)"),
        option("--nproc", type=at_least(1, "a number of at least 1"), default=2, metavar="N",
               help="processes of the run, 1-16, with the fault `slow` 2-16 (default: "
               "%(default)s)"),
        option("--plain", action="store_true",
               help="print one sentence per change, no screen"),
        option("--wait", type=seconds, default=300.0, metavar="SECONDS",
               help="with --plain or --json: longest wait for the verdict, and then for your "
               "reaction, in seconds (default: %(default)g each; for the fault `leak`, each wait "
               "is 400 s longer)"),
    ), "The fault `stop` sends SIGSTOP to the rank, the fault `kill` sends SIGKILL.\n"
       "React on the screen, or in another shell with `nsa-console stop RUN` (RUN is the\n"
       "printed path). For the fault `stop`, `kill -CONT PID` is correct too. When you\n"
       "leave the screen with q, the drill stops the run and prints the score. A drill\n"
       "fails if the verdict or your reaction was not correct.\n",
    "drill.drill",
)  # fmt: skip
RESUME = Command(
    "resume", "Start a new launch with the phases that an ended launch did not pass.",
    ("resume latest", "resume latest --dry-run"), (
        _run("LAUNCH"),
        option("--yes", action="store_true",
               help="resume also in two cases: another launch already continues this launch; "
               "this launch has no recorded end, its supervisor is dead and no rank is alive"),
        WAIT, DRY_RUN,
    ), "The new launch repeats the options of the ended launch. It also repeats each\n"
    "flag that an operator set, if the supervisor of the ended launch confirmed it.\n"
    "A trainer of this project continues from the newest verified checkpoint of its\n"
    "phase. Without a checkpoint, the phase starts at its first step. A sweep begins\n"
    "again with its first run, because runs of two launches are not compared.\n" + WAITS,
    "control.resume", exits_by_run=True,
)  # fmt: skip
ADOPT = Command(
    "adopt", ACTIONS["adopt"].help, ("adopt latest",), (
        _run(),
        option("--yes", action="store_true",
               help="adopt also in three cases: the host was rebooted; the former supervisor "
               "was in another container; another launch continues this launch. The new "
               "supervisor may then start the training again"),
    ), "Ranks that are alive continue under the new supervisor. If the ranks have\n"
       "already exited, their records, pulses and logs decide the result of the run. If\n"
       "the phase passes its gates, the launch continues.\n",
    "control.adopt",
)  # fmt: skip
DO = Command(
    "do", "Send any action to the supervisor, for example checkpoint or proceed.",
    tuple(each for action in action_table.TABLE if not action.verb for each in action.examples), (
        _run(),
        option("action", type=word, metavar="ACTION", help="name of an action from the list below"),
        option("args", nargs="*", default=(), metavar="NAME=VALUE", help="arguments of the action"),
        TIMEOUT,
    ), _actions, "control.do",
)  # fmt: skip


def _verbs() -> Iterator[Command]:
    """Yields one command per verb in the table of actions; options select the verb's actions."""
    verbs: dict[str, list[Action]] = {}
    for action in action_table.TABLE:
        if action.verb:
            verbs.setdefault(action.verb.split()[0], []).append(action)
    for verb, actions in verbs.items():
        options = [_run()]
        for action in actions:
            if choice := action.verb.partition(" ")[2]:
                options.append(option(choice, dest="action", action="store_const",
                                      const=action.name, help=clause(action.help)))  # fmt: skip
            for each in action.args:
                kind = {"type": word, "metavar": each.metavar, "required": each.required}
                kind = kind if each.metavar else {"action": "store_true"}
                options.append(option(f"--{each.name}", help=each.help, **kind))
        examples = tuple(each for action in actions for each in action.examples)
        yield Command(verb, actions[0].help, examples, (*options, TIMEOUT), target="control.act")


TABLE: tuple[Command, ...] = (*QUERIES, LAUNCH, RESUME, DRILL, ADOPT, *_verbs(), DO)
