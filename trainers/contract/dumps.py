"""Stack dumps that cannot kill a healthy process.

SIGUSR1 only wakes a helper thread, through `signal.set_wakeup_fd`: also while the main thread is
blocked in a collective. With the GIL in hand, so that every frame is whole, it has faulthandler
write all threads, and then torch the collective flight record; no object of the program is touched.

A rank that holds the GIL in native code never lets the helper run. For it there is `LAST_RESORT`:
faulthandler writes the main thread from the signal handler itself. Send it only where SIGUSR1
stayed unanswered and nothing moves, so that the frames stand still.

This process's SIGUSR1, `LAST_RESORT` and wake-up descriptor belong to the dumper.

What killed healthy trainings before (CPython 3.11.7, one in about 50,000 dumps each; read from
their core files):

- faulthandler in the handler of SIGUSR1: a frame's evaluation publishes a C frame some instructions
  before it fills in `current_frame` (3.12 does too), and the handler follows what lies there. With
  `all_threads=True` it was one in 7 to 1,019.
- `sys._current_frames()` and `f_back` in the helper: the frame object is allocated, which may
  collect garbage, which may give the GIL away; meanwhile the frame's thread can return from it and
  call another function in the same place, and the object is bound to a frame larger than itself.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

from trainers.contract import rundir

END_MARK = "=== end of dump"
LAST_RESORT = signal.SIGRTMIN + 1  # programs have their own use for SIGUSR2
LAST_DUMP_S = 2.0
STDERR = 2
_THREAD = re.compile(r"^(?:Current t|T)hread (0x[0-9a-f]+).*\n((?: .*\n)*)", re.MULTILINE)
_WOKEN = re.compile(r'\A  File ".*dumps\.py", line \d+ in _woken\n')
_END = 0
UNSEEN = "  (not among the 100 newest threads, which are all that faulthandler shows)\n"


def ignore() -> None:
    """Makes the dump signals harmless until `install`; exec keeps the ignore for children."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(LAST_RESORT, signal.SIG_IGN)


def _woken(_number: int, _frame: FrameType | None) -> None:
    """Does nothing: that Python handles the signal is what wakes the helper thread."""


def _flight_record() -> str:
    """Returns torch's collective flight record as JSON, "" where torch offers none."""
    torch = sys.modules.get("torch")
    distributed = getattr(getattr(torch, "_C", None), "_distributed_c10d", None)
    dump = getattr(distributed, "_dump_fr_trace_json", None)
    if dump is None:
        return ""
    try:
        record = dump(True, False)
    except (RuntimeError, TypeError) as error:
        return f'{{"error": "{type(error).__name__}"}}'
    return record.decode("utf-8", "replace") if isinstance(record, bytes) else str(record)


def _scratch() -> int:
    """Returns a file in memory; not every build of Python, and not every kernel, offers one."""
    try:
        return os.memfd_create("nsa-dump", os.MFD_CLOEXEC)
    except (AttributeError, OSError):
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())


class StackDumper:
    """Owns SIGUSR1 and `LAST_RESORT` of this process; install it in the main thread.

    The dump goes to `live` (memory-backed: a frozen run directory cannot block it) and from there,
    by `later`, which runs a function where it may block, to `stackdump_rank{R}.txt` of the run.
    """

    def __init__(
        self, run: Path, live: Path | None, rank: int,
        later: Callable[[Callable[[], None]], None],
    ):  # fmt: skip
        self._run, self._rank, self._later = run, rank, later
        self._archive = rundir.stackdump(run, rank)
        self._path = rundir.live_stack(live, rank) if live else self._archive
        self._fd = os.open(
            self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        self._copied = os.fstat(self._fd).st_size
        self.count = 0
        self._main = threading.main_thread().ident or 0
        self._scratch = _scratch()
        self._flight, self._trouble, self._asked_to_keep = "", "", False
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(self._wake_read, True)
        self._thread = threading.Thread(target=self._serve, name="nsa-dumper", daemon=True)

    def install(self) -> None:
        """Takes over the signals and their wake-up; a native crash leaves its stack on stderr."""
        if not faulthandler.is_enabled():
            # The crashing thread alone: the frames of the others may change meanwhile.
            faulthandler.enable(STDERR, all_threads=False)
        self._thread.start()
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGUSR1, _woken)
        signal.siginterrupt(signal.SIGUSR1, False)  # native calls of the program go on
        signal.signal(LAST_RESORT, signal.SIG_IGN)  # what `uninstall` comes back to
        faulthandler.register(LAST_RESORT, file=self._fd, all_threads=False)
        os.register_at_fork(after_in_child=self._let_go)

    def uninstall(self) -> None:
        """Ignores both signals from here on: a dump while Python ends would kill the process."""
        if self._thread.ident is None:
            return
        self._let_go()
        with suppress(BlockingIOError):
            os.write(self._wake_write, bytes([_END]))
        self._thread.join(LAST_DUMP_S)

    @staticmethod
    def _let_go() -> None:
        """A forked child does so too: it would write its parent's pipe and its stack."""
        faulthandler.unregister(LAST_RESORT)
        ignore()
        signal.set_wakeup_fd(-1)

    def _serve(self) -> None:
        while _END not in (numbers := os.read(self._wake_read, 4096)):
            if signal.SIGUSR1 not in numbers:
                continue
            self.count += 1
            try:
                os.write(self._fd, self._threads_text().encode("utf-8", "replace"))
                self._flight = _flight_record()
                if not self._asked_to_keep:
                    self._asked_to_keep = True
                    self._later(self._keep)
            except Exception as error:  # whatever this dump met, the next one must come
                self._trouble = f"{type(error).__name__}: {error}"

    def _keep(self) -> None:
        """Brings to the run directory what came since the last time, of a spray its whole."""
        self._asked_to_keep, record = False, self._flight
        self._copy_to_run()
        if record:
            name = f"flight_rank{self._rank}_{time.time_ns() // 1_000_000}.json"
            rundir.write_atomic(self._run / name, record)
            for old in sorted(self._run.glob(f"flight_rank{self._rank}_*.json"))[:-8]:
                old.unlink(missing_ok=True)

    def _threads_text(self) -> str:
        """Returns the stacks of all threads but this one, the main thread's first."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        os.lseek(self._scratch, 0, os.SEEK_SET)
        faulthandler.dump_traceback(self._scratch, all_threads=True)
        size = os.lseek(self._scratch, 0, os.SEEK_CUR)
        raw = os.pread(self._scratch, size, 0).decode("utf-8", "replace")
        stacks = {int(ident, 16): frames for ident, frames in _THREAD.findall(raw)}
        main = _WOKEN.sub("", stacks.pop(self._main, UNSEEN))
        stacks.pop(threading.get_ident(), None)
        parts = [
            f"=== rank {self._rank} pid {os.getpid()} unix {time.time():.3f}\n",
            f"=== the dump before failed: {self._trouble}\n" if self._trouble else "",
            f"Stack (most recent call first):\n{main}",
        ]
        self._trouble = ""
        for ident, frames in stacks.items():
            name = " ".join(names.get(ident, f"{ident:#x}").split())
            parts.append(f"Thread {name} (most recent call first):\n{frames}")
        parts.append(f"{END_MARK} {self.count} of rank {self._rank}\n")
        return "".join(parts)

    def _copy_to_run(self) -> None:
        if self._path == self._archive:
            return
        size = os.fstat(self._fd).st_size
        data = os.pread(self._fd, size - self._copied, self._copied)
        out = rundir.open_append(self._archive)
        try:
            self._copied += os.write(out, data)
        finally:
            os.close(out)
