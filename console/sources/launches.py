"""Finds launches and runs on disk by directory, id, unique prefix or `latest`.

For an action (`act`), a match by id or by `latest` is compared with a second source. See the
decisions `target-id` and `target-latest` in docs/decisions.md.
"""

from __future__ import annotations

import calendar
import contextlib
import functools
import itertools
import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from console import access
from console.sources.process import command, program
from console.sources.sanitize import clean
from trainers.contract import environ, jsonl, rundir
from trainers.contract.errors import NotFoundError, RefusedError, UsageError, did_you_mean

ROOT = Path("artifacts")
STAMP = re.compile(r"(\d{8}-\d{6})(-\d+)?")
SANE_FROM_TS, SANE_AHEAD_S = 1e9, 86_400.0
"""Creation times before 2001-09-09, or more than a day in the future, are not valid."""


@dataclass(frozen=True, slots=True)
class KnownLaunch:
    """A launch on the disk; `written_ts` is the modification time of its plan.json, or 0."""

    path: Path
    id: str
    created_ts: float
    written_ts: float

    def claim_against(self, newest: KnownLaunch) -> str:
        """Returns why this launch may be newer than `newest`, or "" if it seems older."""
        if self.written_ts > newest.written_ts:
            return f"a newer {rundir.PLAN}"
        return "the same creation time" if self.created_ts == newest.created_ts else ""


def is_launch(path: Path) -> bool:
    return rundir.PLAN in _names(path)


def is_run(path: Path) -> bool:
    return _has_run(_names(path))


def launch_of(path: Path) -> Path | None:
    """Returns the launch that a run or launch directory belongs to, or None if there is none."""
    if is_launch(path):
        return path
    return path.parent if is_launch(path.parent) else None


def launch_id(path: Path) -> str:
    """Returns the id in plan.json, or else `<plan>-<stamp>`, or else the name of the directory."""
    return _known(path).id


def _known(path: Path) -> KnownLaunch:
    record = rundir.read_json(path / rundir.PLAN) or {}
    stamp = STAMP.fullmatch(path.name)
    name = clean(
        jsonl.text(record, "launch") or (f"{path.parent.name}-" if stamp else "") + path.name, 200
    )
    created_ts = jsonl.number(record, "created_ts") or 0.0
    written = rundir.stamp(path / rundir.PLAN)
    written_ts = written[2] / 1e9 if written is not None else 0.0
    if not SANE_FROM_TS < created_ts < time.time() + SANE_AHEAD_S:
        created_ts = _stamped(stamp[1]) if stamp else written_ts
    return KnownLaunch(path, name, created_ts, written_ts)


def _stamped(stamp: str) -> float:
    """Returns the time in a directory's name, or 0 if the time is not valid."""
    try:
        return float(calendar.timegm(time.strptime(stamp, "%Y%m%d-%H%M%S")))
    except ValueError:
        return 0.0


def run_directories(launch: Path) -> list[Path]:
    """Returns the runs of a launch in the order of their phases, without copies (`_is_copy`).

    Runs whose name is not that of a phase in plan.json come first.
    """
    found, planned = [], _planned(launch)
    for name in _names(launch):
        index, dash, _ = name.partition("-")
        run = launch / name
        if dash and index.isdecimal() and is_run(run) and not _is_copy(run):
            found.append((name in planned, int(index), run))
    return [path for _, _, path in sorted(found)]


def _planned(launch: Path) -> frozenset[str]:
    """Returns the names of the run directories of all phases in plan.json."""
    path = launch / rundir.PLAN
    return _run_names(path, rundir.stamp(path))


@functools.lru_cache(256)
def _run_names(path: Path, stamp: object) -> frozenset[str]:
    phases = jsonl.entries(rundir.read_json(path) or {} if stamp else {}, "phases")
    return frozenset(f"{n}-{jsonl.text(phase, 'name')}" for n, phase in enumerate(phases))


def _is_copy(run: Path) -> bool:
    """Returns whether a directory in a launch is a copy of another run that is still in the launch.

    Its run.json then names the directory of this run. If plan.json can be read, this directory must
    be that of a phase in it.
    """
    home, launch = _home(run), run.parent
    original = launch / home.name
    if original == run or not (_is_same(home.parent, launch) and is_run(original)):
        return False
    planned = _planned(launch)
    return (not planned or home.name in planned) and _is_in_place(original)


def root_of(path: Path) -> Path:
    """Returns the root in which the launch of a run or launch directory was started.

    For a launch with a directory of its own, this is the default root in its working directory.
    Such a directory may also be named after a time, but its parent is not named after the plan.
    """
    launch = (launch_of(path) or path).absolute()
    stored = rundir.read_json(launch / rundir.PLAN) or {}
    if STAMP.fullmatch(launch.name) and launch.parent.name == jsonl.text(stored, "name"):
        return launch.parents[1]
    return Path(jsonl.text(stored, "cwd")) / ROOT


def root_to_resume(path: Path, root: Path) -> Path:
    """Returns the root of a launch that resumes another: that of the other, or a chosen `root`.

    So a later resume finds the new launch, in whatever directory the command is typed.
    """
    own = root_of(path)
    return root if root != ROOT or own == root.absolute() else own


def launches(*roots: Path) -> list[Path]:
    """Returns the launches in `roots` (`<plan>/<stamp>/` or `<name>/`), the newest first."""
    found = itertools.chain.from_iterable(map(_directories, roots or (ROOT,)))
    return [each.path for each in _known_in(found)]


def paths(*roots: Path) -> tuple[Path, ...]:
    """Returns the launches in `roots` in any order, without reading a document."""
    found = itertools.chain.from_iterable(map(_directories, roots))
    return tuple(path for path, names in found if rundir.PLAN in names)


def bare_runs(root: Path = ROOT) -> list[Path]:
    """Returns the runs in `root` that belong to no launch, the last changed first."""
    return [path for _, path in sorted(_bare(_directories(root)), reverse=True)]


def launches_and_bare_runs(root: Path = ROOT) -> list[Path]:
    """Returns launches and runs without a launch, the newest first.

    Launches are sorted by their creation time, runs by the last change of their directory.
    """
    found = _directories(root)
    dated = [(each.created_ts, each.path) for each in _known_in(found)]
    return [path for _, path in sorted([*dated, *_bare(found)], reverse=True)]


def _has_run(names: Iterable[str]) -> bool:
    """Returns whether a directory that contains these names is a run."""
    return any(name == rundir.RUN or name.startswith("heartbeat_rank") for name in names)


def _bare(directories: Iterable[tuple[Path, list[str]]]) -> list[tuple[float, Path]]:
    """Returns the time of the last change and the path of each run without a launch."""
    found: dict[tuple[int, int], tuple[float, Path]] = {}
    for path, names in directories:
        if rundir.PLAN not in names and _has_run(names):
            with contextlib.suppress(OSError):
                status = path.stat()
                if not (_is_link(path) and launch_of(path.resolve())):
                    found.setdefault((status.st_dev, status.st_ino), (status.st_mtime, path))
    return list(found.values())


def _known_in(directories: Iterable[tuple[Path, list[str]]]) -> list[KnownLaunch]:
    """Returns the launches by creation time, newest first; links cause no duplicates."""
    found: dict[tuple[int, int], KnownLaunch] = {}
    for path, names in directories:
        if rundir.PLAN not in names:
            continue
        try:
            status = path.stat()
        except OSError:
            continue
        found.setdefault((status.st_dev, status.st_ino), _known(path))
    return sorted(found.values(), key=lambda each: (each.created_ts, each.path.name), reverse=True)


def _directories(root: Path) -> list[tuple[Path, list[str]]]:
    """Returns the paths in `root`, and those one level below; in a launch, only other launches.

    With `--run-dir ROOT/PLAN`, a launch has the directory in which later launches of the plan are
    made. Each path comes with the names in it ([] for a file); links come last.
    """
    found = list[tuple[Path, list[str]]]()
    for top in sorted((root / name for name in _names(root)), key=_is_link):
        names = _names(top)
        inside = filter(STAMP.fullmatch, names) if rundir.PLAN in names else names
        found += [(top, names), *((top / name, _names(top / name)) for name in inside)]
    return sorted(found, key=lambda each: bool(each[1]) and _is_link(each[0]))


def _is_link(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return path.is_symlink()
    return False


def _without_copies(known: Sequence[KnownLaunch]) -> list[KnownLaunch]:
    """Returns the launches without the copies of a launch that is among them and in its place."""
    counts = Counter((each.id, each.created_ts) for each in known)
    moved = {each for each in known if counts[each.id, each.created_ts] > 1
             and any(map(why_not_in_place, run_directories(each.path)))}  # fmt: skip
    placed = {(each.id, each.created_ts) for each in known if each not in moved}
    return [each for each in known if each not in moved or (each.id, each.created_ts) not in placed]


def find(name: str, root: Path = ROOT, act: bool = False) -> Path:
    """Returns the launch or run with this name.

    `name` is `latest`, a directory or an id. An id is `<launch>`, `<launch>/<n>`,
    `<launch>/<phase>` or `<launch>/<n>-<phase>`. A unique prefix of `<launch>` is enough. Raises
    NotFoundError if nothing matches, and UsageError if several launches match. For an action
    (`act`), `check_in_place` checks the launch of an id or of `latest`. RefusedError is also raised
    if another launch may be the latest.
    """
    path = Path(name)
    there = name != "latest" and path.is_dir()
    if there and (is_launch(path) or is_run(path)):
        return path
    access.check_listable(root)
    known = _without_copies(_known_in(_directories(root)))
    if name == "latest":
        return _latest(known, root, act)
    wanted, _, phase = name.partition("/")
    matches = _matches(wanted, known)
    if there and not matches:
        raise NotFoundError(
            f"{path} is not a run: it has no {rundir.PLAN}, no {rundir.RUN} and no heartbeat; "
            f"{command('--root', name, 'runs')} lists the runs in it"
        )
    if not matches:
        hint = did_you_mean(wanted, {each.id for each in known})
        raise NotFoundError(f"no run {name!r} under {root}{hint}; {program()} runs lists the runs")
    if len(matches) > 1:
        found = ", ".join(f"{each.id} ({each.path})" for each in matches[:4])
        raise UsageError(
            f"{name!r} matches {len(matches)} launches, for example {found}; give a longer id, or "
            "the directory"
        )
    launch = matches[0].path
    if act:
        check_in_place(launch, by_name=True)
    return _phase_run(launch, phase) if phase else launch


def _matches(wanted: str, known: Sequence[KnownLaunch]) -> list[KnownLaunch]:
    exact = [each for each in known if each.id == wanted]
    return exact or [each for each in known if wanted and each.id.startswith(wanted)]


def _latest(known: Sequence[KnownLaunch], root: Path, act: bool) -> Path:
    """Returns the newest launch.

    Raises NotFoundError if there is none. For an action, raises RefusedError, for example if
    another launch may be newer.
    """
    if not known:
        raise NotFoundError(
            f"no launch under {root.absolute()}; start one with {program()} launch PLAN"
        )
    newest = known[0]
    claims = [(each, sign) for each in known[1:] if (sign := each.claim_against(newest))]
    if act and claims:
        rival, sign = max(claims, key=lambda claim: claim[0].written_ts)
        raise RefusedError(
            f"the latest launch is uncertain: {newest.path} has the latest creation time in its "
            f"{rundir.PLAN}, but {rival.path} has {sign}; give an id or a directory"
        )
    if act:
        check_in_place(newest.path, by_name=True)
    return newest.path


def check_in_place(path: Path, by_name: bool = False) -> None:
    """Raises RefusedError if the records of a launch or run show that it was copied or moved.

    A run records the directory in which it started. With `by_name`, it is also raised if a run has
    recorded another launch id, or if there are runs and none has recorded its directory.
    """
    launch = launch_of(path)
    runs = run_directories(launch) if launch else []
    runs += [path] if path != launch else []
    recorded = False
    for run in runs:
        named, home, _, _ = _origin(run / rundir.RUN, rundir.stamp(run / rundir.RUN))
        recorded = recorded or bool(home)
        if by_name and launch and named and clean(named, 200) != launch_id(launch):
            raise RefusedError(
                f"{launch} has the id {launch_id(launch)} in its plan, {clean(named, 200)} in its "
                "run; give the directory"
            )
        if text := why_not_in_place(run):
            raise RefusedError(text)
    if by_name and runs and not recorded:
        raise RefusedError(
            f"{launch or path} does not record its directory, so its id may belong to another run; "
            "give the directory"
        )


def why_not_in_place(run: Path) -> str:
    """Returns a sentence if a run or its launch was copied or moved; "" if not, or if unknown."""
    if _is_in_place(run):
        return ""
    moved, there, launch = run, _home(run), launch_of(run)
    is_inside = launch is not None and _is_same(there.parent, launch)
    if launch and not is_inside:
        moved, there = launch, there.parent
    can_act = _is_copy(run) if is_inside else rundir.stamp(there)
    advice = "give that directory" if can_act else "move it back to act on it"
    here, home = (clean(str(each), 400) for each in (moved, there))
    return f"{here} is a copy or was moved: its records name {home}; {advice}"


def _home(run: Path) -> Path:
    """Returns the directory in which a run started according to its run.json, or else `run`."""
    path = run / rundir.RUN
    return Path(_origin(path, rundir.stamp(path))[1] or run)


def _is_in_place(run: Path) -> bool:
    """Returns False if a run is known not to be in the directory in which it started."""
    path = run / rundir.RUN
    _, home, host, token = _origin(path, rundir.stamp(path))
    is_elsewhere = host not in ("", rundir.host_name())
    return not home or _is_home(Path(home), run, is_elsewhere, token)


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except (OSError, ValueError):
        return False


@functools.lru_cache(1024)
def _origin(path: Path, stamp: object) -> tuple[str, str, str, str]:
    """Returns launch, directory, host and token in run.json; a new `stamp` causes a new read."""
    record = rundir.read_json(path) or {} if stamp else {}
    home = jsonl.text(jsonl.mapping(record, "environment"), environ.RUN_DIR).partition("\0")[0]
    return jsonl.text(record, "launch"), home, jsonl.text(record, "host"), rundir.token(record)


def _is_home(home: Path, run: Path, is_elsewhere: bool, token: str) -> bool:
    """Returns whether a run is still in the directory `home`, in which it was started.

    `run` is its present directory. The paths of another host may have another meaning here. So for
    a run of another host, returns False only if `home` is another directory with the same run.
    """
    try:
        if (is_same := home.samefile(run)) or not is_elsewhere:
            return is_same
        path, inodes = home / rundir.RUN, {each.stat().st_ino for each in (home, run)}
        return len(inodes) == 1 or _origin(path, rundir.stamp(path))[3] != token
    except (OSError, ValueError):  # a name can contain half of a surrogate pair
        return is_elsewhere


def _phase_run(launch: Path, phase: str) -> Path:
    runs = {run.name: run for run in reversed(run_directories(launch))}
    for name, run in runs.items():
        if phase in (name, name.partition("-")[2], name.partition("-")[0]):
            return run
    raise NotFoundError(f"{launch_id(launch)} has no run {phase!r}{did_you_mean(phase, runs)}")


def _names(path: Path) -> list[str]:
    return rundir.names(path) or []
