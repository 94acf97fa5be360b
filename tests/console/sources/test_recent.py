"""The state that a reader finds in the ends of a run's files, and a `Tail` that starts late."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.sources.run import RunSource
from console.sources.tail import Tail
from tests.console.sources import directory

STEPS, RECENT = 400, 4 << 10


@pytest.fixture
def launch(tmp_path):
    """Returns a launch whose run has two ranks, and a non-finite loss in step 7."""
    path = directory.launch(tmp_path)
    run = directory.run(path / "0-first")
    for step in range(1, STEPS + 1):
        for rank in (0, 1):
            loss = "nan" if step == 7 else 2.0 / step
            directory.beat(run, rank, step, loss=loss, steps_dt_s=[0.1])
        directory.sample(
            run, ranks=[{"rank": rank, "state": "R", "rss_mib": 9.0} for rank in (0, 1)]
        )
    directory.event(run, "alert", alert="disk", level="warn", text="little room")
    return path


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr("console.sources.run_records.RECENT_BYTES", RECENT)


def told(state):
    """Returns the parts of a state that do not depend on how much was read."""
    return (
        state.state, state.why, state.step, state.attempt, state.alerts, state.ranks[0].rss_mib,
        [rank.pulse for rank in state.ranks], state.figures["loss"].value, state.behind_bytes,
    )  # fmt: skip


def test_the_ends_of_the_files_give_the_same_state_as_all_records(launch):
    whole, recent = RunSource(launch, reads="all"), RunSource(launch)
    assert told(recent.poll()) == told(whole.poll())
    assert (whole.has_all_records, recent.has_all_records) == (True, False)
    directory.beat(launch / "0-first", 0, STEPS + 1, loss=0.5)
    assert told(recent.poll()) == told(whole.poll())
    assert recent.poll().step == STEPS + 1


@given(
    st.lists(st.integers(0, 10**6), max_size=40), st.integers(0, 400),
    st.lists(st.integers(0, 10**6), max_size=5),
)  # fmt: skip
def test_a_tail_that_starts_late_has_the_last_complete_lines(
    tmp_path_factory, before, recent, after
):
    path = tmp_path_factory.mktemp("tail") / "x.jsonl"
    lines = [json.dumps({"n": number}).encode() + b"\n" for number in before]
    path.write_bytes(b"".join(lines))
    tail = Tail(path, recent_bytes=recent)
    found = [record["n"] for record in tail.poll()]
    size = sum(map(len, lines))
    assert found == before[len(before) - len(found) :]
    left_out = lines[: len(lines) - len(found)]
    assert (
        tail.left_out_bytes
        <= sum(map(len, left_out))
        <= tail.left_out_bytes + max(map(len, lines), default=0)
    )
    assert tail.left_out_bytes == max(0, size - recent - 1)
    with path.open("ab") as stream:
        stream.write(b"".join(json.dumps({"n": number}).encode() + b"\n" for number in after))
    assert [record["n"] for record in tail.poll()] == after
    assert tail.skipped == 0
