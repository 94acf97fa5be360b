"""A foreign DDP program; the three lines with `join` and `run` make its ranks instrumented.

`foreign_ddp.py STEPS [FILE]`: after its steps, each rank waits until FILE exists.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trainers.contract.member import join

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loss = torch.tensor(0.0)
run = join()
for step in range(1, int(sys.argv[1]) + 1):
    if run.step(step, loss=float(loss)):
        break
    optimizer.zero_grad()
    loss = model(torch.randn(16, 8)).square().mean()
    loss.backward()
    optimizer.step()
    time.sleep(float(os.environ.get("PAUSE", "0.05")))
while len(sys.argv) > 2 and not os.path.exists(sys.argv[2]):
    time.sleep(0.05)
dist.destroy_process_group()
