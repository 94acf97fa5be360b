"""Requests to a live run: hostile, repeated and old ones, and kill; polls of a launch."""

from __future__ import annotations

import math
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from console import actions, plan
from console.sources import process
from console.supervisor import inbox
from console.supervisor.inbox import Inbox, Poller, Request
from console.supervisor.launch_spec import LaunchSpec
from console.supervisor.next_flags import NextFlags
from console.supervisor.rundir_io import Directory
from tests import owners
from tests.launches import HANG_GUARD_S, phase
from trainers.contract import rundir
from trainers.contract.errors import RefusedError, UsageError


@pytest.fixture(scope="module")
def launched(begin):
    slow = {"stall_floor_s": 30, "startup_s": 60, "grace_s": 2 * HANG_GUARD_S}
    started = begin(phase("one", "member.py", 100_000, "deaf"), watch=slow)
    started.wait_steps(2)
    return started


@pytest.fixture
def box(launched):
    return launched.run() / rundir.REQUESTS


def answers(started, request):
    events = started.events(0)
    return [e for e in events if e["kind"] == "answer" and e["request"] == request]


def write_request(box: Path, name: str, **record) -> None:
    rundir.write_json(box / name, {"v": 1, "args": {}, "by": "x", **record})


def test_the_supervisor_is_small_and_idle_and_has_no_torch(launched):
    pid = launched.plan_state["supervisor"]["pid"]
    supervisor = psutil.Process(pid)
    # On a busy machine, or right after the start, one window may show more.
    assert any(supervisor.cpu_percent(5) < 2 for _ in range(3))
    assert supervisor.memory_info().rss < 40 << 20
    assert "torch" not in Path(f"/proc/{pid}/maps").read_text()
    assert os.getsid(pid) == pid
    assert os.readlink(f"/proc/{pid}/fd/0") == os.devnull


@pytest.mark.parametrize(
    ("name", "record", "says"),
    [
        ("b1", {"id": "b1", "action": "explode"}, "no action 'explode'"),
        ("b2", {"id": "b2", "action": "dump", "args": {"rank": "x"}}, "number of a rank"),
        ("b3", {"id": "b3", "action": "dump", "args": {"depth": 1}}, "no argument 'depth'"),
        ("b4", {"id": "b4", "action": "dump", "args": [1]}, "args of the request is not an object"),
        ("b5", {"id": "b5", "action": "dump", "v": 2}, "version 1"),
        ("b6", {"id": "b6", "action": "kill"}, "needs yes"),
        ("b7", {"id": "b7", "action": "proceed"}, "launch"),
        ("b8", {"id": "../b8", "action": "note", "args": {"text": ""}}, "text takes"),
    ],
)
def test_a_wrong_request_is_answered_with_what_is_wrong(launched, box, name, record, says):
    write_request(box, f"{name}.json", **record)
    (answer,) = launched.wait(lambda: answers(launched, name))
    assert not answer["ok"]
    assert says in answer["text"]
    launched.wait(lambda: not (box / f"{name}.json").exists())


def test_what_is_no_request_is_removed_and_harms_nothing(launched, box):
    outside = launched.path / "outside"
    outside.write_text("{}")
    os.mkfifo(box / "c1.json")
    (box / "c2.json").symlink_to(outside)
    (box / "c3.json").mkdir()
    (box / "c4.json").write_bytes(b"[" * 100_000)
    (box / "c5.json").write_bytes(b"\0" * (1 << 20))
    long = launched.path / ("0" * 248)
    long.mkdir()
    (long / "kept").touch()
    long.rename(box / long.name)
    launched.wait(lambda: not [n for n in os.listdir(box) if not n.startswith(".")])
    for name in ("c1", "c2", "c3", "c4", "c5"):
        assert [answer["ok"] for answer in answers(launched, name)] == [False]
    assert outside.read_text() == "{}"
    assert launched.state()["state"] == "running"
    assert "dropped" not in {e.get("alert") for e in launched.events(0)}


def test_many_entries_that_are_no_request_delay_none_and_a_link_is_no_mailbox(launched, box):
    for n in range(inbox.MAX_REQUESTS_A_POLL + 6):
        for name in (f"0{n:03}", f".refused-0{n:03}"):
            (launched.path / name).mkdir()
            (launched.path / name / "kept").touch()
            (launched.path / name).rename(box / name)
    assert launched.ask("note", launched.run(), text="through")["ok"]
    away = box.with_name("elsewhere")
    box.rename(away)
    try:
        write_request(away, "e1.json", id="e1", action="note", args={"text": "x"})
        box.symlink_to(away)
        assert inbox.scan(launched.run(), "run") == []
        time.sleep(1)
        assert (away / "e1.json").exists()
        box.unlink()
    finally:
        away.rename(box)
    launched.wait(lambda: answers(launched, "e1") and not (box / "e1.json").exists())


@pytest.mark.parametrize("name", ["again.json", f"{'longer' * 14}.json"])
def test_a_name_is_the_id_of_a_request_without_one(launched, box, name):
    for text in (f"first {name}", f"second {name}"):
        write_request(box, name, action="note", args={"text": text})
        launched.wait(lambda: not (box / name).exists())
    events = launched.events(0)
    texts = [e["text"] for e in events if e["kind"] == "note" and name in e["text"]]
    assert texts == [f"first {name}"]
    last = [e for e in events if e["kind"] == "answer" and e["action"] == "note"][-2:]
    assert [a["ok"] for a in last] == [True, False]
    assert inbox.IDENTIFIER.fullmatch(last[0]["request"])


def test_an_id_is_executed_once_under_any_name_and_each_file_goes(launched, box):
    texts = ("f1 once", "f1 once", "", b"garbage", "f1 once")
    for name, text in zip(("f1", "f1-again", "f1", "f1", "f1"), texts, strict=True):
        file = box / f"{name}.json"
        if isinstance(text, bytes):
            file.write_bytes(text)
        else:
            write_request(box, file.name, id="f1", action="note", args={"text": text})
        launched.wait(lambda file=file: not file.exists())
    assert [a["ok"] for a in answers(launched, "f1")] == [True] + [False] * 4
    assert [e["text"] for e in launched.events(0) if e["kind"] == "note"].count("f1 once") == 1


def test_events_that_somebody_removed_go_on_with_every_answer(launched):
    for folder in (launched.path, launched.run()):
        (folder / rundir.EVENTS).unlink()
    assert launched.ask("dump")["ok"]
    assert not launched.ask("set-flag", name="NSA_LR", value="1")["ok"]
    said = "0-one/events.jsonl was removed or replaced"
    launched.wait(lambda: any(said in event["text"] for event in launched.events(0)))


def test_two_dumps_at_once_are_one_dump_with_two_answers(launched):
    sent = [actions.send(launched.path, "dump", {}, f"operator {n}") for n in (1, 2)]
    found = [actions.answer(launched.path, request, HANG_GUARD_S) for request in sent]
    assert all(answer["ok"] for answer in found)
    names = {line.split()[-1] for answer in found for line in answer["detail"]}
    assert all((launched.run() / name).stat().st_size > 0 for name in names)


def test_kill_ends_ranks_that_are_deaf_at_once_and_says_who_asked(launched):
    with pytest.raises(UsageError, match="needs yes"):
        actions.send(launched.path, "kill", {}, "tester")
    assert launched.ask("kill", yes="true")["ok"]
    launched.wait_end()  # the grace time of a stop is longer than the limit of this wait
    assert launched.state()["state"] == "killed"
    assert "tester" in launched.state()["why"]
    assert not process.with_token(launched.token())
    with pytest.raises(RefusedError, match="has ended"):
        actions.send(launched.path, "halt", {}, "tester")


# --- without a supervisor --------------------------------------------------------------------


@pytest.fixture
def woken():
    return threading.Event()


@pytest.fixture
def directory(woken):
    found = Directory(woken.set)
    yield found
    found.close(20)


def execute(directory, folder, requests, since_ns=0) -> list[str]:
    """Returns the ids that an inbox executes."""
    done: list[str] = []
    mail = Inbox(directory, lambda folder: 1, since_ns)
    for name, written_ns, found_ns in requests:
        path = folder / rundir.REQUESTS / f"{name}.json"
        request = Request(path, name, "note", {}, "x", "", written_ns, found_ns)
        mail.execute([request], lambda found: done.append(found.id) or (True, "noted", []))
        directory.deliver()
    return done


def test_a_request_is_not_executed_again_after_many_others(tmp_path, directory):
    names = [f"request{number}" for number in range(5000)]
    done = execute(directory, tmp_path, [(name, 1, 1) for name in (*names, "request0")])
    assert done == names


@pytest.mark.parametrize(
    ("written_ns", "found_ns", "is_done"),
    [(99, 200, False), (100, 200, False), (101, 200, True), (50, 60, True), (10**19, 200, False)],
    ids=["before", "same tick", "after", "the clock has gone back", "a time to come"],
)
def test_a_request_from_before_this_supervisor_is_not_executed(
    tmp_path, directory, written_ns, found_ns, is_done
):
    done = execute(directory, tmp_path, [("a", written_ns, found_ns)], since_ns=100)
    assert done == ["a"] * is_done


def test_the_time_of_a_request_is_that_of_its_file_and_not_what_it_tells(tmp_path):
    """One request contains a time in the past, the other request a time far in the future."""
    box = tmp_path / rundir.REQUESTS
    box.mkdir()
    (tmp_path / rundir.LOCK).touch()
    since_ns = (tmp_path / rundir.LOCK).stat().st_ctime_ns
    time.sleep(0.02)  # a tick of the file system's clock
    for name, ts in (("late", time.time() - 3600), ("ahead", 4e9)):
        write_request(box, f"{name}.json", id=name, action="stop", ts=ts)
    found = inbox.scan(tmp_path, "launch")
    assert [(each.id, each.error) for each in found] == [("ahead", ""), ("late", "")]
    assert all(since_ns < each.written_ns <= each.found_ns for each in found)


def test_a_request_whose_times_were_altered_is_as_old_as_its_last_change(tmp_path, directory):
    box = tmp_path / rundir.REQUESTS
    box.mkdir()
    for name, ahead_s in (("late", -3600), ("ahead", 3600)):
        write_request(box, f"{name}.json", id=name, action="stop")
        os.utime(box / f"{name}.json", times=(time.time() + ahead_s,) * 2)
    time.sleep(0.02)
    (tmp_path / rundir.LOCK).touch()
    since_ns = (tmp_path / rundir.LOCK).stat().st_ctime_ns
    found = [(each.id, each.written_ns, each.found_ns) for each in inbox.scan(tmp_path, "launch")]
    assert len(found) == 2
    assert execute(directory, tmp_path, found, since_ns) == []


class Polls:
    """A poller over a folder, and the ids of the requests that it found."""

    def __init__(self, directory, woken, folder):
        self.directory, self._woken = directory, woken
        self.found: list[str] = []
        self.poller = Poller(directory, folder, self._execute, lambda: None, owners.absent())

    def _execute(self, requests) -> None:
        self.found += [request.id for request in requests]

    def wake(self) -> None:
        assert self._woken.wait(HANG_GUARD_S)
        self._woken.clear()
        self.directory.deliver()

    def finish(self) -> None:
        while self.poller.is_polling:
            self.wake()


@pytest.fixture
def polls(directory, woken, tmp_path):
    return Polls(directory, woken, tmp_path)


def test_a_request_wakes_and_is_found_where_polls_are_due_by_a_change_alone(polls, tmp_path):
    run = tmp_path / "0-one"
    box = run / rundir.REQUESTS
    rundir.make_directory(box)

    def poll() -> None:
        while polls.poller.start([run], None, math.inf):
            polls.finish()

    for name in ("first", "second"):
        poll()
        assert polls.found == []
        write_request(box, f"{name}.json", id=name, action="note", args={"text": "x"})
        while not polls.directory.changed:
            polls.wake()
        poll()
        assert set(polls.found) == {name}
        polls.found.clear()
        (box / f"{name}.json").unlink()


def test_a_request_is_found_also_where_the_run_directory_cannot_be_read(polls, tmp_path):
    def unreadable(_):
        raise PermissionError(13, "Permission denied")

    rundir.make_directory(tmp_path / rundir.REQUESTS)
    write_request(tmp_path / rundir.REQUESTS, "stop.json", id="stop", action="stop")
    files = SimpleNamespace(watched=(), poll=unreadable)
    attempt = SimpleNamespace(path=tmp_path, files=files, stage="run", behind=False)
    assert polls.poller.start([], attempt, 0.0)
    polls.finish()
    assert polls.found == ["stop"]


def test_a_flag_that_the_next_phase_overrides_with_its_set_is_rejected():
    phases = [{"name": "one"}, {"name": "two", "set": {"train.accumulate": 2}}]
    flags = NextFlags(LaunchSpec("x", plan.parse({"name": "x", "phases": phases}, ""), "x"))
    asked = {"name": "NSA_ACCUM", "value": "8", "phases": "all"}
    for index, args in ((1, asked | {"phases": "next"}), (0, asked)):
        assert flags.set(index, args, "x") == (
            False, "the phase 'two' sets train.accumulate, which overrides NSA_ACCUM; to change "
            "it, halt the launch, and use launch --phase two --set train.accumulate=8",
        )  # fmt: skip
    assert flags.set(0, asked | {"phases": "next"}, "x")[0]
    assert flags.set(1, {"name": "NSA_ACCUM"}, "x")[0], "a flag can always be reset"
