"""`torchrun -m trainers.ddp --config FILE`, or `python -m trainers.ddp` for one process."""

from trainers.entry import leave, main

if __name__ == "__main__":
    leave(main())
