"""Records dumps of `tests/programs/blocked.py` in stacks/FAULT.rankN.txt, without machine paths.

python -m tests.console.diagnose.record_stacks [FAULT…]
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from console.sources import process
from tests.programs import blocked
from trainers.contract import dumps, environ, pulse, rundir

ROOT = Path(__file__).parents[3]
STACKS = Path(__file__).with_name("stacks")
STILL_S = 3.0
DUMPED_S = 2.0


def shortened(text: str) -> str:
    """Returns a dump in which the paths of this machine, the pid and the time are replaced."""
    text = re.sub(r'"[^"]*/site-packages/', '"/venv/lib/python3.11/site-packages/', text)
    text = re.sub(r'"[^"]*/lib/python3\.\d+/(?!site-packages)', '"/usr/lib/python3.11/', text)
    text = text.replace(str(ROOT), "/src")
    return re.sub(r" pid \d+ unix [\d.]+", " pid 7 unix 1.0", text)


def ranks(pid: int) -> list[int]:
    """Returns the pids of the ranks of torchrun: its children that catch SIGUSR1."""
    return [child for child in process.children(pid) if process.catches(child, signal.SIGUSR1)]


def reached(live: Path, step: int) -> bool:
    """Returns whether both ranks have reached `step`."""
    found = [pulse.read(rundir.pulse(live, rank)) for rank in range(2)]
    return all(each is not None and each.step >= step for each in found)


def record(fault: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        live = Path(folder) / "live"
        live.mkdir()
        started = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2",
             "--master-port=29617", blocked.__file__, fault],
            cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env=os.environ | {environ.RUN_DIR: folder, environ.LIVE_DIR: str(live),
                              "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        try:
            step = 0 if fault == "startup" else blocked.STEP
            while not (len(ranks(started.pid)) == 2 and reached(live, step)):
                assert started.poll() is None, fault
                time.sleep(0.1)
            time.sleep(STILL_S * (1 if step else 5))
            for pid in ranks(started.pid):
                os.kill(pid, signal.SIGUSR1)
            time.sleep(DUMPED_S)
            for rank, pid in enumerate(ranks(started.pid)):
                path = rundir.live_stack(live, rank)
                if not path.read_text():
                    os.kill(pid, dumps.LAST_RESORT)
                    time.sleep(DUMPED_S)
                (STACKS / f"{fault}.rank{rank}.txt").write_text(shortened(path.read_text()))
        finally:
            for pid in (*ranks(started.pid), started.pid):  # each pid is that of a process group
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            started.wait()


if __name__ == "__main__":
    for name in sys.argv[1:] or [*blocked.FAULTS, "startup"]:
        record(name)
        print(name, flush=True)
