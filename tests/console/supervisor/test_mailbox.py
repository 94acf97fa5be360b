"""Requests to a live run: hostile ones, repeated ones, and the last one, kill."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from console import actions, request_schema
from console.sources import process
from console.supervisor import requests
from console.supervisor.mailbox import Mailbox
from console.supervisor.requests import Request
from console.supervisor.rundir_io import Directory
from trainers.contract import rundir
from trainers.contract.errors import RefusedError, UsageError

from .conftest import phase


@pytest.fixture(scope="module")
def launched(begin):
    started = begin(phase("one", "member.py", 100_000, "deaf"))
    started.wait_steps(2)
    return started


def answers(started, index=0):
    return [e for e in started.events(index) if e["kind"] == "answer"]


def drop(started, name, **record):
    """Writes a request file as somebody might."""
    box = started.run() / rundir.REQUESTS
    rundir.write_json(box / name, {"v": 1, "args": {}, "by": "x", **record})


def test_the_supervisor_is_small_and_idle_and_has_no_torch(launched):
    pid = launched.plan_state["supervisor"]["pid"]
    supervisor = psutil.Process(pid)
    supervisor.cpu_percent()
    time.sleep(5)
    assert supervisor.cpu_percent() < 2
    assert supervisor.memory_info().rss < 40 << 20
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "torch" not in maps
    assert os.getsid(pid) == pid
    assert os.readlink(f"/proc/{pid}/fd/0") == os.devnull


@pytest.mark.parametrize(
    ("name", "record", "says"),
    [
        ("b1.json", {"id": "b1", "action": "explode"}, "no action 'explode'"),
        ("b2.json", {"id": "b2", "action": "dump", "args": {"rank": "x"}}, "number of a rank"),
        ("b3.json", {"id": "b3", "action": "dump", "args": {"depth": 1}}, "no argument 'depth'"),
        ("b4.json", {"id": "b4", "action": "dump", "args": [1]}, "version 1"),
        ("b5.json", {"id": "b5", "action": "dump", "v": 2}, "version 1"),
        ("b6.json", {"id": "b6", "action": "kill"}, "needs yes"),
        ("b7.json", {"id": "b7", "action": "proceed"}, "send proceed to a launch"),
        ("b8.json", {"id": "../b8", "action": "note", "args": {"text": ""}}, "text takes"),
    ],
)
def test_a_wrong_request_is_answered_with_what_is_wrong(launched, name, record, says):
    drop(launched, name, **record)
    stem = name.removesuffix(".json")
    found = launched.wait(lambda: [a for a in answers(launched) if a["request"] == stem], 5)
    assert not found[0]["ok"]
    assert says in found[0]["text"]
    launched.wait(lambda: not (launched.run() / rundir.REQUESTS / name).exists(), 5)


def test_what_is_no_request_is_removed_and_harms_nothing(launched):
    box = launched.run() / rundir.REQUESTS
    outside = launched.path / "outside"
    outside.write_text("{}")
    os.mkfifo(box / "c1.json")
    (box / "c2.json").symlink_to(outside)
    (box / "c3.json").mkdir()
    (box / "c4.json").write_bytes(b"[" * 100_000)
    (box / "c5.json").write_bytes(b"\0" * (1 << 20))
    launched.wait(lambda: not [n for n in os.listdir(box) if not n.startswith(".")], 5)
    refused = {a["request"] for a in answers(launched) if not a["ok"]}
    assert {"c1", "c2", "c3", "c4", "c5"} <= refused
    assert outside.read_text() == "{}"
    assert launched.state()["state"] == "running"


def test_a_heap_of_what_is_no_request_holds_up_none_and_a_mailbox_is_no_link(launched):
    box = launched.run() / rundir.REQUESTS
    for n in range(requests.MAX_REQUESTS_A_LOOK + 6):
        for name in (f"0{n:03}", f".refused-0{n:03}"):
            (box / name).mkdir()
            (box / name / "kept").touch()
    assert launched.ask("note", launched.run(), text="through")["ok"]
    away = box.with_name("elsewhere")
    box.rename(away)
    try:
        rundir.write_json(away / "e1.json", {"v": 1, "id": "e1", "action": "note",
                                             "args": {"text": "x"}, "by": "x"})  # fmt: skip
        box.symlink_to(away)
        assert requests.scan(launched.run(), "run") == []
        time.sleep(1)
        assert (away / "e1.json").exists()
        box.unlink()
    finally:
        away.rename(box)


def test_a_request_is_executed_once(launched):
    for name in ("d1.json", "d1-again.json"):
        drop(launched, name, id="d1", action="note", args={"text": "only once"})
        launched.wait(lambda n=name: not (launched.run() / rundir.REQUESTS / n).exists(), 5)
    notes = [e for e in launched.events(0) if e["kind"] == "note" and e["text"] == "only once"]
    assert len(notes) == 1
    assert [a["ok"] for a in answers(launched) if a["request"] == "d1"] == [True, False]


@pytest.mark.parametrize("name", ["again.json", f"{'long' * 20}.json", f"{'longer' * 14}.json"])
def test_a_name_without_an_id_may_be_used_again(launched, name):
    for text in (f"first {name}", f"second {name}"):
        drop(launched, name, action="note", args={"text": text})
        launched.wait(lambda: not (launched.run() / rundir.REQUESTS / name).exists(), 5)
    texts = [e["text"] for e in launched.events(0) if e["kind"] == "note"]
    assert [f"first {name}", f"second {name}"] == [text for text in texts if name in text]
    last = answers(launched)[-2:]
    assert [(a["ok"], a["action"]) for a in last] == [(True, "note")] * 2
    assert requests.IDENTIFIER.fullmatch(last[0]["request"])


def test_an_id_that_was_used_is_refused_under_any_name_and_its_file_goes(launched):
    file = launched.run() / rundir.REQUESTS / "f1.json"
    for text in ("f1 once", "f1 once", "", b"garbage", "f1 once"):
        if isinstance(text, bytes):
            file.write_bytes(text)
        else:
            drop(launched, "f1.json", id="f1", action="note", args={"text": text})
        launched.wait(lambda: not file.exists(), 5)
    assert [a["ok"] for a in answers(launched) if a["request"] == "f1"] == [True] + [False] * 4
    assert [e["text"] for e in launched.events(0) if e["kind"] == "note"].count("f1 once") == 1


def test_a_request_is_not_executed_again_after_many_others(tmp_path):
    box, directory, done = tmp_path / rundir.REQUESTS, Directory(), []
    mailbox = Mailbox(directory, lambda folder: 1)

    def take(name):
        request = Request(box / f"{name}.json", name, "note", {}, "x", "", True, 1, 1)
        mailbox.take([request], lambda taken: done.append(taken.id) or (True, "noted", []))
        directory.deliver()

    for number in range(5000):
        take(f"request{number}")
    take("request0")
    assert len(done) == 5000
    directory.close()


@pytest.mark.parametrize(
    ("written_ns", "found_ns", "is_done"),
    [(99, 200, False), (100, 200, False), (101, 200, True), (50, 60, True), (10**19, 200, True)],
    ids=["before", "same tick", "after", "the clock has gone back", "a time to come"],
)
def test_a_request_from_before_this_supervisor_is_not_executed(
    tmp_path, written_ns, found_ns, is_done
):
    directory, done = Directory(), []
    mailbox = Mailbox(directory, lambda folder: 1, since_ns=100)
    request = Request(tmp_path / rundir.REQUESTS / "a.json", "a", "kill", {}, "x", "", True,
                      written_ns, found_ns)  # fmt: skip
    mailbox.take([request], lambda taken: done.append(taken.id) or (True, "killed", []))
    directory.close()
    assert done == ["a"] * is_done


def test_the_time_of_a_request_is_that_of_its_file_and_not_what_it_tells(tmp_path):
    """The clock of who launched is an hour ahead, that of who asks an hour late."""
    (tmp_path / rundir.REQUESTS).mkdir()
    (tmp_path / rundir.LOCK).touch()
    since_ns = requests.disk_ns(tmp_path / rundir.LOCK)
    time.sleep(0.02)  # a tick of the file system's clock
    for name, ts in (("late", time.time() - 3600), ("ahead", 4e9)):
        record = {"v": 1, "id": name, "action": "stop", "by": "x", "ts": ts}
        rundir.write_json(tmp_path / rundir.REQUESTS / f"{name}.json", record)
    found = requests.scan(tmp_path, "launch")
    assert [(each.id, each.error) for each in found] == [("ahead", ""), ("late", "")]
    assert all(since_ns < each.written_ns <= each.found_ns for each in found)
    assert requests.disk_ns(tmp_path / "nothing") >= since_ns


def test_a_heap_that_comes_twice_under_the_same_names_goes_twice(launched):
    box = launched.run() / rundir.REQUESTS
    names = [f"0000{n:02}.json" for n in range(requests.MAX_REQUESTS_A_LOOK)]
    for _ in range(2):
        for name in names:
            (box / name).write_bytes(b"garbage")
        launched.wait(lambda: not any((box / name).exists() for name in names), 10)
    assert launched.ask("note", launched.run(), text="behind the heap")["ok"]
    told = [a["text"] for a in answers(launched) if a["request"] == "000000"]
    assert told == [requests.NO_OBJECT] * 2


def test_what_cannot_be_removed_holds_up_no_request_and_is_no_lost_record(launched):
    box = launched.run() / rundir.REQUESTS
    long = box / ("0" * 248)
    long.mkdir()
    (long / "kept").touch()
    launched.wait(lambda: not long.exists(), 5)
    time.sleep(1.2)
    assert "dropped" not in {e.get("alert") for e in launched.events(0)}


def test_events_that_somebody_removed_go_on_with_every_answer(launched):
    for folder in (launched.path, launched.run()):
        (folder / rundir.EVENTS).unlink()
    assert launched.ask("dump")["ok"]
    assert launched.ask("set-flag", name="NSA_LR", value="1")["text"].startswith("there is no next")
    told = launched.wait(lambda: [e for e in launched.events(0) if e["kind"] == "note"], 5)
    assert "0-one/events.jsonl was removed or replaced" in told[0]["text"]


def test_two_dumps_at_once_are_one_dump_with_two_answers(launched):
    sent = [actions.send(launched.path, "dump", {}, f"operator {n}") for n in (1, 2)]
    found = [actions.answer(launched.path, request, 10) for request in sent]
    assert all(answer["ok"] for answer in found)
    names = {line.split()[-1] for answer in found for line in answer["detail"]}
    assert all((launched.run() / name).stat().st_size > 0 for name in names)


def test_kill_ends_ranks_that_are_deaf_at_once_and_says_who_asked(launched):
    with pytest.raises(UsageError, match="needs yes"):
        actions.send(launched.path, "kill", {}, "tester")
    assert launched.ask("kill", yes="true")["ok"]
    launched.wait_end(5)
    assert launched.state()["state"] == "killed"
    assert "tester" in launched.state()["why"]
    assert not process.with_token(launched.token())


def test_an_ended_run_takes_no_request(launched):
    with pytest.raises(RefusedError, match="has ended"):
        actions.send(launched.path, "halt", {}, "tester")
    with pytest.raises(RefusedError, match="has ended"):
        actions.send(launched.run(), "dump", {}, "tester")


@pytest.mark.parametrize(
    ("action", "args", "says"),
    [
        ("dumb", {}, "did you mean 'dump'"),
        ("dump", {"rnak": 1}, "did you mean 'rank'"),
        ("halt", {"now": True}, "takes none"),
        ("set-flag", {}, "needs name"),
        ("set-flag", {"name": "NSA_LRR"}, "^there is no flag 'NSA_LRR'; did you mean 'NSA_LR'"),
        ("note", {"text": "x" * 1001}, "at most 1000"),
        ("dump", {"rank": True}, "number of a rank"),
    ],
)
def test_wrong_words_are_refused_before_anything_is_sent(action, args, says):
    with pytest.raises(UsageError, match=says):
        request_schema.check(action, args)


def test_every_action_is_documented_and_reachable():
    for action in request_schema.TABLE:
        assert action.help.endswith(".")
        assert action.mailboxes
        assert all(argument.help for argument in action.args)
