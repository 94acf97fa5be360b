"""`torchrun -m trainers.fsdp --config FILE`: as `trainers.ddp`, with parameters sharded (FSDP2)."""

from trainers.entry import leave, main

if __name__ == "__main__":
    leave(main(entry="trainers.fsdp"))
