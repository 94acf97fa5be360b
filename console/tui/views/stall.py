"""The Stall view: the verdict, the ranks and their stacks side by side, and the evidence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partialmethod
from itertools import zip_longest

from textual.app import ComposeResult

from console.diagnose.stack_classes import is_of_torch, where
from console.model import LIVE_STATES, Rank, RunState, Verdict
from console.sources.process import command
from console.sources.stacks import Frame, Stack, innermost_own
from console.status_text import clock, is_unjoined, spans
from console.tui import format as fmt
from console.tui.feed import ScreenData
from console.tui.rows import Row, columns, cut, labelled, rule, text_of, wrap
from console.tui.views.view import View
from console.tui.widgets.lines import WHOLE, Draw, Panel
from console.tui.widgets.picker import GUTTER, Picker, Reader, Scrolls
from console.tui.widgets.ranks import PROCESS_WORDS, Cells, lives, place_cells, unmeasured, wrong

VERDICT, LEAST_VERDICT, MOST_VERDICT = "VERDICT  ", 2, 5
"""Heading of the verdict, and its least and largest height in lines."""
STATE_WORDS = {"R": "runs", "S": "sleeps", "D": "disk wait", "I": "idle", **{
    letter: word for letter, word in PROCESS_WORDS.items() if word}}  # fmt: skip


def past_verdict(state: RunState, last: Verdict | None) -> Verdict | None:
    """Returns the last verdict if its stall is over, or None."""
    return None if state.state == "stalled" else last


def _past_rows(past: Verdict, calm: str, width: int, height: int, now: float) -> list[Row]:
    """Returns the last verdict below a sentence on the present state of the run."""
    room = width - len(VERDICT)
    begun, ended = (_clock(ts, now) for ts in (past.ts, past.end_ts or now))
    until = f" to {ended}" if past.end_ts else ", no end recorded"
    end = wrap(f"ended: {past.end}", room, 2 if height > 4 else 1) if past.end else []
    said = wrap(f"{calm}; last verdict: {begun}{until}", room, max(1, height - len(end)))
    if (left := height - len(end) - len(said)) > 0:
        said += wrap(past.of_past().sentence, room, left)
    return labelled((VERDICT, "title"), [*said, *end][:height], "dim")


def _clock(ts: float, now: float) -> str:
    """Returns a time of day, with its date if it is more than 20 hours before or after `now`."""
    return clock(ts, "%Y-%m-%d %H:%M" if abs(now - ts) > 20 * 3600 else "%H:%M:%S")


def verdict_rows(
    state: RunState, width: int, height: int, now: float, last: Verdict | None = None
) -> list[Row]:
    """Returns the verdict, or else the state and the past verdict, in at most `height` lines."""
    past, verdict, room = past_verdict(state, last), state.verdict, width - len(VERDICT)
    if verdict is not None and past is None:
        is_stalled = state.state == "stalled"
        ago = f"  ({fmt.age(now - verdict.ts)} ago; the run is {state.state})" * (not is_stalled)
        style = "crit" if is_stalled else "dim"
        said = wrap(verdict.sentence + ago, room, height) or [fmt.DASH]
        rows = labelled((VERDICT, style), said, style)
        if len(said) == 1:
            rows += labelled((" " * len(VERDICT), ""), [_place(verdict)], "dim")
        return rows
    said, style = {
        "running": ("no stall detected", "ok"),
        "stalled": ("stalled; diagnosis in progress", "dim"),
    }.get(state.state, (f"no stall was diagnosed; state of the run: {state.state}", "dim"))
    if state.state == "unsupervised":
        adopt = "R starts a new supervisor; " if state.launch else ""
        said = f"unsupervised; {adopt}without one, watch the run with "
        said += command("watchdog", state.path)
        style = "warn"
    if past is not None:
        return _past_rows(past, said.removeprefix("no stall was diagnosed; "), width, height, now)
    return labelled((VERDICT, "title"), wrap(said, room, height), style)


def _place(verdict: Verdict) -> str:
    step = f", step {verdict.step:,}" if verdict.step is not None else ""
    where = f"rank {verdict.rank}, {verdict.phase}{step}" if verdict.rank is not None else ""
    return f"{where}{'; ' if where else ''}cause: {verdict.cause}; confidence: {verdict.sure}"


COLUMNS = (
    ("rank", 4), ("step", -7), ("phase", 9), ("for", -4), ("process", 9), ("util", -4),
    ("cpu", -4), ("power", -5), ("coll.", -8),
)  # fmt: skip
"""Heading and width of each column before the frame; a negative width aligns right."""
MARK_WIDTH = 2
PLACE = "top frame, age"
"""The heading of the last column: the frame that `top_frame` returns, and the age of the dump."""


def _layout(state: RunState) -> list[tuple[str, int]]:
    """Returns the columns left of the frame: use and power of the GPUs, or the CPU use."""
    away = ("cpu",) if any(rank.gpu for rank in state.ranks) else ("util", "power")
    return [(name, width) for name, width in COLUMNS if name not in away]


def heading(state: RunState) -> str:
    """Returns the heading of the list of ranks."""
    cells = [(name, width, "") for name, width in _layout(state)]
    return text_of(columns([*cells, (PLACE, len(PLACE), "")]))


def rank_rows(state: RunState, stacks: Mapping[int, Stack], width: int, now: float) -> list[Row]:
    """Returns one row per rank; marks the blamed rank, and the ranks below the highest step."""
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
        use, power = "GPU", gpu.state
    process = (rank.exit and wrong(rank)) or STATE_WORDS.get(rank.state, rank.state or fmt.DASH)
    return place_cells(rank, style, style) | {
        "rank": (str(rank.rank), style or "strong"), "process": (process, style),
        "util": (use, ""), "cpu": (use, ""), "power": (power, ""),
        "coll.": (str((pulse and pulse.collectives) or fmt.DASH), ""),
    }  # fmt: skip


def _frame_and_age(stack: Stack | None, width: int, now: float) -> str:
    frame = top_frame(stack)
    if stack is None or frame is None:
        return ""
    age = f" {fmt.age(now - stack.ts)}"
    return cut(frame.short, width - len(age)) + age


def evidence_rows(
    state: RunState, width: int, height: int, _now: float, last: Verdict | None = None
) -> list[Row]:
    """Returns the operator's next step, then at most two lines for each sign of the verdict.

    A past verdict has no next step, because its processes may have ended. The heading counts the
    signs that do not fit. With `WHOLE` as height, no sign is cut.
    """
    past = past_verdict(state, last)
    verdict = past or state.verdict
    if verdict is None:
        return [rule("evidence", width), (("none", "dim"),)]
    limit = 99 if height >= WHOLE else 2
    action = "" if past else verdict.action
    rows = labelled(("→ ", "info"), wrap(action, width - 3, limit), "strong")
    hidden = 0
    for mark, sign in sorted(verdict.signs(), key=lambda each: each[1].startswith("rank ")):
        lines = labelled((f"{mark} ", "info"), wrap(sign, width - 3, limit))
        hidden += len(rows) + len(lines) > height - 1
        rows += lines
    more = f"+{hidden} more: z   " if hidden else ""
    title = "evidence of the last stall" if past else "evidence"
    return [rule(title, width, f"{more}confidence: {verdict.sure}"), *rows[: height - 1]]


def no_dump(state: RunState) -> str:
    """Returns the sentence on a missing dump; it names the key that dumps, if that key works."""
    if is_unjoined(state):
        return "no dump; D dumps only instrumented ranks, and no rank has called join"
    works = state.state in LIVE_STATES and state.state != "unsupervised"
    return f"no dump {'yet; D dumps the stacks of the ranks' if works else 'of this run'}"


# --- the stacks: one column per group of ranks with the same stack ------------------------------

LEAST_WIDTH = 36
Group = tuple[tuple[int, ...], Stack | None]
"""Ranks with the same stack, and this stack, or None for ranks without a dump."""


def frames_of(stack: Stack) -> tuple[Frame, ...]:
    """Returns the frames of the main thread."""
    return stack.threads[0].frames if stack.threads else ()


def top_frame(stack: Stack | None) -> Frame | None:
    """Returns the innermost frame of the rank's own code, or else the innermost frame."""
    return innermost_own(frames_of(stack)) if stack else None


def grouped(stacks: Mapping[int, Stack], ranks: Sequence[int], odd: int | None) -> list[Group]:
    """Returns groups of ranks whose main threads have the same frames in the same dump.

    The order is: 1. the group of the blamed rank `odd`, 2. ranks without a dump, 3. groups of the
    newest dump, 4. groups of an older dump. In 3 and 4, the smallest group comes first.
    """
    held: dict[tuple[object, ...], list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        place = (stack.ts, *(frame.short for frame in frames_of(stack)))
        held.setdefault(place, []).append(rank)
    groups: list[Group] = [(tuple(alike), stacks[alike[0]]) for alike in held.values()]
    if silent := tuple(rank for rank in ranks if rank not in stacks):
        groups.append((silent, None))
    newest = max((stack.ts for stack in stacks.values()), default=0.0)
    return sorted(groups, key=lambda group: (
        odd not in group[0], group[1] is not None, group[1] and group[1].ts < newest,
        len(group[0]), group[0],
    ))  # fmt: skip


def stack_rows(
    groups: Sequence[Group], odd: int | None, width: int, height: int, now: float, first: int = 0
) -> list[Row]:
    """Returns one column per group, from the group `first` on, innermost frames on top.

    Only groups of the newest dump can be marked, and only if there are several. The group of the
    blamed rank `odd` is marked. If no rank is blamed, and one group has more than half of the
    ranks, all other groups are marked.
    """
    newest = max(stack.ts for _, stack in groups if stack)
    sizes = [len(ranks) for ranks, stack in groups if stack and stack.ts == newest]
    most = max(sizes)
    shown = groups[first : first + max(1, width // LEAST_WIDTH)]
    each = (width - 2 * (len(shown) - 1)) // len(shown)
    held = []
    for ranks, stack in shown:
        differs = odd in ranks if odd is not None else len(ranks) < most > sum(sizes) / 2
        is_marked = differs and len(sizes) > 1
        old = "not in newest dump" if stack is not None and stack.ts < newest else ""
        held.append(_column(ranks, stack, old, is_marked, each, now))
    more = f"  {first + 1}–{first + len(shown)} of {len(groups)} ← →"
    note = f"innermost first{more * (len(shown) < len(groups))}  enter: whole"
    lines = zip_longest(*held, fillvalue=("", ""))
    rows = [columns(((text, each, style) for text, style in cells), "  ") for cells in lines]
    return [rule("stacks", width, note), *rows[: height - 1]]


def _column(
    ranks: Sequence[int], stack: Stack | None, old: str, is_marked: bool, width: int, now: float
) -> list[tuple[str, str]]:
    """Returns text and style of each cell: the ranks, what they do, and their frames.

    `old` says why the stack is not compared, or is "".
    """
    head = f"rank{'s' * (len(ranks) > 1)} {','.join(spans(ranks, '–'))}"
    if stack is None:
        return [(head, "crit"), ("no dump of this group", "dim")]
    age = f"{fmt.age(now - stack.ts)} ago"
    if old:
        head, style = f"{head}  {age}, {old}", "warn"
    else:
        head, style = f"{head}{' ◂ differs' * is_marked}  {age}", "crit" if is_marked else "strong"
    at = where(stack)
    frames = [(frame.short, "dim" if old else _style(frame)) for frame in frames_of(stack)]
    waits = [(line, "warn" if at.kind == "native" else "") for line in wrap(at.text, width)]
    return [(head, style), *waits, *frames]


def _style(frame: Frame) -> str:
    return "data" if is_of_torch(frame) else "dim" if frame.is_of_library else ""


def whole_rows(stack: Stack, width: int) -> list[Row]:
    """Returns rows for all threads of one rank."""
    rows: list[Row] = []
    for thread in stack.threads:
        rows.append(((f"thread {thread.name}", "strong"),))
        for frame in thread.frames:
            where = f"{frame.file}:{frame.line} "
            room = width - 2 - len(frame.function)
            where = where if len(where) <= room else "…" + where[1 - room :]
            rows.append((("  ", ""), (where, "dim"), (frame.function, "")))
    return rows


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


def _of_verdict(draw: Callable[..., list[Row]]) -> Draw:
    """Returns a `Draw` that passes the run and the newest stored verdict to `draw`."""
    return lambda data, width, height: (
        draw(data.state, width, height, data.now, data.last_verdict) if data.state else []
    )


class Stall(Scrolls, View):
    DEFAULT_CSS = f"""
    Stall {{ layout: vertical; }}
    Stall #verdict {{ height: {LEAST_VERDICT}; }}
    Stall StacksPanel {{ height: 1fr; }}
    """

    def compose(self) -> ComposeResult:
        yield Panel("verdict", _of_verdict(verdict_rows))
        yield Picker("stall-ranks", "ranks")
        yield StacksPanel("stacks")
        yield Panel("evidence", _of_verdict(evidence_rows))

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
        last = snapshot.last_verdict
        said = len(verdict_rows(state, width, MOST_VERDICT, snapshot.now, last))
        verdict = max(LEAST_VERDICT, min(said, height // 4))
        free = height - verdict - ranks
        evidence = len(evidence_rows(state, width, WHOLE - 1, snapshot.now, last))
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
        if (shown := self.snapshot) is not None:
            panels = [self.query_one(name, Panel) for name in ("#verdict", "#evidence")]
            self.console.open_overlay(Reader(f"stall, as of {clock(shown.now)}", lambda width: [
                row for panel in panels for row in panel.rows(shown, width, WHOLE)
            ]))  # fmt: skip

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
        name = stack.path.rpartition("/")[2]
        app.open_overlay(
            Reader(f"stack of rank {rank}", lambda width: whole_rows(stack, width - 1), name)
        )
