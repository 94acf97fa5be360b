"""Finds and loads plans: by name (see `files`), or by the path of a file."""

from __future__ import annotations

from pathlib import Path

from console.diagnose import rules
from console.plan import Plan
from console.plans import gates, plan_file
from trainers.contract.errors import UsageError, did_you_mean

PROJECT = plan_file.PLANS.parents[1]
FOLDER = Path("configs") / "plans"
ENDINGS = (".yaml", ".yml")


def project_file(name: str) -> Path:
    """Returns the path of a file that a plan names; the working directory overrides the project."""
    path = Path(name)
    return path if path.is_absolute() or path.exists() else PROJECT / path


def files() -> dict[str, Path]:
    """Returns the plan files by name; a file of the working directory overrides the project's.

    Hidden files and links without a target are not plans; editors make them.
    """
    found: dict[str, Path] = {}
    for folder in (PROJECT / FOLDER, FOLDER):
        for path in filter(Path.is_file, folder.glob("[!.]*.yaml")):
            found[path.stem] = path
    return dict(sorted(found.items()))


def is_plan(name: str) -> bool:
    """Returns whether a word names a plan or an existing YAML file."""
    return name in files() or (name.endswith(ENDINGS) and Path(name).is_file())


def find(name: str) -> Path:
    """Returns the file of a plan name or path. Raises UsageError if there is no such file."""
    path, known = Path(name), files()
    if path.is_file():
        return path
    if name not in known:
        raise UsageError(f"there is no plan {name!r}{did_you_mean(name, known)}")
    return known[name]


def load(name: str) -> Plan:
    """Returns a plan whose name, args, gates and watch rules were checked. Raises UsageError."""
    path, known = find(name), files()
    plan = plan_file.load(path)
    named = known.get(plan.name)
    is_misnamed = plan.name != path.stem and any(map(path.samefile, known.values()))
    is_other = not named.samefile(path) if named else is_misnamed
    if is_other:
        raise UsageError(
            f"{path}: the name {plan.name!r} selects {named or 'no file'}, not this file; remove "
            "'name:', or rename the file"
        )
    rules.check(plan.watch, f"{path}: watch")
    for index, phase in enumerate(plan.phases):
        where = f"{path}: phase {phase.name!r}"
        gates.check(phase.gates, where)
        if phase.args and phase.is_ours:
            raise UsageError(
                f"{where}: 'args' is only for a foreign program; use 'set' for the settings of "
                f"{phase.module}, for example {{train.steps: 200}}"
            )
        if why := gates.why_no_single(plan.phases, index):
            raise UsageError(f"{where}: {why}; add such a phase, or remove the gate")
    restarting = [name for name, rule in plan.watch.rules.items() if rule.action == "restart"]
    if restarting and plan.restart.when == "never":
        raise UsageError(
            f"{path}: the watch rule {restarting[0]!r} has the action restart, and 'restart' is "
            "never; set restart: crash, or give the rule another action"
        )
    return plan


def plans() -> tuple[list[Plan], list[str]]:
    """Returns two values: the plans of `files` that can be loaded, and the errors of the others."""
    found, wrong = [], []
    for name in files():
        try:
            found.append(load(name))
        except UsageError as error:
            wrong.append(str(error))
    return found, wrong
