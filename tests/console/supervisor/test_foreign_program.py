"""A foreign DDP program, instrumented with three lines: samples, dumps, a flag and a halt."""

from __future__ import annotations

import itertools
import os
import re
import signal
from pathlib import Path

import pytest

from console import action_table, actions
from console.plans import gates
from console.sources import process
from tests.launches import HANG_GUARD_S, PROGRAMS, phase
from trainers.contract import jsonl, rundir
from trainers.contract.dumps import END_MARK
from trainers.contract.errors import RefusedError


@pytest.fixture(scope="module")
def running(begin):
    started = begin(phase("one", "foreign_ddp.py", 100_000))
    started.wait_steps(3)
    return started


def test_ranks_are_found_and_sampled_every_second(running):
    assert sorted(running.pids()) == [0, 1]
    found = [running.wait(lambda: [s for s in running.samples() if s["ranks"]])[-1]]
    while len(found) < 3 or not is_every_second([sample["mono"] for sample in found[-3:]]):
        found.append(running.wait(lambda: next_after(running.samples(), found[-1])))
        assert len(found) < HANG_GUARD_S
    assert found[-1]["disk"]["free_gib"] > 0
    for row in found[-1]["ranks"]:
        assert row["state"] in "RSDT"
        assert row["rss_mib"] > 50
        assert row["pulse"]["step"] >= 1


def next_after(records, last):
    return next((each for each in records if each["mono"] > last["mono"]), None)


def is_every_second(times) -> bool:
    """Returns whether all times are about 1 s apart; on a busy machine, some may not be."""
    return all(0.5 < after - before < 1.5 for before, after in itertools.pairwise(times))


def test_the_supervisor_heartbeat_is_written_every_second(running):
    path = Path(running.state()["live_dir"]) / rundir.LIVE_STATUS
    found = [running.wait(lambda: rundir.read_json(path))]
    while len(found) < 3 or not is_every_second([status["mono"] for status in found[-3:]]):
        found.append(running.wait(lambda: next_after([rundir.read_json(path)], found[-1])))
        assert len(found) < HANG_GUARD_S
    assert found[0]["run"].endswith("0-one")
    assert min(status["blocked_s"] for status in found) < 1


def test_a_dump_holds_the_stacks_of_both_ranks(running):
    answer = running.ask("dump")
    assert answer["ok"], answer
    assert len(answer["detail"]) == 2
    for rank, line in enumerate(answer["detail"]):
        (path,) = running.run().glob(f"stackdump_rank{rank}_*.txt")
        assert line == f"rank {rank} dumped: {path}"
        text = path.read_text()
        assert "foreign_ddp.py" in text
        assert END_MARK in text


def test_a_stopped_rank_is_named_with_its_phase_and_cleared_when_it_continues(running):
    pid = running.pids()[1]
    os.kill(pid, signal.SIGSTOP)
    try:
        verdict = running.wait_state("stalled")["verdict"]
        assert (verdict["rank"], verdict["cause"], verdict["phase"]) == (1, "stopped", "step")
        assert verdict["sentence"].startswith("rank 1 has been stalled in step")
        assert "it is stopped (SIGSTOP); kill -CONT" in verdict["sentence"]
        assert "rank 0 waits" in verdict["sentence"]
        heartbeat = Path(running.state()["live_dir"]) / rundir.LIVE_STATUS
        running.wait(lambda: (rundir.read_json(heartbeat) or {})["verdict"] is not None)
        running.wait(lambda: list((running.run() / rundir.VERDICTS).iterdir()))
        alert = running.wait(lambda: running.alerts("stall"))[0]
        assert (alert["kind"], alert["key"], alert["level"]) == ("alert", "3", "crit")
        assert running.ask("ack", alert="stall")["ok"]
        refused = running.ask("dump", rank=1)
        assert not refused["ok"]
        assert "stopped" in refused["text"]
    finally:
        os.kill(pid, signal.SIGCONT)
    running.wait(lambda: (s := running.state())["state"] == "running" and s["verdict"] is None)
    running.wait(lambda: running.alerts("stall")[-1]["kind"] == "clear")


def check_that_the_next_phase_gets_the_flag(started, go):
    answer = started.ask("set-flag", name="NCCL_DEBUG", value="warn")
    assert (answer["ok"], answer["text"]) == (True, "NCCL_DEBUG=WARN for two only")
    ours = started.ask("set-flag", name="NSA_DDP_BUCKET_MB", value=4)
    ignored = "; it starts a foreign program, which may ignore this flag"
    assert (ours["ok"], ours["text"]) == (True, f"NSA_DDP_BUCKET_MB=4 for two only{ignored}")
    assert started.ask("set-flag", name="NSA_DDP_BUCKET_MB")["ok"]
    assert not started.ask("set-flag", name="NCCL_DEBUG", value="shout")["ok"]
    late = started.ask("set-flag", name="NCCL_DEBUG", value="info", phase="one")
    text = "the next phase is 'two', not 'one'; nothing was changed"
    assert (late["ok"], late["text"]) == (False, text)
    started.wait(lambda: list(started.plan_state["next_flags"]) == ["NCCL_DEBUG"])
    every = started.ask("set-flag", name="NSA_TB_DISABLE", value=1, phases="all")
    text = f"NSA_TB_DISABLE=1 for two and all later phases{ignored}"
    assert (every["ok"], every["text"]) == (True, text)
    refused = started.ask("proceed")
    assert (refused["ok"], "one is running" in refused["text"]) == (False, True)
    go.touch()
    started.wait(lambda: started.plan_state["state"] == "waiting")
    assert not started.ask("proceed", phase="three")["ok"]
    assert started.ask("proceed", phase="two")["ok"]
    started.wait_steps(5, index=1)
    flags = [rundir.read_json(started.run(index) / rundir.RUN)["flags"] for index in (0, 1)]
    assert "NCCL_DEBUG" not in flags[0]
    assert flags[1]["NCCL_DEBUG"] == {"value": "WARN", "origin": "operator tester"}
    for pid in started.pids(1).values():
        assert process.environment(pid)["NCCL_DEBUG"] == "WARN"
    assert list(started.plan_state["next_flags"]) == ["NSA_TB_DISABLE"]
    assert flags[1]["NSA_TB_DISABLE"]["origin"] == "operator tester"


def check_that_the_guide_names_every_key(started):
    text = (PROGRAMS.parents[1] / "docs" / "run-directory.md").read_text()
    words = set(re.findall(r"[a-z][a-z0-9_]*", text)) | set(gates.RULES)
    run = started.run(1)
    written = [
        *(rundir.read_json(started.path / name) for name in (rundir.PLAN, rundir.PLAN_STATE)),
        *(rundir.read_json(run / name) for name in (rundir.RUN, rundir.SUPERVISOR)),
        rundir.read_json(Path(started.state(1)["live_dir"]) / rundir.LIVE_STATUS),
        rundir.read_json(started.run(0) / rundir.GATES),
        *started.events(), *started.events(0), *started.samples(1)[-1:],
    ]  # fmt: skip
    for record in written:
        assert {key for key in keys_of(record) if key.islower()} <= words
    for action in filter(lambda row: row.mailboxes, action_table.TABLE):
        wanted = [argument.name for argument in action.args] + [*action.mailboxes]
        rows = [line for line in text.splitlines() if line.startswith(f"| `{action.name}` |")]
        assert any(all(word in row for word in wanted) for row in rows), action.name


def keys_of(value):
    """Yields the keys at every depth."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from keys_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from keys_of(inner)


def test_two_phases_with_a_flag_between_them_and_a_halt(begin, tmp_path):
    """This test has one launch for all checks, because a launch is slow."""
    started = begin(
        phase("one", "foreign_ddp.py", 60, tmp_path / "go",
              gates={"steps_done": 50, "no_stall": True}),
        phase("two", "foreign_ddp.py", 100_000, gates={"steps_done": 1}),
        between="ask", watch={"stall_floor_s": 2 * HANG_GUARD_S, "grace_s": 3},
    )  # fmt: skip
    started.wait_steps(3)
    pid = started.owner["pid"]
    with pytest.raises(RefusedError, match=rf"has a supervisor .*pid {pid} .* can be adopted$"):
        actions.adopt(started.path)
    check_that_the_next_phase_gets_the_flag(started, tmp_path / "go")
    check_that_the_guide_names_every_key(started)
    found = rundir.read_json(started.run(0) / rundir.GATES)["gates"]
    assert {g["name"]: g["result"] for g in found} == {"steps_done": "pass", "no_stall": "pass"}
    assert started.ask("halt", started.run(1))["ok"]
    ended = started.wait_end()
    assert [entry["state"] for entry in ended["phases"]] == ["completed", "halted"]
    assert "halted at step" in ended["why"]
    records = [
        jsonl.decode(line) for rank in (0, 1)
        for line in rundir.heartbeat(started.run(1), rank).read_bytes().splitlines()
    ]  # fmt: skip
    assert len({r["step"] for r in records if r["msg"] == "halt"}) == 1
    assert not process.with_token(started.token(1))
    assert not list(Path("/dev/shm").glob(f"*{started.token(1)}*"))
    started.wait(lambda: not rundir.is_alive(ended["supervisor"]))
