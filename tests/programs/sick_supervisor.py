"""The supervisor of the error sweep: at its end it retries unwritten documents for one second.

Except under `growing_supervisor.py`, no span of its history ends, because the time of such an end
depends on the time of day.
"""

import sys

from console.sources import series
from console.supervisor import rundir_io
from console.supervisor.__main__ import main

rundir_io.RETRY_S = 1.0
if series.SPANS_S[0] > 1:
    series.SPANS_S = (10**9,) * len(series.SPANS_S)

sys.exit(main())
