"""A small screen shortens or counts text that does not fit; a zoom shows the whole text."""

from __future__ import annotations

import dataclasses
import re
import time

import pytest

from console.model import Alert, Gate
from console.plans.case import Check
from console.tui.rows import clip, text_of
from console.tui.views.stall import rank_rows as stall_rows
from console.tui.widgets.chooser import entries
from console.tui.widgets.lines import WHOLE, Panel
from console.tui.widgets.phases import check_rows, gate_rows, phase_rows
from console.tui.widgets.ranks import rank_rows
from tests.console.sources import directory
from tests.console.tui import recorded
from tests.console.tui.recorded import (
    NOW,
    SIZES,
    app_on,
    charted,
    driven,
    lines,
    play,
    see,
    settled,
)

LONG = " ".join(["a sign with very many words,"] * 9)
SIGNS = tuple(f"sign {number} of the stall" for number in range(5))


def with_signs(state=None):
    state = state or recorded.stalled()
    verdict = dataclasses.replace(state.verdict, evidence=(*SIGNS, f"{LONG} end of it"),
                                  action="look at rank 3")  # fmt: skip
    return dataclasses.replace(state, verdict=verdict)


@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_evidence_that_does_not_fit_is_counted_and_z_shows_all_of_it(size):
    async with driven(app_on(with_signs()), size) as (_, pilot):
        await play(pilot, "3", "…evidence")
        shown = await settled(pilot)
        seen = sum(sign in shown for sign in SIGNS)
        more = re.search(r"\+(\d) more: z", shown)
        assert seen == 5 if size[1] == 40 else more and seen + int(more[1]) == 6, shown
        assert "a sign with very many" in shown or size[1] == 24
        assert not more or size[1] == 24
        await pilot.press("z")
        await see(pilot, *SIGNS, "end of it", "stall, as of ", "esc closes")


def test_the_end_of_a_rank_fits_its_column():
    state = recorded.crashed()
    ranks = (*state.ranks, recorded.rank(2, False, exit="exit code not available, unreaped"))
    state = dataclasses.replace(state, ranks=ranks)
    for rows in (rank_rows(state, 50, 9)[1:], stall_rows(state, {}, 78, NOW)):
        for row, word in zip(rows, ("SIGSEGV", "code 1", r"code \?"), strict=True):
            assert re.search(f" {word} ", text_of(row)), text_of(row)


@pytest.mark.parametrize("with_gpus", [True, False])
def test_a_pid_is_shown_whole_or_not_at_all(with_gpus):
    ranks = (recorded.rank(0, with_gpus, pid=4_194_303),)
    verdict = dataclasses.replace(recorded.VERDICT, rank=0)
    state = recorded.running(ranks=ranks, verdict=verdict)
    shown = {}
    for width in range(50, 100):
        heading, row = (text_of(clip(row, width)) for row in rank_rows(state, width, 9))
        shown[width] = "pid" in heading
        assert ("4194303" in row) == shown[width], row
        assert width < 70 or row.endswith("◂"), row
    assert shown[78]
    assert shown[70] is not with_gpus


def test_a_dead_supervisor_is_the_first_alert_of_a_stall():
    alerts = recorded.stalled().alerts
    state = dataclasses.replace(recorded.unsupervised(), alerts=alerts)
    first, second = recorded.noticed(state)[:2]
    assert (first.hint, second.alert) == ("R new supervisor", "stall-3")
    alone = recorded.noticed(recorded.by_hand())[0]
    assert (alone.level, alone.hint) == ("warn", ""), "no launch can be adopted, and nothing failed"


@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_gates_that_do_not_fit_are_counted_and_z_shows_all_of_them(size):
    bounds = {f"gate_of_a_long_name_{number}": f"bound {number}" for number in range(7)}
    state = recorded.running(bounds=bounds, launch=recorded.launch(between="go"))
    async with driven(app_on(state), size) as (_, pilot):
        await play(pilot, "2", "…gates of plumbing")
        shown = await settled(pilot)
        more = re.search(r"\+(\d) more: z", shown)
        assert (
            len(re.findall(r"· gate_of_a_long_name_\d", shown)) + int(more[1] if more else 0) == 7
        ), shown
        assert bool(more) == (size[1] == 24), shown
        await play(pilot, "z", *(f"…{name}" for name in bounds))


def test_a_long_check_is_cut_in_its_panel_and_whole_in_the_zoom():
    checks = [Check("disk", "pass", "1 GiB free"), Check("data", "fail", "missing " * 20 + "end")]
    low, whole = ([text_of(row) for row in check_rows(checks, 80, height)] for height in (3, WHOLE))
    assert len(low) == 3
    assert not any("end" in row for row in low)
    assert [row[0] for row in whole[1:]] == ["✗", " ", " ", "✓"]
    assert whole[3].endswith("missing end")
    assert max(map(len, whole)) <= 80
    wide = [text_of(row) for row in check_rows([Check("data", "pass", "数" * 60)], 80, WHOLE)]
    assert sum(row.count("数") for row in wide) == 60


def test_the_bound_of_one_step_is_in_the_singular():
    rows = gate_rows((), {"steps_done": "1"}, 80, 4, "gates")
    text = " ".join(map(text_of, rows))
    assert re.search(r"steps_done: at least 1 step\b", text), text


async def test_the_span_keys_go_on_from_the_span_that_is_shown():
    async with driven(app_on(recorded.running())) as (_, pilot):
        assert re.search(r"utilisation CPU % \[2m]", await charted(pilot))
        await play(pilot, "]", "…utilisation CPU % [5m]", "[", "[", "…utilisation CPU % [1m]")


async def test_a_shorter_span_than_the_shortest_does_not_move_the_charts():
    async with driven(app_on(recorded.running())) as (app, pilot):
        await charted(pilot)
        app.dashboard.panels[0].window = (NOW - 30.0, 60)
        app.dashboard.do_span_less()
        assert app.dashboard.span_s == 0


@pytest.mark.parametrize("why", ["short", f"{LONG} end of it"])
def test_the_zoom_shows_once_why_a_phase_has_its_state(why):
    held = dataclasses.replace(recorded.phases(0, "crashed")[0], why=why)
    rows = phase_rows([held], 0, "ask", 80, WHOLE, NOW)
    assert " ".join(" ".join(map(text_of, rows)).split()).count(why) == 1


@pytest.mark.parametrize(
    ("state", "result", "left", "says"),
    [("failed", "unknown", (), "gates|failed in 1-two"),
     ("completed", "fail", (), "gates fail.* in 1-two"),
     ("completed", "pass", (), "completed, "),
     ("completed", "pass", ({"name": "three", "state": "queued"},), "incomplete in 1-two, ")],
)  # fmt: skip
def test_the_list_of_launches_says_how_each_one_ended(tmp_path, state, result, left, says):
    path = directory.launch(tmp_path)
    phases = [{"name": name, "dir": f"{index}-{name}", "state": state, "result": result}
              for index, name in enumerate(("one", "two"))]  # fmt: skip
    phases += left
    directory.document(path / "plan_state.json", {
        "v": 1, "state": "ended", "phase": 1, "phases": phases, "updated_ts": time.time() - 180,
    })  # fmt: skip
    (first, *_), _ = entries(tmp_path)
    assert re.match(rf"{says}.*3m ago$", first.text), first.text


async def test_a_screen_that_is_too_small_for_charts_has_the_whole_alert_figures_and_the_log(
    tmp_path,
):
    said = (
        "rank 1 has been stalled in backward of step 109 since 20:49:32: it is stopped (SIGSTOP); "
        "kill -CONT 13326 resumes it; rank 0 waits in backward"
    )
    alert = Alert("stall", NOW, "crit", said, "3")
    run = directory.run(tmp_path)
    (run / "logs" / "attempt1").mkdir(parents=True)
    (run / "logs" / "attempt1" / "rank0.log").write_text("the newest line\n")
    state = recorded.running(state="stalled", alerts=(alert,))
    async with driven(app_on(state, run=run), (60, 20)) as (app, pilot):
        await play(pilot, "…the newest line", "…tok/s", "…loss")
        shown = await settled(pilot)
        assert said in " ".join(shown.replace("3 diagnose  A ack", "").split())
        assert "" not in [line.strip() for line in lines(app)[:16]]


@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_all_phases_of_a_short_launch_that_has_ended_are_shown(size, tmp_path):
    state = dataclasses.replace(recorded.gates_failed(), launch=recorded.launch("ended"))
    async with driven(app_on(state, root=tmp_path), size) as (app, pilot):
        app.draft.choose("cpu_smoke")
        await play(pilot, "2", "…flags of a new launch", "…checks passed")
        shown = await settled(pilot)
        assert [phase.numbered in shown for phase in state.launch.phases] == [True] * 3, shown


async def test_gates_of_an_earlier_run_name_that_run_once_another_plan_is_chosen(tmp_path):
    state = dataclasses.replace(recorded.gates_failed(), launch=recorded.launch("ended"))
    async with driven(app_on(state, root=tmp_path)) as (app, pilot):
        await play(pilot, "2", "…gates of plumbing, which ended")
        app.draft.choose("cpu_validation")
        await see(pilot, f"gates of {state.id}, which ended")


async def test_the_zoom_of_launch_has_the_gates_of_an_ended_run_in_full():
    gate = Gate("loss_falls", 0.4, "nats", "run", "heartbeat", f"≥ {LONG} end of it", "fail")
    async with driven(app_on(dataclasses.replace(recorded.crashed(), gates=(gate,)))) as (
        app,
        pilot,
    ):
        await play(pilot, "2", "…, which ended")
        for height, whole in ((9, False), (WHOLE, True)):
            panels = app.query_one("#launch").query(Panel)
            rows = [text_of(row) for p in panels for row in p.rows(app.snapshot, 80, height)]
            assert ("end of it" in " ".join(" ".join(rows).split())) == whole
