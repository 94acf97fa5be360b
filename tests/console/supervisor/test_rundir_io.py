"""The thread of the run directory: documents, jobs and failed writes."""

from __future__ import annotations

import contextlib
import os
import threading
import tracemalloc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

from console.supervisor import rundir_io
from console.supervisor.alerts import DROPPED, SETTLED_S, Alerts
from console.supervisor.context import Services
from console.supervisor.rundir_io import Directory
from tests.launches import records
from trainers.contract import environ, rundir


@contextlib.contextmanager
def queued(directory: Directory) -> Iterator[None]:
    """Executes the calls of the block only after its end, and closes the directory."""
    ready = threading.Event()
    directory.call(ready.wait)
    yield
    ready.set()
    assert directory.close(20)


def test_of_documents_that_wait_only_the_newest_is_kept(tmp_path):
    with queued(directory := Directory()):
        for n in range(10_000):
            directory.document(tmp_path / "a.json", {"n": n})
            directory.document(tmp_path / "b.json", {"n": -n})
    assert rundir.read_json(tmp_path / "a.json") == {"n": 9999}
    assert rundir.read_json(tmp_path / "b.json") == {"n": -9999}


def test_old_versions_that_wait_need_no_memory(tmp_path):
    tracemalloc.start()
    with queued(directory := Directory()):
        for n in range(1000):
            directory.document(tmp_path / "a.json", {"n": str(n) * 10_000})
        used_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert used_bytes < 1 << 20


def test_documents_are_replaced_in_the_order_of_their_newest_calls(tmp_path):
    first, second, first_existed = tmp_path / "plan_state.json", tmp_path / "gates.json", []
    with queued(directory := Directory()):
        directory.document(first, {"state": "running"})
        directory.call(lambda: first_existed.append(first.exists()))
        directory.document(second, {"result": "pass"})
        directory.document(first, {"state": "ended"})
    assert rundir.read_json(first) == {"state": "ended"}
    assert second.exists()
    assert first_existed == [False]


def test_a_version_that_keeps_its_place_is_written_before_later_work(tmp_path):
    path, seen = tmp_path / "plan_state.json", []
    with queued(directory := Directory()):
        directory.document(path, {"phase": 1}, keeps_place=True)
        directory.call(lambda: seen.append(rundir.read_json(path)))
        directory.document(path, {"phase": 1, "state": "running"})
    assert seen == [{"phase": 1}], "run.json is written after plan_state.json"
    assert rundir.read_json(path) == {"phase": 1, "state": "running"}


def test_a_job_brings_its_result_or_what_the_disk_says_and_a_mistake_is_kept(tmp_path):
    directory, brought = Directory(), []
    for work in (lambda: 7, (tmp_path / "nothing").stat, lambda: int("x")):
        directory.job(work, lambda *result: brought.append(result))
    assert directory.close(20)
    assert brought == []
    directory.deliver()
    assert brought[0] == (7, None)
    assert isinstance(brought[1][1], FileNotFoundError)
    assert (brought[2][0], [brought[2][1]]) == (None, list(directory.unexpected_errors))
    assert isinstance(directory.unexpected_errors[0], ValueError)


def test_a_document_is_not_written_before_work_that_was_queued_earlier(tmp_path):
    """A run's supervisor.json must not be written before its directory is made."""
    run, state = tmp_path / "run", tmp_path / "plan_state.json"
    with queued(directory := Directory()):
        directory.document(state, {"n": 1})
        directory.job(run.mkdir, lambda _, error: None)
        directory.document(run / "supervisor.json", {"n": 1})
        directory.document(state, {"n": 2})
    assert rundir.read_json(run / "supervisor.json") == {"n": 1}
    assert rundir.read_json(state) == {"n": 2}
    assert not directory.dropped


def test_a_document_whose_write_failed_is_written_with_the_next_document(tmp_path, monkeypatch):
    monkeypatch.setattr(rundir_io, "RETRY_S", 0.0)
    directory, gates, seen = Directory(), tmp_path / "gone" / "gates.json", []
    directory.document(tmp_path / "removed" / "gates.json", {"n": 0})
    directory.document(gates, {"n": 1})
    directory.call(gates.parent.mkdir)
    directory.document(tmp_path / "plan_state.json", {"n": 2})
    directory.call(lambda: seen.append((gates.exists(), (tmp_path / "plan_state.json").exists())))
    assert directory.close(20)
    assert seen == [(True, True)]


def test_a_new_process_gives_up_the_documents_of_an_earlier_run_that_is_not_at_its_path(tmp_path):
    """Writes of such documents would fail again and again, and delay the end of the launch."""

    def record(token):
        return {"environment": {environ.TOKEN: token}}

    link = SimpleNamespace(stored=lambda path: record("a") | {"name": path.name})
    directory = Directory()
    services = Services(directory, *cast(Any, [None] * 5), link=cast(Any, link))
    for run, content in (("0", record("a")), ("1", {}), ("2", record("b")), ("3", None)):
        if content is not None:
            (tmp_path / run).mkdir()
            rundir.write_json(tmp_path / run / rundir.RUN, content)
        services.write_last_documents(tmp_path / run)
    assert directory.close(20)
    assert (directory.dropped, directory.failing, directory.unwritten) == (0, "", {})
    written = [(tmp_path / str(run) / rundir.GATES).exists() for run in range(4)]
    assert written == [True, True, False, False]


def test_a_verdict_waits_for_the_current_run_whose_directory_is_away(tmp_path):
    directory, run = Directory(), tmp_path / "0-one"
    (run / "verdicts").mkdir(parents=True)
    directory.set_run(run)
    directory.call(lambda: run.rename(tmp_path / "away"))
    directory.document(run / "verdicts" / "1.json", {"n": 1})
    directory.call(lambda: (tmp_path / "away").rename(run))
    assert directory.close(20)
    assert rundir.read_json(run / "verdicts" / "1.json") == {"n": 1}


def test_the_files_of_a_former_run_are_closed_and_a_late_event_reaches_them(tmp_path):
    directory, runs = Directory(), [tmp_path / f"{number}-x" for number in range(3)]
    open_files: list[list[str]] = []

    def look() -> None:
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        found = [os.readlink(link) for link in links if os.path.lexists(link)]
        open_files.append(sorted(each for each in found if each.startswith(f"{tmp_path}/")))

    for run in runs:
        directory.call(lambda run=run: directory.make_run(run, {"v": 1}))
        directory.event(run, 1, "note", "x")
        directory.event(tmp_path, 1, "note", "x")
        directory.call(look)
    directory.event(runs[0], 1, "note", "late")
    assert directory.close(20)
    last = runs[-1]
    assert open_files[-1] == [str(last), str(last / "events.jsonl"), str(tmp_path / "events.jsonl")]
    assert [each["text"] for each in records(runs[0] / rundir.EVENTS)] == ["x", "late"]


def test_a_document_that_cannot_be_written_is_not_called_a_dropped_record(tmp_path):
    directory, events = Directory(), []
    alerts = Alerts(lambda *words, **more: events.append(words) or {}, directory)
    path = tmp_path / "gone" / "gates.json"
    directory.document(path, {"n": 1})
    directory.call(path.parent.mkdir)
    assert directory.close(20)
    alerts.check_directory()
    (text,) = (text for kind, text, *_ in events if kind == "alert")
    assert text.startswith("writes to the run directory fail (No such file or directory: ")
    assert rundir.read_json(path) == {"n": 1}


def test_failed_writes_that_a_run_has_reported_are_not_reported_again_by_its_launch(tmp_path):
    directory, events = Directory(), []
    of_launch, of_run = (
        Alerts(lambda *words, **more: events.append(words) or {}, directory) for _ in range(2)
    )
    directory.document(tmp_path / "gone" / "gates.json", {"n": 1})
    directory.call((tmp_path / "gone").mkdir)
    assert directory.close(20)
    of_run.check_directory()
    of_launch.check_directory()
    assert (list(of_run.open()), list(of_launch.open())) == ([DROPPED], [])
    assert [kind for kind, *_ in events] == ["alert"]


def test_an_alert_on_failed_writes_stays_open_in_a_new_process_until_its_writes_work(tmp_path):
    directory, events = Directory(), []
    alerts = Alerts(lambda *words, **more: events.append(words) or {}, directory)
    alerts.restore({DROPPED: {"text": "writes fail"}}, lambda name: False)
    alerts.check_directory()
    assert (list(alerts.open()), events) == ([DROPPED], [])
    alerts._dropped_at -= SETTLED_S
    alerts.check_directory()
    assert [kind for kind, *_ in events] == ["clear"]
    directory.close()
