"""Counts its steps, saves and resumes like the trainers, without torch and without a model.

The small torchrun starts this program in place of `trainers.ddp`. `report.out_dir` is the folder in
which each rank appends a line per step that all ranks have done, and rank 0 a line per complete
checkpoint. Before a save, rank 0 waits for the lines of all ranks. At the end, each rank waits
until the folder has no file `hold`.
"""

import os
import shutil
import time
from pathlib import Path

from tests.programs.lockstep import Board
from trainers import manifest, settings
from trainers.command_line import parse
from trainers.contract import environ, rundir
from trainers.contract.member import join
from trainers.manifest import Manifest

STEP_S = 0.02
DONE, NOTED = 0, 1
variables = environ.snapshot()
arguments = parse(None, "trainers.ddp", variables)
chosen = settings.resolve(
    arguments.config, variables, arguments.overrides, "trainers.ddp", arguments.origins
).settings
run = join()
folder = Path(chosen.report.out_dir)
phase = run.run.name.partition("-")[2]


def note(what: str, step: int) -> None:
    """Appends a line to the journal of this rank; the journal is outside of the run."""
    line = f"{what} {step} {run.run.parent.name} {run.attempt} {time.monotonic()}\n"
    fd = os.open(folder / f"{phase}.{run.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(fd, line.encode())
    os.close(fd)


def resumed() -> int:
    """Returns the step to resume from, or 0; a later attempt prefers checkpoints of its run."""
    named = chosen.checkpoint.resume
    if run.attempt > 1 and manifest.newest_first(run.run):
        named = str(run.run)
    if not named:
        return 0
    path, _ = manifest.choose(Path(named))
    step = manifest.read(path).step
    run.record("resume", step, path=str(path))
    return step


def wait_for_all(place: int, step: int) -> None:
    """Waits until all ranks have written this step, or a later one, at a place of the board."""
    while board.slowest(place) < step:
        time.sleep(0.001)


def save(step: int) -> None:
    wait_for_all(NOTED, step)
    target = run.run / rundir.CHECKPOINTS / manifest.name_of(step)
    target.parent.mkdir(mode=0o700, exist_ok=True)
    manifest.clear_leftovers(run.run)
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    (temporary / "state").write_text(f"{step}\n")
    manifest.complete(temporary, target, Manifest(step, step * 10, {}))
    note("saved", step)
    manifest.retain(run.run, step, chosen.checkpoint.keep_last, 0)
    run.record("checkpoint", step, path=target.name)


first = resumed() + 1
board = Board(run, places=2)
last = chosen.train.steps
for step in range(first, last + 1):
    if run.step(step, loss=5.5, grad_norm=1.0):
        if run.rank == 0 and step > first:
            save(step - 1)
        break
    run.pulse.set(step, "forward")
    time.sleep(STEP_S)
    run.pulse.set(step, "backward")
    board.write(step, DONE)
    wait_for_all(DONE, step)
    note("step", step)
    board.write(step, NOTED)
    every = chosen.checkpoint.every
    if run.rank == 0 and ((every and step % every == 0) or step == last):
        with run.phase("save"):
            save(step)
while (folder / "hold").exists():
    time.sleep(STEP_S)
