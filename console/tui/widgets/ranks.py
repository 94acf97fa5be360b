"""One row per rank with its GPU, step and phase; without GPUs, with its CPU use and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from console.model import LIVE_STATES, Gpu, Rank, RunState
from console.status_text import BRIEF
from console.tui import format as fmt
from console.tui.rows import Row, columns, rule
from console.tui.widgets.header import RED_S

WIDE = 70
PID, MARK = 7, " ◂"
PROCESS_WORDS = {"T": "stopped", "t": "traced", "Z": "zombie", "gone": "gone", "D": ""}
Cells = dict[str, tuple[str, str]]
"""Text and style of each cell of a rank; the key is the name of the column."""
Column = tuple[str, int]
BAR = ""
"""The column without a heading."""


def rank_rows(state: RunState, width: int, height: int, _now: float = 0.0) -> list[Row]:
    """Returns a heading and a row per rank, or per GPU before a rank has started.

    If not all ranks fit, shows only the worst ranks, the worst first. The last row then has the
    number of hidden ranks.
    """
    has_gpus = bool(state.gpus) or any(rank.gpu is not None for rank in state.ranks)
    idle = [Rank(gpu.index, state.host, 0, "", None, None, None, gpu) for gpu in state.gpus]
    ranks = state.ranks or idle
    if not ranks:
        return [rule("ranks", width), (("no rank has started yet", "dim"),)]
    wide = width >= WIDE
    digits = max(4, len(str(max(rank.rank for rank in ranks))))
    shown = _worst_first(state, ranks, height - 1)
    layout = _layout(state, has_gpus, wide, width, digits)
    rows = [columns((name, w, "dim" if i else "title") for i, (name, w) in enumerate(layout))]
    rows += [_row(state, rank, has_gpus, wide, layout) for rank in shown]
    if len(shown) < len(ranks):
        hidden = len(ranks) - len(shown)
        rows.append(((f"   and {hidden:,} more ranks, none of them worse", "dim"),))
    return rows


def _worst_first(state: RunState, ranks: Sequence[Rank], room: int) -> Sequence[Rank]:
    """Returns all ranks in order if they fit, or else the worst ranks, the worst first."""
    if len(ranks) <= room:
        return ranks
    newest = max((rank.pulse.step for rank in ranks if rank.pulse), default=0)
    blamed = state.verdict.rank if state.verdict else None

    def badness(rank: Rank) -> tuple[Any, ...]:
        behind = newest - rank.pulse.step if rank.pulse else newest + 1
        lost = rank.gpu is not None and rank.gpu.state != "ok"
        fine = not lost, not wrong(rank)
        return rank.rank != blamed, *fine, -behind, -(rank.age_s or 0.0), rank.rank

    return sorted(ranks, key=badness)[: max(0, room - 1)]


def _layout(state: RunState, has_gpus: bool, wide: bool, width: int, digits: int) -> list[Column]:
    """Returns the heading and width of each column; a negative width aligns right."""
    gpus = state.gpus or [rank.gpu for rank in state.ranks if rank.gpu is not None]
    large = max((gpu.mem_total_mib or 0 for gpu in gpus), default=0) >= 100 * 1024
    if has_gpus:
        memory = 6 + 2 * large + 3 * wide
        power = [("power", -9), ("temp", -4)] if wide else [("watt", -4), ("°C", -2)]
        fixed = [
            ("rank" if state.ranks else "GPU", digits),
            ("util", -4),
            (BAR, 0),
            ("mem", -memory),
            *power,
        ]
    else:
        fixed = [("rank", digits), ("cpu", -4), (BAR, 0), ("mem", -8 if wide else -5)]
    fixed += [("step", -8 if wide else -7), ("phase", 9), ("for", -4)]
    fixed += [("age", -4)] * wide
    used, pid = sum(abs(w) + 1 for _, w in fixed), PID + wide
    if width - used >= len(MARK) + pid + 1:  # a pid that is cut would be another pid
        fixed += [("pid", -pid)]
    used = sum(abs(w) + 1 for _, w in fixed) - 1
    bar = max(0, min(16 if has_gpus else 20, width - used - len(MARK)))
    return [(name, w or bar) for name, w in fixed if w or bar > 1]


def _row(state: RunState, rank: Rank, has_gpus: bool, wide: bool, layout: list[Column]) -> Row:
    is_live = lives(state, rank)
    rank = rank if is_live else unmeasured(rank, state)
    stale = rank.age_s is not None and rank.age_s > RED_S
    base = "" if is_live and not stale else "dim"
    blamed = state.verdict is not None and state.verdict.rank == rank.rank
    (name, digits), *rest = layout
    bar = dict(layout).get(BAR, 0)
    cells: Cells = {
        name: (str(rank.rank), "crit" if blamed else "strong"),
        "age": (fmt.age(rank.age_s), "stale" if stale else "dim"),
        "pid": (str(rank.pid or ""), "dim"),
    } | place_cells(rank, base, "crit" if wrong(rank) or blamed else base, wrong(rank))
    if not has_gpus:
        memory = fmt.gib if wide else fmt.short_gib
        cells |= {
            "cpu": (fmt.whole(rank.cpu_pct, "%"), base), BAR: _bar_cell(rank.cpu_pct, bar, base),
            "mem": (memory(rank.rss_mib), base),
        }  # fmt: skip
    elif rank.gpu is not None and rank.gpu.state == "ok":
        cells |= _gpu_cells(rank.gpu, bar, wide, base)
    else:
        at = [name for name, _ in rest].index("step")
        room = sum(abs(width) + 1 for _, width in rest[:at]) - 1
        layout = [(name, digits), ("why", room), *rest[at:]]
        cells["why"] = _lost_cell(rank.gpu)
    row = columns((cells[name][0], width, cells[name][1]) for name, width in layout)
    return (*row, (MARK, "crit")) if blamed else row


def _lost_cell(gpu: Gpu | None) -> tuple[str, str]:
    if gpu is None:
        return "GPU not known", "dim"
    word = "GPU LOST" if gpu.state == "lost" else f"GPU {gpu.state}"
    return f"{word} {gpu.why}".rstrip(), "crit"


def _gpu_cells(gpu: Gpu, bar: int, wide: bool, base: str) -> Cells:
    used, total = (fmt.DASH if mib is None else f"{mib / 1024:.0f}"
                   for mib in (gpu.mem_used_mib, gpu.mem_total_mib))  # fmt: skip
    memory = f"{used}/{total}{' GiB' if wide else 'G'}"
    power = fmt.whole(gpu.power_w)
    if gpu.power_w is not None:
        power += f"/{fmt.whole(gpu.power_limit_w)} W" if gpu.power_limit_w else "W"
    degrees = fmt.whole(gpu.temp_c)
    heat = "warn" if gpu.temp_c is not None and gpu.temp_c >= 85 else base
    return {
        "util": (fmt.whole(gpu.util_pct, "%"), base),
        BAR: _bar_cell(gpu.util_pct, bar, base),
        "mem": (memory if gpu.mem_total_mib or not wide else fmt.gib(gpu.mem_used_mib), base),
        "power": (power, base),
        "watt": (fmt.whole(gpu.power_w, "W"), base),
        "temp": (degrees if gpu.temp_c is None else f"{degrees} C", heat),
        "°C": (degrees, heat),
    }


def _bar_cell(percent: float | None, width: int, base: str) -> tuple[str, str]:
    return "".join(fmt.bar(percent and percent / 100, width)), base or "data"


def lives(state: RunState, rank: Rank) -> bool:
    """Returns whether the measurements of a rank are current: run and rank have not ended."""
    return state.state in LIVE_STATES and not rank.exit and rank.state != "gone"


def unmeasured(rank: Rank, state: RunState) -> Rank:
    """Returns a rank without its ages, its CPU use and its memory.

    If the run has ended, the use, power, memory use and temperature of the GPU are removed too.
    """
    pulse, gpu = rank.pulse and replace(rank.pulse, since_s=None), rank.gpu
    if gpu is not None and state.state not in LIVE_STATES:
        gpu = replace(gpu, util_pct=None, power_w=None, mem_used_mib=None, temp_c=None)
    return replace(rank, age_s=None, cpu_pct=None, rss_mib=None, pulse=pulse, gpu=gpu)


def wrong(rank: Rank) -> str:
    """Returns how a rank ended, short enough for a column: `code 1`, `SIGKILL`, `code ?`.

    For a rank that has not ended, returns what is unusual about its process, or "".
    """
    end = rank.exit.partition(",")[0].removesuffix(")")
    for words, short in (
        ("exited (code ", "code "),
        ("killed (", ""),
        ("exit code not available", "code ?"),
    ):
        end = end.replace(words, short)
    return end or PROCESS_WORDS.get(rank.state, "")


def place_cells(rank: Rank, base: str, style: str, end: str = "") -> Cells:
    """Returns three cells of a rank: its step, its phase or `end`, and the time in this phase."""
    pulse = rank.pulse
    step = fmt.whole(pulse.step) if pulse else fmt.DASH
    phase = end or (pulse.phase if pulse else fmt.DASH)
    since = fmt.age(pulse.since_s, BRIEF) if pulse else fmt.DASH
    return {"step": (step, base), "phase": (phase, style), "for": (since, style)}
