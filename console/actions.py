"""Starts and adopts launches, and sends requests, for keys, buttons and commands."""

from __future__ import annotations

import hashlib
import itertools
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from console import access, rest_of_launch, settings_file, targets
from console import plan as plans_module
from console.action_table import ACTIONS, check
from console.launch_options import LaunchOptions
from console.plan import Phase, Plan
from console.plans import catalog, gpu_checks, launch_facts, preflight, sweep
from console.plans.case import Case, Check
from console.sources import launches, process
from console.sources.tail import Tail
from console.status_text import quoted, shell_line
from console.supervisor import launch_spec, launcher, overrides
from console.supervisor.launch_spec import LaunchSpec
from trainers.contract import VERSION, environ, flags, jsonl, rundir
from trainers.contract.errors import RefusedError, UsageError, did_you_mean

FLAG_OPTION, SET_OPTION, DEVICES_OPTION, SHELL = "--flag", "--set", "--devices", "shell"
TRAINERS = ("ddp", "fsdp")
ANSWER_POLL_S = 0.05
ANSWER_BYTES = 1 << 20
"""The search for an answer begins at most this many bytes before the end of a file of events."""


def who() -> str:
    """Returns the sender of a request as text: user, host and process."""
    return f"{process.user_name()}@{rundir.host_name()} pid {os.getpid()}"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A launch that was checked but not started; `phases` has a preview of each run.json."""

    plan: Plan
    directory: Path
    phases: tuple[Mapping[str, Any], ...]
    checks: tuple[Check, ...]
    spec: LaunchSpec
    options: LaunchOptions
    training: tuple[tuple[str, str], ...] = ()
    """Facts about the training, each with a label and a text."""

    @property
    def ok(self) -> bool:
        return not any(check.result == "fail" for check in self.checks)

    @property
    def digest(self) -> str:
        """A SHA-256 of the plan with its flags and settings."""
        return hashlib.sha256(jsonl.encode(self.plan.as_dict())).hexdigest()

    def shell(self, index: int) -> str:
        """Returns the flags and the command of a phase as one line for a shell."""
        phase = self.phases[index]
        flags = {name: flag["value"] for name, flag in phase["flags"].items()}
        return shell_line(phase["argv"], flags)

    def start(self) -> str:
        """Returns where the first phase starts; a resume may start it from a checkpoint."""
        name = self.phases[0]["phase"]
        text = next(each.text for each in self.checks if each.name == "resume")
        return text if text.startswith(f"{name} ") else f"{name} starts at its first step"

    def as_dict(self) -> dict[str, Any]:
        shown = ("argv", "flags", "environment", "settings")
        return {
            "plan": self.plan.name, "ok": self.ok, "directory": str(self.directory),
            "inherited": sorted(launch_spec.inherited()), "may_inherit": list(environ.INHERITED),
            "hook": asdict(self.spec.operator), "digest": self.digest,
            "checks": [asdict(item) for item in self.checks], "training": dict(self.training),
            "phases": [
                {key: phase[key] for key in shown}
                | {"name": phase["phase"], "shell": self.shell(index)}
                for index, phase in enumerate(self.phases)
            ],
        }  # fmt: skip

    def lines(self) -> list[str]:
        """Returns checks, facts about the training, commands and environments as text."""
        found = [f"{item.result:<8} {item.name}: {item.text}" for item in self.checks]
        found += [f"training {label}: {text}" for label, text in self.training]
        for index, phase in enumerate(self.phases):
            found += [f"phase {phase['phase']}", f"  {self.shell(index)}", "  environment:"]
            found += [f"    {name}={quoted(v)}" for name, v in phase["environment"].items()]
        return found


def prepare(options: LaunchOptions, said: Callable[[str], None] | None = None) -> Prepared:
    """Returns a launch with all its checks; writes nothing into the directory of the launch.

    `said` gets a sentence if checks are late, and when measurements begin. For a resume, it also
    gets a sentence on each flag that differs in the shell, each flag that no answer confirms, and
    each gate whose override ends. Raises UsageError for an unknown plan, phase, flag, setting or
    gate, and for a wrong value. Raises RefusedError, for example if the working directory does not
    exist, or if the launch to resume is rejected.
    """
    access.check_working_directory()
    plan, flag_origins, set_origins = _plan(options, said or str)
    directory = _directory(options, plan.name)
    spec = LaunchSpec(
        _id(plan, directory) if options.run_dir is None else Path(os.path.realpath(directory)).name,
        plan, who(), flag_origins, set_origins,
        launch_spec.host_facts(), launch_spec.git_facts(catalog.PROJECT),
        operator=settings_file.load(),
    )  # fmt: skip
    phases = tuple(_run_record(spec, index, directory) for index in range(len(plan.phases)))
    spec = replace(spec, continues=rest_of_launch.continues(options, phases))
    if options.config is not None:
        plan = gpu_checks.with_gpus(plan, phases[0]["settings"], options.assume_gpus)
        spec = replace(spec, plan=plan)
        phases = (_run_record(spec, 0, directory),)
    settings = tuple(phase["settings"] for phase in phases)
    measure = plan.preflight.measure if options.measure is None else options.measure
    case = Case(
        plan, directory, options.devices, spec.operator, settings, options.assume_gpus,
        options.root, spec.git, measure,
    )  # fmt: skip
    checks = preflight.run(case, said)
    if measured := {key: value for check in checks for key, value in check.figures.items()}:
        spec = replace(spec, host={**spec.host, "measured": measured})
    facts = launch_facts.facts(options.root, phases)
    return Prepared(plan, directory, phases, checks, spec, options, facts)


def launch(options: LaunchOptions, by: str) -> Path:
    """Prepares and begins a launch; raises the errors of `prepare` and of `begin`."""
    return begin(prepare(replace(options, measure=None)), by)


def begin(prepared: Prepared, by: str) -> Path:
    """Starts a prepared launch; returns the directory of the launch.

    Raises UsageError with `assume_gpus`. Raises RefusedError if a check has failed, if the plan has
    another `digest`, or if `check_still_ended` rejects a resume. May raise another ContractError.
    If a directory named after the time is taken, another name is used.
    """
    options = prepared.options
    if options.assume_gpus:
        raise UsageError("--assume-gpus is only for check and --dry-run, so nothing was launched")
    if options.digest not in ("", prepared.digest):
        raise RefusedError(
            f"the plan {prepared.plan.name} has changed since it was checked, so nothing was "
            "launched; check it again"
        )
    failed = [item.text for item in prepared.checks if item.result == "fail"]
    if failed:
        raise RefusedError("; ".join(failed))
    directory, spec = prepared.directory, replace(prepared.spec, by=by)
    rest_of_launch.check_still_ended(options)
    while True:
        try:
            launcher.start(directory, spec)
        except launcher.TakenError:
            if options.run_dir is not None:
                raise
            directory = _new_directory(prepared.directory.parent)
            spec = replace(spec, launch=_id(prepared.plan, directory))
        else:
            return directory


def _plan(
    options: LaunchOptions, said: Callable[[str], object]
) -> tuple[Plan, dict[str, str], dict[str, str]]:
    """Returns three values: the plan to launch, the origins of flags, the origins of settings."""
    if options.nproc is not None and not 1 <= options.nproc <= 1024:
        raise UsageError(f"--nproc {options.nproc}: it must be 1 to 1024 processes")
    flag_origins, set_origins = dict[str, str](), dict[str, str]()
    if options.resume is not None:
        plan, flag_origins, set_origins = rest_of_launch.plan(options.resume, said, options.again)
        folder = Path()
    elif options.config is None:
        plan, folder = catalog.load(options.plan), catalog.find(options.plan).parent
    else:
        plan, folder = _of_config(options.config, options.trainer), options.config.parent
    given, origins = _flags(options)
    if options.resume is not None:
        for sentence in _drop_shell_flags(plan, flag_origins, given, origins):
            said(sentence)
    chosen = [each for each in plan.phases if options.phase in ("", each.name, each.sweep)]
    sweep.check_variants(chosen, given, options.sets)
    phases = tuple(
        replace(
            phase,
            nproc=options.nproc or phase.nproc,
            script=_script(phase, folder),
            config=str(catalog.project_file(phase.config).absolute()) if phase.config else "",
            set={**phase.set, **options.sets},
            flags={**phase.flags, **given},
        )
        for phase in chosen
    )
    launch_spec.check_in_use(options.flags, phases)
    if not phases:
        known = [phase.sweep or phase.name for phase in plan.phases]
        raise UsageError(
            f"{plan.name} has no phase {options.phase!r}{did_you_mean(options.phase, known)}"
        )
    foreign = [phase.name for phase in phases if not phase.is_ours]
    if options.sets and foreign:
        raise UsageError(
            f"--set {next(iter(options.sets))}: the phase {foreign[0]!r} starts a foreign program, "
            "whose settings are not known; add the option to `args` in the plan"
        )
    between = "ask" if (options.between or plan.between) == "ask" else "go"
    set_origins |= dict.fromkeys(options.sets, SET_OPTION)
    return replace(plan, phases=phases, between=between), flag_origins | origins, set_origins


def _of_config(config: Path, trainer: str) -> Plan:
    """Returns a plan of one phase that trains with a config file. Raises UsageError."""
    if not catalog.project_file(str(config)).is_file():
        raise UsageError(f"there is no config file {config}; give a YAML file with settings")
    module = f"trainers.{trainer or TRAINERS[0]}"
    phase = {"name": "train", "module": module, "config": str(config)}
    return plans_module.parse({"name": config.stem.lower(), "phases": [phase]}, str(config))


def _flags(options: LaunchOptions) -> tuple[dict[str, str], dict[str, str]]:
    """Returns two values: the flags of shell and options, and the origin of each flag."""
    given = flags.from_shell(environ.snapshot())
    origins = dict.fromkeys(given, SHELL) | dict.fromkeys(options.flags, FLAG_OPTION)
    given |= {name: _checked(name, value) for name, value in options.flags.items()}
    if options.devices:
        given[flags.DEVICES] = _checked(flags.DEVICES, options.devices)
        origins[flags.DEVICES] = DEVICES_OPTION
    return given, origins


def _drop_shell_flags(
    old: Plan, old_origins: Mapping[str, str], given: dict[str, str], origins: dict[str, str]
) -> list[str]:
    """Drops the shell's flags that an option or the operator set in the old launch.

    Returns a sentence for each shell flag that has another value in a phase of the old launch.
    """
    found = list[str]()
    for name in [name for name, origin in origins.items() if origin == SHELL]:
        used = old_origins.get(name, SHELL) == SHELL
        values = {{**old.env, **phase.flags}.get(name, "no value") for phase in old.phases}
        if values != {given[name]}:
            found.append(
                f"{name}={given[name]} of the shell is {'' if used else 'not '}used; the launch to "
                f"resume has {' and '.join(sorted(values))}"
            )
        if not used:
            del given[name], origins[name]
    return found


def _checked(name: str, value: str) -> str:
    return flags.format_value(flags.parse(name, value))


def _script(phase: Phase, folder: Path) -> str:
    """Returns the path of a script in the working directory, the project or the plan's folder.

    If there is no such file, returns the name as it is.
    """
    places = [Path(phase.script), catalog.PROJECT / phase.script, folder / phase.script]
    found = next(filter(Path.is_file, places), None) if phase.script else None
    return str(found or phase.script)


def _directory(options: LaunchOptions, plan: str) -> Path:
    """Returns the directory of the launch: `--run-dir`, or a new one named after the UTC time."""
    path = options.run_dir or options.root / plan
    try:
        if options.run_dir is None:
            return _new_directory(path)
        path.exists()
    except OSError as error:
        raise UsageError(f"{path} cannot be used as a directory: {error.strerror}") from None
    return path


def _new_directory(folder: Path) -> Path:
    """Returns a path in `folder` that does not exist, named after the UTC time. Raises OSError."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    names = itertools.chain([stamp], (f"{stamp}-{number}" for number in itertools.count(2)))
    return next(path for name in names if not (path := folder / name).exists())


def _id(plan: Plan, directory: Path) -> str:
    """Returns the id of a launch whose directory is named after the time."""
    return f"{plan.name}-{directory.name}"


def _run_record(spec: LaunchSpec, index: int, directory: Path) -> Mapping[str, Any]:
    run = directory / f"{index}-{spec.plan.phases[index].name}"
    contract = {environ.RUN_DIR: str(run.absolute()), environ.ATTEMPT: "1",
                environ.RUN_ID: f"{spec.launch}/{run.name}"}  # fmt: skip
    return spec.run_record(index, run, spec.flags(index, {}), contract)


def adopt(path: Path, sure: bool = False, root: Path = launches.ROOT) -> str:
    """Starts a new supervisor for a launch whose supervisor has died; returns a sentence.

    Raises RefusedError, for example if the launch and its processes have ended, or if its
    supervisor is alive, or if a launch below `root` continues it. After a reboot of the host, or
    from another container, `sure` must be true.
    """
    top = launches.launch_of(path)
    if top is None:
        raise RefusedError(f"{path} belongs to no launch, so no supervisor can adopt it")
    launches.check_in_place(top)
    if not sure:
        rest_of_launch.check_adoptable(top, root)
    return f"a new supervisor has adopted {launcher.adopt(top, settings_file.load(), sure)}"


# --- requests --------------------------------------------------------------------------------


def send(path: Path, action: str, args: Mapping[str, Any], by: str) -> str:
    """Writes a request into the mailbox of a launch or run; returns the id of the request.

    Raises UsageError for a wrong action or argument, and RefusedError, for example if no supervisor
    would answer. If the run `is_unsupervised`, a halt writes `.HALT` directly and returns "". A
    halt does the same if the supervisor is on this host and the request cannot be written. In a
    launch that has ended, this process executes and answers an override.
    """
    converted = check(action, args)
    folder, box = targets.mailbox(path, ACTIONS[action])
    access.check_ours(folder)
    launches.check_in_place(path)
    if action == "override" and targets.has_ended(folder):
        return overrides.apply_to_ended(folder, converted, by)
    run = targets.run_to_halt(path) if action == "halt" else None
    if run is not None and targets.is_unsupervised(run, folder, box):
        halt(run, by)
        return ""
    supervisor = targets.supervisor(folder, box)
    name = f"{time.time_ns() // 1_000_000}-{secrets.token_hex(4)}"
    record = {
        "v": VERSION, "id": name, "action": action, "args": converted, "by": by, "ts": time.time(),
    }  # fmt: skip
    requests = folder / rundir.REQUESTS
    try:
        requests.mkdir(mode=0o700, exist_ok=True)
        access.check_ours(requests)
        rundir.write_atomic(requests / f"{name}.json", jsonl.encode(record))
    except OSError as error:
        if action != "halt" or supervisor.host:
            raise RefusedError(
                f"cannot write a request into {requests}: {error.strerror}; without a request, "
                f"kill -TERM {supervisor.pid} (the supervisor"
                f"{f' on {supervisor.host}' if supervisor.host else ''}) stops the run"
            ) from error
        halt(folder, by)  # the supervisor also reads the `.HALT` of a launch, which may be waiting
        return ""
    return name


def answer(path: Path, request_id: str, timeout_s: float) -> dict[str, Any] | None:
    """Returns the event that answers a request, or None if no answer comes within `timeout_s`.

    For the id "", which `send` returns after a direct halt, returns an answer at once.
    """
    if not request_id:
        text = ".HALT is written without a request; ranks that are alive halt; nothing else starts"
        return {"ok": True, "text": text, "detail": [], "request": ""}
    top = launches.launch_of(path)
    folders = [path] if top is None else [*reversed(launches.run_directories(top)), top]
    tails = [Tail(folder / rundir.EVENTS, recent_bytes=ANSWER_BYTES) for folder in folders]
    deadline = time.monotonic() + timeout_s
    while True:
        for tail in tails:
            while (records := tail.poll()) or tail.offset < tail.size_bytes:
                for record in records:
                    if record.get("kind") == "answer" and record.get("request") == request_id:
                        return record
        if time.monotonic() >= deadline:
            return None
        time.sleep(ANSWER_POLL_S)


def halt(folder: Path, by: str) -> None:
    """Writes `.HALT` directly, without a request. Raises RefusedError if this is not possible."""
    access.check_ours(folder)
    try:
        rundir.write_request(folder, rundir.HALT, by)
    except OSError as error:
        raise RefusedError(
            f"cannot write {folder / rundir.HALT}: {error.strerror}, so the ranks continue; "
            "send them TERM"
        ) from error
