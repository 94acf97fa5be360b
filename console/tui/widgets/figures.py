"""The newest figures, each with value, unit and window."""

from __future__ import annotations

from dataclasses import dataclass

from console.model import Figure, RunState
from console.tui import format as fmt
from console.tui.rows import Row, fill, rule

OLD_S = 30.0


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the panel: the first available figure of `names`.

    `beside` is another figure, shown as a note with its label.
    """

    label: str
    names: tuple[str, ...]
    beside: tuple[str, str] = ("", "")
    only_above: float | None = None


LINES: tuple[Line, ...] = (
    Line("tok/s", ("toks_per_s",)),
    Line("step time", ("step_p50_s",), ("p99", "step_p99_s")),
    Line("loss", ("loss",)),
    Line("bytes right", ("bytes_right",)),
    Line("entropy", ("gate_entropy_mean",), ("min", "gate_entropy_min")),
    Line("grad norm", ("grad_norm",)),
    Line("saved step", ("checkpoint_step",)),
    Line("lr", ("lr",)),
    Line("MFU 6ND", ("mfu",), ("exact", "mfu_exact")),
    Line("memory", ("gpu_mem_reserved", "rss_mib"), ("largest", "")),
    Line("skipped", ("skipped_steps",), only_above=0),
    Line("dropped", ("dropped_records",), only_above=0),
    Line("fetch", ("dt_fetch_s",)),
    Line("tokens", ("tokens_total",)),
    Line("disk free", ("disk_free_gib",)),
    Line("load", ("load1",)),
)
BRANCHES = ("cmp", "sel", "win")


def figure_rows(state: RunState, width: int, height: int, now: float) -> list[Row]:
    """Returns a heading and the available figures, the most important first."""
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
        label, name = line.beside
        other = figures.get(name)
        note = "" if name else label
        if other is not None:
            has_unit = other.unit in ("s", "share")
            value = fmt.figure(other.value, other.unit) if has_unit else f"{other.value:.2f}"
            note = f"{label} {value}"
        old = now - figure.at
        if old > OLD_S and state.data_age_s is not None:
            note = f"{fmt.age(old)} old"
        elif not note and note_width >= 14:
            note = figure.window
        value = fill(fmt.figure(figure.value, figure.unit), value_width, right=True)
        note = f" {note}" if len(note) <= note_width else ""
        rows.append(((fill(line.label, label_width), "dim"), (value, "strong"), (note, "dim")))
        shares = [f for b in BRANCHES if (f := figures.get(f"gate_share_{b}"))]
        if line.label == "entropy" and shares:
            text = " ".join(f"{share.value * 100:.0f}" for share in shares)
            label = fill(" ".join(BRANCHES), label_width)
            rows.append(((label, "dim"), (f" {text} %", "strong")))
    if len(rows) == 1:
        rows.append((("no figures yet", "dim"),))
    return rows[:height]
