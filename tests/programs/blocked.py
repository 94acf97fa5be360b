"""A DDP program of two ranks: `blocked.py FAULT`; a rank blocks in step `STEP` or at the start."""

import concurrent.futures
import ctypes
import fcntl
import multiprocessing
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from trainers.contract.member import join

LONG_S = 600.0
STEP = 3
held, ends, sockets = threading.Lock(), multiprocessing.Pipe(), socket.socketpair()


def all_reduce() -> None:
    dist.all_reduce(torch.ones(2))


def barrier() -> None:
    dist.barrier()


def sleep() -> None:
    time.sleep(LONG_S)


def skip() -> None:
    """Blocks, so the other rank waits in the all-reduce of its backward."""
    time.sleep(LONG_S)


def backward_hook(_gradient: torch.Tensor) -> None:
    time.sleep(LONG_S)


def hook() -> None:
    next(module.parameters()).register_hook(backward_hook)


def loader() -> None:
    batches = iter(DataLoader(TensorDataset(torch.ones(64, 8)), 1, num_workers=1))
    next(batches)
    for child in multiprocessing.active_children():
        os.kill(child.pid or 0, signal.SIGSTOP)
    for _ in batches:
        pass


def get_from_queue() -> None:
    queue.Queue[int]().get()


def put_to_queue() -> None:
    full = queue.Queue[int](1)
    full.put(1)
    full.put(2)


def lock() -> None:
    with held:
        pass


def event() -> None:
    threading.Event().wait()


def thread() -> None:
    helper = threading.Thread(target=time.sleep, args=(LONG_S,), daemon=True)
    helper.start()
    helper.join()


def child() -> None:
    subprocess.run(["sleep", f"{LONG_S}"], check=False)


def child_output() -> None:
    subprocess.check_output(["sleep", f"{LONG_S}"])


def process() -> None:
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(LONG_S,))
    worker.start()
    worker.join()


def file_lock() -> None:
    with tempfile.NamedTemporaryFile() as file, open(file.name) as other:
        fcntl.flock(file, fcntl.LOCK_EX)
        fcntl.flock(other, fcntl.LOCK_EX)


def pipe() -> None:
    ends[0].recv()


def receive() -> None:
    sockets[0].recv(10)


def download() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        urllib.request.urlopen(f"http://127.0.0.1:{server.getsockname()[1]}/")


def busy() -> None:
    while True:
        pass


def future() -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as workers:
        workers.submit(time.sleep, LONG_S).result()


def native() -> None:
    list(map(ctypes.PyDLL(None).pthread_mutex_lock, [ctypes.create_string_buffer(64)] * 2))


FAULTS = {f.__name__: f for f in (
    all_reduce, barrier, sleep, skip, hook, loader, get_from_queue, put_to_queue, lock, event,
    thread, child, child_output, process, file_lock, pipe, receive, download, busy, future, native,
)}  # fmt: skip
OF_RANK_0 = ("all_reduce", "barrier")

if __name__ == "__main__":
    torch.set_num_threads(1)
    fault, rank = sys.argv[1], int(os.environ["RANK"])
    run = join()
    held.acquire()
    if fault == "startup" and rank == 1:
        sleep()
    dist.init_process_group("gloo")
    module = torch.nn.Linear(8, 1)
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, 10):
        if run.step(step):
            break
        if step == STEP and rank == (0 if fault in OF_RANK_0 else 1):
            FAULTS[fault]()
        elif step == STEP and fault in OF_RANK_0:
            sleep()
        optimizer.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()
