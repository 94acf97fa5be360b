"""Trains with FSDP2, which shards parameters: `torchrun -m trainers.fsdp --config FILE`."""

from trainers.entry import exit_now, main

if __name__ == "__main__":
    exit_now(main(entry="trainers.fsdp"))
