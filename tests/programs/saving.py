"""Saves checkpoints while calls on files fail: `saving.py FOLDER CONTROL`.

Each line of standard input is a case as JSON; the program prints a line with the outcome of each
case. `tests.faults.saves` starts this program.
"""

import hashlib
import json
import shutil
import sys
from pathlib import Path

from tests.fakes import errors
from tests.fakes.errors import Failure
from tests.trainers.test_checkpoint import at, made
from trainers import manifest
from trainers.contract import rundir
from trainers.failures import CheckpointError
from trainers.manifest import Manifest
from trainers.saver import Saver
from trainers.schema import CheckpointSettings

COMPLETE = "the checkpoint is complete"
FORMER, KEPT = (1, 2), 2
STEPS = {"new": 3, "background": 3, "again": 2}
"""The step of each kind of save; the step of `again` has a checkpoint already."""
folder, control = Path(sys.argv[1]), Path(sys.argv[2])
parts, run = made(1), folder / "run"


def saver(background: bool = False) -> Saver:
    return Saver(run, parts, CheckpointSettings(
        keep_last=KEPT, background="on" if background else "off"
    ))  # fmt: skip


def prepare() -> None:
    """Puts two checkpoints and the files of a killed save into the run."""
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(folder / "former", run)


def save(kind: str) -> Path | BaseException:
    position = Manifest(STEPS[kind], 7, {"sequences": 7})
    try:
        used = saver(kind == "background")
        if kind != "background":
            return used.save(position)
        used.save_async(position)
        return next(
            iter(used.collect(None)), run / rundir.CHECKPOINTS / manifest.name_of(position.step)
        )
    except BaseException as error:
        return error


def verified() -> dict[int, str]:
    """Returns the digest of each verified checkpoint, by its step."""
    found = {}
    for path in manifest.newest_first(run):
        try:
            step = manifest.verify(path).step
            found[step] = hashlib.sha256((path / manifest.MANIFEST).read_bytes()).hexdigest()
        except CheckpointError:
            continue
    return found


def judge(kind: str, said: Path | BaseException, before: dict[int, str]) -> list[str]:
    """Returns the errors of a save, for example a lost checkpoint or a wrong `latest`."""
    now, step, wrong = verified(), STEPS[kind], []
    written = step in now and now[step] != before.get(step)
    if not isinstance(said, Path | CheckpointError):
        wrong.append(f"it raised {type(said).__name__}: {said}")
    if written != (isinstance(said, Path) or COMPLETE in str(said)):
        wrong.append(f"it said {said}, and step {step} is {'' if written else 'not '}written")
    lost = set(before) - set(now) - ({1} if written and kind != "again" else set())
    if lost:
        wrong.append(f"lost: the checkpoints of step {sorted(lost)}")
    latest = (run / rundir.CHECKPOINTS / rundir.LATEST).read_text().strip()
    if latest not in map(manifest.name_of, now):
        wrong.append(f"latest names {latest}, which does not verify")
    if isinstance(said, Path) and latest != manifest.name_of(step):
        wrong.append(f"latest names {latest}, and step {step} is written")
    return wrong


def go_on() -> list[str]:
    """Saves once more, while no call fails. Returns the errors of this save."""
    try:
        newest = saver().save(Manifest(4, 8, {"sequences": 8}))
    except CheckpointError as error:
        return [f"the next save failed: {error}"]
    names = {path.name for path in newest.parent.iterdir()}
    known = {rundir.LATEST, *map(manifest.name_of, verified())}
    return [f"left behind: {', '.join(sorted(names - known))}"] if names != known else []


run.mkdir()
for step in FORMER:
    saver().save(at(step))
(run / rundir.CHECKPOINTS / ".step_00000003.tmp").mkdir()
(run / rundir.CHECKPOINTS / ".step_00000003.tmp" / "half").write_bytes(b"half")
run.rename(folder / "former")
for line in sys.stdin:
    case = json.loads(line)
    prepare()
    before = verified()
    errors.write(control, Failure(**case["failure"]) if case["failure"] else None, armed=True)
    said = save(case["kind"])
    seen, failed = errors.counts(control)
    errors.write(control, None)
    wrong = judge(case["kind"], said, before) + go_on()
    print(json.dumps({"said": str(said), "seen": seen, "failed": failed, "wrong": wrong}),
          flush=True)  # fmt: skip
