"""The report of a launch, and the gates of a run that has not ended."""

from __future__ import annotations

import json
import random
import re
import xml.etree.ElementTree as ET

import pytest

from console.plans import line_chart, report
from console.sources.rank_totals import FIGURES
from console.sources.series import Series
from console.sources.verdicts import REPLACED
from tests.console.sources import directory
from tests.console.sources.test_verdicts import say
from tests.console.sources.written_runs import HOSTILE as DOCUMENTS
from tests.console.sources.written_runs import places, put
from tests.console.test_cli_answers import said
from tests.console.test_go import BOUNDS, PASSED, plan_gates
from trainers.contract import rundir

SLOW = {"name": "toks_per_s_50_above", "value": 400.0, "unit": "tok/s", "bound": "> 900",
        "window": "surviving steps, last 20 steps", "source": "heartbeat_rank0.jsonl",
        "result": "fail", "override": "A shared node."}  # fmt: skip
HOSTILE = "a|b <script>alert(1)</script> [x](http://e) \x1b]0;t\x07 ![i](u) `c`"


def recorded(launch, **more):
    """Writes a run of 20 steps with 800 tokens and 2 s each, and an override of its speed gate."""
    gates = BOUNDS | {"toks_per_s_50_above": {"bound": 900, "override": "A shared node."}}
    run = directory.completed(
        launch / "0-first", gates, [*PASSED, SLOW],
        figures=lambda step: {"loss": 3.0 - step / 10, "toks_per_s": 400.0, "steps_dt_s": [2.0],
                              "dt_fetch_s": 0.25, "sel_overlap": 0.75,
                              "tokens_total": 800 * step},
        **{"steps_planned": 50_000, "git": {"sha": "abc123"}} | more,
    )  # fmt: skip
    settings = (rundir.read_json(run / rundir.RUN) or {})["settings"]
    directory.change(run / rundir.RUN, settings=settings | {"train.steps": {"value": 50_000}})
    directory.document(run / rundir.ENV, {
        "v": 1, "attempt": 1, "parameters": 450_712, "tokens_per_step": 800,
        "device": {"type": "cpu", "name": "x86_64"}, "comm_hook": "none", "config": "tiny.yaml",
    })  # fmt: skip
    directory.event(run, "note", attempt=1, by="ann@host", text="moved the rack", ts=1e9)
    plan_gates(launch, gates, 0)
    directory.end(launch)
    planned = rundir.read_json(launch / rundir.PLAN) or {}
    planned["phases"] = planned["phases"][:1]
    planned["phases"][0] |= {
        "expects": {"parameters": 450_712, "tokens_per_step": 8192, "hours": 20},
        "flags": {"NSA_DDP_BUCKET_MB": "25"},
    }
    directory.document(launch / rundir.PLAN, planned)
    return run


@pytest.fixture
def launch(tmp_path):
    return directory.launch(tmp_path / "artifacts")


def test_a_report_has_each_deliverable_with_file_and_window(launch, capsys, tmp_path):
    recorded(launch)
    output = tmp_path / "out.md"
    code, out, _ = said(capsys, "report", launch, "--output", output)
    text = output.read_text()
    assert (code, "out-loss.svg" in out) == (0, True)
    assert text.startswith("# Report of toy-20261121-030000\n\n**go** with 1 override: ")
    for row in (
        "| 0-first | pass | loss_finite | 0 | = 0 |",
        "| 0-first | fail | toks_per_s_50_above | 400 tok/s | > 900 | surviving steps, last 20 "
        "steps | heartbeat_rank0.jsonl |  | A shared node. |",
        "| 0-first | NSA_DDP_BUCKET_MB=25 | 400 | 0 | last 20 steps | "
        "0-first/heartbeat_rank0.jsonl |",
        "| 0-first | fetch_max_s | 0.25 | s | largest dt_fetch_s, all attempts | ",
        "| 0-first | sel_overlap | 0.75 | share | step 20 | ",
        "| 0-first | time of all steps | 20 h | 27.8 h | hours of the plan |",
        "| 0-first | parameters | 450,712 | 450,712 |  |",
        "| 0-first | tokens_per_step | 8,192 | 800 | DIFFERS |",
        "| 0-first | time of all steps | 12.3 h | 27.8 h | the bound of toks_per_s_50_above "
        "implies 12.3 h for 50,000 steps of 800 tokens |",
        "| comm_hook | none | all |",
        "| git | sha abc123 | all |",
        "| 0-first | 2001-09-09 01:46:40 | ann@host | note | moved the rack |",
        "| 0-first | use, power and memory of GPUs | no sample has a GPU |",
        "![out-loss.svg](out-loss.svg)",
    ):
        assert row in text, row
    for name in FIGURES:
        assert re.search(rf"\b{name}\b", text), name
    assert "nvidia_smi.xml" not in text, "runs on a CPU have no such file"
    assert "metrics.json" in text.partition("## Artefacts")[2].partition("##")[0]
    for name in ("out-loss.svg", "out-speed.svg"):
        chart = ET.parse(tmp_path / name).getroot()
        assert len(chart.findall("{http://www.w3.org/2000/svg}polyline")) == 1
    code, out, _ = said(capsys, "report", launch / "0-first", "--json")
    assert (code, "Report of toy/0-first" in json.loads(out)["report"]) == (0, True)


def test_a_report_has_the_last_verdict_on_each_stall(launch, capsys):
    run = recorded(launch)
    say(run, 1e9, "stopped", sentence="rank 1 is stopped", end=REPLACED)
    say(run, 1e9 + 5, "stopped", sentence="rank 1 | is stopped; kill -CONT 7 resumes it",
        action="kill -CONT 7 resumes it", end="the ranks step again", end_ts=1e9 + 20)  # fmt: skip
    say(run, 1e9 + 60, "lock", sentence="rank 0 waits for a lock")
    _, out, _ = said(capsys, "report", launch, "--json")
    rows = json.loads(out)["report"].partition("## Stalls\n\n")[2].partition("\n\n")[0]
    assert rows.splitlines()[2:] == [
        "| 0-first | 2001-09-09 01:46:45 | rank 1 \\| is stopped | 2001-09-09 01:47:00 | "
        "the ranks step again |",
        "| 0-first | 2001-09-09 01:47:40 | rank 0 waits for a lock | – |  |",
    ]


def test_a_report_has_earlier_stalls_although_the_cause_of_a_later_one_changed_often(
    launch, capsys, monkeypatch
):
    run = recorded(launch)
    say(run, 1e9, "sleep", sentence="rank 5 sleeps", end="the ranks step again", end_ts=1e9 + 9)
    for second in range(9):
        say(run, 1e9 + 60 + second, "lock", sentence=f"cause {second}", end=REPLACED)
    say(run, 1e9 + 70, "lock", sentence="rank 0 waits for a lock")
    stalls = said(capsys, "report", launch)[1].partition("## Stalls")[2].partition("##")[0]
    assert [word in stalls for word in ("rank 5 sleeps", "cause 8", "waits for a lock")] == [
        True, False, True,
    ]  # fmt: skip
    assert "left out" not in stalls
    monkeypatch.setattr(report, "MAX_ROWS", 10)
    stalls = said(capsys, "report", launch)[1].partition("## Stalls")[2].partition("##")[0]
    assert "rank 5 sleeps" not in stalls
    assert "| 0-first |  | older verdicts are left out |  |  |" in stalls
    say(run, 1e9 + 80, "lock", sentence="the newest")
    monkeypatch.setattr(report, "MAX_ROWS", 2)
    assert "| the newest |" in said(capsys, "report", launch)[1].partition("## Stalls")[2]


def test_a_report_says_how_many_rows_of_notes_are_left_out(launch, capsys, monkeypatch):
    run = recorded(launch)
    for number in range(30):
        directory.event(run, "note", by="bob@host", text=f"note {number}", ts=1e9 + number)
    monkeypatch.setattr(report, "MAX_ROWS", 25)
    notes = said(capsys, "report", launch)[1].partition("## Notes and requests")[2]
    rows = notes.partition("\n\n##")[0].splitlines()[4:]
    assert rows[0] == "|  |  |  |  | 7 rows before the next row are left out |"
    assert (len(rows), "note 6 |" in rows[1], "note 29 |" in rows[-1]) == (25, True, True), rows


def test_figures_of_an_ended_run_say_when_and_up_to_which_step_they_were_measured(launch, capsys):
    run = recorded(launch)
    directory.sample(run, ts=1e9)
    _, out, _ = said(capsys, "report", launch, "--json")
    report = json.loads(out)["report"]
    at = "0-first, record or sample of 2001-09-09 01:46:40 UTC"
    assert f"| 0-first | disk_free_gib | 3.5 | GiB | newest sample | {at} |" in report
    assert "| 0-first | tokens_total | 16,000 | tokens | up to step 20 | 0-first, record" in report
    _, out, _ = said(capsys, "status", launch, "--all")
    assert re.search(r"disk_free_gib +3.5 GiB +newest sample, \d+d ago", out)
    assert re.search(r"tokens_total +16,000 tokens +up to step 20, \d+s ago", out)


def test_a_figure_that_was_not_measured_differs_from_the_figure_of_a_record(launch, capsys):
    directory.run(launch / "0-first", 1)
    directory.beat(launch / "0-first", 0, 1, toks_per_s=400.0)
    report = json.loads(said(capsys, "report", launch, "--json")[1])["report"]
    figures, _, lacking = report.partition("## Figures")[2].partition("## Not measured")
    assert (
        "| 0-first | toks_per_s | 400 | tok/s | steps since the record before | 0-first" in figures
    )
    assert ", toks_per_s (last 50 steps, tokens divided by time), " in lacking


def test_a_report_says_that_it_lacks_the_notes_before_many_other_events(
    launch, capsys, monkeypatch
):
    run = recorded(launch)
    monkeypatch.setattr(report, "EVENT_BYTES", 2000)
    for number in range(20):
        directory.event(run, "note", by="supervisor", text=f"rank0.log was rotated {number}")
    directory.event(run, "note", by="bob@host", text="moved it back", ts=1e9 + 60)
    notes = said(capsys, "report", launch)[1].partition("## Notes and requests")[2]
    assert "| moved it back |" in notes
    assert "moved the rack" not in notes
    assert "| 0-first |  |  |  | the file is long; older events are left out |" in notes


def test_a_report_names_the_flag_that_a_request_changed(launch, capsys):
    flags = {"NSA_LR": {"value": "0.0005", "origin": "operator ann@host"},
             "NSA_TB_DISABLE": {"value": "1", "origin": "plan env"}}  # fmt: skip
    run = recorded(launch, flags=flags)
    directory.event(launch, "request", by="ann@host", text="set-flag requested", ts=1e9)
    directory.event(launch, "answer", by="supervisor", asked_by="ann@host",
                    text="NSA_LR=0.0005 for first only", ts=1e9)  # fmt: skip
    directory.change(run / rundir.RUN, settings={})
    _, out, _ = said(capsys, "report", launch)
    assert "| 0-first | NSA_DDP_BUCKET_MB=25 NSA_LR=0.0005 | 400 |" in out
    assert "| ann@host | answer | NSA_LR=0.0005 for first only |" in out
    assert "| 0-first | completed | 20 | 1 |" in out, "the table has no number of planned steps"


def test_text_from_the_run_directory_stays_text(launch, capsys):
    recorded(launch, run=HOSTILE, host=HOSTILE, plan=HOSTILE)
    directory.event(launch / "0-first", "note", by=HOSTILE, text=HOSTILE, ts="nan")
    code, out, _ = said(capsys, "report", launch)
    assert (code, out.count("alert(1)") > 0) == (0, True)
    for bad in ("<script", "[x](http", "![i](u)", "\x1b", "a|b"):
        assert bad not in out.replace("\\|", "").replace("\\[", "").replace("\\]", ""), bad
    assert report.cell("x" * 10_000) == "x" * (report.MAX_CELL - 1) + "…"
    hostile = line_chart.svg("<script>", "&", [(0.0, 1.0), (1.0, float("nan")), (2.0, 1e300)])
    assert "<script" not in hostile
    ET.fromstring(hostile)


@pytest.mark.parametrize("records", [20, 1500, 6000, 20_000])
def test_a_chart_of_a_report_has_every_extreme_and_no_jump_where_the_bands_end(records):
    """Older steps have bands. A spike stays visible, and both parts have the same mean."""
    series, rng = Series(), random.Random(4)
    for second in range(records):
        loss = 11.0 if second == records // 3 else 2.0 + rng.uniform(-0.3, 0.3)
        series.add("heartbeat_rank0.jsonl", 1.7e9 + second, {"loss": loss})
    chart = ET.fromstring(line_chart.svg("loss", "nats", series.points("loss")))
    labels = [each.text for each in chart.iter("{http://www.w3.org/2000/svg}text")]
    assert labels[1] == "11", labels
    (line,) = chart.iter("{http://www.w3.org/2000/svg}polyline")
    drawn = [tuple(map(float, place.split(","))) for place in line.attrib["points"].split()]
    assert [x for x, _ in drawn] == sorted(x for x, _ in drawn)
    assert (drawn[0][0], drawn[-1][0]) == (line_chart.MARGIN, line_chart.WIDTH - line_chart.MARGIN)
    assert min(y for _, y in drawn) == line_chart.MARGIN
    raw = drawn[-1][0] - (drawn[-1][0] - drawn[0][0]) * min(0.5, 600 / records)
    old, new = ([y for x, y in drawn if (x >= raw) == is_new and y > 120] for is_new in (0, 1))
    assert abs(sum(old) / len(old) - sum(new) / len(new)) < 1, "a pixel"


def test_a_chart_of_a_report_has_a_gap_where_nothing_ran_and_none_between_rare_points():
    night = [(float(second), 1.0) for at in (0, 43_200) for second in range(at, at + 7200, 10)]
    rare = [(60.0 * minute, 1.0) for minute in range(9)]
    for points, count in ((night, 2), (rare, 1)):
        chart = ET.fromstring(line_chart.svg("loss", "nats", points))
        lines = [*chart.iter("{http://www.w3.org/2000/svg}polyline")]
        assert len(lines) == count
        assert all(line.attrib["points"] for line in lines)


def test_a_failed_gate_of_a_late_phase_is_in_the_report(launch):
    state = rundir.read_json(launch / rundir.PLAN_STATE) or {}
    for index in range(72):
        run = directory.run(launch / f"{index}-p{index}", 1, "completed")
        failed = PASSED[0] | {"result": "fail" if index == 71 else "pass"}
        directory.document(run / rundir.GATES, {"v": 1, "gates": [failed]})
    directory.document(launch / rundir.PLAN_STATE, state)

    *_, files = report.versions(launch, launch / "r.md")
    text = files[launch / "r.md"]
    assert (
        0
        < text.find("| 71-p71 | FAIL | steps_done")
        < text.lower().find("| 0-p0 | pass | steps_done")
    )


def test_a_report_that_cannot_be_written_is_one_sentence(launch, capsys, tmp_path):
    recorded(launch)
    (tmp_path / "folder.md").mkdir()
    for output, expected in (("x.txt", 2), ("none/x.md", 2), ("folder.md", 4)):
        code, _, err = said(capsys, "report", launch, "--output", tmp_path / output)
        assert (code, len(err.splitlines())) == (expected, 1), err
    assert said(capsys, "report", tmp_path / "nothing")[0] == 3


def test_no_document_makes_a_report_raise(launch):
    run, rng = recorded(launch), random.Random(1)
    names = (run / rundir.RUN, run / rundir.ENV, run / rundir.GATES, launch / rundir.PLAN,
             launch / rundir.PLAN_STATE)  # fmt: skip
    for _ in range(60):
        path = rng.choice(names)
        held = rundir.read_json(path) or {}
        changed = json.loads(json.dumps(held))
        put(changed, rng.choice(list(places(changed))[1:]), rng.choice(DOCUMENTS))
        path.write_text(json.dumps(changed))
        *_, files = report.versions(launch, launch / "r.md")
        assert files[launch / "r.md"].startswith("# Report of ")
        directory.document(path, held)


def live(launch, **bounds):
    run = directory.run(launch / "0-first", 1)
    directory.change(run / rundir.RUN, world=1, gates=BOUNDS | bounds)
    directory.event(run, "state", attempt=1, state="running")
    directory.beat(run, 0, 0, "boot")
    for step in range(1, 11):
        directory.beat(run, 0, step, loss=1.0, grad_norm=0.5, nonfinite_loss_steps=0)
    return run


def test_check_of_a_live_run_says_what_holds_so_far(launch, capsys):
    live(launch)
    with directory.owned(launch):
        code, out, _ = said(capsys, "check", launch)
        assert (code, "gates so far: 2 passed, 1 unknown, 0 failed" in out) == (1, True), out
        assert "??   steps_done: 10 steps (≥ 20; surviving steps, so far;" in out
        assert "\ngo" not in out
        code, out, _ = said(capsys, "check", launch, "--json")
        assert (json.loads(out)["so_far"], json.loads(out)["exit_code"]) == (True, 1)
        code, out, _ = said(capsys, "report", launch)
        assert "**no go yet: the run has not ended**" in out
        assert "| so far: 2 passed, 1 unknown, 0 failed |" in out


def test_no_text_gives_the_loss_of_a_foreign_program_a_unit(launch, capsys, tmp_path):
    run, output = live(launch, loss_falls=True), tmp_path / "out.md"
    for settings in ({"train.steps": {"value": 20}}, {}):
        directory.change(run / rundir.RUN, settings=settings)
        with directory.owned(launch):
            said(capsys, "report", launch, "--output", output)
            texts = [path.read_text() for path in (output, output.with_name("out-loss.svg"))]
            texts += [said(capsys, command, launch)[1] for command in ("status", "check")]
        assert ["nats/token" in text for text in texts] == [bool(settings)] * 4, texts


@pytest.mark.decision("go-run", "lie")
def test_results_that_stand_in_the_directory_of_a_live_run_are_no_go(launch, capsys):
    """Other programs may write gates.json, and the supervisor writes it before the final state."""
    directory.document(live(launch) / rundir.GATES, {
        "v": 1, "result": "pass", "gates": [{"name": "steps_done", "value": 3000, "bound": 100,
                                             "unit": "steps", "result": "pass"}],
    })  # fmt: skip
    with directory.owned(launch):
        code, out, _ = said(capsys, "check", launch)
        assert (code, "gates so far: 2 passed, 1 unknown, 0 failed" in out) == (1, True), out
        assert "3,000" not in said(capsys, "status", launch, "--all")[1]
        assert "**no go yet: the run has not ended**" in said(capsys, "report", launch)[1]
