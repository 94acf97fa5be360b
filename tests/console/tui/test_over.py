"""Stalls and launches that have ended on the screen: their evidence, and the next step."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import pytest

from console.model import Alert, Gate, Verdict
from console.plans import catalog
from console.sources.run import RunSource
from console.supervisor import lock
from console.tui.confirmations import CannotAsk
from console.tui.keys import KEYS
from console.tui.rows import text_of
from console.tui.views.stall import evidence_rows, verdict_rows
from console.tui.widgets.figures import figure_rows
from tests.console.sources import directory
from tests.console.tui import recorded
from tests.console.tui.recorded import NOW, SIZES, Asked, app_on, driven, play, until

AGAIN = "81 s in forward on rank 1 (stopped); the ranks step again"
STOPPED = {
    "ts": NOW - 600, "cause": "stopped", "rank": 1, "phase": "forward", "step": 15, "sure": "high",
    "sentence": "rank 1 is stopped (SIGSTOP); kill -CONT 71588 resumes it; rank 0 waits in forward",
    "action": "kill -CONT 71588 resumes it; a stop costs all 15 steps",
    "evidence": ["rank 1: process state T"], "end": AGAIN, "end_ts": NOW - 500,
}  # fmt: skip


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", ["running", "crashed"])
async def test_a_stall_that_is_over_stays_in_the_stall_view_without_its_commands(
    tmp_path, name, size
):
    (tmp_path / "verdicts").mkdir()
    directory.document(tmp_path / "verdicts" / f"{int(NOW - 600) * 1000}.json", STOPPED)
    since, to = (time.strftime("%H:%M:%S", time.localtime(NOW - ago)) for ago in (600, 500))
    async with driven(app_on(recorded.STATES[name](), run=tmp_path), size) as (app, pilot):
        await play(pilot, "3", f"…last verdict: {since}")
        shown = " ".join(" ".join(recorded.lines(app)).split())
    for words in (
        f"last verdict: {since} to {to}", "rank 1 is stopped (SIGSTOP); rank 0 waits",
        f"ended: {AGAIN}", "evidence of the last stall", "+ rank 1: process state T",
    ):  # fmt: skip
        assert words in shown
    assert "71588" not in shown
    assert "→" not in shown


def test_a_past_verdict_that_does_not_fit_is_cut_with_an_ellipsis():
    """A stopped rank stays stopped after a stop: the verdict ended, not the stall."""
    past = Verdict(
        **STOPPED | {"sentence": "rank 1 is stopped " * 9, "end": "stop, requested " * 6}
    )
    state = recorded.running(state="stopping")
    rows = [text_of(row).strip() for row in verdict_rows(state, 80, 5, NOW, past)]
    assert rows[2].endswith("…")
    assert (len(rows), rows[3].startswith("ended: stop")) == (5, True)
    assert "the stall ended" not in " ".join(rows)


def test_a_new_stall_is_not_described_by_the_last_one():
    last = Verdict(**STOPPED)
    fresh = dataclasses.replace(recorded.stalled(), verdict=None)
    rows = [*verdict_rows(fresh, 80, 5, NOW, last), *evidence_rows(fresh, 80, 9, NOW, last)]
    assert "SIGSTOP" not in " ".join(map(text_of, rows))
    assert "diagnosis in progress" in text_of(rows[0])


def test_the_number_of_stalls_is_a_figure_once_there_was_one(tmp_path):
    run = directory.run(tmp_path / "0-first")
    assert "stalls" not in RunSource(run).poll().figures
    with (run / "events.jsonl").open("a") as events:
        for kind in ("alert", "clear"):
            events.write(f'{{"v": 1, "kind": "{kind}", "alert": "stall", "ts": {NOW}}}\n')
    state = RunSource(run).poll()
    assert [text_of(row).split()[:2] for row in figure_rows(state, 28, 5, NOW)][1:] == [
        ["stalls", "1"]
    ]


def ended(**given):
    held = {"checkpoint": "step_00000138", "decided": {"NSA_LR": "0.001"}}
    return dataclasses.replace(recorded.crashed(), **(held | given))


async def test_r_resumes_a_launch_that_ended_early_and_asks_first():
    asked = Asked()
    async with driven(app_on(ended(), actions=asked)) as (app, pilot):
        await until(pilot, lambda: "R resume" in recorded.lines(app)[1])
        await play(pilot, "R", "…Resume this launch, in a new launch?",
                   "…from the checkpoint of step 138", "…next phases: recall")  # fmt: skip
        assert not asked.launched
        await play(pilot, "y", "…launched the rest of /nowhere/cpu_smoke/20261120-031500 in")
    assert [(each.resume, each.plan) for each in asked.launched] == [
        (Path("/nowhere/cpu_smoke/20261120-031500"), "")
    ]


@pytest.mark.parametrize("checkpoint", ["step_00000138", ""])
async def test_both_questions_name_the_checkpoint_from_which_a_resume_would_continue(
    tmp_path, checkpoint
):
    """A run without a checkpoint may itself have resumed from a checkpoint of another run."""
    state = ended(checkpoint=checkpoint, resumed_step=0 if checkpoint else 138)
    facts = dict(KEYS["adopt"].question(state).facts)
    assert facts["begins"] == "plumbing from the checkpoint of step 138"
    async with driven(app_on(state, root=tmp_path)) as (app, pilot):
        await pilot.press("2")
        await until(pilot, lambda: app.draft.is_checked)
        facts = dict(app.draft.question("gpu01", state).facts)
    unused = f"without the checkpoint of step 138 of {state.id}; R resumes from it"
    assert facts["begins"] == f"sanity at step 1, {unused}"


@pytest.mark.parametrize("plan", ["cpu_smoke", "no_file"])
async def test_a_launch_without_a_supervisor_whose_ranks_train_has_not_ended(tmp_path, plan):
    phases = recorded.phases(1, "unsupervised")
    launch = recorded.launch("unsupervised", plan=plan, phases=phases)
    state = dataclasses.replace(recorded.gates_failed(), state="unsupervised", launch=launch)
    async with driven(app_on(state, root=tmp_path)) as (app, pilot):
        await play(pilot, "2", "…state of the launch: unsupervised", "…▸ 1-plumbing   unsupervised")
        assert "ended" not in recorded.picture(app)


def passed(**given):
    """Returns a run whose phase passed, in a launch that ended with a phase left."""
    phases = list(recorded.phases(1, "completed"))
    phases[1] = dataclasses.replace(phases[1], result="pass")
    return recorded.running(state="completed", launch=recorded.launch("ended", phases=phases))


def test_r_starts_the_next_phase_of_a_launch_whose_newest_phase_passed():
    facts = dict(KEYS["adopt"].question(passed()).facts)
    assert (facts["begins"], facts["then"]) == (
        "recall, because plumbing passed", "next phases: none"
    )  # fmt: skip
    assert "R resume" in [each.hint for each in recorded.noticed(passed())]


def in_sweep(state):
    """Returns the state, with `plumbing` and `recall` as two runs of a sweep."""
    phases = [dataclasses.replace(each, sweep="lr" * (each.index > 0))
              for each in state.launch.phases]  # fmt: skip
    phases.append(dataclasses.replace(phases[-1], index=3, name="after", sweep=""))
    launch = dataclasses.replace(state.launch, phases=tuple(phases))
    return dataclasses.replace(state, launch=launch)


@pytest.mark.parametrize("state", [in_sweep(ended()), in_sweep(passed())])
def test_r_begins_a_sweep_again(state):
    facts = dict(KEYS["adopt"].question(state).facts)
    assert (facts["begins"], facts["then"]) == (
        "the sweep lr with its first run", "next phases: after"
    )  # fmt: skip


async def test_a_launch_names_the_flags_of_the_shell(tmp_path, monkeypatch):
    monkeypatch.setenv("NSA_LR", "0.5")
    async with driven(app_on(root=tmp_path)) as (app, pilot):
        app.draft.flags["NSA_OPT_FUSED"] = "0"
        await pilot.press("2")
        await until(pilot, lambda: app.draft.is_checked)
        facts = dict(app.draft.question("gpu01").facts)
        assert facts["flags"] == "NSA_LR=0.5 of the shell, NSA_OPT_FUSED=0"
        file = catalog.files()["cpu_smoke"]
        assert facts["plan"] == f"{file}: sanity, plumbing, recall", "another may have its name"


FIRST = recorded.launch("ended", phase=0, phases=recorded.phases(0, "crashed"))
GATES = "not all gates of plumbing passed; 2 shows them, and nsa-console override accepts one"


@pytest.mark.parametrize(
    ("changed", "why"),
    [({"checkpoint": ""}, "plumbing has no usable checkpoint; L starts the whole plan"),
     ({"checkpoint": "", "path": f"{FIRST.path}/0-sanity", "launch": FIRST},
      "sanity has no usable checkpoint; to start sanity again: nsa-console resume /nowhere"),
     ({"decided": {}}, "plumbing has no usable checkpoint; L starts the whole plan"),
     ({"state": "completed"}, GATES), ({"state": "completed", "checkpoint": ""}, GATES),
     ({"launch": recorded.launch("unsupervised"), "state": "killed"}, "")],
)  # fmt: skip
def test_r_offers_no_resume_that_would_be_rejected_or_begin_again(changed, why):
    state = ended(**changed)
    assert not state.can_resume
    assert all("R resume" not in each.hint for each in recorded.noticed(state))
    if state.launch.state == "ended":
        with pytest.raises(CannotAsk, match=f"R cannot resume it: {why}"):
            KEYS["adopt"].question(state)
    else:
        assert "new supervisor" in KEYS["adopt"].question(state).title


def test_r_on_an_earlier_phase_does_not_judge_the_checkpoints_of_the_newest_one():
    launch = recorded.launch()
    state = ended(id=f"{launch.id}/0-sanity", path=f"{launch.path}/0-sanity", state="completed")
    with pytest.raises(CannotAsk) as reason:
        KEYS["adopt"].question(state)
    assert str(reason.value) == (
        f"{launch.id}/0-sanity has ended (completed); the launch ended in plumbing; open the "
        "launch with o, and press R"
    )


async def test_a_key_that_can_change_no_flag_says_so_before_anything_is_typed():
    last = recorded.running(launch=recorded.launch(phase=2, phases=recorded.phases(2)))
    async with driven(app_on(last)) as (app, pilot):
        await play(pilot, "2", "…no phase left", "enter", "…has no next phase")
        assert app.overlay is None
        await play(pilot, "1", "…now ──")
        assert "has no next phase" not in recorded.picture(app)
    async with driven(app_on(recorded.crashed())) as (app, pilot):
        await play(pilot, "2", "…✓ torch", "v", "…v works only while a launch runs")


def test_a_past_verdict_without_an_action_keeps_its_sentence():
    sentence = "rank 1 waits in forward; rank 0 is ahead; no source names a cause"
    last = Verdict(**(STOPPED | {"sentence": sentence, "action": ""}))
    rows = verdict_rows(recorded.running(), 120, 5, NOW, last)
    assert sentence in " ".join(" ".join(map(text_of, rows)).split())


@pytest.mark.parametrize(
    "changed",
    [{"end_ts": 1e20}, {"end_ts": -1e20}, {"ts": -1e20}, {"ts": float("inf")}],
    ids=str,
)
def test_a_verdict_whose_times_are_no_dates_is_shown(changed):
    last = Verdict(**(STOPPED | changed))
    rows = verdict_rows(recorded.running(), 80, 5, NOW, last)
    assert "last verdict: " in text_of(rows[0])


async def test_an_alert_of_a_moved_directory_says_first_what_to_do_and_no_action_promises_more(
    tmp_path,
):
    path = tmp_path / "artifacts" / "tiny_cpu" / "20261126-215130"
    path.mkdir(parents=True)
    fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT)
    lock.claim(fd, "tiny_cpu", "op")
    held = lock.LaunchLock(path, fd)
    path.rename(tmp_path / "away")
    text = held.lost()
    os.close(fd)
    alert = Alert("own-directory", NOW, "crit", text)
    state = recorded.running(alerts=(alert,))
    for size in ((80, 24), (60, 20)):
        async with driven(app_on(state), size) as (app, pilot):
            await play(pilot, f"…kill -TERM {os.getpid()}")
            await play(pilot, "H", "…✗ stop the run with kill -TERM")
            assert "all work" not in recorded.picture(app)
    for key in "dump", "halt", "stop", "checkpoint":
        with pytest.raises(CannotAsk, match=f"kill -TERM {os.getpid()}"):
            KEYS[key].question(state)


@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_an_ended_launch_whose_plan_has_no_file_shows_its_own_phases_and_gates(
    tmp_path, size
):
    gates = (Gate("no_stall", 1.0, "stalls", "run", "events", "yes", "fail"),)
    held = recorded.launch("ended", plan="tiny_cpu", phases=recorded.phases(1, "crashed"))
    async with driven(app_on(ended(launch=held, gates=gates), root=tmp_path), size) as (app, pilot):
        await play(pilot, "2", "…✗ no_stall", "…1-plumbing", "…command of phase plumbing",
                   "…crashed", "…o chooses a plan", "…0.001")  # fmt: skip
        shown = recorded.picture(app)
        assert "would be rejected" not in shown
        await play(pilot, "enter", "…its plan has no file; o chooses a plan")
        assert app.overlay is None
        app.draft.choose("cpu_smoke")
        await play(pilot, "…plan cpu_smoke", "…gates of " + held.id)


@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_the_launch_view_names_the_former_launch_and_the_gates_with_an_override(size):
    (passed, failed), former = recorded.gates_failed().gates, "cpu_smoke-20261119-201500"
    gates = (passed, dataclasses.replace(failed, override="a toy dataset"))
    state = recorded.running(gates=gates, launch=recorded.launch(continues=(former,)))
    async with driven(app_on(state), size) as (app, pilot):
        await play(pilot, "2", f"…phases, continues {former}", "…✗ overridden bytes_right: 0.41")
        assert "overridden steps_done" not in recorded.picture(app)


def test_the_number_of_stalls_is_as_new_as_the_data_and_not_as_old_as_a_stall(tmp_path):
    run = directory.run(tmp_path / "0-first")
    directory.event(run, "alert", alert="stall", ts=time.time() - 7500)
    directory.beat(run, 0, 5, loss=2.0)
    figures = RunSource(run).poll().figures
    assert figures["stalls"].at == figures["loss"].at > time.time() - 60
