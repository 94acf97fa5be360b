"""A DDP program that is not ours, joined with three lines: watched, dumped, flagged, halted."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from console import actions, request_schema
from console.plans import gates
from console.sources import process
from trainers.contract import rundir
from trainers.contract.dumps import END_MARK
from trainers.contract.errors import RefusedError

from .conftest import PROGRAMS, phase


@pytest.fixture(scope="module")
def launched(begin):
    """Two phases that wait for each other; the tests below follow its life in order."""
    started = begin(
        phase("one", "foreign_ddp.py", 60, gates={"steps_done": 50, "no_stall": True}),
        phase("two", "foreign_ddp.py", 100_000, gates={"steps_done": 1}),
        between="ask",
    )
    started.wait_steps(3)
    return started


def test_the_program_is_short_and_not_ours():
    lines = (PROGRAMS / "foreign_ddp.py").read_text().splitlines()
    code = [line for line in lines[2:] if line.strip()]
    assert len(code) <= 25
    assert sum("run" in line and ("join" in line or "run.step" in line) for line in code) == 2


def test_ranks_are_found_and_sampled_every_second(launched):
    assert sorted(launched.pids()) == [0, 1]
    launched.wait(lambda: len([s for s in launched.samples() if s["ranks"]]) >= 3)
    samples = launched.samples()
    seconds = [int(sample["mono"]) for sample in samples]
    assert len(set(seconds)) == len(seconds)
    assert seconds[-1] - seconds[0] < 2 * len(seconds)
    newest = launched.samples()[-1]
    assert newest["gpus"] == []
    assert newest["disk"]["free_gib"] > 0
    for row in newest["ranks"]:
        assert row["state"] in "RSD"
        assert row["rss_mib"] > 50
        assert row["pulse"]["step"] >= 1


def test_a_flag_for_the_next_phase_is_in_its_workers_and_not_in_this_ones(launched):
    answer = launched.ask("set-flag", name="NCCL_DEBUG", value="warn")
    assert (answer["ok"], answer["text"]) == (True, "NCCL_DEBUG=WARN for two only")
    assert launched.ask("set-flag", name="NSA_DDP_BUCKET_MB", value=4)["ok"]
    assert launched.ask("set-flag", name="NSA_DDP_BUCKET_MB")["ok"]
    assert not launched.ask("set-flag", name="NCCL_DEBUG", value="shout")["ok"]
    assert list(launched.plan_state["next_flags"]) == ["NCCL_DEBUG"]
    for pid in launched.pids().values():
        assert "NCCL_DEBUG" not in process.environment(pid)


def test_the_next_phase_waits_for_proceed_and_is_born_with_the_flag(launched):
    refused = launched.ask("proceed")
    assert (refused["ok"], "one is still running" in refused["text"]) == (False, True)
    pid = launched.plan_state["supervisor"]["pid"]
    with pytest.raises(RefusedError, match=rf"has a supervisor .*pid {pid} .* to take over$"):
        actions.adopt(launched.path)
    launched.wait(lambda: launched.plan_state["state"] == "waiting")
    assert launched.plan_state["phases"][0]["result"] == "pass"
    gates = rundir.read_json(launched.run(0) / rundir.GATES)["gates"]
    assert {g["name"]: g["result"] for g in gates} == {"steps_done": "pass", "no_stall": "pass"}
    assert not launched.ask("proceed", phase="three")["ok"]
    assert launched.ask("proceed", phase="two")["ok"]
    launched.wait_steps(5, index=1)
    for pid in launched.pids(1).values():
        assert process.environment(pid)["NCCL_DEBUG"] == "WARN"
    flag = rundir.read_json(launched.run(1) / rundir.RUN)["flags"]["NCCL_DEBUG"]
    assert flag == {"value": "WARN", "origin": "operator tester"}
    assert "NCCL_DEBUG" not in rundir.read_json(launched.run(0) / rundir.RUN)["flags"]
    assert launched.plan_state["next_flags"] == {}


def test_the_live_directory_of_the_former_phase_is_gone(launched):
    assert not launched.state(0)["live_dir"]
    assert Path(launched.state(1)["live_dir"]).is_dir()


def test_the_sign_of_life_is_written_every_second(launched):
    path = Path(launched.state(1)["live_dir"]) / rundir.LIVE_STATUS
    first = launched.wait(lambda: (s := rundir.read_json(path)) and s["state"] == "running" and s)
    launched.wait(lambda: rundir.read_json(path)["mono"] > first["mono"], 3)
    assert first["run"].endswith("1-two")
    assert first["blocked_s"] < 1


def test_the_document_names_every_key_that_is_written(launched):
    """docs/run-directory.md is what other readers go by."""
    text = (PROGRAMS.parents[1] / "docs" / "run-directory.md").read_text()
    words = set(re.findall(r"[a-z][a-z0-9_]*", text)) | set(gates.RULES)
    run = launched.run(1)
    written = [
        *(rundir.read_json(launched.path / name) for name in (rundir.PLAN, rundir.PLAN_STATE)),
        *(rundir.read_json(run / name) for name in (rundir.RUN, rundir.SUPERVISOR)),
        rundir.read_json(Path(launched.state(1)["live_dir"]) / rundir.LIVE_STATUS),
        rundir.read_json(launched.run(0) / rundir.GATES),
        *launched.events(), *launched.events(0), *launched.samples(1)[-1:],
    ]  # fmt: skip
    for record in written:
        assert {key for key in keys_of(record) if key.islower()} <= words
    for action in request_schema.TABLE:
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


def test_a_dump_holds_the_stacks_of_both_ranks(launched):
    answer = launched.ask("dump")
    assert answer["ok"], answer
    assert len(answer["detail"]) == 2
    for rank in (0, 1):
        (path,) = launched.run(1).glob(f"stackdump_rank{rank}_*.txt")
        text = path.read_text()
        assert "foreign_ddp.py" in text
        assert END_MARK in text
    assert sum(e["kind"] == "answer" for e in launched.events(1)) == 1


def test_sigusr1_to_the_whole_process_group_harms_nothing(launched):
    before = launched.samples(1)[-1]["ranks"][0]["pulse"]["step"]
    agent = launched.state(1)["torchrun"]["pid"]
    for _ in range(20):
        os.killpg(agent, signal.SIGUSR1)
        for pid in launched.pids(1).values():
            os.killpg(pid, signal.SIGUSR1)
        time.sleep(0.01)
    os.kill(launched.plan_state["supervisor"]["pid"], signal.SIGUSR1)
    os.kill(launched.plan_state["supervisor"]["pid"], signal.SIGHUP)
    launched.wait(lambda: launched.samples(1)[-1]["ranks"][0]["pulse"]["step"] > before + 10)
    assert launched.state(1)["state"] == "running"


def test_a_stopped_rank_is_named_with_its_phase_and_cleared_when_it_goes_on(launched):
    pid = launched.pids(1)[1]
    os.kill(pid, signal.SIGSTOP)
    begun = time.monotonic()
    try:
        found = launched.wait_state("stalled", index=1, timeout_s=20)
        assert time.monotonic() - begun < 20
        verdict = found["verdict"]
        assert (verdict["rank"], verdict["cause"], verdict["phase"]) == (1, "stopped", "forward")
        assert "rank 1 is stopped" in verdict["sentence"]
        assert "rank 0 waits" in verdict["sentence"]
        assert list((launched.run(1) / rundir.VERDICTS).iterdir())
        alert = next(e for e in launched.events(1) if e["kind"] == "alert")
        assert (alert["alert"], alert["key"], alert["level"]) == ("stall", "3", "crit")
        assert launched.ask("ack", alert="stall")["ok"]
        refused = launched.ask("dump", rank=1)
        assert not refused["ok"]
        assert "stopped" in refused["text"]
    finally:
        os.kill(pid, signal.SIGCONT)
    launched.wait_state("running", index=1, timeout_s=10)
    assert launched.state(1)["verdict"] is None
    assert any(e["kind"] == "clear" and e["alert"] == "stall" for e in launched.events(1))


def test_halt_stops_both_ranks_at_the_same_step_and_ends_the_plan(launched):
    assert launched.ask("halt", launched.run(1))["ok"]
    ended = launched.wait_end()
    assert launched.state(1)["state"] == "halted"
    assert "halted at step" in ended["why"]
    judged = rundir.read_json(launched.run(1) / rundir.GATES)["result"]
    assert ended["phases"][1]["result"] == judged
    assert f"two halted, gates {judged}: " in [e["text"] for e in launched.events()][-2]
    steps = set()
    for rank in (0, 1):
        lines = rundir.heartbeat(launched.run(1), rank).read_text().splitlines()
        steps |= {r["step"] for r in map(json.loads, lines) if r["msg"] == "halt"}
    assert len(steps) == 1
    assert not process.with_token(launched.token(1))
    assert not list(Path("/dev/shm").glob(f"*{launched.token(1)}*"))
    launched.wait(lambda: not rundir.is_alive(ended["supervisor"]), 5)
