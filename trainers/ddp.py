"""`torchrun -m trainers.ddp --config FILE`, or `python -m trainers.ddp` for one process."""

from trainers.entry import exit_now, main

if __name__ == "__main__":
    exit_now(main())
