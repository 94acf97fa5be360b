"""The newest figures, each with its value and, if there is room, a note."""

from __future__ import annotations

from console.model import LIVE_STATES, Figure, RunState
from console.status_text import oldest_s
from console.tui import format as fmt
from console.tui.rows import Row, fill, rule

STEPS = " steps"
"""The end of a window of steps, which is left out if it does not fit."""

LINES: tuple[tuple[str, tuple[str, ...], str, str], ...] = (
    ("tok/s", ("toks_per_s",), "", ""),
    ("step p50", ("step_p50_s",), "p99", "step_p99_s"),
    ("stalls", ("stalls",), "", ""),
    ("loss", ("loss",), "", ""),
    ("skipped", ("skipped_steps",), "", ""),
    ("dropped", ("dropped_records",), "", ""),
    ("bytes right", ("bytes_right",), "", ""),
    ("entropy", ("gate_entropy_mean",), "min", "gate_entropy_min"),
    ("grad norm", ("grad_norm",), "", ""),
    ("saved step", ("checkpoint_step",), "", ""),
    ("lr", ("lr",), "", ""),
    ("MFU 6ND", ("mfu",), "exact", "mfu_exact"),
    ("memory GPU", ("gpu_mem_reserved",), "largest", ""),
    ("memory RSS", ("rss_mib",), "largest", ""),
    ("fetch", ("dt_fetch_s",), "", ""),
    ("tokens", ("tokens_total",), "", ""),
    ("disk free", ("disk_free_gib",), "", ""),
    ("load", ("load1",), "", ""),
)
"""Each line has a label, names of figures, and the word and the figure of a note. The line shows
the first figure that is available."""
IF_ANY = ("skipped", "dropped")
"""Lines that are left out while their figure is 0."""
BRANCHES = ("cmp", "sel", "win")


def figure_rows(state: RunState, width: int, height: int, now: float) -> list[Row]:
    """Returns a heading and the available figures, the most important first."""
    rows, at = [rule("now", width)], now
    if state.state not in LIVE_STATES and state.figures:
        at = max(figure.at for figure in state.figures.values())
        rows = [rule("last", width, f"{fmt.age(now - at)} ago")]
    label_width, value_width = 11, 8
    note_width = width - label_width - value_width - 1
    figures = dict(state.figures)
    saved = state.checkpoint.removeprefix("step_")
    if saved.isdecimal():
        figures["checkpoint_step"] = Figure(float(saved), "", "", now)
    for label, names, word, beside in LINES:
        figure = next((figures[name] for name in names if name in figures), None)
        if figure is None or (label in IF_ANY and not figure.value):
            continue
        notes = [] if beside else [word]
        if (other := figures.get(beside)) is not None:
            has_unit = other.unit in ("s", "share")
            value = fmt.figure(other.value, other.unit) if has_unit else f"{other.value:.2f}"
            notes = [f"{word} {value}"]
        if at - figure.at > oldest_s(state) and (at < now or state.data_age_s is not None):
            notes = [f"{fmt.age(now - figure.at)} old"]
        elif figure.window.endswith(STEPS):
            short = figure.window.removesuffix(STEPS)
            notes = [f"{note}, {short}" for note in notes if note] + [figure.window, short]
        elif not any(notes) and note_width >= 14:
            notes = [figure.window]
        value = fill(fmt.figure(figure.value, figure.unit), value_width, right=True)
        note = next((f" {note}" for note in notes if note and len(note) <= note_width), "")
        rows.append(((fill(label, label_width), "dim"), (value, "strong"), (note, "dim")))
        shares = [f for b in BRANCHES if (f := figures.get(f"gate_share_{b}"))]
        if label == "entropy" and shares:
            text = " ".join(f"{share.value * 100:.0f}" for share in shares)
            branches = fill(" ".join(BRANCHES), label_width)
            rows.append(((branches, "dim"), (f" {text} %", "strong")))
    if len(rows) == 1:
        rows.append((("no figures yet", "dim"),))
    return rows[:height]
