"""Logs stay bounded while programs write to them, and readers get the newest lines."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from console.sources import record_files
from console.sources.logs import LogSource
from console.sources.record_files import RecordFiles
from console.supervisor.rotation import Rotation
from console.supervisor.run_files import Files
from tests.mounts import tmpfs
from trainers.contract import rundir

LIMIT = 1 << 16


@pytest.fixture
def run(tmp_path):
    rundir.make_directory(rundir.logs(tmp_path, 1))
    return tmp_path


def rotation(run, **more) -> Rotation:
    return Rotation(rundir.logs(run, 1), LIMIT, **{"reserve_bytes": 0, **more})


def append(path, data: bytes) -> None:
    with path.open("ab") as stream:
        stream.write(data)


def numbered(first: int, last: int) -> bytes:
    return b"".join(b"line %08d %s\n" % (n, b"x" * 80) for n in range(first, last))


def lines_of(path) -> list[int]:
    return [int(n) for n in re.findall(rb"^line (\d{8}) ", path.read_bytes(), re.MULTILINE)]


def test_a_short_log_is_left_alone_and_a_long_one_goes_on_in_a_new_file(run):
    short, long = rundir.rank_log(run, 1, 0), rundir.rank_log(run, 1, 1)
    append(short, b"hello\n")
    append(long, numbered(0, 1000))
    inode = long.stat().st_ino
    said = rotation(run).poll()
    assert said == "rank1.log was rotated: its content is in rank1.log.1"
    assert short.read_bytes() == b"hello\n"
    assert (long.stat().st_ino, long.stat().st_size) == (inode, 0)
    assert record_files.rotated_log(long).read_bytes() == numbered(0, 1000)
    assert record_files.rotated_log(long).stat().st_mode & 0o777 == 0o600
    assert rotation(run).poll() == ""


def test_one_former_part_is_kept_and_of_a_much_longer_log_its_end(run):
    log, rotates = rundir.logs(run, 1) / rundir.TORCHRUN_LOG, rotation(run)
    for part in range(3):
        append(log, numbered(part * 1000, part * 1000 + 1000))
        rotates.poll()
    assert lines_of(record_files.rotated_log(log))[0] == 2000
    append(log, numbered(3000, 8000))
    said = rotates.poll()
    assert "without the first 0.3 MiB" in said
    assert record_files.rotated_log(log).stat().st_size == 2 * LIMIT
    assert lines_of(record_files.rotated_log(log))[-1] == 7999
    assert sorted(os.listdir(log.parent)) == ["torchrun.log", "torchrun.log.1"]


def test_each_of_many_long_logs_gets_its_turn(run):
    logs, rotates = [rundir.rank_log(run, 1, rank) for rank in range(3)], rotation(run)
    for _ in range(9):
        for log in logs:
            append(log, b"x" * (LIMIT + 1))
        assert rotates.poll()
    assert all(record_files.rotated_log(log).exists() for log in logs)
    assert max(log.stat().st_size for log in logs) < 3 * LIMIT


def test_what_is_written_during_the_copy_is_copied_too(run, monkeypatch):
    log, rename = rundir.rank_log(run, 1, 0), os.rename

    def write_and_rename(*paths, **folders) -> None:
        append(log, numbered(1000, 1001))
        rename(*paths, **folders)

    append(log, numbered(0, 1000))
    monkeypatch.setattr(os, "rename", write_and_rename)
    assert rotation(run).poll()
    assert lines_of(record_files.rotated_log(log)) == list(range(1001))


def test_the_ranks_and_torchrun_append_so_that_a_cut_leaves_no_hole(run):
    program = (
        "import os, fcntl\nfrom trainers.contract.member import join\nrun = join()\n"
        "print(*[bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND) for fd in (1, 2)])\n"
    )
    told = {"NSA_CONSOLE_RUN_DIR": str(run), "NSA_CONSOLE_ATTEMPT": "1", "RANK": "0",
            "NSA_CONSOLE_TOKEN": "rotation", "NSA_CONSOLE_RUN_ID": "x"}  # fmt: skip
    subprocess.run([sys.executable, "-c", program], env=os.environ | told, check=True)
    assert "True True" in rundir.rank_log(run, 1, 0).read_text()
    fd = rundir.open_append(rundir.logs(run, 1) / rundir.TORCHRUN_LOG)
    os.write(fd, b"before")
    os.ftruncate(fd, 0)
    os.write(fd, b"after")
    os.close(fd)
    assert (rundir.logs(run, 1) / rundir.TORCHRUN_LOG).read_bytes() == b"after"


def test_nothing_is_cut_or_written_through_a_link(run, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    for name in ("log", "copy"):
        append(outside / name, numbered(0, 1000))
    logs = rundir.logs(run, 1)
    (logs / "rank0.log").symlink_to(outside / "log")
    append(logs / "rank2.log", numbered(0, 1000))
    (logs / ".rank2.log.copy").symlink_to(outside / "copy")
    assert rotation(run).poll().startswith("rank2.log was rotated")
    assert rotation(run).poll() == ""
    for name in ("log", "copy"):
        assert (outside / name).read_bytes() == numbered(0, 1000)


def test_a_disk_without_room_is_not_filled_further(tmp_path):
    with tmpfs(tmp_path, 4) as mount:
        folder = rundir.logs(mount, 1)
        rundir.make_directory(folder)
        log = folder / "rank0.log"
        append(record_files.rotated_log(log), b"a" * (1 << 20))
        append(log, b"e" * (1 << 20))
        rotates = Rotation(folder, 1 << 19, reserve_bytes=1 << 19)
        append(mount / "checkpoint", b"d" * (3 << 18))
        said = rotates.poll()
        assert "cannot be rotated (No space left on device" in said
        assert rotates.poll() == ""
        assert sorted(os.listdir(folder)) == ["rank0.log", "rank0.log.1"]
        assert record_files.rotated_log(log).read_bytes().startswith(b"aaa")
        assert log.read_bytes().startswith(b"eee")
        (mount / "checkpoint").unlink()
        said = rotates.poll()
        assert "was rotated" in said


def numbers(lines) -> list[int]:
    return [int(line.text.split()[1]) for line in lines]


def test_readers_of_a_log_see_each_line_once_before_and_after_a_rotation(run):
    log, rotates, source = rundir.rank_log(run, 1, 0), rotation(run), LogSource(run)
    append(log, numbered(0, 800))
    assert numbers(source.poll()) == list(range(800))
    assert rotates.poll()
    append(log, numbered(800, 805))
    assert numbers(source.poll()) == list(range(800, 805))
    later = LogSource(run)
    assert numbers(later.poll()) == list(range(805))
    assert later.poll() == source.poll() == []
    append(log, b"=" * LIMIT)
    assert rotates.poll()
    (line,) = LogSource(run).poll(over=True)[-1:]
    assert line.text.startswith("====")


@pytest.mark.parametrize("skips", [False, True])
def test_lines_between_the_last_read_and_a_rotation_are_read_or_reported(run, skips):
    log, rotates, source = rundir.rank_log(run, 1, 0), rotation(run), LogSource(run, skips=skips)
    append(log, numbered(0, 700))
    assert numbers(source.poll()) == list(range(700))
    whole = numbered(700, 805)
    append(log, whole[:-50])  # the last line is not complete
    assert rotates.poll()
    append(log, whole[-50:])
    assert numbers(source.poll()) == list(range(700, 805))
    append(log, numbered(805, 1600))
    assert rotates.poll()
    append(log, numbered(1600, 2400))
    assert rotates.poll()
    append(log, numbered(2400, 2405))
    said, *lines = source.poll()
    assert said.text == "[console: this log was truncated; lines may be missing]"
    assert numbers(lines) == list(range(2400, 2405))
    assert source.poll() == []


@pytest.mark.parametrize("lines", [800, 5_000], ids=["at the end", "behind"])
def test_a_reader_of_the_rotated_file_reports_that_a_later_rotation_replaced_it(run, lines):
    log, source = rundir.rank_log(run, 1, 0), LogSource(run)
    rotates = Rotation(log.parent, lines * 60, reserve_bytes=0)
    append(log, numbered(0, lines))
    assert rotates.poll()
    assert numbers(source.poll())[:800] == list(range(800))
    assert source.is_behind == (lines > 800)
    append(log, numbered(lines, 2 * lines))
    assert rotates.poll()
    append(log, numbered(2 * lines, 2 * lines + 5))
    said, *fresh = source.poll()
    assert said.text == "[console: this log was truncated; lines may be missing]"
    assert numbers(fresh) == list(range(2 * lines, 2 * lines + 5))
    assert source.poll() == []


def test_a_display_that_falls_behind_skips_to_the_newest_lines_and_says_so(run):
    log = rundir.rank_log(run, 1, 0)
    append(log, numbered(0, 10))
    shown, whole = LogSource(run, skips=True), LogSource(run)
    for source in (shown, whole):
        assert numbers(source.poll()) == list(range(10))
    append(log, numbered(10, 30_000))
    said, cut, *lines = shown.poll()
    assert re.fullmatch(r"\[console: 2\.\d MiB of this log skipped\]", said.text), said
    assert "line" not in cut.text, "the first line after the skipped bytes is cut"
    assert numbers(lines) == list(range(30_000 - len(lines), 30_000))
    read = [numbers(whole.poll()) for _ in range(12)]
    assert [n for part in read for n in part] == list(range(10, 30_000))
    append(log, numbered(30_000, 30_001))
    assert numbers(shown.poll()) == [30_000]


def test_the_supervisor_reads_the_end_of_a_run_from_rotated_logs(run):
    torchrun, rank = rundir.logs(run, 1) / rundir.TORCHRUN_LOG, rundir.rank_log(run, 1, 0)
    append(torchrun, numbered(0, 800) + b"W1121 Received 15 death signal\n")
    append(rank, numbered(0, 800) + b"ValueError: the batch of step 5 is broken\n")
    rotates = rotation(run)
    assert rotates.poll()
    assert rotates.poll()
    append(torchrun, b"a line behind it\n")
    rest = Files(run, 1, 1, RecordFiles(run)).read_final(0)
    assert rest.torchrun_signal == "SIGTERM"
    assert rest.last[0].error == "ValueError: the batch of step 5 is broken"
