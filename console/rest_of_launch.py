"""Makes a plan of the phases of an ended launch, from the first phase that did not pass."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from console import access
from console.launch_options import LaunchOptions
from console.model import OPERATOR
from console.plan import Phase, Plan
from console.plans import gate_check
from console.sources import json_documents, launches, liveness, process
from console.sources.run import RunSource
from console.supervisor import cross_check, former_documents, launch_spec, launcher
from trainers import manifest
from trainers.contract import jsonl, rundir
from trainers.contract.errors import RefusedError

RESUME = "resume"
"""The origin of the settings that select a checkpoint if this module sets them."""


def working_directory(path: Path) -> Path | None:
    """Returns the directory in which a launch was started, or None if it is the present one.

    The plan of the launch may have paths relative to this directory. Raises RefusedError if the
    directory cannot be used.
    """
    top = launches.launch_of(path) or path
    stored = rundir.read_json(top / rundir.PLAN) or {}
    with contextlib.suppress(OSError, ValueError):
        if Path(jsonl.text(stored, "cwd")).samefile(Path.cwd()):
            return None
    return launcher.working_directory(stored, ", or cd to it, and resume again")


def plan(
    path: Path, said: Callable[[str], object], again: bool = False
) -> tuple[Plan, dict[str, str], dict[str, str]]:
    """Returns three values: a plan, the origins of its flags, and the origins of its settings.

    The plan has the phases of an ended launch, from the first phase that did not pass. The options
    of the launch stay in effect. An operator's flag stays in effect if the answer to its request
    confirms it. `said` gets a sentence on each flag without this confirmation, on each gate whose
    override ends, and on a sweep that begins again with its first run. If the first phase starts a
    trainer of this project, has a checkpoint and is no run of a sweep, it resumes from its newest
    checkpoint. With `again`, an unsupervised launch without a living process on this host counts as
    ended. Raises RefusedError, for example if a process of the launch is alive, or if all phases
    have passed.
    """
    top = launches.launch_of(path)
    if top is None:
        raise RefusedError(f"{path} belongs to no launch; pass --resume to its trainer instead")
    access.check_ours(top)
    launches.check_in_place(top)
    _check_ended(top, again)
    state, name = rundir.read_json(top / rundir.PLAN_STATE) or {}, launches.launch_id(top)
    stored = rundir.read_json(top / rundir.PLAN)
    old = launch_spec.load(top, stored)
    done = [(each.get("state"), each.get("result")) for each in jsonl.entries(state, "phases")]
    index = len(list(itertools.takewhile(("completed", "pass").__eq__, done)))
    first, sweep = _first_run(old.plan, index)
    gate_check.check_former(top, stored or {}, state | {"phase": first, "state": "running"})
    if index >= len(old.plan.phases):
        raise RefusedError(f"all phases of {name} have passed; there is nothing to resume")
    phases, by_operator = _with_operator_flags(top, old.plan, index, first, state, said)
    runs = [top / f"{n}-{old.plan.phases[n].name}" for n in range(first, index + 1)]
    for gate in dict.fromkeys(itertools.chain(*map(_overrides, runs))):
        said(f"gate {gate} is evaluated again, without its override")
    origins = dict(old.set_origins)
    if sweep:
        if (runs[0] / rundir.RUN).exists():
            said(f"the sweep {sweep} begins again, because runs of two launches are not compared")
    elif phases[0].is_ours and _has_checkpoint(runs[0]):
        own = {gate_check.RESUME: str(runs[0].absolute()), gate_check.FROM_STEP: 0}
        phases[0] = replace(phases[0], set={**phases[0].set, **own})
        origins |= dict.fromkeys(own, RESUME)
    return replace(old.plan, phases=tuple(phases)), {**old.flag_origins, **by_operator}, origins


def _check_ended(top: Path, again: bool) -> None:
    """Raises RefusedError if the launch has not ended, or if a process of it is alive.

    With `again`, an unsupervised launch without a living process on this host counts as ended.
    """
    launch = RunSource(top).poll().launch
    name = launches.launch_id(top)
    living = next(filter(None, map(liveness.living_in, launches.run_directories(top))), "")
    if launch and launch.state == "unsupervised" and liveness.is_locked(top):
        living = living or "a process holds its lock"  # perhaps in another container
    accepted = ("ended", "unsupervised") if again else ("ended",)
    if launch and (living or launch.state not in accepted):
        why = living or (f"it is {launch.state}" if launch.under_way else launch.why)
        other = "halt it first" if living else "and no rank is alive there, add --yes to resume it"
        adopt = (
            f"; {process.command('adopt', top)} starts a supervisor on the host of its ranks; if "
            f"that is not possible, {other}"
        )
        then = {"unsupervised": adopt, "unknown": ""}.get(launch.state, "; halt it first")
        raise RefusedError(f"{name} has not ended ({why}){then}")


def _first_run(planned: Plan, index: int) -> tuple[int, str]:
    """Returns the index of the first run of the sweep that has the phase `index`, and the sweep.

    Returns `index` and "" if the phase is no run of a sweep.
    """
    sweeps = [phase.sweep for phase in planned.phases]
    name = sweeps[index] if index < len(sweeps) else ""
    return (sweeps.index(name) if name else index), name


def _overrides(run: Path) -> Iterable[str]:
    """Returns the names of the overridden gates of a run."""
    source = RunSource(run)
    source.poll()
    return source.summary.overrides if source.summary else ()


def _has_checkpoint(run: Path) -> bool:
    """Returns whether a run has a checkpoint. Raises RefusedError if this is not known."""
    name = json_documents.latest_checkpoint(run, has_ended=True)
    if name is None:
        raise RefusedError(
            f"the newest checkpoint in {run / rundir.CHECKPOINTS} is not known: the directory "
            f"cannot be listed, or none of its newest checkpoints has a {manifest.MANIFEST}; "
            "repair it, or move it away to start the phase at its first step"
        )
    return bool(name)


def continues(options: LaunchOptions, phases: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Returns the launches that a new launch continues, as {directory: id}.

    A launch continues the launch that it resumes, each launch whose checkpoint one of its phases
    loads, and the launches that those continue. `phases` has a preview of each run.json.
    """
    settings = (each["settings"].get(gate_check.RESUME, {}) for each in phases)
    named = (options.resume, *(each.get("value") for each in settings))
    tops = [top for path in named if path and (top := launches.launch_of(Path(path)))]
    found = {os.path.realpath(top): launches.launch_id(top) for top in tops}
    for top in tops:
        former = jsonl.mapping(rundir.read_json(top / rundir.PLAN) or {}, "continues")
        found |= {path: jsonl.text(former, path) for path in former}
    return found


def continuation(path: Path, root: Path) -> Path | None:
    """Returns the newest launch that continues the launch at `path`, or None.

    That launch is below `root`, or below the root of the launch at `path`. A launch continues the
    launches in its plan.json, and also the launches that those continue.
    """
    top, newest = launches.launch_of(path) or path, None
    chain = _marks(str(top), launches.launch_id(top))
    roots = {os.path.realpath(each) for each in (root, launches.root_of(top))}
    for each in reversed(launches.launches(*map(Path, roots))):
        stored = rundir.read_json(each / rundir.PLAN) or {}
        continues = jsonl.mapping(stored, "continues")
        if any(chain & _marks(former, jsonl.text(continues, former)) for former in continues):
            chain |= _marks(str(each), launches.launch_id(each))
            newest = each
    return newest


def _marks(path: str, name: str) -> set[object]:
    """Returns what identifies a launch: its real path, and its id with the last two names in it.

    The id and the names remain if the root is moved. Names other than a time are not unique.
    """
    with contextlib.suppress(ValueError):  # a document may contain a path that is not valid
        path = os.path.realpath(path)
    place = Path(path).parts[-2:]
    return {path, (name, *place)} if launches.STAMP.fullmatch(place[-1]) else {path}


def continued_words(path: Path, root: Path, with_state: bool = True) -> str:
    """Returns a sentence on the `continuation` of the launch at `path`, or ""."""
    newest = continuation(path, root)
    if newest is None:
        return ""
    top = launches.launch_of(path) or path
    text = f"{launches.launch_id(top)} is already continued by {launches.launch_id(newest)}"
    if not with_state:
        return text
    source = RunSource(newest)
    state = source.poll()
    phase = source.run_path.name.partition("-")[2] if source.run_path else "its first phase"
    return f"{text}, which is {state.state} at step {state.step or 0} of {phase}"


def check_still_ended(options: LaunchOptions) -> None:
    """Raises RefusedError for a resume of a launch that changed after `plan` had read it.

    It was moved, or another launch continues it, or it has a supervisor again. With `again`, the
    resume of a launch that another launch continues is accepted.
    """
    if options.resume is None:
        return
    if not options.resume.is_dir():
        raise RefusedError(f"{options.resume} was moved or removed, so nothing was launched")
    if not options.again and (text := continued_words(options.resume, options.root)):
        raise RefusedError(f"{text}, so nothing was launched")
    _check_ended(launches.launch_of(options.resume) or options.resume, options.again)


def check_adoptable(top: Path, root: Path) -> None:
    """Raises RefusedError if another launch continues the launch at `top`.

    The launch is accepted if a process of it is alive on this host, which needs a supervisor.
    """
    text = continued_words(top, root)
    if text and not any(map(liveness.living_in, launches.run_directories(top))):
        raise RefusedError(
            f"{text}, so no supervisor was started; act on that launch, or add --yes to adopt "
            "this one"
        )


def _with_operator_flags(
    top: Path, planned: Plan, index: int, first: int, plan_state: Mapping[str, Any],
    said: Callable[[str], object],
) -> tuple[list[Phase], dict[str, str]]:  # fmt: skip
    """Returns two values: phases with the operator's flags, and the origins of these flags.

    The phases begin with the phase `first`. The operator's flags are in run.json for the phase
    `index`, if it began, and in plan_state.json for later phases. The runs of a sweep up to `index`
    get the flags for all later phases. A flag that no answer to a request confirms is not used, and
    `said` gets a sentence on it.
    """
    of_run, phases = planned.phases[index], list(planned.phases[first:])
    run = top / f"{index}-{of_run.name}"
    has_begun, evidence = (run / rundir.RUN).exists(), cross_check.Evidence(top, [run])
    names = [phase.name for phase in planned.phases[: index + 1 + has_begun]]
    pending, unconfirmed = cross_check.confirmed_flags(plan_state, names, evidence)
    record = rundir.read_json(run / rundir.RUN) or {}
    own = {
        name: {"value": flag.value, "by": flag.origin.removeprefix(OPERATOR)}
        for name, flag in former_documents.flags(jsonl.mapping(record, "flags"), "origin").items()
        if flag.origin.startswith(OPERATOR) and of_run.flags.get(name) != flag.value
    }
    begun = {name: flag for name, flag in own.items()
             if evidence.confirms_flag(name, flag["value"], names[: index + 1])}  # fmt: skip
    unconfirmed += [f"{name}={own[name]['value']}" for name in own if name not in begun]
    for claim in unconfirmed:
        said(f"{claim} of an operator is not used: no answer to a request confirms it")
    lasting = {name: flag for name, flag in pending.items() if flag["phases"] == "all"}
    for name in begun if of_run.sweep else ():
        if name not in lasting:
            said(f"{name}={begun[name]['value']} of an operator is not used in a sweep")
    earlier = [lasting if of_run.sweep else begun] * (index - first + has_begun)
    added = [*earlier, pending, *[lasting] * len(phases)]
    origins = {name: f"{OPERATOR}{flag['by']}" for each in added for name, flag in each.items()}
    phases = [
        replace(phase, flags={**phase.flags, **{name: flag["value"] for name, flag in of.items()}})
        for phase, of in zip(phases, added, strict=False)
    ]
    return phases, origins
