"""Waits of the second author: for other threads, for other programs, for data, for servers."""

import asyncio
import fcntl
import importlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import pty
import queue
import select
import signal
import socket
import sqlite3
import ssl
import struct
import subprocess
import sys
import threading
import time
import urllib.request

from drilled_place import folder, rank

LONG_S = 3600
FORK = multiprocessing.get_context("fork")


def never() -> None:
    queue.Queue[int]().get()


# --- waits between threads and for files that others hold ----------------------------------------


def take_turn() -> None:
    turn = threading.Condition()
    with turn:
        turn.wait_for(lambda: (folder / "turn").exists())


def meet() -> None:
    threading.Barrier(2).wait()


def take_slots() -> None:
    slots = threading.BoundedSemaphore(2)
    for _ in range(3):
        slots.acquire()


class Shipping(logging.Handler):
    """A log handler whose `emit` does not return, as if its collector had exited."""

    def emit(self, record: logging.LogRecord) -> None:
        never()


def write_record() -> None:
    logger = logging.getLogger("training")
    logger.addHandler(Shipping())
    threading.Thread(target=logger.warning, args=("slow shard",), daemon=True).start()
    time.sleep(0.3)
    logger.warning("step")


def load_schedule() -> None:
    """Two threads import a module whose first import does not return."""
    name = f"schedule{rank}"
    (folder / f"{name}.py").write_text("import queue\nqueue.Queue().get()\n")
    sys.path.insert(0, str(folder))
    threading.Thread(target=importlib.import_module, args=(name,), daemon=True).start()
    time.sleep(0.3)
    importlib.import_module(name)


def enter_result() -> None:
    with sqlite3.connect(folder / "runs.db", timeout=LONG_S, isolation_level=None) as ledger:
        ledger.execute("BEGIN EXCLUSIVE")


def prepare_dataset() -> None:
    filelock = importlib.import_module("filelock")  # torch and dataset libraries need it
    filelock.FileLock(folder / "dataset.use").acquire()


def claim_region() -> None:
    with (folder / "index.bin").open("r+b") as stream:
        whole = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0)
        fcntl.fcntl(stream, fcntl.F_OFD_SETLKW, whole)


def flush_saver() -> None:
    saver = threading.Thread(target=never, daemon=True)
    saver.start()
    saver.join()


def hand_metrics() -> None:
    metrics: queue.Queue[int] = queue.Queue(1)
    for step in range(2):
        metrics.put(step)


def share_table() -> None:
    """Acquires a lock that an ended process did not release."""
    table = FORK.Lock()
    former = FORK.Process(target=table.acquire)
    former.start()
    former.join()
    with table:
        pass


# --- waits for other programs --------------------------------------------------------------------


def sort_names() -> None:
    with subprocess.Popen(["sort"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as sorting:
        sorting.wait()


def snapshot() -> None:
    pid = os.fork()
    while pid == 0:
        signal.pause()
    os.waitpid(pid, 0)


def mirror() -> None:
    os.system("tail -f /dev/null; true")


def squeeze() -> None:
    subprocess.run(["sh", "-c", "while :; do :; done"], check=False)


def write_aside() -> None:
    writer = FORK.Process(target=FORK.Event().wait)
    writer.start()
    writer.join()


def ask_for_key() -> None:
    _, terminal = pty.openpty()
    subprocess.run(["sh", "-c", "read key"], stdin=terminal, check=False)


def publish() -> None:
    async def run() -> None:
        publishing = await asyncio.create_subprocess_exec("tail", "-f", "/dev/null")
        await publishing.wait()

    asyncio.run(run())


# --- reads and writes without another end --------------------------------------------------------


def open_spool() -> None:
    path = folder / f"spool{rank}"
    os.mkfifo(path)
    path.write_text("step\n")


def stream_metrics() -> None:
    """Writes to a collector that another process stops."""
    with (folder / "metrics").open("w") as stream:
        while True:
            stream.write("step loss rate\n" * 100)


def print_samples() -> None:
    _collected, console = os.pipe()
    with open(console, "w") as stream:
        while True:
            print("sample", "x" * 500, file=stream, flush=True)


def collect_shapes() -> None:
    shapes, _sending = multiprocessing.Pipe(duplex=False)
    shapes.recv()


def await_token() -> None:
    tokens, _giving = os.pipe()
    select.select([tokens], [], [])


def send_parcel() -> None:
    FORK.SimpleQueue().put(bytes(1 << 20))


# --- talks to servers ----------------------------------------------------------------------------


def peer() -> tuple[str, int]:
    host, _, port = (folder / "peer").read_text().partition(":")
    return host, int(port)


def resolve_name() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stream:
        stream.sendto(b"name?", peer())
        stream.recvfrom(512)


def download() -> None:
    urllib.request.urlopen("http://{}:{}/tokens".format(*peer())).read()


def register() -> None:
    with socket.create_connection(peer()) as stream:
        stream.sendall(b"rank")


def download_again() -> None:
    while True:
        try:
            urllib.request.urlopen("http://{}:{}/tokens".format(*peer()), timeout=8).read()
        except OSError:
            continue


def greet_store() -> None:
    context = ssl.create_default_context()
    with (
        socket.create_connection(peer()) as stream,
        context.wrap_socket(stream, server_hostname="store.invalid"),
    ):
        pass


def reach_tracker() -> None:
    multiprocessing.connection.Client(peer(), authkey=b"tracker").close()


def follow_feed() -> None:
    async def follow() -> None:
        reader, _ = await asyncio.open_connection(*peer())
        await reader.readline()

    asyncio.run(follow())


MECHANISMS = {
    "turn": take_turn, "meet": meet, "slots": take_slots, "record": write_record,
    "schedule": load_schedule, "ledger": enter_result, "dataset": prepare_dataset,
    "region": claim_region, "saver": flush_saver, "metrics": hand_metrics, "table": share_table,
    "names": sort_names, "snapshot": snapshot, "mirror": mirror, "squeeze": squeeze,
    "aside": write_aside, "key": ask_for_key, "publish": publish,
    "spool": open_spool, "collector": stream_metrics, "print": print_samples,
    "shapes": collect_shapes, "token": await_token, "parcel": send_parcel,
    "resolve": resolve_name, "trickle": download, "register": register, "again": download_again,
    "greet": greet_store, "tracker": reach_tracker, "feed": follow_feed,
}  # fmt: skip
