"""A foreign DDP program (gloo, CPU) with one fault: `drilled_ddp.py FOLDER [OPTIONS]`.

`FAULT=<mechanism>-<phase>@<step>:<rank>` in the environment, or this value in `FOLDER/fault`, names
the fault; the rank `all` means every rank. The file `FOLDER/reached.RANK` has the unix time of the
start of the fault. Another process may use `FOLDER` too, to inject a fault from outside.
"""

import contextlib
import ctypes
import fcntl
import json
import multiprocessing
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from drilled_more import MECHANISMS as MORE_MECHANISMS
from drilled_more_data import IN_LOADER as MORE_IN_LOADER
from drilled_more_data import SOURCES
from drilled_more_ranks import RETURN, TOGETHER, attach
from drilled_more_waits import peer
from drilled_place import due, here, mechanism, options, rank, world
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from trainers.contract.member import join

BATCH, WIDTH, SAVE_EVERY, STEPS = 16, 8, 3, 100_000
LONG_S = 3600
PACE_S = 0.02


def strike(phase: str, step: int) -> None:
    """Performs the fault of this phase and step, if it is one of `MECHANISMS` or `TOGETHER`."""
    if mechanism in TOGETHER and here(mechanism, phase, step):
        TOGETHER[mechanism](due(mechanism, phase, step))
    elif mechanism in MECHANISMS and due(mechanism, phase, step):
        MECHANISMS[mechanism]()


# --- mechanisms ----------------------------------------------------------------------------------


def poll_for_file() -> None:
    while not (options.folder / "never").exists():
        time.sleep(0.1)


def count_up() -> None:
    total = 0
    while True:
        total = (total * 31 + 7) % 1_000_003


def iterate() -> None:
    """Repeats a computation that does not converge."""
    state = torch.eye(64)
    while float(state.norm()) > 0:
        state = torch.nn.functional.normalize(state @ state + 1.0)


def lock_mutex_twice() -> None:
    """Waits in C and holds the GIL, so no signal handler of Python runs."""
    native, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    native.pthread_mutex_lock(mutex)
    native.pthread_mutex_lock(mutex)


def match_slowly() -> None:
    re.match(r"(a|aa)+$", "a" * 80 + "b")


def lock_that_is_taken() -> None:
    lock = threading.Lock()

    def work() -> None:
        with lock:
            queue.Queue[int]().get()

    threading.Thread(target=work, name="uploader", daemon=True).start()
    time.sleep(0.1)
    with lock:
        pass


def locks_in_two_orders() -> None:
    first, second = threading.Lock(), threading.Lock()
    both = threading.Barrier(2)

    def take(one: threading.Lock, other: threading.Lock) -> None:
        with one:
            both.wait()
            with other:
                pass

    threading.Thread(target=take, args=(second, first), daemon=True).start()
    take(first, second)


def wait_for_event() -> None:
    threading.Event().wait()


def wait_for_future() -> None:
    ThreadPoolExecutor(1).submit(threading.Event().wait).result()


def lock_file() -> None:
    with (options.folder / "flock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)


def lock_record() -> None:
    with (options.folder / "fcntl").open("w") as stream:
        fcntl.lockf(stream, fcntl.LOCK_EX)


def kill_self(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def map_in_pool() -> None:
    """Waits for a pool that lost its worker."""
    multiprocessing.get_context("fork").Pool(1).map(kill_self, [1])


def run_child(*words: str, **more: bool) -> None:
    subprocess.run(words, check=False, **more)


def open_fifo() -> None:
    path = options.folder / f"fifo{rank}"
    os.mkfifo(path)
    path.read_text()


def read_pipe() -> None:
    """Reads from a pipe whose writer writes nothing."""
    reading, _writing = os.pipe()
    os.read(reading, 1)


def fill_pipe() -> None:
    _reading, writing = os.pipe()
    while True:
        os.write(writing, b"x" * 65536)


def receive() -> None:
    with socket.create_connection(peer()) as stream:
        stream.sendall(b"ready?\n")
        stream.recv(64)


def request_page() -> None:
    urllib.request.urlopen("http://{}:{}/metrics".format(*peer())).read()


def send_much() -> None:
    with socket.create_connection(peer()) as stream:
        while True:
            stream.sendall(b"x" * 65536)


def compute_a_while() -> None:
    """Computes for 60 s; another process stops, traces, freezes or kills this process meanwhile."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        torch.eye(64).matmul(torch.ones(64, 64))


def write_to_disk() -> None:
    """Writes to a file system when another process has frozen it, or after 20 s."""
    until = time.monotonic() + 20
    while not (options.folder / "frozen").exists() and time.monotonic() < until:
        torch.eye(64).matmul(torch.ones(64, 64))
    with (options.folder / "mount" / f"part{rank}").open("wb") as stream:
        stream.write(bytes(1 << 20))
        os.fsync(stream.fileno())


def look_at_disk() -> None:
    os.stat(options.folder / "silent" / "weights")


def stop_receiving() -> None:
    """Lets the kernel drop every packet that arrives on a connection to another rank."""
    attach((RETURN, 0, 0, 0))


MECHANISMS = {
    **MORE_MECHANISMS,
    "sleep": lambda: time.sleep(LONG_S),
    "poll": poll_for_file,
    "count": count_up,
    "iterate": iterate,
    "mutex": lock_mutex_twice,
    "power": lambda: 3 ** (10**10),
    "regex": match_slowly,
    "lock": lock_that_is_taken,
    "deadlock": locks_in_two_orders,
    "event": wait_for_event,
    "future": wait_for_future,
    "flock": lock_file,
    "fcntl": lock_record,
    "pool": map_in_pool,
    "child": lambda: run_child("sleep", str(LONG_S)),
    "output": lambda: run_child("tail", "-f", "/dev/null", capture_output=True),
    "paused": lambda: run_child("sh", "-c", "kill -STOP $$; true"),
    "fifo": open_fifo,
    "mute": read_pipe,
    "full": fill_pipe,
    "recv": receive,
    "http": request_page,
    "send": send_much,
    "exit": lambda: sys.exit(0),
    "segv": lambda: ctypes.string_at(0),
    "filter": stop_receiving,
    "disk": write_to_disk,
    "fuse": look_at_disk,
    "stop": compute_a_while,
    "trace": compute_a_while,
    "freeze": compute_a_while,
    "kill": compute_a_while,
}
IN_LOADER = {
    **MORE_IN_LOADER,
    "worker_asleep": lambda: time.sleep(LONG_S),
    "worker_stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "worker_busy": count_up,
    "thread_asleep": lambda: time.sleep(LONG_S),
    "thread_died": lambda: json.loads("{"),
}


# --- data ----------------------------------------------------------------------------------------


class Samples(Dataset):
    """Random samples; the fault of a loader happens when the first sample of a step is read."""

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> torch.Tensor:
        step, place = divmod(index, BATCH)
        if place == 0 and mechanism in IN_LOADER and due(mechanism, "fetch", step + 1):
            IN_LOADER[mechanism]()
        return torch.randn(WIDTH)


def in_thread(samples: Samples):
    """Returns batches that a thread reads ahead."""
    ready: queue.Queue[torch.Tensor] = queue.Queue(2)

    def read() -> None:
        for step in range(STEPS):
            ready.put(torch.stack([samples[step * BATCH + place] for place in range(BATCH)]))

    threading.Thread(target=read, name="prefetch", daemon=True).start()
    return iter(ready.get, None)


def batches():
    """Returns the batches of this rank, from the kind of source that the fault needs."""
    if mechanism in SOURCES:
        return SOURCES[mechanism](Samples(), BATCH)
    if mechanism.startswith("thread_"):
        return in_thread(Samples())
    workers = max(options.workers, mechanism.startswith("worker_"))
    return iter(DataLoader(Samples(), batch_size=BATCH, num_workers=workers))


# --- training ------------------------------------------------------------------------------------


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 1)
        self.step = 0

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.into(batch).relu()
        hidden.register_hook(lambda _: strike("backward", self.step))
        if due("unused", "backward", self.step):
            return hidden
        return self.out(hidden)


def report(step: int, loss: torch.Tensor) -> None:
    """Calls two collectives, which the fault may change, and writes a line with their results."""
    losses, count = [torch.zeros(1) for _ in range(world)], torch.tensor([float(BATCH)])
    gather = [lambda: dist.all_gather(losses, loss.detach().reshape(1))]
    total = [lambda: dist.all_reduce(count)]
    calls = gather + total
    if due("skip", "log", step):
        calls = total
    elif due("swap", "log", step):
        calls = total + gather
    elif due("empty", "log", step):
        calls = [*gather, lambda: dist.all_reduce(torch.zeros(0))]
    for call in calls:
        call()
    with (options.folder / f"log_rank{rank}.txt").open("a") as stream:
        stream.write(f"{step} {float(sum(losses)):.4f} {float(count):.0f}\n")


def train(run) -> None:
    def mark(phase: str) -> None:
        if options.phases:
            run.pulse.set(step, phase)
        strike(phase, step)

    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    source, loss = batches(), torch.zeros(())
    for step in range(1, STEPS + 1):
        if run.step(step, loss=loss.item()):
            break
        mark("fetch")
        batch = next(source)
        mark("forward")
        model.module.step = step
        optimizer.zero_grad()
        local = model.no_sync() if due("nosync", "backward", step) else contextlib.nullcontext()
        with local:
            loss = model(batch).square().mean()
            if options.phases:
                run.pulse.set(step, "backward")
            loss.backward()
        if due("twice", "backward", step):
            model(batch).square().mean().backward()
        mark("optimizer")
        if due("extra", "optimizer", step):
            dist.barrier()
        optimizer.step()
        time.sleep(PACE_S)
        mark("log")
        report(step, loss)
        if step % SAVE_EVERY == 0:
            mark("save")
            torch.save(model.state_dict(), options.folder / f"shard{rank}.pt")
            dist.barrier()


def main() -> None:
    torch.set_num_threads(1)
    strike("early", 0)
    run = join() if options.phases else None
    if options.phases:
        strike("late", 0)
    dist.init_process_group("gloo")
    if run is None:
        strike("late", 0)
        run = join()
    train(run)
    dist.destroy_process_group()


main()
