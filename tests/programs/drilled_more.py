"""Faults of one rank, by a second author who did not know the rules of the diagnosis.

`MECHANISMS` includes those of `drilled_more_waits` and `drilled_more_ranks`. No function, thread or
file is named after its cause. A wait must survive a signal that requests stacks.
"""

import asyncio
import collections
import ctypes
import hashlib
import importlib
import itertools
import mmap
import multiprocessing
import multiprocessing.connection
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time

import torch
from drilled_more_ranks import MECHANISMS as OF_RANKS
from drilled_more_waits import MECHANISMS as OF_WAITS
from drilled_place import folder, rank

LONG_S = 3600
WORK_S = 90
FORK = multiprocessing.get_context("fork")


def accumulate(ready: str = "ready") -> None:
    """Computes until the file `ready` exists, at most `WORK_S`; the fault may come from outside."""
    until = time.monotonic() + WORK_S
    while time.monotonic() < until and not (folder / ready).exists():
        torch.eye(64).matmul(torch.ones(64, 64))


# --- waits by the clock --------------------------------------------------------------------------


def fetch_manifest() -> None:
    delay_s = 0.5
    while True:
        try:
            (folder / "manifest.json").read_text()
            return
        except FileNotFoundError:
            time.sleep(delay_s)
            delay_s = min(2 * delay_s, 60)


def settle() -> None:
    select.select([], [], [], LONG_S)


def cool_down() -> None:
    native = ctypes.CDLL(None)
    while True:
        native.sleep(600)


def pace_uploads() -> None:
    async def pace() -> None:
        while not (folder / "uploaded").exists():
            await asyncio.sleep(0.5)

    asyncio.run(pace())


def take_tokens() -> None:
    """Limits a rate; the bucket is never filled."""
    tokens, rate = 0.0, 0.0
    while tokens < 1:
        time.sleep(0.25)
        tokens += 0.25 * rate


# --- computes ------------------------------------------------------------------------------------


def merge_pairs() -> None:
    """Merges the pairs of a text that never gets shorter."""
    text = [place % 17 for place in range(400)]
    while len(text) > 1:
        counts: dict[tuple[int, int], int] = {}
        for pair in itertools.pairwise(text):
            counts[pair] = counts.get(pair, 0) + 1
        best = max(counts, key=lambda pair: counts[pair])
        text = [*text[1:], best[0]]


def pack_documents() -> None:
    """Tries all ways to pack documents exactly, which takes too long."""
    sizes = [2 * place + 10 for place in range(60)]

    def fill(place: int, room: int) -> bool:
        if place == len(sizes):
            return room == 1
        return fill(place + 1, room - sizes[place]) or fill(place + 1, room)

    fill(0, 1001)


def draw_until_small() -> None:
    while True:
        if float(torch.randn(64).norm()) < 0.1:
            return


def await_handoff() -> None:
    given: list[int] = []
    while not given:
        os.sched_yield()


# --- one long call -------------------------------------------------------------------------------


def spectrum() -> None:
    torch.linalg.eigvals(torch.randn(5000, 5000))


def seal_shard() -> None:
    hashlib.pbkdf2_hmac("sha256", b"shard", b"salt", 2**31 - 1)


def drop_rest() -> None:
    """Consumes the rest of an iterator that has no end."""
    collections.deque(itertools.repeat(None), maxlen=0)


def enter_kernel() -> None:
    """Locks the same spin lock twice in C, and holds the GIL."""
    native, word = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    native.pthread_spin_init(word, 0)
    native.pthread_spin_lock(word)
    native.pthread_spin_lock(word)


def finish_stream() -> None:
    """Starts a second thread that waits in C and holds the GIL."""
    native, two = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    native.pthread_barrier_init(two, None, 2)
    threading.Thread(target=lambda: native.pthread_barrier_wait(two), daemon=True).start()
    accumulate()


# --- ends ----------------------------------------------------------------------------------------


def finish_aside() -> None:
    threading.Thread(target=os._exit, args=(0,)).start()
    accumulate()


def read_shrunk() -> None:
    """Reads a mapped file that became shorter."""
    with (folder / f"tokens{rank}").open("w+b") as stream:
        stream.truncate(1 << 16)
        mapped = mmap.mmap(stream.fileno(), 1 << 16)
        stream.truncate(0)
        mapped[1 << 15]


def exceed() -> None:
    used_s = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
    resource.setrlimit(resource.RLIMIT_CPU, (used_s + 1, resource.RLIM_INFINITY))
    accumulate()


def parse_shard() -> None:
    raise ValueError("shard 17 has 3 columns, not 4")


def cache_more() -> None:
    """Allocates more memory than the limit of its cgroup."""
    accumulate("moved")
    cached = [bytearray(b"x" * (8 << 20)) for _ in range(128)]
    cached.clear()


# --- files ---------------------------------------------------------------------------------------


def commit_shard() -> None:
    last = folder / "mount" / f"last{rank}"
    last.write_bytes(b"weights")
    accumulate("frozen")
    last.replace(last.with_suffix(".pt"))


def append_journal() -> None:
    with (folder / "mount" / "journal").open("a") as stream:
        accumulate("frozen")
        stream.write("step\n")


def update_pages() -> None:
    with (folder / "mount" / f"state{rank}").open("w+b") as stream:
        stream.write(bytes(1 << 16))
        stream.flush()
        os.fsync(stream.fileno())
        pages = mmap.mmap(stream.fileno(), 1 << 16)
        accumulate("frozen")
        pages[5000] = 1


def list_shards() -> None:
    os.listdir(folder / "silent")


def load_tokenizer() -> None:
    sys.path.insert(0, str(folder / "silent"))
    importlib.import_module("tokenizer_of_this_run")


def read_shard() -> None:
    with (folder / "bucket" / "shard").open("rb", buffering=0) as stream:
        stream.read()


# --- stopped or slowed from outside --------------------------------------------------------------


def pause_here() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    accumulate()


def watch_memory() -> None:
    words = f"sleep 0.3; kill -STOP {os.getpid()}"
    with subprocess.Popen(["sh", "-c", words]):
        accumulate()


def log_often() -> None:
    """Makes system calls for `WORK_S`."""
    until = time.monotonic() + WORK_S
    while time.monotonic() < until:
        os.stat("/")


MECHANISMS = {
    **OF_RANKS,
    **OF_WAITS,
    "manifest": fetch_manifest, "settle": settle, "cool": cool_down, "pace": pace_uploads,
    "tokens": take_tokens,
    "merge": merge_pairs, "pack": pack_documents, "draw": draw_until_small,
    "handoff": await_handoff,
    "spectrum": spectrum, "seal": seal_shard, "drop": drop_rest, "kernel": enter_kernel,
    "beside": finish_stream,
    "quit": lambda: os._exit(0), "finish": finish_aside,
    "abort": lambda: ctypes.CDLL(None).abort(), "shrunk": read_shrunk, "exceed": exceed,
    "parse": parse_shard, "cache": cache_more,
    "commit": commit_shard, "journal": append_journal, "pages": update_pages,
    "list": list_shards, "tokenizer": load_tokenizer, "shard": read_shard,
    "here": pause_here, "watch": watch_memory,
    "suspend": accumulate, "group": accumulate,
    "seize": accumulate, "inspect": accumulate, "calls": log_often, "leader": accumulate,
    "older": accumulate, "nested": accumulate, "tree": accumulate,
}  # fmt: skip
"""The function of each mechanism; the fault names the phase in which it is called."""
