"""Stack dumps on SIGUSR1 that cannot kill a healthy process.

faulthandler writes the main thread's stack from the signal handler itself, also when the GIL is
held in C; `all_threads=True` crashed healthy processes (measured: SIGSEGV after 7 to 1,019 dumps
beside one busy Python thread). The chained Python-level handler wakes a helper thread through
`signal.set_wakeup_fd`; with the GIL in hand it writes the other threads and the collective flight
record, also while the main thread is blocked in a collective.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from trainers.contract import rundir

END_MARK = "=== end of dump"
MAX_FRAMES = 100
LAST_DUMP_S = 2.0
STDERR = 2


def ignore() -> None:
    """Makes SIGUSR1 harmless until `install`; exec keeps the ignore for children."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _flight_record() -> str | None:
    """Returns torch's collective flight record as JSON, None where torch offers none."""
    torch = sys.modules.get("torch")
    distributed = getattr(getattr(torch, "_C", None), "_distributed_c10d", None)
    dump = getattr(distributed, "_dump_fr_trace_json", None)
    if dump is None:
        return None
    try:
        record = dump(True, False)
    except RuntimeError as error:
        return f'{{"error": "{type(error).__name__}"}}'
    return record.decode() if isinstance(record, bytes) else str(record)


class StackDumper:
    """Owns SIGUSR1 of this process; install it in the main thread.

    The dump goes to `live` (memory-backed: a frozen run directory cannot block the handler) and
    from there, by the helper thread, to `stackdump_rank{R}.txt` in the run directory.
    """

    def __init__(self, run: Path, live: Path | None, rank: int, on_dump: Callable[[], None]):
        self._run, self._rank, self._on_dump = run, rank, on_dump
        self._archive = rundir.stackdump(run, rank)
        self._path = rundir.live_stack(live, rank) if live else self._archive
        self._fd = os.open(
            self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        self._copied = os.fstat(self._fd).st_size
        self.count = 0
        self._main = threading.main_thread().ident
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(self._wake_read, True)
        self._thread = threading.Thread(target=self._serve, name="nsa-dumper", daemon=True)

    def install(self) -> None:
        """Takes over SIGUSR1 and its wake-up; a native crash leaves its stack on stderr."""
        if not faulthandler.is_enabled():
            # The crashing thread alone: the frames of the others may change meanwhile.
            faulthandler.enable(STDERR, all_threads=False)
        self._thread.start()
        signal.signal(signal.SIGUSR1, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        faulthandler.register(signal.SIGUSR1, file=self._fd, all_threads=False, chain=True)

    def uninstall(self) -> None:
        """Ignores SIGUSR1 from here on: a dump while Python ends would kill the process."""
        if self._thread.ident is None:
            return
        faulthandler.unregister(signal.SIGUSR1)
        ignore()
        signal.set_wakeup_fd(-1)
        os.close(self._wake_write)
        self._thread.join(LAST_DUMP_S)

    def _serve(self) -> None:
        while True:
            numbers = os.read(self._wake_read, 4096)
            if not numbers:
                return
            if signal.SIGUSR1 in numbers:
                self._on_dump()
                self._write_rest()

    def _write_rest(self) -> None:
        self.count += 1
        os.write(self._fd, self._threads_text().encode("utf-8", "replace"))
        try:
            self._copy_to_run()
            record = _flight_record()
            if record is not None:
                name = f"flight_rank{self._rank}_{time.time_ns() // 1_000_000}.json"
                self._keep_one_flight(name, record)
        except OSError as error:
            os.write(self._fd, f"dump not copied to the run directory: {error}\n".encode())

    def _threads_text(self) -> str:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        parts = [f"=== rank {self._rank} pid {os.getpid()} unix {time.time():.3f}\n"]
        mine = threading.get_ident()
        for ident, frame in sys._current_frames().items():
            if ident in (self._main, mine):
                continue
            parts.append(f"Thread {names.get(ident, '?')} (most recent call first):\n")
            at: FrameType | None = frame
            for _ in range(MAX_FRAMES):
                if at is None:
                    break
                code = at.f_code
                parts.append(f'  File "{code.co_filename}", line {at.f_lineno} in {code.co_name}\n')
                at = at.f_back
        parts.append(f"{END_MARK} {self.count} of rank {self._rank}\n")
        return "".join(parts)

    def _copy_to_run(self) -> None:
        if self._path == self._archive:
            return
        size = os.fstat(self._fd).st_size
        data = os.pread(self._fd, size - self._copied, self._copied)
        out = rundir.open_append(self._archive)
        try:
            os.write(out, data)
        finally:
            os.close(out)
        self._copied += len(data)

    def _keep_one_flight(self, name: str, record: str) -> None:
        rundir.write_atomic(self._run / name, record)
        mine = sorted(self._run.glob(f"flight_rank{self._rank}_*.json"))
        for old in mine[:-8]:
            old.unlink(missing_ok=True)
