"""A program on a GPU with one very slow kernel: `device_wait.py [--phases]`.

At step 6, this kernel spins for about half a minute, and the host waits for the device.
"""

import contextlib
import sys

import torch

from trainers.contract.member import join

torch.cuda.set_device(0)
model = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
phases = "--phases" in sys.argv
run = join()
for step in range(1, 100_000):
    with run.phase("forward") if phases else contextlib.nullcontext():
        loss = model(torch.randn(64, 1024, device="cuda")).square().mean()
        loss.backward()
        if step == 6:
            torch.cuda._sleep(int(45e9))
    with run.phase("log") if phases else contextlib.nullcontext():
        value = loss.item()
    optimizer.step()
    optimizer.zero_grad()
    if run.step(step, loss=value) or step == 400:
        break
