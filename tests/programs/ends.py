"""A contract process whose ranks end in a chosen way: `ends.py MODE`.

`native`: rank 1 reads address 0 at step 3; `raise`: rank 1 raises an error at step 3; `early`: rank
0 leaves a real gloo group at step 5; `wait`: the ranks run until a halt or a signal ends them.
"""

import ctypes
import faulthandler
import os
import sys
import time

from trainers.contract.member import join

mode = sys.argv[1]
run = join()
faulthandler.enable()
if mode == "early":
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")


def forward() -> None:
    ctypes.string_at(0)


def fetch(step: int) -> None:
    raise ValueError(f"the batch of step {step} is broken")


for step in range(1, 100_000):
    if run.step(step, loss=1.0):
        break
    if mode == "early":
        if run.rank == 0 and step == 5:
            run.close(5, reason="done")
            os._exit(0)
        dist.all_reduce(torch.ones(4))
    if run.rank == 1 and step == 3:
        if mode == "native":
            forward()
        elif mode == "raise":
            with run.phase("fetch"):
                fetch(step)
    time.sleep(0.02)
