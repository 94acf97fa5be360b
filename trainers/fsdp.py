"""`torchrun -m trainers.fsdp --config FILE`: like `trainers.ddp`, but parameters are sharded."""

from trainers.entry import exit_now, main

if __name__ == "__main__":
    exit_now(main(entry="trainers.fsdp"))
