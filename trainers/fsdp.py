"""Trains with FSDP2, or as a single process: `torchrun -m trainers.fsdp --config FILE`."""

from trainers.entry import exit_now, main

if __name__ == "__main__":
    exit_now(main(entry="trainers.fsdp"))
