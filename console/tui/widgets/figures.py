"""The figures of now: value, unit, and over which window each was taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from console.model import Figure, RunState
from console.tui import format as fmt
from console.tui.feed import Snapshot
from console.tui.rows import Row, fill, rule
from console.tui.widgets.lines import Panel

OLD_S = 30.0
Figures = Mapping[str, Figure]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the panel: the first figure of `names` that there is, and a note to it."""

    label: str
    names: tuple[str, ...]
    note: Callable[[Figures], str] = lambda figures: ""
    only_above: float | None = None


def _p99(figures: Figures) -> str:
    slow = figures.get("step_p99_s")
    return f"p99 {fmt.duration(slow.value)}" if slow else ""


def _gate_min(figures: Figures) -> str:
    low = figures.get("gate_entropy_min")
    return f"min {low.value:.2f}" if low else ""


def _branches(figures: Figures) -> str:
    parts = [(b, figures.get(f"gate_share_{b}")) for b in ("cmp", "sel", "win")]
    return " ".join(f"{f.value * 100:.0f}" for _, f in parts if f)


LINES: tuple[Line, ...] = (
    Line("tok/s", ("toks_per_s",)),
    Line("step time", ("step_p50_s",), _p99),
    Line("loss", ("loss",)),
    Line("bytes right", ("bytes_right",)),
    Line("entropy", ("gate_entropy_mean",), _gate_min),
    Line("grad norm", ("grad_norm",)),
    Line("saved step", ("checkpoint_step",)),
    Line("lr", ("lr",)),
    Line("MFU", ("mfu",)),
    Line("memory", ("gpu_mem_reserved", "rss_mib"), lambda figures: "largest"),
    Line("skipped", ("skipped_steps",), only_above=0),
    Line("dropped", ("dropped_records",), only_above=0),
    Line("fetch", ("dt_fetch_s",)),
    Line("tokens", ("tokens_total",)),
    Line("disk free", ("disk_free_gib",)),
    Line("load", ("load1",)),
)


def figure_rows(state: RunState, width: int, height: int, now: float) -> list[Row]:
    """Returns a heading and the figures that there are, most important first."""
    rows = [rule("now", width)]
    label_width, value_width = 11, 8
    note_width = width - label_width - value_width - 1
    figures = dict(state.figures)
    saved = state.checkpoint.removeprefix("step_")
    if saved.isdecimal():
        figures["checkpoint_step"] = Figure(float(saved), "", "", now)
    for line in LINES:
        figure = next((figures[name] for name in line.names if name in figures), None)
        if figure is None or (line.only_above is not None and figure.value <= line.only_above):
            continue
        note = line.note(figures)
        old = now - figure.at
        if old > OLD_S and state.data_age_s is not None:
            note = f"{fmt.age(old)} old"
        elif not note and note_width >= 14:
            note = figure.window
        rows.append(
            (
                (fill(line.label, label_width), "dim"),
                (fill(fmt.figure(figure.value, figure.unit), value_width, right=True), "strong"),
                (" " + note if len(note) <= note_width else "", "dim"),
            )
        )
        if line.label == "entropy" and (shares := _branches(figures)):
            label = fill("cmp sel win", label_width)
            rows.append(((label, "dim"), (f" {shares} %", "strong")))
    if len(rows) == 1:
        rows.append((("no figures yet", "dim"),))
    return rows[:height]


class FiguresPanel(Panel):
    def rows(self, snapshot: Snapshot, width: int, height: int) -> list[Row]:
        state = snapshot.state
        return figure_rows(state, width, height, snapshot.now) if state else []
