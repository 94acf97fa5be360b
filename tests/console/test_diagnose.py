"""`nsa-console diagnose`: with a supervisor, after its death, and for other directories."""

from __future__ import annotations

import json
import os
import re
import tarfile
import time
from pathlib import Path

import pytest

from console.action_table import ACTIONS
from console.commands import diagnose
from console.diagnose.evidence import Evidence
from console.model import RunState, Verdict
from console.sources import verdicts
from console.sources.run import RunSource
from console.status_text import status_lines
from console.supervisor import offline
from console.tui.confirmations import question
from tests.console.sources import directory
from tests.console.test_cli import cli
from tests.launches import PROGRAMS, STUB, Begin, Started, phase
from trainers.contract import rundir

STALLS_AT = next(
    number for number, line in enumerate((PROGRAMS / "member.py").read_text().splitlines(), 1)
    if "time.sleep(3600)" in line
)  # fmt: skip
WATCH = {"stall_floor_s": 1, "startup_s": 60, "grace_s": 1}


def diagnosed(path: Path, *words: str, root: Path | None = None) -> tuple[int, dict]:
    done = cli(root or path.parent, "diagnose", str(path), "--json", *words)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.fixture(scope="module")
def stalled(begin: Begin, tmp_path_factory) -> list[Started]:
    """Two launches under one root that stall at the same line; the first has the older verdict."""
    root = tmp_path_factory.mktemp("root") / "artifacts"
    hang = phase("one", "member.py", 100_000, "hang")
    found = [begin(hang, root=root, watch=WATCH, shell=STUB) for _ in range(2)]
    for each in found:
        each.wait(lambda each=each: has_verdict(each.path / "0-one"))
    return sorted(found, key=lambda each: verdicts.newest(each.path / "0-one").ts)


def has_verdict(run: Path) -> bool:
    """Returns whether the newest verdict names the line where rank 1 sleeps, and a dump exists.

    A slow start may have caused an earlier stall with another verdict.
    """
    found = verdicts.newest(run)
    named = found is not None and found.place == f"member.py:{STALLS_AT}"
    return named and any(run.glob("stackdump_rank1_*"))


def test_the_verdict_of_the_supervisor_has_the_run_that_had_it_before_and_no_unknown_cost(stalled):
    code, found = diagnosed(stalled[1].path, root=stalled[1].path.parents[1])
    assert (code, found["outlook"], found["source"]) == (1, "stalled", "supervisor")
    assert (found["verdict"]["rank"], found["verdict"]["cause"]) == (1, "sleep")
    assert found["verdict"]["place"] == f"member.py:{STALLS_AT}"
    assert found["cost"] == "", "a foreign program may save without a record"
    seen = found["seen_before"]
    assert seen["run"] == stalled[0].state()["run"]
    assert (seen["cause"], seen["place"]) == ("sleep", f"member.py:{STALLS_AT}")


def test_the_bundle_of_a_live_run_has_its_verdict_and_its_stacks(stalled, tmp_path):
    output = tmp_path / "live.tar.gz"
    done = cli(tmp_path, "bundle", str(stalled[1].path), "--output", str(output))
    assert done.returncode == 0, done.stderr
    with tarfile.open(output) as tar:
        names = [name.partition("/")[2] for name in tar.getnames()]
        said = tar.extractfile("live/diagnosis.txt").read().decode()
    assert "rank 1 has been stalled" in said
    assert any(name.startswith("run/verdicts/") for name in names)
    assert any(name.startswith("run/stackdump_rank1_") for name in names)


def test_a_run_that_has_failed_is_not_healthy_while_its_launch_still_ends(tmp_path):
    """A full disk delays the end of the launch; the ranks are dead and have no exit record."""
    path = directory.launch(tmp_path)
    why = "rank 1: checkpoint error at step 25 (code 15)"
    run = directory.run(path / "0-first", state="failed", why=why)
    workers = [
        {"rank": rank, "local_rank": rank, **directory.DEAD, "exit": None} for rank in (0, 1)
    ]
    directory.change(run / rundir.SUPERVISOR, workers=workers)
    for rank in (0, 1):
        directory.beat(run, rank, 10)
    with directory.owned(path):
        assert RunSource(path).poll().launch.under_way
        code, found = diagnosed(path)
    assert (code, found["outlook"]) == (5, "ended")
    assert found["why"].startswith(f"toy/0-first is failed: {why}")


def test_a_run_with_a_dead_rank_is_not_called_healthy(tmp_path):
    run = directory.run(tmp_path / "0-first")
    dead = directory.DEAD | {"host": rundir.host_name()}
    workers = [{"rank": rank, "local_rank": rank, **process} | {"exit": None}
               for rank, process in enumerate((rundir.identity(), dead))]  # fmt: skip
    directory.change(run / rundir.SUPERVISOR, workers=workers)
    for rank in (0, 1):
        directory.beat(run, rank, 10, pid=workers[rank]["pid"])
    found = offline.diagnosis(run)
    assert (found.outlook, found.exit_code) == ("unknown", 1)
    assert found.why == "whether the run progresses is not known: rank 1 has ended"


def test_without_a_supervisor_the_evidence_is_collected_and_no_rank_is_signalled(stalled):
    run = stalled[0]
    run.kill_supervisor()
    code, found = diagnosed(run.path)
    assert (code, found["source"]) == (1, "evidence collected now")
    verdict = found["verdict"]
    assert (verdict["rank"], verdict["cause"]) == (1, "sleep"), verdict
    assert verdict["place"] == f"member.py:{STALLS_AT}"
    words = cli(run.path.parent, "diagnose", str(run.path))
    assert "  next: see " in words.stdout
    assert "    ? no flight record of ranks 0-1" in words.stdout


def test_a_state_without_its_verdict_is_diagnosed_by_the_command(tmp_path):
    """A full disk keeps supervisor.json, which has the verdict on an earlier stall."""
    launch = directory.launch(tmp_path)
    run = directory.run(launch / "0-first", 1, "stalled", verdict=VERDICT)
    directory.change(run / rundir.SUPERVISOR, updated_ts=time.time() - 5)
    for step in (1, 2, 3):
        directory.beat(run, 0, step, pid=os.getpid(), ts=time.time() - 200)
    directory.event(run, "state", attempt=1, state="stalled", why="rank 0 is slow")
    with directory.owned(launch):
        found = offline.diagnosis(launch)
    assert (found.outlook, found.source) == ("stalled", "evidence collected now")
    assert found.verdict.rank == 0


def test_an_ended_run_shows_its_last_verdict(stalled):
    run = stalled[1]
    run.ask("stop")
    run.wait_over()
    code, found = diagnosed(run.path)
    assert (code, found["outlook"]) == (4, "ended")
    assert found["verdict"]["cause"] == "sleep"
    assert found["age_s"] > 0


def test_a_second_start_by_hand_with_fewer_ranks_does_not_wait_for_a_rank_of_the_first(tmp_path):
    """Both ranks were killed; a program with `join` has attempt 1 in each start by hand."""
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    for step in range(1, 15):
        for rank in (0, 1):
            directory.beat(run, rank, step, world=2, ts=time.time() - 1000 + step)
    assert RunSource(run).poll().world == 2
    for step in range(1, 41):
        directory.beat(run, 0, step, world=1)
    found = offline.diagnosis(run)
    assert (found.outlook, [each.rank for each in found.ranks]) == ("no stall", [0]), found
    directory.beat(run, 0, 40, "exit", world=1, exit_code=0)
    state = RunSource(run).poll()
    assert (state.state, state.world) == ("completed", 1)


def test_a_second_start_by_hand_after_a_reboot_is_not_a_copy_of_the_first(tmp_path):
    """Its records have small numbers and small monotonic times, but later clock times."""
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    for step in range(1, 41):
        directory.beat(run, 0, step, world=1, ts=time.time() - 86400 + step, mono=3e6 + step)
    reader = RunSource(run)
    assert reader.poll().step == 40
    for number, step in enumerate(range(41, 61), 1):
        ts = time.time() - 21 + number
        directory.beat(run, 0, step, world=1, n=number, ts=ts, mono=500.0 + number)
    assert (reader.poll().step, RunSource(run).poll().step) == (60, 60)
    assert offline.diagnosis(run).outlook == "no stall"


def test_a_plan_that_waits_for_its_operator_says_so(tmp_path):
    launch = directory.launch(tmp_path)
    directory.run(launch / "0-first", state="completed")
    why = "first is done; to start second: nsa-console do toy proceed"
    directory.change(launch / rundir.PLAN_STATE, state="waiting", why=why)
    with directory.owned(launch):
        code, found = diagnosed(launch)
    assert (code, found["why"], found["ranks"]) == (0, f"the launch waits: {why}", [])
    assert "known" not in cli(tmp_path / "none", "diagnose", "nope").stderr


def test_a_run_that_begins_to_end_while_evidence_is_collected_is_ending(tmp_path, monkeypatch):
    run = directory.run(directory.launch(tmp_path) / "0-first")
    for step in (1, 2, 3):
        directory.beat(run, 0, step, pid=os.getpid(), ts=time.time() - 1000)

    def collect(*_: object) -> Evidence:
        directory.change(run / rundir.SUPERVISOR, state="restarting", why="exit 1")
        return Evidence()

    monkeypatch.setattr(offline, "collect", collect)
    found = offline.diagnosis(run)
    assert (found.outlook, found.why) == ("ending", "the ranks are being ended: exit 1")


def test_a_record_that_names_another_process_is_no_proof(tmp_path):
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    for step in (1, 2, 3):
        directory.beat(run, 0, step, pid=os.getpid(), ts=time.time() - 1000)
    code, found = diagnosed(run)
    assert code == 1
    assert [each["pid"] for each in found["ranks"]] == [None]
    assert "no process evidence of rank 0" in found["missing"]


def test_a_legacy_run_is_stalled_by_its_records_and_a_silent_program_is_not_known(tmp_path):
    code, found = diagnosed(directory.legacy(tmp_path / "old", 10.0, 1000.0))
    assert (code, found["outlook"], found["verdict"]["sure"]) == (1, "stalled", "low")
    launch = directory.launch(tmp_path / "artifacts")
    directory.run(launch / "0-first", state="starting", since_ts=time.time() - 1000)
    code, found = diagnosed(launch)
    assert (code, found["outlook"]) == (1, "unknown")
    assert "ranks 0-1: no pulse and no record shows progress" in found["why"]


def test_any_verdict_file_of_another_run_is_harmless(tmp_path):
    for stamp, text in (
        ("20261121-030001", "[" * 9000),
        ("20261121-030002", '{"ts": [], "rank": {}}'),
    ):
        other = directory.run(directory.launch(tmp_path, stamp=stamp) / "0-first")
        (other / "verdicts").mkdir()
        (other / "verdicts" / "1.json").write_text(text)
        os.mkfifo(other / "verdicts" / "2.json")
        (other / "verdicts" / "3.json").symlink_to("/dev/zero")
    run = directory.run(tmp_path / "0-single", state="crashed")
    (run / "verdicts").mkdir()
    directory.document(run / "verdicts" / "9.json", {"ts": 9.0, "cause": "lock", "place": "a.py:1",
                                                     "sentence": "\x1b[31mred"})  # fmt: skip
    done = cli(tmp_path, "diagnose", str(run))
    assert done.returncode == 5
    assert "red" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


VERDICT = {
    "ts": 0.0, "sentence": "rank 1 has been stalled in forward of step 43", "rank": 1,
    "cause": "stopped", "phase": "forward", "step": 43, "sure": "high",
    "action": "kill -CONT 4242 resumes it; a stop costs all 43 steps (no checkpoint)",
}  # fmt: skip


def resumed(tmp_path: Path, state: str, **supervisor) -> Path:
    """Writes a run that resumed from step 33 of an earlier run, and has saved no checkpoint."""
    launch = directory.launch(tmp_path)
    run = directory.run(launch / "0-first", state=state, **supervisor)
    for rank in (0, 1):
        directory.beat(run, rank, 33, "resume")
        for step in range(34, 44):
            directory.beat(run, rank, step)
    return launch


@pytest.mark.parametrize(
    ("phase", "halt"),
    [("forward", "saves first, but only when all ranks step again"),
     ("save", "loses no step, but waits for the end of this save")],
)  # fmt: skip
def test_the_cost_of_a_stop_counts_the_checkpoint_from_which_the_run_resumed(tmp_path, phase, halt):
    cost = f"a stop costs 10 steps (newest checkpoint: step 33); a halt {halt}"
    action = f"kill -CONT 4242 resumes it; {cost}"
    verdict = VERDICT | {"ts": time.time(), "phase": phase, "action": action}
    launch = resumed(tmp_path, "stalled", verdict=verdict)
    with directory.owned(launch):
        state = RunSource(launch).poll()
        done = cli(tmp_path, "diagnose", str(launch))
    assert (state.resumed_step, state.saved_step) == (33, 33)
    assert f"next: {action}" in done.stdout
    assert "  cost:" not in done.stdout
    facts = dict(question(state, ACTIONS["stop"]).facts)
    assert facts["loses"] == "10 steps (newest checkpoint: step 33)"
    assert facts["saved"] == "step 33, from which this run resumed"
    assert "  checkpoint step 33, from which this run resumed" in list(status_lines(state))


@pytest.mark.parametrize("state", ["halted", "crashed"])
def test_an_ended_run_has_its_last_verdict_as_the_past_and_no_advice_on_processes(tmp_path, state):
    command = "kill -CONT 4242 resumes it"
    sentence = f"{VERDICT['sentence']}: it is stopped; {command}; rank 0 waits"
    verdict = VERDICT | {"ts": time.time(), "sentence": sentence}
    launch = resumed(tmp_path, state, verdict=verdict)
    why = "9 s in forward on rank 1 (stopped); the ranks step again"
    run = launch / "0-first"
    (run / rundir.VERDICTS).mkdir()
    ended = verdict | {"end": why, "end_ts": time.time()}
    directory.document(run / rundir.VERDICTS / "1.json", ended)
    directory.change(launch / rundir.PLAN_STATE, state="ended", why="over")
    for words in (["diagnose"], ["diagnose", "--json"], ["status", "--json"]):
        assert command not in cli(tmp_path, *words, str(launch)).stdout
    for name in ("diagnose", "status"):
        done = cli(tmp_path, name, str(launch))
        assert command not in done.stdout, done.stdout
        assert "it is stopped; rank 0 waits" in done.stdout
        assert "next:" not in done.stdout
        assert "a stop costs" not in done.stdout
        assert re.search(rf"  to resume, run: \S+.* resume {launch}\n", done.stdout)
    said = cli(tmp_path, "diagnose", str(launch)).stdout
    assert f"ago; ended: {why}): rank 1 has been stalled" in said


def test_a_verdict_from_the_future_has_no_age(tmp_path):
    verdict = Verdict(time.time() + 3600, "rank 1 hangs", "peers", 1, "forward", 9, "high")
    state = RunState("toy/0-first", str(tmp_path), "stalled", "")
    found = offline.Diagnosis("stalled", state, "", verdict, "supervisor")
    assert diagnose.as_json(found, tmp_path)["age_s"] is None
