"""A small torchrun: starts each rank in its own session, and ends all ranks if one fails.

Tests of launching use it, because it starts much faster than torch's torchrun.
"""

import argparse
import os
import signal
import subprocess
import sys
import time

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--standalone", action="store_true")
parser.add_argument("-m", dest="module", action="store_true")
for name in ("--nproc-per-node", "--max-restarts", "--shutdown-timeout"):
    parser.add_argument(name, type=int, default=1)
for name in ("--log-dir", "--rdzv-id", "--rdzv-endpoint", "--rdzv-backend", "--master-port"):
    parser.add_argument(name)
parser.add_argument("program")
parser.add_argument("args", nargs=argparse.REMAINDER)
options = parser.parse_args()
if options.module and options.program == "trainers.ddp":
    options.program = "tests.programs.counting"  # a trainer needs torch
ranks: list[subprocess.Popen[bytes]] = []


def end(number: int = 0, _frame: object = None) -> None:
    """Sends TERM to the ranks and, after `--shutdown-timeout`, KILL; then exits with code 1."""
    if number:
        print(f"Received {number} death signal, shutting down workers", flush=True)
    failed = [index for index, rank in enumerate(ranks) if rank.poll()]
    for rank in ranks:
        if rank.poll() is None:
            print(f"Sending process {rank.pid} closing signal SIGTERM", flush=True)
            rank.terminate()
    until = time.monotonic() + options.shutdown_timeout
    for rank in ranks:
        try:
            rank.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()
    for index in failed[:1]:
        rank = ranks[index]
        print("Root Cause (first observed failure):")
        print(f"[0]:\n  rank      : {index} (local_rank: {index})")
        print(f"  exitcode  : {rank.returncode} (pid: {rank.pid})", flush=True)
    sys.exit(1)


for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, end)
for index in range(options.nproc_per_node):
    told = {"RANK": index, "LOCAL_RANK": index, "WORLD_SIZE": options.nproc_per_node}
    words = [sys.executable, *(["-m"] if options.module else []), options.program, *options.args]
    ranks.append(subprocess.Popen(
        words, env=os.environ | {name: str(value) for name, value in told.items()},
        start_new_session=True,
    ))  # fmt: skip
while any(rank.poll() is None for rank in ranks):
    if any(rank.poll() for rank in ranks):
        end()
    time.sleep(0.02)
if any(rank.returncode for rank in ranks):
    end()
