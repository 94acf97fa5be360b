"""The content of plan.json and run.json: plan, flags, settings, torchrun's command, commit."""

from __future__ import annotations

import functools
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from console import plan as plans_module
from console import settings_file
from console.plan import Phase, Plan
from console.plans.catalog import PROJECT, project_file
from console.plans.gates import demand
from console.settings_file import Settings
from console.supervisor import program
from trainers.contract import VERSION, environ, jsonl, rundir
from trainers.contract import flags as registry
from trainers.contract.errors import NotFoundError, UsageError
from trainers.settings import resolve

PLAN_ENV, PHASE_FLAGS, LOG_DIR = "plan env", "plan", "--log-dir"
GIT_S = 10.0
REMOVED = "[removed]"
_LOGIN = re.compile(r"^([a-zA-Z][\w+.-]*://)?.*@")
"""The user and the password in the address of a proxy, after its scheme."""
Origins = Mapping[str, str]
MAPPINGS = ("flag_origins", "set_origins", "host", "git", "continues")
"""The fields of `LaunchSpec` that plan.json repeats as they are, in their order."""


@dataclass(frozen=True, slots=True)
class FlagValue:
    """The value of a flag in the environment of a process, and its origin."""

    value: str
    origin: str


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """A launch as data; `plan` includes the changes that the options of the launch made."""

    launch: str
    plan: Plan
    by: str
    flag_origins: Origins = field(default_factory=dict)
    set_origins: Origins = field(default_factory=dict)
    host: Mapping[str, Any] = field(default_factory=dict)
    git: Mapping[str, Any] = field(default_factory=dict)
    continues: Mapping[str, str] = field(default_factory=dict)
    """The ids, by directory, of the launches that this launch resumes or loads checkpoints from."""
    operator: Settings = field(default_factory=Settings)
    """Settings of the operator who started or adopted the launch; a plan does not contain them."""

    def as_dict(self, created_ts: float) -> dict[str, Any]:
        """Returns plan.json: the keys of the plan, and the keys of the launch."""
        return self.plan.as_dict() | {
            "v": VERSION, "launch": self.launch, "by": self.by, "created_ts": created_ts,
            **{key: dict(getattr(self, key)) for key in MAPPINGS}, "cwd": str(Path.cwd()),
            "boot_id": rundir.boot_id(), "up_s": time.clock_gettime(time.CLOCK_BOOTTIME),
        } | asdict(self.operator)  # fmt: skip

    def flags(self, index: int, pending: Mapping[str, FlagValue]) -> dict[str, FlagValue]:
        """Returns the flags of a phase: `pending` overrides the phase, which overrides the plan."""
        phase = self.plan.phases[index]
        found = {name: FlagValue(value, PLAN_ENV) for name, value in self.plan.env.items()}
        for name, value in phase.flags.items():
            found[name] = FlagValue(value, self.flag_origins.get(name, PHASE_FLAGS))
        return found | dict(pending)

    def settings(self, index: int, flags: Mapping[str, FlagValue]) -> dict[str, Any]:
        """Returns the resolved settings of a phase with origins; {} for a foreign program.

        Raises UsageError if the settings are not valid.
        """
        phase = self.plan.phases[index]
        if not phase.is_ours:
            return {}
        config = project_file(phase.config) if phase.config else None
        environment = {name: flag.value for name, flag in flags.items()}
        origins = dict.fromkeys(phase.set, PHASE_FLAGS) | dict(self.set_origins)
        return resolve(config, environment, phase.set, phase.module, origins).as_dict()

    def entries(self) -> list[dict[str, Any]]:
        """Returns the value that the key `phases` of plan_state.json has before the first phase."""
        return [
            {"name": phase.name, "state": "next" if i == 0 else "later", "why": "", "result": "",
             "steps": None, "started_ts": None, "ended_ts": None, "dir": f"{i}-{phase.name}"}
            for i, phase in enumerate(self.plan.phases)
        ]  # fmt: skip

    def copies(self, index: int) -> dict[str, Any]:
        """Returns the part of run.json that repeats plan.json; an adoption compares both files."""
        phase = self.plan.phases[index]
        return {
            "launch": self.launch, "plan": self.plan.name, "phase": phase.name, "index": index,
            "proves": phase.proves, "nproc": phase.nproc, "world": phase.nproc,
            "gates": dict(phase.gates), "watch": asdict(self.plan.watch),
            "restart": asdict(self.plan.restart),
        }  # fmt: skip

    def run_record(
        self, index: int, run: Path, flags: Mapping[str, FlagValue], contract: Mapping[str, str]
    ) -> dict[str, Any]:
        """Returns run.json of a phase: its command, environment, flags and settings.

        The environment has no login at a proxy, because the record is shown and copied.
        Raises UsageError if the settings or flags are not valid.
        """
        phase = self.plan.phases[index]
        settings = self.settings(index, flags)
        planned = settings.get("train.steps", {}).get(
            "value", demand(phase.gates.get("steps_done")).bound
        )
        return {
            **self.copies(index),
            "v": VERSION, "run": contract[environ.RUN_ID],
            "by": self.by, "created_ts": time.time(), "nnodes": 1, "steps_planned": planned,
            "argv": argv(phase, self.plan.watch.grace_s, rundir.logs(run, 1)),
            "cwd": str(Path.cwd()),
            "environment": without_logins(environment(phase, flags, contract)),
            "flags": {name: asdict(flag) for name, flag in flags.items()},
            "expects": asdict(phase.expects), "settings": settings, "host": rundir.host_name(),
            "machine": dict(self.host), "git": dict(self.git),
        }  # fmt: skip


def check_in_use(given: Mapping[str, str], phases: Iterable[Phase], runs: bool = False) -> None:
    """Raises UsageError if the `set` of a phase overrides one of the given flags.

    `runs` says that the launch of these phases runs already.
    """
    for phase in phases:
        for name, value in given.items():
            key = registry.lookup(name).setting
            if phase.is_ours and key in phase.set:
                halt = f"halt the launch, and use launch --phase {phase.sweep or phase.name}"
                raise UsageError(
                    f"the phase {phase.name!r} sets {key}, which overrides {name}; to change it, "
                    f"{halt if runs else 'use launch'} --set {key}={value}"
                )


def load(launch: Path, stored: Mapping[str, Any] | None = None) -> LaunchSpec:
    """Returns the launch from `stored`, the content of a plan.json, or else from the directory.

    Raises NotFoundError or UsageError.
    """
    record = stored or rundir.read_json(launch / rundir.PLAN)
    if record is None:
        raise NotFoundError(f"{launch} contains no readable {rundir.PLAN}")
    own = {each.name for each in fields(Plan)}
    plan = plans_module.parse({k: v for k, v in record.items() if k in own}, rundir.PLAN)
    operator = {key: record[key] for key in settings_file.KEYS if key in record}
    return LaunchSpec(
        str(record.get("launch", launch.name)), plan, str(record.get("by", "?")),
        *(jsonl.mapping(record, key) for key in MAPPINGS),
        operator=settings_file.parse(operator, rundir.PLAN),
    )  # fmt: skip


@functools.cache
def _has_shutdown_timeout() -> bool:
    """Returns whether torchrun has the option --shutdown-timeout (torch 2.12 and newer).

    Older versions always give the ranks 30 s to end. An unknown version counts as new.
    """
    from importlib.metadata import PackageNotFoundError, version

    try:
        numbers = version("torch").split(".")[:2]
        return tuple(int(number) for number in numbers) >= (2, 12)
    except (PackageNotFoundError, ValueError):
        return True


def argv(phase: Phase, grace_s: float, logs: Path) -> list[str]:
    """Returns the command that starts a phase on one host; torchrun writes its files in `logs`."""
    words = [
        sys.executable, "-P", "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", str(phase.nproc), "--max-restarts", "0",
        *(("--shutdown-timeout", str(max(1, round(grace_s)))) if _has_shutdown_timeout() else ()),
        LOG_DIR, str(logs.absolute() / "torchrun"),
    ]  # fmt: skip
    words += [phase.script] if phase.script else ["-m", phase.module]
    if phase.config:
        words += ["--config", str(project_file(phase.config))]
    for key, value in phase.set.items():
        words += ["--set", f"{key}={value}"]
    return words + list(phase.args)


def inherited(recorded: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Returns the inherited variables that are allowed; this project is first in PYTHONPATH.

    `recorded`, the `environment` in a run.json, replaces the variables of this process. Only a
    proxy whose login was removed from the record comes from this process.
    """
    found = environ.inherited()
    if recorded:
        texts = {name: jsonl.text(recorded, name) for name in environ.INHERITED if name in recorded}
        found = {name: found.get(name, "") if REMOVED in text else text
                 for name, text in texts.items() if text.isprintable()}  # fmt: skip
    others = [e for e in found.get("PYTHONPATH", "").split(":") if e not in ("", str(PROJECT))]
    return found | {"PYTHONPATH": ":".join((str(PROJECT), *others))}


def environment(
    phase: Phase, flags: Mapping[str, FlagValue], contract: Mapping[str, str]
) -> dict[str, str]:
    """Returns the whole environment of torchrun: inherited variables, flags and the contract.

    PYTHONSAFEPATH makes the trainers of this project import nothing from the working directory. For
    a foreign program, this project is last in PYTHONPATH, because the program may have packages of
    the same names.
    """
    chosen = {name: flag.value for name, flag in flags.items()}
    variables = inherited() | {"PYTHONUNBUFFERED": "1"} | environ.DEVICE_ORDER
    if phase.is_ours:
        variables["PYTHONSAFEPATH"] = "1"
    else:
        project, *others = variables["PYTHONPATH"].split(":")
        variables["PYTHONPATH"] = ":".join((*others, project))
    return variables | chosen | dict(contract)


def without_logins(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns environment variables with `REMOVED` in place of the logins at proxies."""
    return {name: _LOGIN.sub(rf"\1{REMOVED}@", value) if name.lower().endswith("_proxy") else value
            for name, value in variables.items()}  # fmt: skip


def host_facts() -> dict[str, Any]:
    """Returns facts about this host, for plan.json and run.json."""
    uname = os.uname()
    return {
        "name": rundir.host_name(), "kernel": f"{uname.sysname} {uname.release}",
        "machine": uname.machine, "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "python": ".".join(map(str, sys.version_info[:3])), "executable": sys.executable,
    }  # fmt: skip


def code_folder(phase: Phase) -> Path:
    """Returns this project's folder, or that of a foreign script, or else the working directory."""
    return PROJECT if phase.is_ours else Path(phase.script).parent


def changed_words(former: Mapping[str, Any], git: Mapping[str, Any]) -> str:
    """Returns a sentence if both results of `git_facts` are known and differ, or else ""."""
    if not (former and git) or former == git:
        return ""
    names = [
        f"commit {jsonl.text(each, 'sha')[:12]}{' with local changes' * bool(each.get('dirty'))}"
        for each in (former, git)
    ]
    return f"the code changed since the launch or the last attempt: {' → '.join(names)}"


ASK_GIT = """
cd "$0" && sha=$(git rev-parse HEAD) || exit 1
changes() { git diff --no-ext-diff --no-textconv "$@" HEAD; }
changes --quiet
case $? in
0) echo "$sha" ;;
1) echo "$sha $(changes | sha256sum)" ;;
*) exit 1 ;;
esac
"""


def git_facts(folder: Path) -> dict[str, Any]:
    """Returns the commit of the code in a folder, or {} if git cannot report it.

    `diff` is a hash of the local changes to tracked files, or "" if there are none.
    """
    ended = program.run(["sh", "-c", ASK_GIT, str(folder)], inherited(), GIT_S, keeps_output=True)
    if ended.code != 0:
        return {}
    sha, _, changes = ended.last_line.partition(" ")
    return {"sha": sha, "dirty": bool(changes), "diff": changes[:16]}
