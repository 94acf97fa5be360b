"""The supervisor of the error sweep: at its end it retries unwritten documents for one second."""

import sys

from console.supervisor import directory
from console.supervisor.__main__ import main

directory.RETRY_S = 1.0

sys.exit(main())
