"""One row a rank: its GPU where it has one, else CPU and memory; step, phase, age."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from console.model import LIVE_STATES, Gpu, Rank, RunState
from console.tui import format as fmt
from console.tui.feed import Snapshot
from console.tui.rows import Row, columns, rule
from console.tui.widgets.header import RED_S
from console.tui.widgets.lines import Panel

WIDE = 70
PID, MARK = 7, " ◂"
PROCESS_WORDS = {"T": "stopped", "t": "traced", "Z": "zombie", "gone": "gone", "D": ""}
Cells = dict[str, tuple[str, str]]
"""Text and style of a rank's cells by the name of their column."""
Column = tuple[str, int]
BAR = ""
"""The column without a heading."""


def rank_rows(state: RunState, width: int, height: int) -> list[Row]:
    """Returns a heading and a row a rank; with more ranks than room, the worst and a count."""
    has_gpus = bool(state.gpus) or any(rank.gpu is not None for rank in state.ranks)
    heading = "GPUs" if has_gpus else "ranks"
    if not state.ranks:
        rows = [rule(heading, width)]
        if not state.gpus:
            return [*rows, (("no rank has started yet", "dim"),)]
        idle = [Rank(gpu.index, state.host, 0, "", None, None, None, gpu) for gpu in state.gpus]
        return _table(state, idle, has_gpus, width, height)
    return _table(state, state.ranks, has_gpus, width, height)


def _table(
    state: RunState, ranks: Sequence[Rank], has_gpus: bool, width: int, height: int
) -> list[Row]:
    wide = width >= WIDE
    digits = max(3 if has_gpus else 4, len(str(max(rank.rank for rank in ranks))))
    shown = _worst_first(state, ranks, height - 1)
    layout = _layout(state, has_gpus, wide, width, digits)
    rows = [columns((name, w, "dim" if i else "title") for i, (name, w) in enumerate(layout))]
    rows += [_row(state, rank, has_gpus, wide, layout) for rank in shown]
    if len(shown) < len(ranks):
        hidden = len(ranks) - len(shown)
        rows.append(((f"   and {hidden:,} more ranks, none of them worse", "dim"),))
    return rows


def _worst_first(state: RunState, ranks: Sequence[Rank], room: int) -> Sequence[Rank]:
    """Returns all ranks in order when they fit, else the worst ones, worst first."""
    if len(ranks) <= room:
        return ranks
    newest = max((rank.pulse.step for rank in ranks if rank.pulse), default=0)
    guilty = state.verdict.rank if state.verdict else None

    def badness(rank: Rank) -> tuple[bool, bool, bool, int, float, int]:
        behind = newest - rank.pulse.step if rank.pulse else newest + 1
        lost = rank.gpu is not None and rank.gpu.state != "ok"
        wrong = rank.state in PROCESS_WORDS and bool(PROCESS_WORDS[rank.state])
        return (
            rank.rank != guilty, not lost, not (wrong or rank.exit), -behind,
            -(rank.age_s or 0.0), rank.rank,
        )  # fmt: skip

    return sorted(ranks, key=badness)[: max(0, room - 1)]


def _layout(state: RunState, has_gpus: bool, wide: bool, width: int, digits: int) -> list[Column]:
    """Returns heading and width of the columns; a negative width aligns right."""
    memory = max((g.mem_total_mib or 0 for g in _gpus(state)), default=0) >= 100 * 1024
    if has_gpus and wide:
        fixed = [("GPU", digits), ("util", -4), (BAR, 0), ("mem", -11 if memory else -9),
                 ("power", -9), ("temp", -4)]  # fmt: skip
    elif has_gpus:
        fixed = [("GPU", digits), ("util", -4), (BAR, 0), ("mem", -8 if memory else -6),
                 ("watt", -4), ("°C", -2)]  # fmt: skip
    else:
        fixed = [("rank", digits), ("cpu", -4), (BAR, 0), ("mem", -8 if wide else -5)]
    fixed += [("step", -8 if wide else -7), ("phase", 9), ("for", -4)]
    used = sum(abs(w) for _, w in fixed) + len(fixed) - 1
    if wide:
        fixed += [("age", -4), ("pid", -8)]
    elif width - used >= 1 + len(MARK) + PID + 1:
        fixed += [("pid", -PID)]
    used = sum(abs(w) for _, w in fixed) + len(fixed) - 1
    bar = max(1, min(16 if has_gpus else 20, width - used - len(MARK)))
    return [(name, w or bar) for name, w in fixed]


def _gpus(state: RunState) -> Sequence[Gpu]:
    return state.gpus or [rank.gpu for rank in state.ranks if rank.gpu is not None]


def _row(state: RunState, rank: Rank, has_gpus: bool, wide: bool, layout: list[Column]) -> Row:
    is_live = lives(state, rank)
    stale = is_live and rank.age_s is not None and rank.age_s > RED_S
    base = "" if is_live and not stale else "dim"
    guilty = state.verdict is not None and state.verdict.rank == rank.rank
    wrong = rank.exit or PROCESS_WORDS.get(rank.state, "")
    (name, digits), *rest = layout
    cells: Cells = {
        name: (str(rank.rank), "crit" if guilty else "strong"),
        "age": (fmt.age(rank.age_s if is_live else None), "stale" if stale else "dim"),
        "pid": (str(rank.pid or ""), "dim"),
    } | place_cells(rank, is_live, base, "crit" if wrong or guilty else base, wrong)
    if not has_gpus:
        cells |= _cpu_cells(rank if is_live else None, dict(layout)[BAR], wide, base)
    elif rank.gpu is not None and rank.gpu.state == "ok":
        gpu = rank.gpu if state.state in LIVE_STATES else _unmeasured(rank.gpu)
        cells |= _gpu_cells(gpu, dict(layout)[BAR], wide, base)
    else:
        room = sum(abs(width) for _, width in rest[:5]) + 4
        layout = [(name, digits), ("why", room), *rest[5:]]
        cells["why"] = _lost_cell(rank.gpu)
    row = columns((cells[name][0], width, cells[name][1]) for name, width in layout)
    return (*row, (MARK, "crit")) if guilty else row


def _lost_cell(gpu: Gpu | None) -> tuple[str, str]:
    if gpu is None:
        return "no GPU", "dim"
    word = "GPU LOST" if gpu.state == "lost" else f"GPU {gpu.state}"
    return f"{word} {gpu.why}".rstrip(), "crit"


def _unmeasured(gpu: Gpu) -> Gpu:
    """Returns a GPU without the measurements of its last sample."""
    return replace(gpu, util_pct=None, power_w=None, mem_used_mib=None, temp_c=None)


def _gpu_cells(gpu: Gpu, bar: int, wide: bool, base: str) -> Cells:
    used, total = gpu.mem_used_mib, gpu.mem_total_mib
    memory = f"{_whole_gib(used)}/{_whole_gib(total)}{' GiB' if wide else 'G'}"
    degrees = fmt.DASH if gpu.temp_c is None else f"{gpu.temp_c:.0f}"
    heat = "warn" if gpu.temp_c is not None and gpu.temp_c >= 85 else base
    return {
        "util": (fmt.percent(gpu.util_pct), base),
        BAR: _bar_cell(gpu.util_pct, bar, base),
        "mem": (memory if total or not wide else fmt.gib(used), base),
        "power": (fmt.watts(gpu.power_w, gpu.power_limit_w), base),
        "watt": (fmt.watts(gpu.power_w), base),
        "temp": (degrees if gpu.temp_c is None else f"{degrees} C", heat),
        "°C": (degrees, heat),
    }


def _whole_gib(mib: float | None) -> str:
    return fmt.DASH if mib is None else f"{mib / 1024:.0f}"


def _bar_cell(percent: float | None, width: int, base: str) -> tuple[str, str]:
    return "".join(fmt.bar(percent and percent / 100, width)), base or "data"


def lives(state: RunState, rank: Rank) -> bool:
    """Says whether what is known of a rank can be of now: nothing of one that ended counts on."""
    return state.state in LIVE_STATES and not rank.exit and rank.state != "gone"


def _cpu_cells(rank: Rank | None, bar: int, wide: bool, base: str) -> Cells:
    if rank is None:
        return {"cpu": (fmt.DASH, base), BAR: ("", ""), "mem": (fmt.DASH, base)}
    return {
        "cpu": (fmt.percent(rank.cpu_pct), base),
        BAR: _bar_cell(rank.cpu_pct, bar, base),
        "mem": (fmt.gib(rank.rss_mib) if wide else fmt.short_gib(rank.rss_mib), base),
    }


def place_cells(rank: Rank, is_live: bool, base: str, style: str, wrong: str = "") -> Cells:
    """Returns at which step and in which phase a rank is, or what is wrong with it, since when.

    A rank that does not live keeps its last place, without a time that counts on.
    """
    pulse = rank.pulse
    step = fmt.count(pulse.step) if pulse else fmt.DASH
    phase = wrong or (pulse.phase if pulse else fmt.DASH)
    since = fmt.span(pulse.since_s) if pulse and is_live else fmt.DASH
    return {"step": (step, base), "phase": (phase, style), "for": (since, style)}


class Ranks(Panel):
    def rows(self, snapshot: Snapshot, width: int, height: int) -> list[Row]:
        return rank_rows(snapshot.state, width, height) if snapshot.state else []
