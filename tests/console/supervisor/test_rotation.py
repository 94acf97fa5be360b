"""Logs stay bounded while their writers go on, and no reader loses the newest lines."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import pytest

from console.sources.logs import LogSource
from console.sources.record_files import RecordFiles
from console.supervisor.rotation import Rotation
from console.supervisor.run_files import Files
from tests.mounts import tmpfs
from trainers.contract import rundir

LIMIT = 1 << 16
WRITER = """
import os, sys
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
for n in range(int(sys.argv[2])):
    os.write(fd, b"line %08d %s\\n" % (n, b"x" * 80))
"""


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
    (said,) = rotation(run).look()
    assert said == "rank1.log was cut; rank1.log.1 has what was in it"
    assert short.read_bytes() == b"hello\n"
    assert (long.stat().st_ino, long.stat().st_size) == (inode, 0)
    assert rundir.kept_log(long).read_bytes() == numbered(0, 1000)
    assert rundir.kept_log(long).stat().st_mode & 0o777 == 0o600
    assert rotation(run).look() == []


def test_one_former_part_is_kept_and_no_more(run):
    log, rotates = rundir.logs(run, 1) / rundir.TORCHRUN_LOG, rotation(run)
    for part in range(3):
        append(log, numbered(part * 1000, part * 1000 + 1000))
        rotates.look()
    assert lines_of(rundir.kept_log(log))[0] == 2000
    assert sorted(os.listdir(log.parent)) == ["torchrun.log", "torchrun.log.1"]


def test_a_log_that_outgrew_its_rotation_keeps_its_end(run):
    log = rundir.rank_log(run, 1, 0)
    append(log, numbered(0, 5000))
    (said,) = rotation(run).look()
    assert "without the first 0.3 MiB" in said
    assert rundir.kept_log(log).stat().st_size == 2 * LIMIT
    assert lines_of(rundir.kept_log(log))[-1] == 4999


def test_a_writer_that_never_pauses_loses_lines_only_at_a_cut(run):
    log, count = rundir.rank_log(run, 1, 0), 200_000
    rotates = Rotation(rundir.logs(run, 1), 1 << 20, reserve_bytes=0)
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(log), str(count)])
    seen: set[int] = set()
    said: list[str] = []
    while writer.poll() is None:
        if new := rotates.look():
            said += new
            seen |= set(lines_of(rundir.kept_log(log)))
        time.sleep(0.001)
    seen |= set(lines_of(log))
    gaps = sum(n - 1 in seen and n not in seen for n in range(count))
    assert len(said) > 3
    assert gaps <= 2 * len(said), "lines are lost only where the log was cut or too long"
    assert len(seen) > count // 2
    assert not log.read_bytes().startswith(b"\0"), "the writer appends, so there is no hole"


def test_what_is_written_during_the_copy_is_copied_too(run):
    """The copy takes long enough for the writer; of five cuts at least one meets no line."""
    log, limit = rundir.rank_log(run, 1, 0), 8 << 20
    rotates = Rotation(rundir.logs(run, 1), limit, reserve_bytes=0)
    slow = WRITER.replace("\n    os.write", "\n    time.sleep(1e-4); os.write").replace(
        "sys", "sys, time", 1
    )
    writer = subprocess.Popen([sys.executable, "-c", slow, str(log), "1000000"])
    lost = []
    try:
        for _ in range(5):
            while not (log.exists() and lines_of(log)):
                time.sleep(0.001)
            append(log, b"\n" + b"x" * limit + b"\n")
            assert rotates.look()
            last = lines_of(rundir.kept_log(log))[-1]
            while not (after := lines_of(log)):
                time.sleep(0.001)
            lost.append(after[0] - last - 1)
    finally:
        writer.kill()
        writer.wait()
    assert min(lost) == 0, lost


def test_the_ranks_and_torchrun_append_so_that_a_cut_leaves_no_hole(run):
    program = (
        "import os, fcntl\nfrom trainers.contract.member import join\nrun = join()\n"
        "print(*[bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND) for fd in (1, 2)])\n"
    )
    told = {"NSA_CONSOLE_RUN_DIR": str(run), "NSA_CONSOLE_ATTEMPT": "1", "RANK": "0",
            "NSA_CONSOLE_TOKEN": "rotation", "NSA_CONSOLE_RUN_ID": "x"}  # fmt: skip
    subprocess.run([sys.executable, "-c", program], env=os.environ | told, check=True, timeout=60)
    assert "True True" in rundir.rank_log(run, 1, 0).read_text()
    fd = rundir.open_append(rundir.logs(run, 1) / rundir.TORCHRUN_LOG)
    os.write(fd, b"before")
    os.ftruncate(fd, 0)
    os.write(fd, b"after")
    os.close(fd)
    assert (rundir.logs(run, 1) / rundir.TORCHRUN_LOG).read_bytes() == b"after"


def test_nothing_is_cut_or_written_through_a_link(run, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    for name in ("symbolic", "hard", "target"):
        append(outside / name, numbered(0, 1000))
    logs = rundir.logs(run, 1)
    (logs / "rank0.log").symlink_to(outside / "symbolic")
    (logs / "rank1.log").hardlink_to(outside / "hard")
    append(logs / "rank2.log", numbered(0, 1000))
    (logs / "rank2.log.1").symlink_to(outside / "target")
    (logs / ".rank2.log.copy").symlink_to(outside / "target")
    os.mkfifo(logs / "rank3.log")
    rotates = rotation(run)
    said = rotates.look() + rotates.look()
    assert [text.split()[0] for text in said] == ["rank1.log", "rank2.log"]
    assert "hard link" in said[0]
    assert rotates.look() == [], "what cannot be done is said once"
    for name in ("symbolic", "hard", "target"):
        assert (outside / name).read_bytes() == numbered(0, 1000)
    moved = run / "elsewhere"
    logs.rename(moved)
    logs.symlink_to(moved)
    append(moved / "rank2.log", numbered(0, 1000))
    assert rotation(run).look() == []


def test_a_disk_without_room_is_not_filled_further(tmp_path):
    with tmpfs(tmp_path, 4) as mount:
        folder = rundir.logs(mount, 1)
        rundir.make_directory(folder)
        log = folder / "rank0.log"
        append(rundir.kept_log(log), b"a" * (1 << 20))
        append(log, b"e" * (1 << 20))
        rotates = Rotation(folder, 1 << 19, reserve_bytes=1 << 19)
        append(mount / "checkpoint", b"d" * (3 << 18))
        (said,) = rotates.look()
        assert "cannot be rotated (No space left on device" in said
        assert rotates.look() == []
        assert sorted(os.listdir(folder)) == ["rank0.log", "rank0.log.1"]
        assert rundir.kept_log(log).read_bytes().startswith(b"aaa")
        assert log.read_bytes().startswith(b"eee")
        (mount / "checkpoint").unlink()
        (said,) = rotates.look()
        assert "was cut" in said


def test_the_log_screen_goes_on_after_a_rotation(run):
    log, rotates, source = rundir.rank_log(run, 1, 0), rotation(run), LogSource(run)
    append(log, numbered(0, 800))
    assert len(source.poll()) == 800
    assert rotates.look()
    append(log, numbered(800, 805))
    assert [line.text.split()[1] for line in source.poll()] == [f"{n:08d}" for n in range(800, 805)]
    assert source.poll() == []


def test_who_looks_after_a_cut_sees_what_was_before_it_once_and_also_without_a_newline(run):
    log, rotates = rundir.rank_log(run, 1, 0), rotation(run)
    append(log, numbered(0, 800))
    assert rotates.look()
    append(log, b"line 00000800 x\n")
    source = LogSource(run)
    assert [line.text.split()[1] for line in source.poll()] == [f"{n:08d}" for n in range(801)]
    assert source.poll() == []
    append(log, b"=" * LIMIT)
    assert rotates.look()
    (line,) = LogSource(run).poll(over=True)[-1:]
    assert line.text.startswith("====")


def test_the_supervisor_finds_torchruns_words_after_a_rotation(run):
    log, files = rundir.logs(run, 1) / rundir.TORCHRUN_LOG, Files(run, 1, 1, RecordFiles(run))
    append(log, numbered(0, 800))
    append(log, b"W1121 Received 15 death signal\n")
    assert rotation(run).look()
    append(log, b"a line behind it\n")
    assert files.rest().agent_signal == "SIGTERM"


def test_an_exception_that_was_just_rotated_still_explains_the_end(run):
    log = rundir.rank_log(run, 1, 0)
    append(log, numbered(0, 800) + b"ValueError: the batch of step 5 is broken\n")
    assert rotation(run).look()
    files = Files(run, 1, 1, RecordFiles(run))
    assert files.rest().last[0].error == "ValueError: the batch of step 5 is broken"
