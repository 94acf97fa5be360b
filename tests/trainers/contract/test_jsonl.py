"""JSON lines: floats survive the round trip, and a heartbeat is one short line."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainers.contract import heartbeat, jsonl

GOOD = {"v": 1, "run": "r", "attempt": 1, "ts": 1.5, "rank": 0, "step": 3, "msg": "progress"}


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_every_float_makes_the_round_trip_and_the_line_is_strict_json(value):
    line = jsonl.encode({"loss": value, "list": [value]})
    record = json.loads(line, parse_constant=lambda name: pytest.fail(f"not JSON: {name}"))
    back = jsonl.number(record, "loss")
    assert back is not None
    assert (math.isnan(back) and math.isnan(value)) or back == value


def test_keys_that_json_does_not_have_become_text():
    """For example, `numpy.unique` returns such keys."""
    found = jsonl.decode(jsonl.encode({"loss": math.nan, "classes": {(1, 2): 3, 4: math.inf}}))
    assert found == {"loss": "nan", "classes": {"(1, 2)": 3, "4": "inf"}}
    found = jsonl.decode(jsonl.encode({"classes": {(1, 2): 3}}))
    assert found == {"classes": {"(1, 2)": 3}}


@given(st.lists(st.floats(0, 10), max_size=3000), st.text(max_size=3000))
@settings(max_examples=60)
def test_a_line_is_never_longer_than_4_kib_and_stays_a_heartbeat(durations, text):
    line = heartbeat.encode(GOOD | {"steps_dt_s": durations, "note": text})
    assert len(line) <= jsonl.MAX_HEARTBEAT_BYTES
    assert line.count(b"\n") == 1
    record = jsonl.decode(line)
    assert record is not None
    assert heartbeat.accept(record) is not None
    cut = json.loads(heartbeat.encode(GOOD | {"steps_dt_s": [0.1234567] * 2000}))
    assert (cut["cut"], 10 < len(cut["steps_dt_s"]) < 2000) == ("steps_dt_s", True)


def test_a_long_record_loses_first_the_figures_that_the_contract_does_not_name():
    own = {f"layers.{i}.grad_norm": 0.1234567890123456 for i in range(200)}
    known = {"loss": 2.5, "toks_per_s": 9.0, "grad_norm": 1.0, "steps_dt_s": [0.1]}
    found = json.loads(heartbeat.encode({**known, **own, **GOOD}))
    assert found == known | GOOD | {"cut": "other figures"}
    found = json.loads(heartbeat.encode(GOOD | known | {"loss": "x" * 5000}))
    assert found == GOOD | {"cut": "all figures"}
