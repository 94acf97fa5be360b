"""The real trainer, in which torch warns when the host waits for the GPU.

`python -m tests.gpu.sync_warned …` accepts the options of `trainers.ddp`. A warning contains
"called a synchronizing CUDA operation".
"""

from __future__ import annotations

import warnings

import torch

from trainers.entry import exit_now, main

if __name__ == "__main__":
    warnings.simplefilter("always")
    torch.cuda.set_sync_debug_mode("warn")
    exit_now(main())
