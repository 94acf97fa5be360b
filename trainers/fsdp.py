"""Starts a training; several ranks use FSDP2 by default: `torchrun -m trainers.fsdp …`."""

from trainers.entry import exit_now, main

if __name__ == "__main__":
    exit_now(main(entry="trainers.fsdp"))
