"""`torchrun -m trainers.fsdp --config FILE`: as `trainers.ddp`, with parameters sharded (FSDP2)."""

import sys

from trainers.entry import main

if __name__ == "__main__":
    sys.exit(main(entry="trainers.fsdp"))
