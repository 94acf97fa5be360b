"""The supervisor of the error sweep, with low limits at which it rotates and compresses files."""

import runpy
from pathlib import Path

from console.sources import series

series.SPANS_S = (1, 2, 4, 8)

from console.sources import snapshot  # noqa: E402
from console.supervisor import rotation, snapshot_writer  # noqa: E402

rotation.divide.__defaults__ = (100,)
rotation.POLL_EVERY_S = 0.2
rotation.Rotation.__init__.__defaults__ = (2048, 0)
snapshot.HISTORY_BYTES = 100
snapshot_writer.EVERY_S = 0.5

runpy.run_path(str(Path(__file__).with_name("sick_supervisor.py")), run_name="__main__")
