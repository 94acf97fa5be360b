"""The class of a stack: its own code, or the kind of object that the rank waits for.

The recorded stacks are dumps of `blocked.py`, a DDP program of two ranks, of which one blocks. The
drills (`make drills`) classify stacks of the installed torch.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from console.diagnose.stack_classes import WAITS, missing_threads, where
from console.sources.stacks import Frame, Stack, Thread, parse
from trainers import build, loader
from trainers.loader import Loader
from trainers.parallel import Single
from trainers.sequences import Synthetic
from trainers.settings import resolve

CPU = torch.device("cpu")

GIL = "waits for the GIL, or holds it in native code"
STACKS = Path(__file__).with_name("stacks")
BLOCKED = {
    "sleep": ("own", "sleep", "runs in blocked.py:39 sleep"),
    "skip": ("own", "skip", "runs in blocked.py:44 skip"),
    "hook": ("own", "backward_hook", "runs in blocked.py:48 backward_hook"),
    "loader": ("loader", "loader", "waits for its data loader"),
    "get_from_queue": ("queue", "get_from_queue", "waits for a queue"),
    "put_to_queue": ("queue", "put_to_queue", "waits for a queue"),
    "lock": ("own", "lock", "runs in blocked.py:75 lock"),
    "event": ("lock", "event", "waits for a lock"),
    "thread": ("thread", "thread", "waits for another thread"),
    "child": ("process", "child", "waits for a child process"),
    "child_output": ("process", "child_output", "waits for a child process"),
    "process": ("process", "process", "waits for a child process"),
    "file_lock": ("own", "file_lock", "runs in blocked.py:106 file_lock"),
    "pipe": ("pipe", "pipe", "waits for a pipe or socket"),
    "receive": ("own", "receive", "runs in blocked.py:114 receive"),
    "download": ("socket", "download", "waits for a socket"),
    "busy": ("own", "busy", "runs in blocked.py:123 busy"),
    "future": ("thread", "future", "waits for another thread"),
    "native": ("native", "native", f"{GIL}, in blocked.py:133 native"),
}
"""For each case: the kind, the function of the own frame and the text of the stack of rank 1."""


def recorded(name: str, rank: int) -> Stack:
    text = (STACKS / f"{name}.rank{rank}.txt").read_text()
    return Stack(rank, 1.0, name, parse(text))


@pytest.mark.parametrize("name", BLOCKED)
def test_a_blocked_rank_is_told_from_its_peer_that_waits(name):
    kind, function, text = BLOCKED[name]
    found = where(recorded(name, 1))
    assert (found.kind, found.text) == (kind, text)
    assert found.own is not None
    assert found.own.function == function
    peer = where(recorded(name, 0))
    assert (peer.kind, peer.text) == ("peers", "runs backward, or waits for its peers in it")


@pytest.mark.parametrize("name", ["all_reduce", "barrier"])
def test_a_collective_is_named(name):
    found = where(recorded(name, 0))
    assert (found.kind, found.text) == ("peers", f"waits for its peers in {name}")
    assert found.frame is not None
    assert found.frame.place.startswith("distributed_c10d.py")
    assert found.own is not None
    assert found.own.short.endswith(name)


def test_a_rank_that_waits_for_one_that_has_not_joined_waits_for_the_store():
    assert where(recorded("startup", 0)).kind == "store"
    assert where(recorded("startup", 1)).kind == "own"


def dump(*frames: str, also: tuple[Thread, ...] = (), rank: int = 0) -> Stack:
    """Returns a stack with these frames ("file function", innermost first) and further threads."""
    helper = Thread("nsa-watcher", (Frame("/usr/lib/python3.11/threading.py", 1, "_bootstrap"),))
    return Stack(rank, 1.0, "", (Thread("main", made(*frames)), helper, *also))


def made(*frames: str) -> tuple[Frame, ...]:
    return tuple(Frame(*_parts(each)) for each in frames)


def _parts(frame: str) -> tuple[str, int, str]:
    file, function = frame.rsplit(" ", 1)
    return file, 7, function


STD, TORCH = "/usr/lib/python3.11/", "/venv/lib/python3.11/site-packages/torch/"
BACKWARD = f"{TORCH}autograd/graph.py _engine_run_backward"


@pytest.mark.parametrize(
    ("frames", "kind"),
    [
        ((f"{STD}threading.py wait", f"{STD}queue.py get", "/src/trainers/loader.py _wait"),
         "loader"),
        (("/src/queue.py get", "/src/train.py step"), "own"),
        ((f"{TORCH}nn/modules/linear.py forward", "/src/train.py step"), "own"),
        (("/src/data.py __getitem__", f"{TORCH}utils/data/dataloader.py _next_data"), "own"),
        ((f"{TORCH}cuda/__init__.py synchronize", "/src/train.py step"), "device"),
        ((f"{STD}ssl.py read", f"{STD}socket.py readinto", "/src/a.py f"), "socket"),
        (("<frozen importlib._bootstrap> acquire", "/src/train.py <module>"), "lock"),
        ((f"{TORCH}_tensor.py __hash__", BACKWARD, "/src/train.py step"), "peers"),
        ((f"{STD}threading.py wait", f"{STD}concurrent/futures/_base.py result",
          f"{TORCH}_inductor/async_compile.py wait", BACKWARD, "/src/train.py step"), "thread"),
        (("/venv/lib/python3.11/site-packages/triton/compiler.py compile", BACKWARD), "own"),
        ((f"{TORCH}_tensor.py add",), "own"),
        (("<string> f",), "own"),
        ((), "none"),
    ],
)  # fmt: skip
def test_the_call_of_the_innermost_own_code_decides(frames, kind):
    assert where(dump(*frames)).kind == kind


@pytest.mark.parametrize("work", ["open", "draw", "fetch"])
def test_a_training_that_waits_for_its_data_waits_for_its_loader(monkeypatch, work):
    """The frames are those of a thread that waits until the data come."""
    reads, come = threading.Event(), threading.Event()
    read, chosen = Synthetic.read, resolve(None, {}, {"eval.every": 1, "eval.batches": 1}).settings

    def late(source: Synthetic, *given: int):
        reads.set()
        assert come.wait(60)
        return read(source, *given)

    monkeypatch.setattr(Synthetic, "read", late)
    if work == "open":
        monkeypatch.setattr(loader, "_source", lambda *_: late(Synthetic(chosen.data, 0), 1, 0, 1))
    waits = threading.Thread(target=WAITING[work], args=(chosen,))
    waits.start()
    assert reads.wait(60)
    kind, began = "", time.monotonic()
    while kind != "loader" and time.monotonic() - began < 10:
        time.sleep(0.01)
        frames = traceback.extract_stack(sys._current_frames()[waits.ident or 0])
        kind = where(dump(*(f"{each.filename} {each.name}" for each in frames[::-1]))).kind
    come.set()
    waits.join()
    assert kind == "loader"


WAITING = {
    "open": loader.open_source,
    "draw": lambda chosen: build.draw_held_out(chosen, Single(CPU), pytest.fail),
    "fetch": lambda chosen: Loader(Synthetic(chosen.data, 0), chosen, 0, 1, CPU).fetch(),
}


def test_a_hook_in_a_thread_of_autograd_is_why_backward_waits():
    hook = Thread("0x7f01", made("/src/loss.py backward_hook"))
    found = where(dump(BACKWARD, "/src/train.py step", also=(hook,)))
    assert (found.kind, found.text) == ("own", "runs in loss.py:7 backward_hook")
    held = Thread("0x7f01", made(f"{STD}queue.py get", "/src/loss.py backward_hook"))
    assert where(dump(BACKWARD, "/src/train.py step", also=(held,))).kind == "queue"
    plain = Thread("loader", made("/src/loss.py read", f"{STD}threading.py _bootstrap"))
    assert where(dump(BACKWARD, "/src/train.py step", also=(plain,))).kind == "peers"


def test_a_dump_of_the_main_thread_alone_comes_from_a_signal_handler():
    text = "Stack (most recent call first):\n" + f'  File "{STD}queue.py", line 171 in get\n'
    found = where(Stack(0, 1.0, "", parse(text + '  File "/src/a.py", line 7 in feed\n')))
    assert found.kind == "native"
    assert found.text == f"{GIL}, in a.py:7 feed"


def test_frames_of_the_contract_are_no_own_code_where_there_is_other_code():
    helper = "/src/trainers/contract/member.py step"
    own = where(dump(helper, "/src/train.py loop")).own
    assert own is not None
    assert own.function == "loop"
    assert where(dump(helper)).own == made(helper)[0]


def test_a_thread_that_only_one_rank_lacks_is_missing():
    def threads(rank: int, *names: str) -> Stack:
        return dump(rank=rank, also=tuple(Thread(name, ()) for name in names))

    stacks = {
        0: threads(0, "Thread-3 (feed)", "0x7f", "pool-1_0"), 1: threads(1, "pool-2_1"),
        2: threads(2, "Thread-14 (feed)", "pool-1_1", "odd"),
        3: Stack(3, 1.0, "", (Thread("main", ()),)),
    }  # fmt: skip
    assert missing_threads(stacks) == {1: ("Thread-N (feed)",)}
    assert missing_threads({}) == {}
    assert missing_threads({rank: recorded("future", rank) for rank in range(2)}) == {
        0: ("ThreadPoolExecutor-N_N",)
    }


FRAMES = [f'  File "{file}", line 7 in {function or "f"}' for file, function, _ in WAITS] + [
    '  File "/src/train.py", line 1 in step', '  File "", line 0 in ', "Thread a:", "Thread 0x1:",
    "Stack (most recent call first):", "Current thread 0x1:", "=== end of dump 1",
]  # fmt: skip
TEXTS = st.one_of(
    st.text(max_size=40), st.lists(st.sampled_from(FRAMES), max_size=12).map("\n".join)
)


@settings(max_examples=60)
@given(st.dictionaries(st.integers(0, 9), TEXTS, max_size=4))
@example({0: "Stack (most recent call first):\n" + FRAMES[0].replace("7", "9" * 30) + "\n"})
def test_any_text_has_a_class_and_threads(texts):
    stacks = {rank: Stack(rank, 1.0, "", parse(text)) for rank, text in texts.items()}
    for stack in stacks.values():
        found = where(stack)
        assert (found.kind == "none") == (found.frame is None)
        assert found.text
    assert missing_threads(stacks).keys() <= stacks.keys()
