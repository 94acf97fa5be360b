"""`torchrun -m trainers.ddp --config FILE`, or `python -m trainers.ddp` for one process."""

import sys

from trainers.entry import main

if __name__ == "__main__":
    sys.exit(main())
