"""The Stall view: the verdict, the ranks and their stacks side by side, and the evidence."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partialmethod

from textual.app import ComposeResult

from console.model import LIVE_STATES, Rank, RunState, Verdict
from console.sources.process import program
from console.sources.stacks import Stack
from console.tui import format as fmt
from console.tui.feed import ScreenData
from console.tui.rows import Row, columns, cut, labelled, rule, text_of, wrap
from console.tui.views.view import View
from console.tui.widgets.lines import WHOLE, Panel, of_run
from console.tui.widgets.picker import GUTTER, Picker, Reader, Scrolls
from console.tui.widgets.ranks import PROCESS_WORDS, Cells, lives, place_cells, unmeasured, wrong
from console.tui.widgets.stacks import LEAST_WIDTH, grouped, stack_rows, top_frame, whole_rows

VERDICT, LEAST_VERDICT, MOST_VERDICT = "VERDICT  ", 2, 4
"""Heading of the verdict, and its least and largest height in lines."""
STATE_WORDS = {"R": "runs", "S": "sleeps", "D": "disk wait", "I": "idle", **{
    letter: word for letter, word in PROCESS_WORDS.items() if word}}  # fmt: skip


def verdict_rows(state: RunState, width: int, height: int, now: float) -> list[Row]:
    """Returns the verdict, or why there is none, in at most `height` lines."""
    verdict = state.verdict
    if verdict is not None:
        words = {"unsupervised": "no supervisor now"}.get(state.state, f"the run is {state.state}")
        since = words if state.state in LIVE_STATES else "the run has ended"
        ago = f"  ({fmt.age(now - verdict.ts)} ago; {since})"
        style, over = ("crit", "") if state.state == "stalled" else ("dim", ago)
        said = wrap(verdict.sentence + over, width - len(VERDICT), height) or [fmt.DASH]
        rows = labelled((VERDICT, style), said, style)
        if len(said) == 1:
            rows += labelled((" " * len(VERDICT), ""), [_place(verdict)], "dim")
        return rows
    calm = {
        "running": ("no stall detected", "ok"),
        "stalled": ("stalled; diagnosis in progress", "dim"),
    }
    said, style = calm.get(state.state, (f"no verdict: the run is {state.state}", "dim"))
    if state.state == "unsupervised":
        adopt = "R starts one; " if state.launch else ""
        said = f"no supervisor: {adopt}{program()} watchdog {state.id} checks the run now"
        style = "warn"
    return labelled((VERDICT, "title"), wrap(said, width - len(VERDICT), height), style)


def _place(verdict: Verdict) -> str:
    step = f", step {verdict.step:,}" if verdict.step is not None else ""
    where = f"rank {verdict.rank}, {verdict.phase}{step}" if verdict.rank is not None else ""
    return f"{where}{'; ' if where else ''}{verdict.cause}  confidence: {verdict.sure}"


COLUMNS = (
    ("rank", 4), ("step", -7), ("phase", 9), ("for", -4), ("process", 9), ("use", -4),
    ("power", -5), ("coll.", -6),
)  # fmt: skip
"""Heading and width of each column before the frame; a negative width aligns right."""
MARK_WIDTH = 2
PLACE = "frame, age"
"""The heading of the last column: the frame that `top_frame` returns, and the age of the dump."""


def _layout(state: RunState) -> list[tuple[str, int]]:
    """Returns the columns left of the frame; without GPUs there is no column for the power."""
    has_gpus = any(rank.gpu for rank in state.ranks)
    return [(name, width) for name, width in COLUMNS if has_gpus or name != "power"]


def heading(state: RunState) -> str:
    """Returns the heading of the list of ranks."""
    cells = [(name, width, "") for name, width in _layout(state)]
    return text_of(columns([*cells, (PLACE, len(PLACE), "")]))


def rank_rows(state: RunState, stacks: Mapping[int, Stack], width: int, now: float) -> list[Row]:
    """Returns one row per rank; marks the rank to blame, and the ranks at a lower step."""
    rows, layout = [], _layout(state)
    left = max(0, width - sum(abs(cell) + 1 for _, cell in layout) - MARK_WIDTH)
    newest = max((rank.pulse.step for rank in state.ranks if rank.pulse), default=0)
    blamed = state.verdict.rank if state.verdict else None
    for rank in state.ranks:
        behind = rank.pulse is not None and rank.pulse.step < newest
        style = "crit" if rank.rank == blamed else "warn" if behind else ""
        cells = _rank_cells(rank if lives(state, rank) else unmeasured(rank, state), style)
        place = _frame_and_age(stacks.get(rank.rank), left, now)
        mark = "◂" if rank.rank == blamed or behind else " "
        held = [(cells[name][0], cell, cells[name][1]) for name, cell in layout]
        rows.append(columns([*held, (place, left, ""), (mark, 1, style)]))
    return rows


def _rank_cells(rank: Rank, style: str) -> Cells:
    pulse, gpu = rank.pulse, rank.gpu
    use = fmt.whole(gpu.util_pct if gpu else rank.cpu_pct, "%")
    power = fmt.whole(gpu.power_w, "W") if gpu else ""
    if gpu is not None and gpu.state != "ok":
        use, power = gpu.state, "GPU"
    process = (rank.exit and wrong(rank)) or STATE_WORDS.get(rank.state, rank.state or fmt.DASH)
    return place_cells(rank, style, style) | {
        "rank": (str(rank.rank), style or "strong"), "process": (process, style),
        "use": (use, ""), "power": (power, ""),
        "coll.": (fmt.short(pulse.collectives or None if pulse else None), ""),
    }  # fmt: skip


def _frame_and_age(stack: Stack | None, width: int, now: float) -> str:
    frame = top_frame(stack)
    if stack is None or frame is None:
        return ""
    age = f" {fmt.age(now - stack.ts)}"
    return cut(frame.short, width - len(age)) + age


CALM = {"running": "none: no stall detected", "unsupervised": "none: no supervisor"}


def evidence_rows(state: RunState, width: int, height: int, _now: float) -> list[Row]:
    """Returns the operator's next step, then at most two lines for each sign of the verdict.

    The heading counts the signs that do not fit. With `WHOLE` as height, no sign is cut.
    """
    verdict = state.verdict
    if verdict is None:
        return [rule("evidence", width), ((CALM.get(state.state, "none"), "dim"),)]
    limit = 99 if height >= WHOLE else 2
    rows = labelled(("→ ", "info"), wrap(verdict.action, width - 3, limit), "strong")
    hidden = 0
    for mark, sign in sorted(verdict.signs(), key=lambda each: each[1].startswith("rank ")):
        lines = labelled((f"{mark} ", "info"), wrap(sign, width - 3, limit))
        hidden += len(rows) + len(lines) > height - 1
        rows += lines
    more = f"+{hidden} more: z   " if hidden else ""
    return [rule("evidence", width, f"{more}confidence: {verdict.sure}"), *rows[: height - 1]]


def no_dump(state: RunState) -> str:
    """Returns a sentence that there is no dump; for a live run, with the key that dumps stacks."""
    can = "yet; D dumps the stacks of all ranks" if state.state in LIVE_STATES else "of this run"
    return f"no dump {can}"


class StacksPanel(Panel):
    first = 0
    """The index of the leftmost displayed group of ranks."""

    def rows(self, snapshot: ScreenData, width: int, height: int) -> list[Row]:
        state = snapshot.state
        if state is None:
            return []
        if not snapshot.stacks:
            return [rule("stacks", width), ((no_dump(state), "dim"),)]
        odd = state.verdict.rank if state.verdict else None
        groups = grouped(snapshot.stacks, [rank.rank for rank in state.ranks], odd)
        last = len(groups) - max(1, width // LEAST_WIDTH)
        self.first = max(0, min(self.first, last))
        return stack_rows(groups, odd, width, height, snapshot.now, self.first)


class Stall(Scrolls, View):
    DEFAULT_CSS = f"""
    Stall {{ layout: vertical; }}
    Stall #verdict {{ height: {LEAST_VERDICT}; }}
    Stall StacksPanel {{ height: 1fr; }}
    """

    def compose(self) -> ComposeResult:
        yield Panel("verdict", of_run(verdict_rows))
        yield Picker("stall-ranks", "ranks")
        yield StacksPanel("stacks")
        yield Panel("evidence", of_run(evidence_rows))

    def focus_default(self) -> None:
        self.picker.focus()

    def take(self, snapshot: ScreenData) -> None:
        super().take(snapshot)
        state = snapshot.state
        width = self.size.width
        if state is None or not width:
            return
        self.picker.heading = " " * GUTTER + cut(heading(state), width - GUTTER)
        self.picker.fill(rank_rows(state, snapshot.stacks, width - GUTTER, snapshot.now))

    def fit_panels(self) -> None:
        snapshot, (width, height) = self.snapshot, self.size
        state = snapshot.state if snapshot else None
        if snapshot is None or state is None or not height:
            return
        ranks = min(len(state.ranks) + 1, max(3, height // 2 - 1))
        said = len(verdict_rows(state, width, MOST_VERDICT, snapshot.now))
        verdict = max(LEAST_VERDICT, min(said, height // 4))
        free = height - verdict - ranks
        evidence = len(evidence_rows(state, width, WHOLE - 1, snapshot.now))
        stacks = len(self.query_one(StacksPanel).rows(snapshot, width, WHOLE))
        self.query_one("#verdict").styles.height = verdict
        self.picker.styles.height = ranks
        self.query_one("#evidence").styles.height = max(
            1, min(evidence, max(free - stacks, (free + 1) // 2))
        )

    def _shift(self, by: int) -> None:
        panel = self.query_one(StacksPanel)
        panel.first = max(0, panel.first + by)
        panel.redraw()

    do_right, do_left = partialmethod(_shift, 1), partialmethod(_shift, -1)

    def do_zoom(self) -> None:
        """Opens an overlay with the whole verdict and all its evidence."""
        snapshot, width = self.snapshot, self.size.width
        if snapshot is not None:
            panels = [self.query_one(name, Panel) for name in ("#verdict", "#evidence")]
            rows = [row for panel in panels for row in panel.rows(snapshot, width, WHOLE)]
            self.console.open_overlay(Reader("stall", rows))

    def do_open(self) -> None:
        """Opens the whole stack of the rank under the cursor."""
        app = self.console
        snapshot = self.snapshot
        state = snapshot.state if snapshot else None
        ranks = state.ranks if state else ()
        if snapshot is None or state is None or not ranks:
            app.say("no rank has started yet: no stack to show", "error")
            return
        rank = ranks[min(self.picker.cursor, len(ranks) - 1)].rank
        stack = snapshot.stacks.get(rank)
        if stack is None:
            app.say(f"rank {rank}: {no_dump(state)}", "error")
            return
        rows = whole_rows(stack, self.size.width - 1)
        app.open_overlay(Reader(f"stack of rank {rank}", rows, f"{stack.path.rpartition('/')[2]}"))
