"""Writes the stacks and the flight record of this process on SIGUSR1; the process continues.

SIGUSR1 wakes a helper thread through `signal.set_wakeup_fd`, also while the main thread is blocked
in a collective. The helper holds the GIL, so every frame is complete. The helper lets faulthandler
write the stacks of at most 100 threads. Then the helper reads torch's flight record of the
collectives, if there is one. The helper creates no frame object of another thread.

If a rank holds the GIL in native code, the helper cannot run. The signal `LAST_RESORT` is for this
case: faulthandler writes the stack of the main thread in the signal handler itself. The frames of
the rank must not change meanwhile. So send `LAST_RESORT` only if SIGUSR1 had no effect and the rank
makes no progress.

Core files show that two other methods killed healthy trainings (CPython 3.11.7, each in about one
of 50,000 dumps):

- faulthandler in the handler of SIGUSR1. To run a frame, Python publishes a C frame and some
  instructions later sets its `current_frame` (also in 3.12). In between, the handler follows the
  old pointer. With `all_threads=True`, trainings died after only 7 to 1,019 dumps.
- `sys._current_frames()` and `f_back` in the helper. They allocate a frame object, which may
  collect garbage and release the GIL. Meanwhile the other thread can return and call another
  function in the same memory. The object then refers to a frame larger than itself.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType

from trainers.contract import rundir

END_MARK = "=== end of dump"
LAST_RESORT = signal.SIGRTMIN + 1  # programs often use SIGUSR2 themselves
LAST_DUMP_S = 2.0
STDERR = 2
_THREAD = re.compile(r"^(?:Current t|T)hread (0x[0-9a-f]+).*\n((?: .*\n)*)", re.MULTILINE)
_WOKEN = re.compile(r'\A  File ".*dumps\.py", line \d+ in _woken\n')
_END = 0
UNSEEN = "  (not available: faulthandler shows the 100 newest threads only)\n"


def ignore() -> None:
    """Ignores the dump signals until `install`; programs started before then ignore them too."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(LAST_RESORT, signal.SIG_IGN)


def _woken(_number: int, _frame: FrameType | None) -> None:
    """Does nothing; Python's handling of the signal wakes the helper thread."""


def _flight_record() -> str:
    """Returns torch's flight record of the collectives as JSON, or "" without a recorder.

    If torch raises RuntimeError or TypeError, the JSON has only the name of this error.

    NCCL's recorder is read only if the general recorder has no entry. NCCL's recorder queries CUDA
    events, which took 2 ms on an H100 whose kernel did not end. NCCL's function that returns no
    JSON is never called, because it took 36 s to resolve the symbols of C++ stacks.
    """
    torch = sys.modules.get("torch")
    distributed = getattr(getattr(torch, "_C", None), "_distributed_c10d", None)
    record = ""
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(distributed, name, None)
        if dump is None:
            continue
        try:
            found = dump(True, False)
        except (RuntimeError, TypeError) as error:
            return f'{{"error": "{type(error).__name__}"}}'
        record = found.decode("utf-8", "replace") if isinstance(found, bytes) else str(found)
        if '"collective_seq_id"' in record:
            break
    return record


class StackDumper:
    """Owns SIGUSR1, `LAST_RESORT` and the wake-up descriptor.

    The dump goes to a file in `live`, a directory in memory, so a frozen run directory cannot block
    the dump. `later` runs functions that may block, and reports their errors. One function copies
    the dump to the run directory as `stackdump_rank{R}.txt`, and writes the flight record there.
    Another function raises the error of a failed dump. Without `live`, the dump goes to
    `stackdump_rank{R}.txt` directly. Call `install` in the main thread.
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
        self._scratch = os.memfd_create("nsa-dump", os.MFD_CLOEXEC)
        self._flight, self._copy_is_queued = (0, ""), False
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(self._wake_read, True)
        self._thread = threading.Thread(target=self._run_dumps, name="nsa-dumper", daemon=True)

    def install(self) -> None:
        """Handles the dump signals, and lets faulthandler write the stack of a native crash."""
        if not faulthandler.is_enabled():
            # Dumps only the crashing thread, because the frames of other threads may change
            # meanwhile.
            faulthandler.enable(STDERR, all_threads=False)
        self._thread.start()
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGUSR1, _woken)
        signal.siginterrupt(signal.SIGUSR1, False)  # native calls of the program continue
        signal.signal(LAST_RESORT, signal.SIG_IGN)  # `unregister` restores this handler
        faulthandler.register(LAST_RESORT, file=self._fd, all_threads=False)
        os.register_at_fork(after_in_child=self._unregister)

    def uninstall(self) -> None:
        """Ignores the dump signals again, because a dump while Python exits could kill the process.

        Waits up to `LAST_DUMP_S` for the present dump. Does nothing without `install`.
        """
        if self._thread.ident is None:
            return
        self._unregister()
        with suppress(BlockingIOError):
            os.write(self._wake_write, bytes([_END]))
        self._thread.join(LAST_DUMP_S)

    @staticmethod
    def _unregister() -> None:
        """Ignores the dump signals, also in a forked child, which shares its parent's files."""
        faulthandler.unregister(LAST_RESORT)
        ignore()
        signal.set_wakeup_fd(-1)

    def _run_dumps(self) -> None:
        while _END not in (numbers := os.read(self._wake_read, 4096)):
            if signal.SIGUSR1 not in numbers:
                continue
            self.count += 1
            try:
                text = self._threads_text().encode("utf-8", "replace")
                while text:  # a write to a full disk may be partial; the next write then fails
                    text = text[os.write(self._fd, text) :]
                # A run directory that hangs delays the copy, so the record is stored with its time.
                self._flight = time.time_ns(), _flight_record()
                if not self._copy_is_queued:
                    self._copy_is_queued = True
                    self._later(self._save)
            except Exception as error:  # one failed dump must not prevent the next
                # `later` reports the error; a write of this thread could block the next dump.
                self._later(partial(self._fail, error.with_traceback(None)))

    def _fail(self, error: Exception) -> None:
        """Raises the error of a dump; an OSError without a path gets that of the stack file."""
        if isinstance(error, OSError):
            error.filename = error.filename or self._path
        raise error

    def _save(self) -> None:
        """Copies new dumps from `live`, and the newest flight record if any, to the run directory.

        Keeps the eight newest flight records of this rank. Records whose time is later than
        that of the new record, from before the clock was set back, are removed first.
        """
        self._copy_is_queued, (at_ns, record) = False, self._flight
        if self._path != self._archive:
            size = os.fstat(self._fd).st_size
            data = os.pread(self._fd, size - self._copied, self._copied)
            with os.fdopen(rundir.open_append(self._archive), "ab", buffering=0) as archive:
                self._copied += archive.write(data) or 0
        if record:
            name = f"flight_rank{self._rank}_{at_ns // 1_000_000}.json"
            rundir.write_atomic(self._run / name, record)
            found = self._run.glob(f"flight_rank{self._rank}_*.json")
            for old in sorted(found, key=lambda path: (path.name <= name, path.name))[:-8]:
                old.unlink(missing_ok=True)

    def _threads_text(self) -> str:
        """Returns the stacks that faulthandler shows, except this thread's; main thread first."""
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
            f"Stack (most recent call first):\n{main}",
        ]
        for ident, frames in stacks.items():
            name = " ".join(names.get(ident, f"{ident:#x}").split())
            parts.append(f"Thread {name} (most recent call first):\n{frames}")
        parts.append(f"{END_MARK} {self.count} of rank {self._rank}\n")
        return "".join(parts)
