"""Classifies stacks by the object that the main thread waits for.

No file is read here. A stack shows Python frames only. For a wait inside a built-in function, such
as `time.sleep` or `recv`, the stack shows only the caller. If the program itself is the caller, the
class is usually "own".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from console.sources.stacks import BY_PY_SPY, Frame, Stack, Thread

Kind = Literal[
    "peers", "queue", "lock", "thread", "process", "socket", "pipe", "file", "loader", "store",
    "device", "sleep", "native", "own", "none",
]  # fmt: skip
Wait = tuple[Kind, str]
_COLLECTIVE: Wait = "peers", "waits for its peers in {}"
_BACKWARD: Wait = "peers", "runs backward, or waits for its peers in it"
_JOINING: Wait = "store", "waits for its peers to join"
_LOADER: Wait = "loader", "waits for its data loader"
_DEVICE: Wait = "device", "waits for its GPU"
_QUEUE: Wait = "queue", "waits for a queue"
_LOCK: Wait = "lock", "waits for a lock"
_THREAD: Wait = "thread", "waits for another thread"
_PROCESS: Wait = "process", "waits for a child process"
_PIPE: Wait = "pipe", "waits for a pipe or socket"
_SOCKET: Wait = "socket", "waits for a socket"
_FILE: Wait = "file", "waits for a file lock"
WAITS: Sequence[tuple[str, str, Wait]] = (
    ("torch/autograd/graph.py", "_engine_run_backward", _BACKWARD),
    ("torch/distributed/distributed_c10d.py",
     "_store_based_barrier|init_process_group|_new_process_group_helper", _JOINING),
    ("torch/distributed/rendezvous.py", "", _JOINING),
    ("torch/distributed/elastic/utils/store.py", "", _JOINING),
    ("torch/distributed/distributed_c10d.py", "", _COLLECTIVE),
    ("torch/distributed/_functional_collectives.py", "", _COLLECTIVE),
    ("torch/distributed/utils.py", "_verify_param_shape_across_processes|_sync_.*", _COLLECTIVE),
    ("torch/nn/parallel/distributed.py", ".*_broadcast_coalesced", _COLLECTIVE),
    ("torch/utils/data/dataloader.py", "_try_get_data|_next_data|_shutdown_workers", _LOADER),
    ("trainers/loader.py", "_wait|within_limit", _LOADER),
    ("torch/cuda/__init__.py", "synchronize", _DEVICE),
    ("torch/cuda/streams.py", "synchronize", _DEVICE),
    ("torch/utils/file_baton.py", "wait", _FILE),
    ("filelock/_api.py", "acquire", _FILE),
    ("tenacity/nap.py", "sleep", ("sleep", "sleeps before it tries again")),
    ("queue.py", "get|put|join", _QUEUE),
    ("multiprocessing/queues.py", "get|put|join", _QUEUE),
    ("threading.py", "_wait_for_tstate_lock|join|_shutdown", _THREAD),
    ("threading.py", "wait|wait_for|acquire", _LOCK),
    ("multiprocessing/synchronize.py", "", _LOCK),
    ("logging/__init__.py", "acquire", _LOCK),
    ("importlib._bootstrap>", "acquire", _LOCK),
    ("concurrent/futures/_base.py", "result|exception|wait|as_completed", _THREAD),
    ("subprocess.py", "wait|_wait|_try_wait|communicate|_communicate|run|call|check_output",
     _PROCESS),
    ("multiprocessing/popen_fork.py", "wait|poll", _PROCESS),
    ("multiprocessing/pool.py", "get|wait|next|join", _PROCESS),
    ("multiprocessing/connection.py", "", _PIPE),
    ("selectors.py", "select", _PIPE),
    ("socket.py", "", _SOCKET),
    ("ssl.py", "", _SOCKET),
    ("http/client.py", "", _SOCKET),
)  # fmt: skip
"""Each row has the end of a file name, a pattern of functions ("" matches all), and the wait with
its class and its words. The first row that matches a frame decides."""
_WAITS = tuple((file, re.compile(functions or ".*"), wait) for file, functions, wait in WAITS)
DECISIVE = frozenset[Kind](("peers", "store", "loader", "device"))
"""The innermost wait of one of these kinds decides. If there is no such wait, the outermost wait
decides: for example, a queue waits for its lock, and the kind is "queue"."""
_MACHINERY = re.compile(r"^<|/(?:contextlib|functools)\.py$")
_HELPERS = re.compile(r"/trainers/contract/")
_DATA = re.compile(
    r"(?<![A-Za-z])(?i:data|batch|load|pre_?fetch|fetch|read|produce|collate)|__getitems?__"
    r"|Data|Batch|Load|Fetch|Read(?!y)|Produce|Collate"
)
"""Matches the name of a thread that reads the program's data, or its frames in the program."""
_TORCH = re.compile(r"-packages/torch/")
MAX_THREADS = 99
"""A dump with at least this many threads may lack threads: faulthandler shows at most 100, and one
of these writes the dump."""


@dataclass(frozen=True, slots=True)
class Where:
    """The class of a stack, the frame that decided the class, and a description.

    `own` is the innermost frame of the program, or else of the contract. It is None if all frames
    are in libraries.
    """

    kind: Kind
    frame: Frame | None
    own: Frame | None
    text: str


def where(stack: Stack) -> Where:
    """Returns the class of a stack: "none" without frames.

    If the dump has only one thread, and py-spy did not make the dump, the class is "native".
    """
    frames = _deciding(stack)
    own = _own(frames)
    if not frames:
        return Where("none", None, None, "has no stack")
    if len(stack.threads) == 1 and not stack.path.endswith(BY_PY_SPY):
        # A rank that gets the GIL also dumps the contract's threads.
        place = (own or frames[0]).short
        text = f"waits for the GIL, or holds it in native code, in {place}"
        return Where("native", frames[0], own, text)
    if (found := _wait(frames)) is not None:
        frame, (kind, text) = found
        return Where(kind, frame, own, text.format(frame.function.lstrip("_")))
    top = own or next((each for each in frames if not each.file.startswith("<")), frames[0])
    return Where("own", top, own, f"runs in {top.short}")


def _deciding(stack: Stack) -> Sequence[Frame]:
    """Returns the frames of the main thread, or of the hook for which its backward pass waits.

    On a GPU, hooks run in threads of autograd. Native code starts these threads, so their outermost
    frame is not in `threading`.
    """
    main, *others = [each.frames for each in stack.threads] or [()]
    found = _wait(main)
    if found is not None and found[1] is _BACKWARD:
        for frames in others:
            if frames and frames[-1].function != "_bootstrap" and _own(frames):
                return frames
    return main


def _wait(frames: Sequence[Frame]) -> tuple[Frame, Wait] | None:
    """Returns two values, the frame that decides and its wait; None if no frame shows a wait."""
    found = None
    for at, frame in enumerate(frames):
        wait = _wait_of(frame)
        if wait is _BACKWARD and not all(map(_is_of_backward, frames[:at])):
            break  # backward runs a hook or a compiler
        if wait is not None and (found is None or found[1][0] not in DECISIVE):
            found = frame, wait
        if not (frame.is_of_library or _HELPERS.search(frame.file)):
            break
    return found


def _is_of_backward(frame: Frame) -> bool:
    return is_of_torch(frame) or bool(_MACHINERY.search(frame.file))


def _wait_of(frame: Frame) -> Wait | None:
    for file, functions, wait in _WAITS:
        # A row without a folder is for the standard library. A program may have such a file too.
        is_file = frame.file == file or frame.file.endswith((f"/{file}", f" {file}"))
        if is_file and ("/" in file or frame.is_of_library) and functions.fullmatch(frame.function):
            return wait
    return None


def _own(frames: Sequence[Frame]) -> Frame | None:
    """Returns the innermost frame of the program, or else of the contract, or None."""
    ours = [each for each in frames if not each.is_of_library]
    helper = ours[0] if ours else None
    return next((each for each in ours if not _HELPERS.search(each.file)), helper)


def is_of_torch(frame: Frame) -> bool:
    return bool(_TORCH.search(frame.file))


def loader_thread(rank: int, stacks: Mapping[int, Stack]) -> tuple[str, bool]:
    """Returns two values: what the rank's data thread does, and whether two signs identify it.

    A data thread reads the data of the program. The first sign is that the thread's name or one of
    its frames in the program matches `_DATA`. The second sign is that a thread of the same name on
    another rank has filled its queue. The text is "" if no thread has such a sign. If a queue of
    this rank is full, only missing threads count.
    """
    others = [each for number, stack in stacks.items() if number != rank
              for each in stack.threads[1:]]  # fmt: skip
    full = {_name(each) for each in others if _puts(each)}
    own = [each for each in stacks[rank].threads[1:] if not each.name.startswith("nsa-")]
    for each in () if any(map(_puts, own)) else own:
        is_named, is_fed = _reads_data(each), _name(each) in full
        if each.frames and (is_named or is_fed):
            place = (_own(each.frames) or each.frames[0]).short
            return f"its thread {each.name} is in {place}", is_named and is_fed
    for name in missing_threads(stacks).get(rank, ()):
        same = [each for each in others if _name(each) == name]
        if any(map(_reads_data, same)) or name in full:
            text = f"it lacks the thread {name} of most other ranks"
            return text, any(map(_reads_data, same)) and name in full
    return "", False


def _name(thread: Thread) -> str:
    return re.sub(r"\d+", "N", thread.name)


def _puts(thread: Thread) -> bool:
    return any(each.function == "put" and each.is_of_library for each in thread.frames[:6])


def _reads_data(thread: Thread) -> bool:
    words = [thread.name.replace("Thread", "")]
    words += [
        f"{frame.place} {frame.function}" for frame in thread.frames if not frame.is_of_library
    ]
    return any(_DATA.search(each) for each in words)


def missing_threads(stacks: Mapping[int, Stack]) -> dict[int, tuple[str, ...]]:
    """Returns the names of the threads that a rank lacks and most other ranks have, by rank.

    Numbers in names are replaced by "N". Ranks whose dump may lack threads, or has only one thread,
    are left out.
    """
    names = {
        rank: {_name(t) for t in stack.threads[1:] if t.name[:2] != "0x"}
        for rank, stack in sorted(stacks.items()) if 1 < len(stack.threads) < MAX_THREADS
    }  # fmt: skip
    counts = Counter(name for held in names.values() for name in held)
    most = (len(names) - 1) / 2
    missing = {
        rank: tuple(sorted(name for name in counts if name not in held and counts[name] > most))
        for rank, held in names.items()
    }
    return {rank: lacking for rank, lacking in missing.items() if lacking}
