"""A hook under test: `hook.py FOLDER [MODE] …` writes its input to FOLDER, one file per run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

folder, mode = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
kept = {
    "argv": sys.argv[1:], "env": dict(os.environ), "stdin": sys.stdin.read(), "cwd": os.getcwd(),
    "pid": os.getpid(), "sid": os.getsid(0), "usr1": str(signal.getsignal(signal.SIGUSR1)),
}  # fmt: skip
if mode in ("hang", "leave"):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    kept["child"] = child.pid
temporary = folder / f".{os.getpid()}"
temporary.write_text(json.dumps(kept))
temporary.rename(folder / f"{time.time_ns()}.json")
print("the hook was here")
if mode == "hang":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
if mode == "flood":
    sys.stdout.write("x" * (8 << 20))
sys.exit(7 if mode == "fail" or (mode == "fail-until" and not Path(sys.argv[3]).exists()) else 0)
