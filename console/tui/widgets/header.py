"""The first line: which run, which state, how far, how fresh, what is armed."""

from __future__ import annotations

import time

from console.model import LIVE_STATES, RunState
from console.tui import format as fmt
from console.tui.feed import Snapshot
from console.tui.palette import STATE_STYLE
from console.tui.rows import BLANK, Part, Row, cut, fit, width_of
from console.tui.widgets.lines import Panel

AMBER_S, RED_S = 3.0, 10.0
FULL_NAME_WIDTH = 150
LONGEST, GAP = 999, 2
PUNCTUAL_S = 2.5
"""A snapshot a second is due; only what is later than this adds to the age of the data."""


def header_row(snapshot: Snapshot, width: int, late_s: float = 0.0, paused: bool = False) -> Row:
    """Returns the header for a width; the least important parts go first."""
    state = snapshot.state
    if state is None:
        return fit([(9, [(("NSA console", "strong"),)]), (8, [(("no run", "dim"),)])], width)
    host: Row = ((f"{state.host} ×{state.world}", "dim"),)
    held: list[Row] = [(("picture paused", "caution"),), (("paused", "caution"),)]
    attempt: list[Row] = [((f"{word} {state.attempt}", "warn"),) for word in ("attempt", "att")]
    parts: list[Part] = [
        (9, _name(state, width)),
        (10, [_state(state, snapshot.now)]),
        (10, held if paused else [BLANK]),
        (7, attempt if state.attempt > 1 else [BLANK]),
        (4, _phase(state)),
        (8, _progress(state)),
        (6, _eta(state)),
        (2, [host if state.world else BLANK, BLANK]),
        (9, [_freshness(state, snapshot.now, late_s)]),
    ]
    room = width - width_of(fit(parts, LONGEST)) - GAP
    return fit([*parts, (5, _armed(state, room))], width, GAP)


def _name(state: RunState, width: int) -> list[Row]:
    """The full id where there is room, else plan, time of day and phase, else plan and phase."""
    long = state.id or state.path
    launch = state.launch
    if launch is None or not launch.phases:
        return [((cut(long, limit), "strong"),) for limit in (64, 30)]
    stamp = launch.id.removeprefix(f"{launch.plan}-").partition("-")[2]
    forms = [f"{launch.plan} {launch.current}"]
    if len(stamp) >= 6 and stamp[:6].isdigit():
        forms.insert(0, f"{launch.plan} {stamp[:4]} {launch.current}")
    if width >= FULL_NAME_WIDTH:
        forms.insert(0, long)
    return [((cut(form, 64), "strong"),) for form in forms]


def _state(state: RunState, now: float) -> Row:
    if state.launch is not None and state.launch.state == "waiting":
        return (("WAITING", STATE_STYLE["waiting"]),)
    word = state.state.upper()
    since = now - state.since_ts if state.since_ts else None
    if state.state == "stalled":
        since = _still_s(state) or since
    if since is not None and state.state in ("stalled", "halting", "stopping", "starting"):
        word += f" {fmt.age(since)}"
    return ((word, STATE_STYLE.get(state.state, "strong")),)


def _still_s(state: RunState) -> float | None:
    """Returns for how long the rank to blame, or else every rank, has stood still."""
    guilty = state.verdict.rank if state.verdict else None
    pulses = [r.pulse for r in state.ranks if r.pulse and guilty in (None, r.rank)]
    return min((p.since_s for p in pulses if p.since_s is not None), default=None)


def _phase(state: RunState) -> list[Row]:
    launch = state.launch
    if launch is None or len(launch.phases) < 2:
        return [BLANK]
    here = f"{launch.phase + 1}/{len(launch.phases)}"
    return [((f"phase {here}", ""),), ((f"ph {here}", ""),)]


def _progress(state: RunState) -> list[Row]:
    if state.step is None:
        return [BLANK]
    if not state.steps_planned or state.state == "completed":
        return [((f"step {state.step:,}", ""),)]
    steps = f"{state.step:,}/{state.steps_planned:,}"
    share = f"{100 * state.step // state.steps_planned}%"
    return [((f"step {steps} {share}", ""),), ((f"{steps} {share}", ""),), ((steps, ""),)]


def _eta(state: RunState) -> list[Row]:
    return [((f"ETA {fmt.eta(state.eta_s)}", ""),)] if state.eta_s else [BLANK]


def _freshness(state: RunState, now: float, late_s: float) -> Row:
    if state.state == "lost":
        return (("end time unknown", "dim"),)
    if state.data_age_s is None or state.state not in LIVE_STATES:
        if state.since_ts and state.state not in ("queued", "preflight", "starting"):
            return ((f"ended {fmt.age(now - state.since_ts)} ago", "dim"),)
        return (("no data yet", "dim"),)
    age = state.data_age_s + late_s
    style = "stale" if age > RED_S else "warn" if age > AMBER_S else "dim"
    return ((f"data {fmt.age(age)}{' old' if age > AMBER_S else ''}", style),)


def _armed(state: RunState, room: int) -> list[Row]:
    """The automatic reactions: the whole sentence where it has room, else its short form.

    Nothing does where nobody watches.
    """
    watched = state.state in LIVE_STATES and state.state != "unsupervised"
    if not state.armed or not watched or (state.launch and state.launch.state == "unsupervised"):
        return [BLANK]
    short = f"armed: {state.armed_short or 'see status'}"
    forms = [state.armed] if width_of(((state.armed, ""),)) <= room else []
    return [((form, "dim"),) for form in (*forms, short)]


class Header(Panel):
    """Also ages on its own when no snapshot comes: then nothing on the screen is fresh."""

    paused = False

    def rows(self, snapshot: Snapshot, width: int, height: int) -> list[Row]:
        late = time.monotonic() - snapshot.at
        return [header_row(snapshot, width, late if late > PUNCTUAL_S else 0.0, self.paused)]
