"""A resize of the terminal: no text is lost, and only a question that can be read is acted on."""

from __future__ import annotations

import dataclasses

import pytest

from console.tui.rows import text_of
from console.tui.widgets import overlay
from console.tui.widgets.lines import Lines
from tests.console.tui import recorded
from tests.console.tui.recorded import (
    Asked,
    app_on,
    driven,
    lines,
    picture,
    play,
    settled,
    until,
)

LONG = dataclasses.replace(recorded.running(), checkpoint="step_40")


async def resized(pilot, *size: int) -> None:
    await pilot.resize_terminal(*size)
    await settled(pilot)


OPENED = {
    "confirm": ("H", "…Halt this run"),
    "typed": ("K", "…type"),
    "help": ("?", "…Keys in"),
    "palette": (":", "…type words"),
    "charts": ("c", "…space shows"),
    "runs": ("o", "…enter opens"),
    "launch in full": ("2", "…flags", "z", "…esc closes"),
    "editor": ("2", "…flags", "enter", "…enter accepts"),
    "message": ("x", "…has no function"),
}


@pytest.mark.parametrize("name", OPENED)
async def test_a_resize_and_back_leaves_each_overlay_as_it_was(name, monkeypatch):
    monkeypatch.setitem(overlay.KEEP_S, "error", 3600.0)
    async with driven(app_on(LONG, actions=Asked())) as (app, pilot):
        await play(pilot, *OPENED[name])
        app.feed.stop()
        await settled(pilot)
        before = lines(app)[1:]
        for size in ((30, 24), (4, 24), (80, 6), (80, 24)):
            await resized(pilot, *size)
        assert lines(app)[1:] == before


@pytest.mark.parametrize("keys", [("y",), ("tab", "enter")])
@pytest.mark.parametrize("size", [(4, 24), (20, 24), (80, 5)])
async def test_a_question_that_cannot_be_read_starts_no_action_and_says_why(size, keys):
    asked = Asked()
    async with driven(app_on(LONG, actions=asked)) as (app, pilot):
        await play(pilot, "H", "…Halt this run")
        await resized(pilot, *size)
        shown = app.query_one("#facts", Lines).shown
        assert "too small" in " ".join(map(text_of, shown)) or size[0] < 10
        assert "y yes" not in picture(app)
        await pilot.press(*keys)
        assert app.overlay is not None
        await resized(pilot, 80, 24)
        assert "Halt this run?" in picture(app)
        assert "y yes   n no" in picture(app)
        await pilot.press("y")
        await until(pilot, lambda: len(asked.sent) == 1)


@pytest.mark.parametrize("width", [30, 47, 80])
@pytest.mark.parametrize("height", [8, 12, 24])
async def test_every_fact_and_the_buttons_are_on_the_screen_if_a_question_can_be_answered(
    width, height
):
    async with driven(app_on(LONG)) as (app, pilot):
        await play(pilot, "K", "…type")
        await resized(pilot, width, height)
        question = app.overlay
        assert question is not None
        text = "".join(picture(app).split())
        if "too small" not in text_of(app.query_one("#facts", Lines).shown[0]):
            for label, words in question.question.facts:
                assert "".join((label + words).split()) in text.replace("│", "")
            assert "[Stop][Kill]" in text
        else:
            assert height < 24 or width < 30
        assert "[No]" in text
