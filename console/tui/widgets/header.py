"""The first line: run, state, progress, age of the data, policy."""

from __future__ import annotations

import time

from console.model import LIVE_STATES, RunState
from console.status_text import counted, is_unjoined, outcome
from console.tui import format as fmt
from console.tui.feed import ScreenData
from console.tui.rows import BLANK, Part, Row, cell_len, cut, fit, width_of
from console.tui.styles import STATE_STYLE
from console.tui.widgets.lines import Panel

AMBER_S, RED_S = 3.0, 10.0
LONGEST, GAP = 999, 2
PUNCTUAL_S = 2.5
"""If the last snapshot is older than this, the header adds its age to the age of the data."""


def header_row(snapshot: ScreenData, width: int, late_s: float = 0.0, paused: bool = False) -> Row:
    """Returns the header for a width; the least important parts are shortened first."""
    state = snapshot.state
    if state is None:
        return fit([_part(9, "strong", "NSA console"), _part(8, "dim", "no run")], width)
    attempt = [f"attempt {state.attempt}", f"att {state.attempt}"] if state.attempt > 1 else []
    parts = [
        _part(9, "strong", *_names(state)),
        _part(10, *_state(state, snapshot.now)),
        _part(10, "caution", *(("display paused", "paused") if paused else ())),
        _part(7, "warn", *attempt),
        _part(4, "", *_phase(state)),
        _part(8, "", *_progress(state)),
        _part(6, "", f"ETA {fmt.eta(state.eta_s)}" if state.eta_s else ""),
        _part(2, "dim", f"{state.host}, {counted(state.world, 'rank')}" if state.world else "", ""),
        _part(9, *_freshness(state, snapshot.now, late_s)),
    ]
    room = width - width_of(fit(parts, LONGEST)) - GAP
    return fit([*parts, _part(5, "dim", *_armed(state, room))], width, GAP)


def _part(weight: int, style: str, *forms: str) -> Part:
    return weight, [((form, style),) if form else BLANK for form in forms]


def _names(state: RunState) -> list[str]:
    """Returns the forms of the run's name, the longest first."""
    launch, own = state.launch, state.own_phase
    if launch is None or own is None:
        return [cut(state.id or state.path, limit) for limit in (64, 30)]
    stamp = launch.id.removeprefix(f"{launch.plan}-").partition("-")[2]
    forms = [f"{launch.plan} {own.name}"]
    if len(stamp) >= 6 and stamp[:6].isdigit():
        forms.insert(0, f"{launch.plan} {stamp[:4]} {own.name}")
    return [cut(form, 64) for form in forms]


def _state(state: RunState, now: float) -> tuple[str, str]:
    """Returns the style and the word of the state, for some states with a duration."""
    launch, own = state.launch, state.own_phase
    if launch and (own is None or own.index == launch.phase):
        if launch.state == "waiting":
            return STATE_STYLE["waiting"], "WAITING"
        if (word := outcome(state)[0]) != state.state:
            return "warn", word.upper()
    word = state.state.upper()
    since = now - state.since_ts if state.since_ts else None
    if state.state == "stalled":
        since = _still_s(state) or since
    if since is not None and state.state in ("stalled", "halting", "stopping", "starting"):
        word += f" {fmt.age(since)}"
    return STATE_STYLE.get(state.state, "strong"), word


def _still_s(state: RunState) -> float | None:
    """Returns the time of the blamed rank in its phase, or else the least time of any rank."""
    blamed = state.verdict.rank if state.verdict else None
    pulses = [r.pulse for r in state.ranks if r.pulse and blamed in (None, r.rank)]
    return min((p.since_s for p in pulses if p.since_s is not None), default=None)


def _phase(state: RunState) -> list[str]:
    phases, own = state.launch.phases if state.launch else (), state.own_phase
    here = f"{own.index + 1}/{len(phases)}" if own else ""
    return [f"phase {here}", f"ph {here}"] if len(phases) > 1 else []


def _progress(state: RunState) -> list[str]:
    if state.step is None:
        return ["no join yet, steps not known", "no join"] if is_unjoined(state) else []
    if not state.steps_planned or state.state == "completed":
        return [f"step {state.step:,}"]
    steps = f"{state.step:,}/{state.steps_planned:,}"
    share = f"{100 * state.step // state.steps_planned}%"
    return [f"step {steps} {share}", f"{steps} {share}", steps]


def _freshness(state: RunState, now: float, late_s: float) -> tuple[str, str]:
    """Returns the style and the text for the age of the data, or of the end of the run."""
    if state.state == "lost":
        return "dim", "end time unknown"
    if state.data_age_s is None or state.state not in LIVE_STATES:
        if state.since_ts and state.state not in LIVE_STATES:
            return "dim", f"ended {fmt.age(now - state.since_ts)} ago"
        is_undated = any(rank.pulse and rank.pulse.age_s is None for rank in state.ranks)
        return "dim", "age of data unknown" if is_undated else "no data yet"
    age = state.data_age_s + late_s
    style = "stale" if age > RED_S else "warn" if age > AMBER_S else "dim"
    return style, f"data {fmt.age(age)}{' old' if age > AMBER_S else ''}"


def _armed(state: RunState, room: int) -> list[str]:
    """Returns the forms of the policy's text, longest first; [] if no supervisor applies one."""
    watched = state.state in LIVE_STATES and state.state != "unsupervised"
    if not state.armed or not watched or (state.launch and state.launch.state == "unsupervised"):
        return []
    short = f"on stall: {state.armed_short or 'see status'}"
    return [state.armed, short] if cell_len(state.armed) <= room else [short]


class Header(Panel):
    """The first line of the screen. The age of the data increases even without a new snapshot."""

    paused = False

    def rows(self, snapshot: ScreenData, width: int, height: int) -> list[Row]:
        late = time.monotonic() - snapshot.at
        return [header_row(snapshot, width, late if late > PUNCTUAL_S else 0.0, self.paused)]
