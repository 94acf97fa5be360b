"""Text from a run directory is made safe for a terminal, and is parsed without an error."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.model import LogLine
from console.sources import launches, record_files, stacks
from console.sources.logs import LogSource
from console.sources.sanitize import MAX_CHARS, clean
from tests.console.sources import directory
from trainers.contract import environ, rundir
from trainers.contract.errors import NotFoundError, RefusedError, UsageError

DUMP = """Stack (most recent call first):
  File "/x/distributed_c10d.py", line 3252 in all_reduce
  File "/x/loop.py", line 40 in train
=== rank 1 pid 5 unix 1.0
Thread prefetch (most recent call first):
  File "/x/data.py", line 9 in fetch
=== end of dump 1 of rank 1
"""


@given(st.text(max_size=400))
def test_no_control_character_remains(text):
    shown = clean(text)
    assert not any(ord(c) < 32 or 0x7F <= ord(c) < 0xA0 for c in shown)
    assert not any(c in shown for c in "\u202e\u2066\u200f\ufeff")
    shown.encode("utf-8")


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]52;c;aGk=\x07after", "after"),
        ("\x1b]0;title\x1b\\after", "after"),
        ("10 %\r50 %\r100 %\r\n", "100 %"),
        (
            "".join(f"\r{i} %{'#' * 90}" for i in range(200)) + "\rterminate called",
            "terminate called",
        ),
        ("[bold]not markup[/bold]", "[bold]not markup[/bold]"),
        ("a\tb", "a    b"),
        ("\x9b31mC1", "�31mC1"),
        ("abc\u202edef", "abcdef"),
        ("x" * 10_000, "x" * (MAX_CHARS - 1) + "…"),
    ],
)
def test_known_tricks_become_plain_text(raw, shown):
    assert clean(raw) == shown


def test_the_last_words_after_a_long_progress_bar_are_read_whole(tmp_path):
    bar = "".join(f"\r{i} %{'#' * 90}" for i in range(2000))
    log = rundir.rank_log(tmp_path, 1, 0)
    log.parent.mkdir(parents=True)
    log.write_text(f"{bar} terminate called\n{'y' * 5000} the end\n")
    for skips in (False, True):
        bar, long = (line.text for line in LogSource(tmp_path, skips=skips).poll())
        assert bar == f"1999 %{'#' * 90} terminate called"
        assert long.endswith("…" if skips else " the end")


def test_a_dump_names_its_threads_and_frames():
    threads = stacks.parse(DUMP)
    assert [thread.name for thread in threads] == ["main", "prefetch"]
    assert threads[0].frames[0].short == "distributed_c10d.py:3252 all_reduce"


@given(st.text(max_size=600))
def test_any_text_is_parsed_as_a_dump(text):
    stacks.parse(text)


def test_the_newest_dump_of_each_rank_is_shown(tmp_path):
    for ms, function in ((1000, "old"), (2000, "new")):
        (tmp_path / f"stackdump_rank0_{ms}.txt").write_text(DUMP.replace("all_reduce", function))
    (tmp_path / "stackdump_rank1_1500.txt").write_text(DUMP)
    (tmp_path / "stackdump_rank2_1.txt").symlink_to("/etc/passwd")
    found = stacks.latest(tmp_path, range(3))
    assert found[0].threads[0].frames[0].function == "new"
    assert (found[1].ts, set(found)) == (1.5, {0, 1})


def test_logs_of_all_ranks_come_merged_and_only_once(tmp_path):
    logs = rundir.logs(tmp_path, 1)
    logs.mkdir(parents=True)
    (logs / "rank0.log").write_bytes(b"hello \x1b[2J\nhalf")
    (logs / "torchrun.log").write_text("starting\n")
    directory.event(tmp_path, "alert", level="crit", text="rank 1 is stopped")
    source = LogSource(tmp_path)
    lines = [(line.source, line.text) for line in source.poll()]
    assert ("r0", "hello ") in lines
    assert ("torchrun", "starting") in lines
    assert any(s == "sup" and "CRIT rank 1 is stopped" in t for s, t in lines)
    assert source.poll() == []
    with (logs / "rank0.log").open("ab") as stream:
        stream.write(b" line\n")
    assert [line.text for line in source.poll()] == ["half line"]
    with (logs / "rank0.log").open("ab") as stream:
        stream.write(b"last words")
    assert source.poll() == []
    assert [line.text for line in source.poll(over=True)] == ["last words"]
    assert source.poll(over=True) == []


def test_a_sentence_of_three_events_is_shown_once(tmp_path):
    sentence = "rank 1 has been stalled in save since 16:30:29"
    for kind, text in (("verdict", sentence), ("alert", sentence),
                       ("state", f"running → stalled: {sentence}")):  # fmt: skip
        directory.event(tmp_path, kind, level="crit", text=text)
    first, last = (line.text for line in LogSource(tmp_path).poll())
    assert first.endswith(f"CRIT {sentence}")
    assert last.endswith("CRIT running → stalled")


def test_lines_without_a_known_common_order_are_not_shown_as_if_in_order(tmp_path):
    logs = rundir.logs(tmp_path, 1)
    logs.mkdir(parents=True)
    for rank, text in enumerate(("step 525\n", "resumed from step_00000138\n")):
        (logs / f"rank{rank}.log").write_text(text)
    source = LogSource(tmp_path)
    *old, said = source.poll()
    assert [line.source for line in old] == ["r0", "r1"]
    assert (said.source, "order between sources not known" in said.text) == ("all", True)
    for rank in (0, 1):
        with (logs / f"rank{rank}.log").open("a") as stream:
            stream.write("step 530\n")
    assert [line.source for line in source.poll()] == ["r0", "r1"]


def test_the_order_of_long_logs_is_called_not_known_once_when_all_are_read(tmp_path):
    rundir.logs(tmp_path, 1).mkdir(parents=True)
    for rank in (0, 1):
        rundir.rank_log(tmp_path, 1, rank).write_text("".join(f"step {i}\n" for i in range(90_000)))
    source, found = LogSource(tmp_path), list[LogLine]()
    while fresh := source.poll():
        found += fresh
    assert [line.text for line in found if line.source == "r1"][-1] == "step 89999"
    assert [i for i, line in enumerate(found) if line.source == "all"] == [len(found) - 1]


def test_a_long_log_that_is_gone_is_not_waited_for(tmp_path):
    log = rundir.rank_log(tmp_path, 1, 0)
    log.parent.mkdir(parents=True)
    log.write_text("step\n" * 90_000)
    source = LogSource(tmp_path)
    source.poll()
    assert source.is_behind
    log.unlink()
    assert (source.poll(), source.is_behind) == ([], False)


def test_a_display_begins_near_the_end_of_long_logs_and_says_so(tmp_path):
    log = rundir.rank_log(tmp_path, 1, 0)
    log.parent.mkdir(parents=True)
    record_files.rotated_log(log).write_text("the first line\n" * 100_000)
    log.write_text("".join(f"step {i}\n" for i in range(90_000)))
    for _ in range(9000):
        directory.event(tmp_path, "note", text="a note" + 200 * "-", ts=5.0)
    directory.event(tmp_path, "note", text="the newest note")
    lines = LogSource(tmp_path, skips=True).poll()
    firsts = {line.source: line.text for line in reversed(lines)}
    for source in ("sup", "r0"):
        assert re.fullmatch(r"\[console: \d\.\d MiB of this log skipped\]", firsts[source]), firsts
    texts = [line.text for line in lines if line.source == "r0"]
    assert (texts[2][:4], texts[-1]) == ("step", "step 89999")
    assert all("skipped" not in line.text for line in LogSource(tmp_path).poll())


def test_no_log_is_read_through_a_link(tmp_path):
    run, outside = tmp_path / "run", tmp_path / "outside"
    for folder in (outside / "attempt1", run):
        folder.mkdir(parents=True)
    (outside / "attempt1" / "rank0.log").write_text("secret\n")
    (run / "logs").symlink_to(outside)
    assert LogSource(run).poll() == []
    (run / "logs").unlink()
    (run / "logs").mkdir()
    (run / "logs" / "attempt1").symlink_to(outside / "attempt1")
    assert LogSource(run).poll() == []


@pytest.mark.parametrize("home", ["/x/\ud800", "/\ud800/x"])
def test_a_recorded_directory_whose_name_is_no_text_is_another_directory(tmp_path, home):
    run = directory.run(directory.launch(tmp_path) / "0-first")
    directory.change(run / rundir.RUN, environment={environ.RUN_DIR: home})
    with pytest.raises(RefusedError, match="is a copy or was moved"):
        launches.check_in_place(run)


def test_a_name_without_one_run_raises_a_sentence(tmp_path):
    (tmp_path / "empty").mkdir()
    for stamp in ("20261121-040000", "20261121-050000"):
        directory.launch(tmp_path, "beta", stamp)
    for hour in range(5):
        directory.launch(tmp_path, "gamma", f"20261121-0{hour}0000")
    for name, root, error, words in (
        (str(tmp_path / "empty"), tmp_path, NotFoundError, "is not a run"),
        ("betta-20261121-040000", tmp_path, NotFoundError, "did you mean"),
        ("latest", tmp_path / "empty", NotFoundError, "no launch under"),
        (
            "beta",
            tmp_path,
            UsageError,
            r"2 launches, .* beta-20261121-050000 \(.*, beta-20261121-040000 \(",
        ),
        (
            "gamma",
            tmp_path,
            UsageError,
            "5 launches, .*gamma-20261121-010000.*; give a longer id",
        ),
    ):
        with pytest.raises(error, match=words):
            launches.find(name, root)
