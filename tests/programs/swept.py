"""A contract process for the error sweep: `swept.py STEPS [MODE]`, ranks in lockstep.

The files that this text names are in the parent of the launch directory. Rank 0 writes to `control`
at step 3; then calls of the supervisor fail. A rank that completes or halts appends a record to
`ends.jsonl`. The modes:

- `ask`: rank 0 sends requests; at the end, the ranks wait for the answers, at most `ANSWERED_S`;
- `halt`: rank 0 requests a halt;
- `poor`: the loss of one step is NaN;
- `again`: rank 1 exits with code 7 in its first attempt, and calls fail only from then on;
- `grow`: the ranks fill their logs;
- `stand`: rank 1 makes no progress for `STAND_S`;
- `adopt`: the ranks wait at step `EXIT_AT` for the file `go`, and rank 0 does not write `control`;
- `family`: each rank has a child process.
"""

import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

from tests.programs.lockstep import Board
from trainers.contract import environ, rundir
from trainers.contract.member import join

FAIL_AT, ASK_AT, EXIT_AT = 3, 6, 12
STAND_S, ANSWERED_S = 7.0, 6.0
ASKED = {"ask": ("note", "dump", "checkpoint"), "halt": ("halt",)}
ARGS = {"note": {"text": "requested by rank 0"}}


def fail_from_now_on() -> None:
    with (case / "control").open("r+b") as stream:
        stream.write(struct.pack("=i", 1))


def ask(action: str) -> None:
    record = {
        "v": 1, "id": f"swept-{action}", "action": action, "args": ARGS.get(action, {}),
        "by": "rank 0", "ts": time.time(),
    }  # fmt: skip
    rundir.write_json(Path(run.run) / rundir.REQUESTS / f"{action}.json", record)


def waits() -> bool:
    """Returns whether a request has no answer yet, because its file is still there."""
    return any((Path(run.run) / rundir.REQUESTS).glob("*.json"))


steps, mode = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
run = join()
case, step = Path(run.run).parents[1], 0
board = Board(run)
halted = False
family = [subprocess.Popen(["sleep", "100"])] if mode == "family" else []
for step in range(1, steps + 1):
    bad = mode == "poor" and step == ASK_AT
    halted = run.step(step, loss=float("nan") if bad else 1.0 / step, grad_norm=1.0)
    if halted:
        break
    run.pulse.set(step, "forward")
    if run.rank == 0 and step == FAIL_AT and mode not in ("again", "adopt"):
        fail_from_now_on()
    if mode == "grow":
        print("x" * 1000, flush=True)
    if mode == "stand" and run.rank == 1 and step == EXIT_AT:
        time.sleep(STAND_S)
    while mode == "adopt" and step == EXIT_AT and not (case / "go").exists():
        (case / f"ready{run.rank}").touch()
        time.sleep(0.01)
    if run.rank == 0 and step == ASK_AT:
        for action in ASKED.get(mode, ()):
            ask(action)
    if mode == "again" and run.attempt == 1 and run.rank == 1 and step == EXIT_AT:
        fail_from_now_on()
        os._exit(7)
    until = time.monotonic() + ANSWERED_S
    while mode == "ask" and step == steps and waits() and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.02)
    run.pulse.set(step, "backward")
    board.write(step)
    while board.slowest() < step:
        if mode == "again" and run.halt_reason:
            os._exit(1)
        time.sleep(0.002)
end = {"phase": Path(run.run).name, "attempt": run.attempt, "rank": run.rank, "step": step,
       "halted": halted, "token": os.environ[environ.TOKEN]}  # fmt: skip
fd = os.open(case / "ends.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
os.write(fd, json.dumps(end).encode() + b"\n")
