"""Records of a rank: numbers, values, counts, and records that are lost."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from tests.launches import wait_for
from tests.trainers.contract.programs import beats, environment
from trainers.contract import pulse, rundir
from trainers.contract.member import Member
from trainers.contract.recorder import Recorder

LOOP = """
import sys
from trainers.contract.member import join
class Tensor:
    def __float__(self): return 0.5
class Odd:
    pass
run = join()
for step in range(1, 4):
    run.step(step, loss=Tensor(), odd=Odd())
if "raise" in sys.argv:
    raise SystemError("in the last step")
if "end" in sys.argv:
    run.end_step(loss=0.25)
    run.end_step(loss=9.0)
"""


@pytest.mark.parametrize(
    ("words", "steps", "newest"),
    [((), [1, 2, 3], None), (("raise",), [1, 2], 0.5), (("end",), [1, 2, 3], 0.25)],
)
def test_the_last_step_counts_unless_it_failed_and_values_that_json_lacks_are_converted(
    tmp_path, words, steps, newest
):
    subprocess.run([sys.executable, "-c", LOOP, *words], env=environment(tmp_path), timeout=150)
    records = [b for b in beats(tmp_path) if b["msg"] == "progress"]
    assert [b["step"] for b in records] == steps
    assert (records[0]["loss"], records[-1].get("loss")) == (0.5, newest)
    assert "Odd object" in records[0]["odd"]
    assert beats(tmp_path)[-1]["msg"] == "exit"


def test_records_are_dropped_and_counted_when_nobody_writes(tmp_path, monkeypatch):
    """The queue of a recorder is bounded while its disk does not answer."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    recorder = Recorder()
    recorder.call(lambda: os.close(os.open(fifo, os.O_WRONLY)))  # waits for a reader
    wait_for(lambda: recorder.waiting == 0)  # the call has left the queue
    kept = sum(recorder.put(tmp_path / "f", b"x\n") for _ in range(12_000))
    assert kept == 10_000
    assert recorder.dropped == 2_000
    recorder.call(lambda: None, keep=False)
    assert (recorder.dropped, recorder.waiting) == (2_001, 10_000)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    assert recorder.close(150)
    os.close(reader)
    assert (tmp_path / "f").read_bytes().count(b"\n") == 10_000


BLOCKED = """
import sys
from pathlib import Path
from trainers.contract.member import Member
member = Member(Path(sys.argv[1]), {"RANK": "0"})
for line in ("long " * 100_000, *["short"] * 20_000):
    member.log(line)
    member.record("progress", 1)
    while member.recorder.waiting > 9_000:
        pass
sys.exit(0 if member.recorder.close(60) and member.recorder.dropped > 1 else 1)
"""


def test_a_stdout_that_nobody_reads_blocks_no_record(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", BLOCKED, str(tmp_path)], stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env=environment(tmp_path),
    )  # fmt: skip
    try:
        assert process.wait(150) == 0
    finally:
        process.kill()
    assert process.stdout is not None
    with process.stdout:
        lines = process.stdout.read().splitlines()
    assert len(beats(tmp_path)) == 20_001
    assert len(lines[0]) == 4095
    assert lines[1], "a line that is cut still ends with a newline"
    assert lines[1:4] == [b"", b"short", b"short"] or lines[1:3] == [b"short", b"short"]


def test_a_call_that_raises_is_counted_and_the_records_after_it_are_written(tmp_path, capfd):
    recorder = Recorder()
    for _ in range(3):
        recorder.call(lambda: {}["missing"])
    recorder.put(tmp_path / "f", b"after\n")
    assert recorder.close(150)
    assert (tmp_path / "f").read_bytes() == b"after\n"
    assert (recorder.dropped, recorder.trouble) == (3, "KeyError: 'missing'")
    assert capfd.readouterr().err.count("KeyError: 'missing'") == 1


def test_the_first_record_of_a_process_is_whole_after_a_torn_last_line(tmp_path):
    path = tmp_path / "f.jsonl"
    for before, expected in ((b'{"n":1}\n', b""), (b'{"n":1}\n{"n":', b"\n")):
        path.write_bytes(before)
        recorder = Recorder()
        recorder.put(path, b"one\n")
        recorder.put(path, b"two\n")
        assert recorder.close(150)
        assert path.read_bytes() == before + expected + b"one\ntwo\n"


def test_records_go_on_in_the_file_that_is_there_when_somebody_replaced_it(tmp_path, capfd):
    recorder, path, aside = Recorder(), tmp_path / "f.jsonl", tmp_path / "aside"
    recorder.check_every_s = 0.0

    def write(word: bytes) -> None:
        done = threading.Event()
        recorder.put(path, b'"%s"\n' % word)
        recorder.call(done.set)
        assert done.wait(150)

    write(b"before")
    path.unlink()
    write(b"after a removal")
    assert path.read_text() == '"after a removal"\n'
    rundir.write_atomic(path, '"edited, no newline at the end"')
    write(b"after a replacement")
    assert path.read_text().split("\n")[1:] == ['"after a replacement"', ""]
    path.rename(aside)
    path.symlink_to("/etc/passwd")
    write(b"what was moved is still written to")
    assert "still written" in aside.read_text()
    aside.unlink()
    write(b"lost")
    assert recorder.dropped == 1
    path.unlink()
    write(b"last")
    assert recorder.close(150)
    assert path.read_text() == '"last"\n'
    assert capfd.readouterr().err.count("f.jsonl was removed or replaced") == 3


COUNTED = """
import sys
from trainers.contract.member import join
run = join()
losses = [1.0, float("nan"), 2.0, float("inf"), eval(sys.argv[1]), 1.0]
for step, loss in enumerate([0.0, *losses], start=1):
    run.step(step, **({} if loss is None else {"loss": loss}))
"""


@pytest.mark.parametrize(
    ("loss", "counts"),
    [("3.0", [0, 1, 1, 2, 2, 2, 2]), ("None", [0, 1, 1, 2, None, None, None])],
    ids=["each step", "a step without"],
)
def test_records_are_numbered_and_steps_that_are_not_finite_counted(tmp_path, loss, counts):
    """`run.step(step, loss=…)` gets the loss of the previous step; the last step has no loss."""
    (live := tmp_path / "live").mkdir()
    words = [sys.executable, "-c", COUNTED, loss]
    subprocess.run(words, env=environment(tmp_path, live), timeout=150, check=True)
    records = beats(tmp_path)
    assert [record["n"] for record in records] == list(range(1, len(records) + 1))
    progress = [r.get("nonfinite_loss_steps") for r in records if r["msg"] == "progress"]
    assert progress == counts
    assert records[-1]["msg"] == "exit"
    assert records[-1].get("nonfinite_loss_steps") == counts[-1]
    left = pulse.read(rundir.pulse(live, 0))
    assert left is not None
    assert (left.records, left.nonfinite_steps) == (len(records), counts[-1] or -1)


def test_a_figure_with_the_name_of_a_field_or_an_odd_value_ends_no_rank(tmp_path):
    program = """
from trainers.contract.member import join
fields = (
    "v", "n", "run", "attempt", "ts", "mono", "host", "pid", "rank", "local_rank", "world", "step",
    "msg", "steps_dt_s", "nonfinite_loss_steps", "cut",
)
run = join()
for step in (1, 2, 3):
    run.step(step, **dict.fromkeys(fields, "mine"), loss=10**400, mine=7)
"""
    subprocess.run(
        [sys.executable, "-c", program], env=environment(tmp_path), timeout=150, check=True
    )
    first = next(record for record in beats(tmp_path) if record["msg"] == "progress")
    assert (first["step"], first["mine"], first["nonfinite_loss_steps"]) == (1, 7, 1)
    assert isinstance(first["steps_dt_s"][0], float)
    assert "mine" not in first.values()


def test_a_dropped_record_leaves_its_number_free(tmp_path):
    member = Member(tmp_path, {"RANK": "0"})
    member.record("boot", 0)
    member.recorder.put, put = lambda *_: False, member.recorder.put
    member.record("progress", 1)
    member.recorder.put = put
    member.record("progress", 2)
    assert member.recorder.close(150)
    assert [record["n"] for record in beats(tmp_path)] == [1, 3]
    assert member.pulse.records == 3
