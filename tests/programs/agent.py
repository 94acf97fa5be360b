"""Stands in for torchrun where its start-up would be all that a test waits for.

`agent.py WORLD PROGRAM ARGS…`: starts the ranks as torchrun does, each in its own session, and ends
the others by TERM when one fails.
"""

import os
import subprocess
import sys
import time

world, command = int(sys.argv[1]), [sys.executable, *sys.argv[2:]]
ranks = []
for rank in range(world):
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    ranks.append(subprocess.Popen(command, env=os.environ | place, start_new_session=True))
codes = [None]
while None in codes and not any(codes):
    time.sleep(0.05)
    codes = [each.poll() for each in ranks]
for each in ranks:
    each.terminate()
for each in ranks:
    each.wait()
sys.exit(int(any(codes)))
