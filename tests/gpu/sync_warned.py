"""The real trainer, which warns each time the host waits for the GPU.

`python -m tests.gpu.sync_warned …` takes the words of `trainers.ddp`. torch prints "called a
synchronizing CUDA operation".
"""

from __future__ import annotations

import warnings

import torch

from trainers.entry import exit_now, main

if __name__ == "__main__":
    warnings.simplefilter("always")
    torch.cuda.set_sync_debug_mode("warn")
    exit_now(main())
