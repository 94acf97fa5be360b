"""The Launch view: phases with what they prove, flags, the exact command, checks or gates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from textual.app import ComposeResult

from console.model import LIVE_STATES, LaunchState, RunState
from console.status_text import DASH, clock, continues_text, counted, shell_line
from console.tui.draft import BETWEEN
from console.tui.feed import ScreenData
from console.tui.operator import Console
from console.tui.rows import Row, rule, wrap
from console.tui.views.view import View
from console.tui.widgets import flags as flag_list
from console.tui.widgets.lines import WHOLE, Box, Panel
from console.tui.widgets.phases import CHECKS, check_rows, gate_rows, phase_rows, planned_phases
from console.tui.widgets.picker import GUTTER, MARK, Picker, Reader, Scrolls
from trainers.contract import flags as registry

WIDE = 110
LEAST_FLAGS, LEAST_HEIGHT = 7, 18
"""The list of flags and its heading get `LEAST_FLAGS` rows, if possible. A view with less than
`LEAST_HEIGHT` rows shows no facts about the training."""


def live_launch(snapshot: ScreenData | None) -> tuple[RunState, LaunchState] | None:
    """Returns the run and the launch if a launch is in progress, or else None."""
    state = snapshot.state if snapshot else None
    launch = state.launch if state else None
    return (state, launch) if state and launch and launch.under_way else None


def command_rows(title: str, line: str, routes: str, width: int, height: int) -> list[Row]:
    """Returns the effective attention backend, if it is known, and the command, wrapped."""
    rows = [rule(title, width, "y copies it")]
    if routes:
        note = wrap(f"attention: {routes}", width - 1, max(1, height - 2))
        rows += [((text, "dim"),) for text in note]
    lines = wrap(line, width - 1, max(1, height - len(rows)))
    return rows + [((text, ""),) for text in lines]


class FlagList(Picker):
    """The list of flags; its rows are made again when its size changes."""

    def on_resize(self) -> None:
        super().on_resize()
        self.query_ancestor(Launch).fill()


class Launch(Scrolls, View):
    """Shows a launch in progress, or else the draft and parts of an ended launch, if any."""

    DEFAULT_CSS = """
    Launch { layout: vertical; }
    Launch #plan { layout: vertical; height: 1fr; }
    Launch #plan.wide { layout: horizontal; }
    Launch #plan.wide #phases { width: 1fr; height: 1fr; margin-right: 2; }
    Launch #plan Picker { height: 1fr; width: 1fr; }
    """

    def __init__(self, console: Console, id: str):
        super().__init__(console, id)
        self.draft = console.draft
        self._items: list[flag_list.Item] = []
        self._later = "next"
        """The phases to which changed flags of a launch in progress apply: "next" or "all"."""
        self._plan = Box(id="plan")
        self._phases = Panel("phases", self._phase_rows)
        self._training = Panel("training", self._training_rows)
        self._command = Panel("command", self._command_rows)
        self._checks = Panel("checks", self._check_rows)

    def compose(self) -> ComposeResult:
        with self._plan:
            yield self._phases
            yield FlagList("flags", "flags")
        yield self._training
        yield self._command
        yield self._checks

    # --- the panels ------------------------------------------------------------------------------

    def _phase_rows(self, snapshot: ScreenData, width: int, height: int) -> list[Row]:
        live = live_launch(snapshot)
        if shown := live or self._ended(snapshot):
            state, launch = shown
            between = BETWEEN.get(launch.between, "") if launch.rest else "the last phase"
            note = between if live else "the launch has ended"
            if launch.state in ("unsupervised", "unknown"):
                note = f"state of the launch: {launch.state}"
            at = state.own_phase.index if state.own_phase else 0
            phases = [
                replace(each, steps_planned=each.steps_planned or state.steps_planned)
                if each is state.own_phase else each for each in launch.phases
            ]  # fmt: skip
            title = ", ".join(filter(None, ("phases", continues_text(launch))))
            return phase_rows(
                phases, at, note, width, height, snapshot.now, state.step, state.gates, title
            )  # fmt: skip
        plan = self.draft.plan
        if plan is None:
            return [rule("phases", width), ((self.draft.trouble or "reading the plan …", "dim"),)]
        note = f"{counted(len(plan.phases), 'phase')}, L launches"
        return phase_rows(
            planned_phases(plan), 0, note, width, height, snapshot.now, title=f"plan {plan.name}"
        )

    def _ended(self, snapshot: ScreenData) -> tuple[RunState, LaunchState] | None:
        """Returns the run and its launch, if it is not in progress and has the draft's plan."""
        state = snapshot.state
        launch = state.launch if state else None
        is_shown = launch and not launch.under_way and launch.plan == self.draft.plan_name
        return (state, launch) if state and launch and is_shown else None

    def _shown(self, snapshot: ScreenData) -> tuple[RunState, LaunchState] | None:
        """Returns the run and launch whose command and flags are shown; None means the draft's.

        An ended launch is returned only if no new launch of its plan can be prepared. For example,
        the plan of a drill or of `--config` has no file.
        """
        has_no_file = self.draft.plan is None and self.draft.trouble
        return live_launch(snapshot) or (self._ended(snapshot) if has_no_file else None)

    def _training_rows(self, snapshot: ScreenData, width: int, height: int) -> list[Row]:
        """Returns facts about the draft's training, or no row while a launch is in progress."""
        prepared = self.draft.prepared
        if prepared is None or live_launch(snapshot):
            return []
        lines = wrap("; ".join(map(" ".join, prepared.training)), width, height - 1)
        return [
            rule("training of a new launch, first phase", width),
            *(((x, ""),) for x in lines),
        ]

    def _line(self, snapshot: ScreenData) -> tuple[str, str]:
        """Returns two values: a title, and the command of the draft or of the displayed launch."""
        if shown := self._shown(snapshot):
            state, own = shown[0], shown[0].own_phase
            ended = "" if state.state in LIVE_STATES else ", which ended"
            title = f"command of phase {own.name if own else DASH}{ended}"
            return title, shell_line(state.argv, state.environment)
        prepared = self.draft.prepared
        return "command of a new launch, first phase", prepared.shell(0) if prepared else ""

    def _command_rows(self, snapshot: ScreenData, width: int, height: int) -> list[Row]:
        title, line = self._line(snapshot)
        live = live_launch(snapshot)
        return command_rows(title, line or "…", live[0].backend if live else "", width, height)

    def _check_rows(self, snapshot: ScreenData, width: int, height: int) -> list[Row]:
        """Returns the gates of a launch in progress, or else the checks of the draft.

        The gates of an ended run are shown above the checks. They get at most half the height; with
        `WHOLE` as height, all rows are shown.
        """
        state, rows = snapshot.state, []
        is_live, is_whole = live_launch(snapshot) is not None, height >= WHOLE
        if state is not None and (is_live or state.gates):
            own = state.own_phase if is_live or self._ended(snapshot) else None
            name = own.name if own else state.id
            most = height if is_live or is_whole else height // 2
            ended = "" if is_live or state.state in LIVE_STATES else ", which ended"
            title = f"gates of {name}{ended}"
            alerts = [alert.id for alert in state.alerts]
            rows = gate_rows(state.gates, state.bounds, width, most, title, alerts)
        if is_live:
            return rows
        return rows + self._draft_check_rows(width, height if is_whole else height - len(rows))

    def _draft_check_rows(self, width: int, height: int) -> list[Row]:
        draft = self.draft
        if draft.is_checked and draft.trouble:
            lines = wrap(draft.trouble, width, height - 1)
            note = "the launch would be rejected" if draft.is_chosen else "o chooses a plan"
            style = "crit" if draft.is_chosen else "dim"
            return [rule(CHECKS, width, note), *(((line, style),) for line in lines)]
        found = check_rows(draft.checks, width, height)
        if not draft.is_checked:
            before = [tuple((text, "dim") for text, _ in row) for row in found[1:]]
            found = [rule(CHECKS, width, "in progress …"), *before]
        return found

    # --- the flags and keys ----------------------------------------------------------------------

    def focus_default(self) -> None:
        self.picker.focus()
        if live_launch(self.console.snapshot) is None:
            self.console.operator.prepare()

    def take(self, snapshot: ScreenData) -> None:
        super().take(snapshot)
        self.fill()

    def fill(self) -> None:
        snapshot = self.snapshot
        if snapshot is None or not self.size.width:
            return
        held = self._chosen()
        if shown := self._shown(snapshot):
            (state, launch), own = shown, shown[0].own_phase
            when = launch.rest[0].name if launch.rest else ""
            changed = {flag.name: flag.value for flag in launch.next_flags}
            now = {**state.environment, **state.decided}
            lasting = [flag.name for flag in launch.next_flags if flag.phases == "all"]
            self._items = flag_list.items(now, snapshot.coming or None, changed, lasting=lasting)
            later = " and later" if self._later == "all" else ""
            runs = launch.under_way or state.state in LIVE_STATES
            is_now = runs and (own is None or own.index == launch.phase)
            heading = (
                "flags now" if is_now else f"flags of {own.name if own else DASH}, which ended"
            )
            if launch.under_way:
                heading += f" → {when}{later}" if when else ", no phase left"
            heading += " (next values unknown; z says why)" * bool(snapshot.coming_trouble)
        else:
            draft, when, heading = self.draft, "launch", "flags of a new launch"
            choice = {flag_list.BETWEEN.name: "0"} if draft.between == "go" else {}
            planned = {flag_list.BETWEEN.name: "1", **draft.planned}
            flags = (flag_list.BETWEEN, *registry.FLAGS.values())
            self._items = flag_list.items({}, planned, {**draft.flags, **choice}, flags)
        if live_launch(snapshot) is None and not self.draft.is_checked:
            self.console.operator.prepare()
        self.picker.heading = heading
        rows = flag_list.item_rows(self._items, when, self.picker.size.width - GUTTER)
        self.picker.fill(rows, notes=[f"{MARK}{item.flag.key.help}" for item in self._items])
        names = [item.flag.name for item in self._items]
        if held is not None and held.flag.name in names:  # a launch has one row less than a draft
            self.picker.move(names.index(held.flag.name) - self.picker.cursor)

    def fit_panels(self) -> None:
        snapshot, (width, height) = self.snapshot, self.size
        if snapshot is None or not height:
            return
        wide, tall = width >= WIDE, height >= 30
        self._plan.set_class(wide, "wide")
        state = snapshot.state
        both = 2 if state and state.gates and not live_launch(snapshot) else 1
        line = len(self._command_rows(snapshot, width, 8 if tall else 3))
        check = max(2, len(self._check_rows(snapshot, width, (9 if tall else 3) * both)))
        facts = 3 if tall or both == 1 else 2
        size = len(self._training_rows(snapshot, width, facts)) if height >= LEAST_HEIGHT else 0
        self._training.display = size > 0
        room = max(2, min(4, height // 4), height - LEAST_FLAGS - line - check - size)
        phase = "1fr" if wide else len(self._phase_rows(snapshot, width, room))
        for panel, rows in ((self._command, line), (self._checks, check), (self._phases, phase),
                            (self._training, size)):  # fmt: skip
            panel.styles.height = rows

    def _chosen(self) -> flag_list.Item | None:
        cursor = self.picker.cursor
        return self._items[cursor] if 0 <= cursor < len(self._items) else None

    def do_toggle(self) -> None:
        """Changes the value under the cursor, or opens a field if the value must be typed."""
        item, live = self._chosen(), live_launch(self.snapshot)
        if item is None or self.snapshot is None:
            return
        if live is not None and not live[1].rest:
            why = f"{live[1].id} has no next phase: a changed flag would have no effect"
            self.console.say(why, "error")
            return
        if live is None and self._shown(self.snapshot):
            why = "this launch is not in progress, and its plan has no file; o chooses a plan"
            self.console.say(why, "error")
            return
        name = item.flag.name
        decided, value = flag_list.next_value(item.flag, item.planned or "", item.held)
        if decided:
            self._set(live, name, value, item.planned)
            return
        from console.tui.widgets.confirm import Editor

        hint = f"{registry.expected(item.flag)}; empty: undo the change.  {item.flag.key.help}"
        self.console.open_overlay(
            Editor(name, item.held or "", hint,
                   lambda text: text.strip() and registry.parse(name, text),
                   lambda text: self._set(live, name, text or None, item.planned))
        )  # fmt: skip

    do_open = do_toggle

    def do_phases(self) -> None:
        """Switches whether changed flags apply to the next phase only or to all later phases."""
        if live_launch(self.snapshot) is None:
            self.console.say("v works only while a launch runs: a new launch has these flags "
                             "in all its phases", "error")  # fmt: skip
            return
        self._later = "next" if self._later == "all" else "all"
        self.fill()

    def do_zoom(self) -> None:
        """Opens an overlay with the rows of all panels, up to `WHOLE` of each, and all flags."""
        snapshot, items = self.snapshot, self._items
        if snapshot is None:
            return

        def rows(width: int) -> list[Row]:
            found = [row for p in self.query(Panel) for row in p.rows(snapshot, width, WHOLE)]
            found += [rule(self.picker.heading, width)]
            found += [((line, "warn"),) for line in wrap(snapshot.coming_trouble, width)]
            return [*found, *flag_list.whole_rows(items, width)]

        self.console.open_overlay(Reader(f"launch, as of {clock(snapshot.now)}", rows))

    def _set(
        self, live: tuple[RunState, LaunchState] | None, name: str, value: str | None,
        planned: str | None,
    ) -> None:  # fmt: skip
        """Sends a changed flag to the launch for which it was chosen, or stores it in the draft.

        The planned value undoes the change, except in a launch whose changes apply to all later
        phases.
        """
        if name == flag_list.BETWEEN.name:
            self.draft.between = "go" if value == "0" else "ask"
            self.fill()
            return
        is_planned = value and registry.format_value(registry.parse(name, value)) == planned
        if is_planned and (live is None or self._later == "next"):
            value = None
        if live is not None:
            args = {"name": name, "value": value, "phases": self._later}
            args["phase"] = live[1].rest[0].name  # another phase may be next now
            self.console.operator.send(Path(live[1].path), "set-flag", args)
            return
        if value is None:
            self.draft.flags.pop(name, None)
        else:
            self.draft.flags[name] = value
        self.fill()

    def copied(self) -> str:
        return self._line(self.snapshot)[1] if self.snapshot else ""
