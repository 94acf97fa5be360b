"""The cause of a crash in a log, from recorded and from generated texts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.sources.crash_log import Crash, read

TRACEBACK = b"""step 40 loss 2.1
[rank1]: Traceback (most recent call last):
[rank1]:   File "/work/run/train.py", line 88, in <module>
[rank1]:     main()
[rank1]:   File "/work/run/train.py", line 41, in step
[rank1]:     loss = model(batch)
[rank1]:            ^^^^^^^^^^^^
[rank1]:   File "/env/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1773, in _call
[rank1]:     return self._call_impl(*args, **kwargs)
[rank1]: ValueError: the batch is broken
"""
FAULT = b"""Fatal Python error: Segmentation fault

Thread 0x00007f51c2ffd6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Current thread 0x00007f51dd5bb740 (most recent call first):
  File "/env/lib/python3.11/site-packages/torch/nn/functional.py", line 125 in linear
  File "/work/nsa/model.py", line 88 in forward
  File "/work/trainers/loop.py", line 70 in run_steps
  ...

Extension modules: numpy.core._multiarray_umath, torch._C (total: 2)
"""
ABORTED = b"""terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0 Rank 0] Process group watchdog thread terminated with exception: \
NCCL error: remote process exited or there was a network error, NCCL version 2.20.5
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting.
Fatal Python error: Aborted

Current thread 0x00007f51dd5bb740 (most recent call first):
  <no Python frame>
"""


def test_the_innermost_frame_outside_the_libraries_is_named():
    assert read(TRACEBACK) == Crash("ValueError: the batch is broken", "train.py:41")


def test_in_a_shared_log_only_the_lines_of_the_rank_count():
    other = TRACEBACK.replace(b"[rank1]", b"[rank0]").replace(b"ValueError", b"KeyError")
    assert read(TRACEBACK + other, 1).error == "ValueError: the batch is broken"
    assert read(TRACEBACK + other, 0).error == "KeyError: the batch is broken"
    assert read(TRACEBACK, 7) == Crash()


def test_an_exception_without_a_message_counts():
    frame = b'  File "a.py", line 3, in f\n    g()\n'
    log = b"Traceback (most recent call last):\n" + frame + b"AssertionError\n"
    assert read(log) == Crash("AssertionError", "a.py:3")


def test_the_last_fatal_exception_of_a_chain_counts():
    second = b'Traceback (most recent call last):\n  File "b.py", line 9, in h\n    x\n'
    chain = b"\nDuring handling of the above exception, another exception occurred:\n\n"
    log = TRACEBACK + chain + second + b"RuntimeError: no batch\n"
    assert read(log) == Crash("RuntimeError: no batch", "b.py:9")
    for head in (b"Exception ignored in: <f>\n", b"Exception in thread Thread-1 (run):\n"):
        noise = head + second + b"BrokenPipeError: [Errno 32] Broken pipe\n"
        assert read(TRACEBACK + noise).error == "ValueError: the batch is broken"
        assert read(noise).error == "BrokenPipeError: [Errno 32] Broken pipe"
    agent = second + b"torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    assert read(TRACEBACK + agent).error == "ValueError: the batch is broken"


def test_an_option_that_argparse_rejects_is_the_error():
    usage = b"usage: run.py [-h] [--nnodes NNODES]\n              training_script ...\n"
    log = usage + b"run.py: error: unrecognized arguments: --shutdown-timeout\n"
    assert read(log).error == "run.py: error: unrecognized arguments: --shutdown-timeout"


@pytest.mark.parametrize("before", ["", "usage: run.py [-h]\n    x ...\nstep 1 loss 3\n"])
def test_the_error_of_a_tool_that_a_program_starts_is_not_its_own(before):
    log = f"{before}rsync: error: some files could not be transferred\nstep 2 loss 3\n"
    assert read(log.encode()).error == ""


def test_faulthandler_names_the_thread_that_crashed():
    assert read(TRACEBACK + FAULT).crashed_in == "forward (model.py:88)"
    library = FAULT.replace(b"/work/nsa", b"/env/lib/python3.11/site-packages/x")
    library = library.replace(b"/work/trainers", b"/env/lib/python3.11/site-packages/x")
    assert read(library).crashed_in == "linear (functional.py:125)"


def test_an_uncaught_cxx_exception_is_the_error_of_an_abort():
    crash = read(ABORTED)
    assert crash.error.startswith("c10::DistBackendError: [PG ID 0 PG GUID 0 Rank 0]")
    assert crash.crashed_in == ""


PIECES = [
    "Traceback (most recent call last):", '  File "a.py", line 3, in f', "    x()", "KeyError",
    '  File "\x1b]0;x\x07", line 999999999, in \x1b[2J', '  File "', "ValueError: \x1b[31m\u202e",
    "[rank1]: ", "[rank0]: RuntimeError: x", "Exception ignored in", "Fatal Python error: \x00\x9b",
    "Current thread 0x1 (most recent call first):", '  File "/m.py", line 8 in f\x1b[0m',
    "terminate called after throwing an instance of 'X'", "  what():  \x07", "\r", "Error: " * 9000,
]  # fmt: skip
LINES = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=40)), max_size=30)


@given(LINES.map(lambda lines: "\n".join(lines).encode("utf-8", "replace")) | st.binary())
def test_any_log_gives_short_clean_lines(log):
    for rank in (None, 0, 1):
        crash = read(log, rank)
        for text in (crash.error, crash.raised_at, crash.crashed_in):
            assert len(text) <= 400
            assert not any(ord(c) < 32 or 0x7F <= ord(c) < 0xA0 or c == "\u202e" for c in text)
