"""The alert line: the worst notice first, with the key that handles it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from console.model import BAD_STATES, LEVELS, STALL, Alert, Gate, LaunchState, Level, RunState
from console.status_text import not_passed, skipped, with_word
from console.tui import format as fmt
from console.tui.background import Pending
from console.tui.feed import ScreenData
from console.tui.rows import Row, cell_len, clip, labelled, spread, width_of, wrap
from console.tui.styles import LEVEL_STYLE
from console.tui.widgets.lines import Panel

BLOCKED_S = 2.0
SILENT_S = 5.0
MOST_LINES, SHARE = 4, 5
"""Most lines of the notice: `MOST_LINES`, but not more than one in `SHARE` lines of the screen."""
LEAST_ROOM = 24
"""If the text to the left of the keys would get less width than this, no keys are shown."""
WORDS: dict[Level, str] = {"crit": "! CRIT", "warn": "! WARN", "info": "  info"}


@dataclass(frozen=True, slots=True)
class Notice:
    """One message of the alert line: an alert, a late action, or a fact on run, launch or screen.

    `hint` names the keys that help. `alert` is the id of the alert that A acknowledges. Both may be
    "".
    """

    level: Level
    text: str
    hint: str = ""
    alert: str = ""


def notices(
    snapshot: ScreenData | None, silent_s: float = 0.0, pending: Sequence[Pending] = ()
) -> list[Notice]:
    """Returns all notices, the worst first.

    `silent_s` is the time for which the directory has not answered; `pending` has the actions in
    progress.
    """
    found: list[Notice] = []
    if snapshot is not None and snapshot.trouble:
        found.append(Notice("crit", snapshot.trouble))
    if silent_s > SILENT_S:
        old = "; the display is old" if snapshot is not None else ""
        text = f"the run directory has not answered for {fmt.age(silent_s)}{old}"
        found.append(Notice("crit", text))
    found += [
        Notice("warn", f"{each}: no answer for {fmt.age(each.waited_s)}, still waiting")
        for each in pending if each.is_late
    ]  # fmt: skip
    if snapshot is None:
        return found
    state = snapshot.state
    if state is None:
        return found or [Notice("info", "no run; L launches one")]
    if state.directory_blocked_s > BLOCKED_S:
        blocked = fmt.age(state.directory_blocked_s)
        text = f"no write to the run directory has finished for {blocked}; training continues"
        found.append(Notice("crit", text))
    alerts = [_of_alert(alert) for alert in state.alerts]
    own = _of_state(state, any(alert.id.startswith(STALL) for alert in state.alerts))
    found += own + alerts if state.state == "unsupervised" else alerts + own
    found += _of_launch(state, state.launch)
    found += _of_gates(state.gates)
    if state.skipped_records:
        found.append(Notice("info", skipped(state)))
    found.sort(key=lambda notice: LEVELS.index(notice.level))
    return found


KEY_WORDS = {"2": "view gates", "3": "diagnose", "4": "logs", "L": "start", "E": "flags",
             "D": "dump", "H": "halt", "K": "stop", "R": "new supervisor"}  # fmt: skip


def _of_alert(alert: Alert) -> Notice:
    hint = f"{alert.key} {KEY_WORDS.get(alert.key, 'look')}" if alert.key else ""
    if alert.acknowledged:
        return Notice("info", f"acknowledged: {alert.text}", hint)
    if alert.observed:
        return Notice(alert.level, alert.text, hint)
    return Notice(alert.level, alert.text, f"{hint}  A ack".strip(), alert.id)


def _of_state(state: RunState, is_stall_told: bool) -> list[Notice]:
    if state.state == "stalled":
        said = state.verdict.sentence if state.verdict else state.why or "no rank makes progress"
        return [] if is_stall_told else [Notice("crit", said, "3 diagnose")]
    if state.state == "unsupervised":
        why = state.why or "the supervisor is not running; ranks are alive"
        # Nothing went wrong if a run that was started by hand has no supervisor.
        return [Notice("crit", why, "R new supervisor") if state.launch else Notice("warn", why)]
    text = with_word(state.state, state.why or "no reason recorded")
    resume = "R resume" if state.can_resume else ""
    if state.state in BAD_STATES:
        return [Notice("crit", text, f"{resume}  4 logs".strip())]
    if state.state == "restarting":
        return [Notice("warn", text, "H halt")]
    early = state.state == "completed" and (state.step or 0) < (state.steps_planned or 0)
    told = state.state in ("halting", "halted", "stopping", "stopped")
    return [Notice("info", text, resume)] if (told or early) and (state.why or resume) else []


def _of_launch(state: RunState, launch: LaunchState | None) -> list[Notice]:
    if launch is None or launch.state not in ("waiting", "ended"):
        return []
    if launch.state == "waiting":
        name = f"phase {launch.rest[0].name}" if launch.rest else "the next phase"
        text = f"the launch waits for you before {name}"
        return [Notice("warn", text, "L start  E flags  H halt")]
    if not launch.not_started:
        return []
    last, missed = launch.phases[launch.phase], not_passed(state.gates)
    why = f"{last.name} {last.state}"
    if last.state in ("completed", "next"):
        why = missed or launch.why or why
    hint = "2 view gates" if missed else "R resume" if state.can_resume else ""
    text = f"launch ended: {why}; not started: {launch.not_started}"
    return [Notice("warn" if missed else "info", text, hint)]


def _of_gates(gates: tuple[Gate, ...]) -> list[Notice]:
    if missed := not_passed(gates):
        return [Notice("warn", missed, "2 view gates")]
    overridden = sum(gate.result != "pass" for gate in gates)
    text = f"gates of this phase: {len(gates) - overridden} passed, {overridden} overridden"
    return [Notice("info", text)] if gates else []


def alert_rows(found: list[Notice], width: int, at: int = 0, limit: int = 1) -> list[Row]:
    """Returns one of the notices in at most `limit` lines, or a neutral line if there is none.

    The last line ends with the keys, if at least `LEAST_ROOM` cells of text can precede them. Text
    that does not fit is cut.
    """
    if not found:
        return [(("  no alert", "dim"),)]
    notice = found[at]
    tail: Row = ((notice.hint, "key"),)
    if len(found) > 1:
        tail = (*tail, ("  a next", "key"), (f" ({at + 1} of {len(found)})", "dim"))
    word, style = WORDS[notice.level], LEVEL_STYLE[notice.level]
    room = width - len(word) - 1
    beside = room - width_of(tail) - 2
    lines = wrap(notice.text, room, limit) or [""]
    if beside < LEAST_ROOM:
        tail = ()
    elif cell_len(lines[-1]) > beside:
        full = [] if len(lines) < limit else wrap(lines.pop(), beside, 1)
        lines = [*lines, *(full or [""])]
    *rows, last = labelled((f"{word} ", style), lines, style)
    return [clip(row, width) for row in (*rows, spread(last, tail, width))]


class AlertLine(Panel):
    """Shows one notice; `A` acknowledges its alert.

    When the levels or the alerts of the notices change, the first notice is shown.

    The alert line has as many lines as the notice needs, within `MOST_LINES` and `SHARE`. In the
    Stall view, it has one line if the notice repeats the verdict.
    """

    notice: Notice | None = None
    _at = 0
    _kinds: tuple[tuple[str, str], ...] = ()

    def rows(self, snapshot: ScreenData | None, width: int, height: int) -> list[Row]:
        app: Any = self.app
        found = notices(snapshot, app.feed.silent_s, app.pending)
        if snapshot is None and not found:
            return []
        kinds = tuple((notice.level, notice.alert) for notice in found)
        self._at = self._at % len(found) if found and kinds == self._kinds else 0
        self._kinds = kinds
        self.notice = found[self._at] if found else None
        limit = max(1, min(MOST_LINES, self.screen.size.height // SHARE))
        verdict = snapshot.state.verdict if snapshot and snapshot.state else None
        if app.view_name == "stall" and self.notice and verdict:
            is_told = verdict.sentence in self.notice.text  # the view shows the sentence
            limit = 1 if is_told else limit
        return alert_rows(found, width, self._at, limit)

    def redraw(self) -> None:
        """Draws the line, even before the first snapshot, which may never arrive."""
        if not self.size.area:
            return
        rows = self.rows(self.snapshot, *self.size)
        if max(1, len(rows)) != self.size.height:
            self.styles.height = max(1, len(rows))
        self.show(rows)

    def turn(self) -> None:
        """Shows the next notice; after the last notice, the first."""
        self._at += 1
        self.redraw()
