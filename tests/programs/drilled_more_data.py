"""Data sources of the second author: each yields batches until its fault."""

import asyncio
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

import torch
from drilled_more_waits import peer
from drilled_place import due, fault_step, mechanism
from torch.utils.data import DataLoader, Dataset

FORK = multiprocessing.get_context("fork")
guard = threading.Lock()


def batch_of(samples: Dataset, step: int, size: int) -> torch.Tensor:
    return torch.stack([samples[step * size + place] for place in range(size)])


def never(_: object = None) -> None:
    threading.Event().wait()


def own_process(samples: Dataset, size: int) -> Iterator[torch.Tensor]:
    """Returns batches that a process of the program puts in a queue."""
    ready = FORK.Queue(4)

    def read() -> None:
        for step in range(len(samples) // size):  # pyright: ignore[reportArgumentType]
            ready.put(batch_of(samples, step, size).tolist())

    FORK.Process(target=read, daemon=True).start()
    return (torch.tensor(rows) for rows in iter(ready.get, None))


def two_workers(samples: Dataset, size: int) -> Iterator[torch.Tensor]:
    return iter(DataLoader(samples, size, num_workers=2, prefetch_factor=2,
                           persistent_workers=True))  # fmt: skip


def guarded(samples: Dataset, size: int) -> Iterator[torch.Tensor]:
    """Returns batches of a worker that was forked while a lock was held."""
    with guard:
        return iter(DataLoader(samples, size, num_workers=1))


def ring(samples: Dataset, size: int) -> Iterator[torch.Tensor]:
    """Returns batches that a thread puts in two places; after the fault, no place becomes free."""
    free, filled, places = threading.Semaphore(2), threading.Semaphore(0), deque[torch.Tensor]()

    def fill() -> None:
        for step in range(len(samples) // size):  # pyright: ignore[reportArgumentType]
            free.acquire()
            places.append(batch_of(samples, step, size))
            filled.release()

    def take() -> Iterator[torch.Tensor]:
        step, lost = 0, False
        while True:
            step += 1
            lost = lost or due(mechanism, "fetch", step)
            filled.acquire()
            batch = places.popleft()
            if not lost:
                free.release()
            yield batch

    threading.Thread(target=fill, daemon=True).start()
    return take()


def encode(rows: list[list[float]], last: bool) -> list[list[float]]:
    """Returns the rows in a worker process; for the `last` batch, stops this process instead."""
    while last:
        os.kill(os.getpid(), signal.SIGSTOP)
    return rows


def pooled(samples: Dataset, size: int) -> Iterator[torch.Tensor]:
    pool = ProcessPoolExecutor(1, FORK)
    for step in range(len(samples) // size):  # pyright: ignore[reportArgumentType]
        last = due(mechanism, "fetch", step + 1)
        rows = batch_of(samples, step, size).tolist()
        yield torch.tensor(pool.submit(encode, rows, last).result())


def streamed(samples: Dataset, size: int) -> Iterator[torch.Tensor]:
    """Yields batches that coroutines of a second thread read; at the fault, one never ends."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def read(step: int, last: bool) -> torch.Tensor:
        if last:
            await asyncio.Event().wait()
        return batch_of(samples, step, size)

    for step in range(len(samples) // size):  # pyright: ignore[reportArgumentType]
        last = due(mechanism, "fetch", step + 1)
        yield asyncio.run_coroutine_threadsafe(read(step, last), loop).result()


def next_epoch(samples: Dataset, size: int) -> Iterator[torch.Tensor]:
    """Begins a second epoch; on the rank of the fault, its workers do not get ready."""
    for step in range(int(fault_step) - 1):
        yield batch_of(samples, step, size)
    last = due(mechanism, "fetch", int(fault_step))
    yield from DataLoader(samples, size, num_workers=2, worker_init_fn=never if last else None)


def read_remote() -> None:
    """Reads a shard from a server in a worker."""
    with socket.create_connection(peer()) as stream:
        stream.sendall(b"GET shard\n")
        stream.recv(64)


def read_guarded() -> None:
    with guard:
        pass


def kill_reader() -> None:
    time.sleep(0.5)  # the training uses the ready batches first
    os.kill(os.getpid(), signal.SIGKILL)


SOURCES: dict[str, Callable[[Dataset, int], Iterator[torch.Tensor]]] = {
    "reader": own_process, "crew": two_workers, "guarded": guarded, "remote": two_workers,
    "ring": ring, "pooled": pooled, "streamed": streamed, "epoch": next_epoch,
}  # fmt: skip
IN_LOADER: dict[str, Callable[[], object]] = {
    "reader": kill_reader,
    "crew": never,
    "guarded": read_guarded,
    "remote": read_remote,
}
"""The fault of a source, called when the first sample of its step is read."""
