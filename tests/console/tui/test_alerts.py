"""The alert line: whole sentences, several alerts, and a directory that does not answer."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest

from console.model import Alert
from console.tui.rows import text_of, width_of
from console.tui.widgets import alertline
from console.tui.widgets.alertline import Notice, alert_rows
from tests.console.tui import recorded
from tests.console.tui.recorded import (
    NOW,
    SIZES,
    Asked,
    app_on,
    driven,
    lines,
    play,
    see,
    until,
)

WITHHELD = (
    "no act on the stall of 74 s: the pulses stand still, but the records of rank 3 show new "
    "steps; the run goes on, and a person has to look at it"
)
MOVED = (
    "the run directory at this path is another one than the supervisor holds (device and inode "
    "differ): no request and no .HALT from there is obeyed, and nothing is written there"
)


def two_alerts():
    alerts = (
        Alert("own-directory", NOW, "crit", MOVED),
        Alert("withheld", NOW, "warn", WITHHELD, "3"),
    )
    return dataclasses.replace(recorded.stalled(), alerts=alerts)


@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_a_long_alert_is_shown_whole_and_is_acknowledged_by_its_id(size):
    asked = Asked(text="noted")
    async with driven(app_on(two_alerts(), actions=asked), size) as (app, pilot):
        await see(pilot, "is written there")
        shown = lines(app)
        notice = " ".join(" ".join(shown[1:4]).split())
        assert notice.startswith(f"! CRIT {MOVED} A ack a next (1 of 3)")
        assert "q leave" in shown[-1]
        assert "[ Dump ]" in shown[-2]
        await pilot.press("a")
        await until(pilot, lambda: "a next (2 of 3)" in " ".join(lines(app)[1:5]))
        assert lines(app)[1].startswith(f"! CRIT {recorded.SENTENCE[:20]}")
        await play(pilot, "a", "…has to look at it")
        assert lines(app)[1].startswith("! WARN no act on the stall")
        await play(pilot, "A", "…Acknowledge this alert?", "y")
        await until(pilot, lambda: bool(asked.sent))
        assert asked.sent[0][1:] == ("ack", {"alert": "withheld"})


@pytest.mark.parametrize("width", [30, 60, 80, 200])
@pytest.mark.parametrize("text", [WITHHELD, MOVED * 4, "x" * 500, "", "short"], ids=len)
def test_an_alert_fits_and_what_is_cut_is_marked(text, width):
    notice = Notice("crit", text, "3 diagnose  A ack", "withheld")
    rows = alert_rows([notice, notice], width, 0, 3)
    assert len(rows) <= 3
    assert all(width_of(row) <= width for row in rows)
    whole = "".join("".join(text_of(row) for row in rows).split())
    assert "".join(text.split()) in whole.replace("3diagnoseAacka1of2", "") or "…" in whole


@pytest.mark.parametrize("limit", [2, 3])
def test_the_keys_do_not_interrupt_the_sentence_of_an_alert(limit):
    notice = Notice("crit", "one two three four five six seven eight nine", "3 diagnose")
    *above, below = (text_of(row) for row in alert_rows([notice], 46, 0, limit))
    assert not any("diagnose" in row for row in above)
    assert below.endswith("3 diagnose")


async def test_a_directory_that_does_not_answer_is_an_alert_also_before_the_first_picture(
    monkeypatch,
):
    monkeypatch.setattr(alertline, "SILENT_S", 0.5)
    answers = threading.Event()

    class Hangs(recorded.Recorded):
        def poll(self):
            answers.wait(600)
            return super().poll()

    app = app_on(recorded.running())
    app.feed._open = lambda path: Hangs(recorded.running())

    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "the run directory has not answered for" in lines(app)[1])
        assert app.snapshot is None
        answers.set()
        await until(pilot, lambda: "no alert" in lines(app)[1])
        answers.clear()
        await until(pilot, lambda: "; the display is old" in lines(app)[1])
        answers.set()
        await until(pilot, lambda: "no alert" in lines(app)[1])


async def test_a_busy_screen_is_no_silent_directory(monkeypatch):
    monkeypatch.setattr(alertline, "SILENT_S", 0.5)
    async with driven(app_on(recorded.running())) as (app, _):
        time.sleep(2)
        while app.feed.silent_s:  # the busy screen may have delayed a read
            time.sleep(0.01)
        app._tick()
        assert app.alert.notice is None
