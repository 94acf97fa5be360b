"""A contract process without torch; its ranks step together through a shared file.

`member.py STEPS [MODE]`: with `raise`, rank 1 raises an error at step 5; with `leave`, rank 1 exits
with code 7 at step 5; with `hang`, rank 1 sleeps at step 30; with `mute`, rank 1 then also ignores
SIGUSR1; with `deaf`, all ranks ignore TERM. With `until FILE`, the ranks continue after STEPS until
the file exists.
"""

import itertools
import os
import signal
import sys
import time
from pathlib import Path

from tests.programs.lockstep import Board
from trainers.contract.member import join

BEYOND = 1 << 62
"""The step of a rank that has ended, so that no rank waits for this rank."""
steps, mode = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
run = join()
if mode == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
board = Board(run)
for step in itertools.count(1):
    is_last = step >= steps and (mode != "until" or Path(sys.argv[3]).exists())
    if run.step(step, loss=1.0 / step, grad_norm=1.0):
        break
    run.pulse.set(step, "forward")
    if mode == "raise" and run.rank == 1 and step == 5:
        raise ValueError("the batch of step 5 is broken")
    if mode == "leave" and run.rank == 1 and step == 5:
        os._exit(7)
    if mode in ("hang", "mute") and run.rank == 1 and step == 30:
        if mode == "mute":
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        time.sleep(3600)
    time.sleep(0.02)
    run.pulse.set(step, "backward")
    board.meet(step)
    if is_last:
        board.write(BEYOND)
        break
