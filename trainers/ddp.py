"""Starts a training; several ranks use DDP by default: `torchrun -m trainers.ddp --config FILE`."""

from trainers.entry import exit_now, main

if __name__ == "__main__":
    exit_now(main())
