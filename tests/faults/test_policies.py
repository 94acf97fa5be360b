"""Faults to which a policy reacts: restarts and watch rules."""

from __future__ import annotations

import itertools
import json

import pytest

from console.sources.run import RunSource
from tests.faults.scene import sentence_of
from tests.faults.test_drilled import trainer
from tests.launches import STUB

pytestmark = pytest.mark.slow

ALWAYS_KILLED = """
import os, signal
from trainers.contract.member import join
run = join()
for step in range(1, 4):
    run.step(step)
os.kill(os.getpid(), signal.SIGKILL)
"""
BACKOFF_S, ATTEMPTS = 0.5, 4


@pytest.mark.fault("29")
def test_a_run_that_always_dies_is_given_up_after_waits_that_double(scene, begin, tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(ALWAYS_KILLED)
    started = begin(
        {"name": "one", "script": str(script)}, nproc=1, shell=STUB,
        restart={"when": "crash", "attempts": ATTEMPTS, "backoff_s": BACKOFF_S},
    )  # fmt: skip
    started.wait_end()
    changes = [event for event in started.events(0) if event["kind"] == "state"]
    waits = []
    for now, after in itertools.pairwise(changes):
        if now["state"] == "restarting":
            waits.append(BACKOFF_S * 2 ** len(waits))
            says = f"attempt {len(waits) + 1} starts in {waits[-1]:g} s with the same command"
            assert says in now["text"]
            assert after["mono"] - now["mono"] >= waits[-1]
    assert waits == [0.5, 1.0, 2.0]
    why = scene.ended(started, "crashed", 5)
    assert f"not restarted: {ATTEMPTS} attempts without a new checkpoint" in why
    scene.note(why)


OTHERS_S, SLOWER_S = 0.1, 0.035


@pytest.mark.fault("34")
def test_a_rank_that_is_slower_is_named_and_never_killed(scene, begin):
    started = begin(
        trainer(f"slow@1:all:{OTHERS_S},slow@20:1:{SLOWER_S}", train__steps=100_000),
        watch={"stall_floor_s": 2, "startup_s": 60, "grace_s": 2,
               "rules": {"imbalance": {"for_s": 3, "action": "warn"}}},
    )  # fmt: skip
    started.wait_steps(1)
    pids, source, seen = started.pids(), RunSource(started.path), sentence_of("imbalance")
    words = started.wait(lambda: seen(source.poll()))
    told = next(event for event in started.events(0) if event.get("alert") == "imbalance")
    assert words.startswith("rank 1 takes 1.")
    assert " times as long as the other ranks in fetch and forward, mostly in forward (" in words
    scene.goes_on(started, pids)
    assert not [event for event in started.events(0) if event["kind"] in ("verdict", "watch")]
    drill = next(json.loads(line) for line in
                 (started.run() / "heartbeat_rank1.jsonl").read_text().splitlines()
                 if '"fires"' in line and f"slow@20:1:{SLOWER_S}" in line)  # fmt: skip
    assert started.ask("halt")["ok"]
    started.wait_end()
    scene.note(words, told["ts"] - drill["ts"])
