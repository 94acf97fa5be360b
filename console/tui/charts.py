"""The charts of the Dashboard: their series and units, and the choice of the charts to show."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from console.model import LIVE_STATES, RunState
from console.status_text import OLD_S, oldest_s

BANDED = 16
"""One chart draws a band over at most this many GPUs or ranks; more series take too much memory."""
DEFAULT = 4
"""Number of charts that are shown while no chart has data and the operator has chosen none."""
LAYER, LOWEST_LAYER = "gate_entropy:", "gate_entropy_lowest_layer"


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart: its title and its series.

    `each` is "GPU", "rank" or "layer" if each of them has its own series, or else "". A chart of
    layers draws one curve for each of its `names`. Any other chart draws one band over them.
    """

    title: str
    names: tuple[str, ...]
    unit: str
    from_zero: bool = False
    scale: float = 1.0
    """The number by which the values are divided to convert them to `unit`."""
    each: str = ""
    parts: tuple[str, ...] = ()
    """The series whose values the zoomed chart lists one by one."""
    measures: str = ""
    """The measured thing ("GPU", "CPU" or "RSS") if the unit does not show it, or else "".

    With more than `BANDED` GPUs or ranks, the numbers of the shown ones follow.
    """
    is_over: bool = False
    """True after the end of the run, and for a chart of ranks or GPUs without a present value."""
    old_s: float = OLD_S
    """The title shows the age of the newest value if it is above this."""

    @property
    def unit_word(self) -> str:
        """The words after the title: `measures` and the unit, except a unit of time or size."""
        unit = {"share": "%", "s": "", "GiB": ""}.get(self.unit, self.unit)
        return f"{self.measures} {unit}".strip()

    def series(self, zoomed: bool) -> tuple[str, ...]:
        """Returns the names of the series that the chart needs."""
        lowest = (LOWEST_LAYER,) if self.each == "layer" else ()
        return (*self.names, *lowest, *(self.parts if zoomed else ()))


UTILISATION, MEMORY, ENTROPY = "utilisation", "memory", "gate entropy"
"""Titles of charts. The gate of `ENTROPY` is the attention gate."""
CATALOG = (
    Chart(UTILISATION, (), "%", from_zero=True),
    Chart("throughput", ("toks_per_s",), "tok/s", from_zero=True),
    Chart(MEMORY, (), "GiB", from_zero=True, scale=1024.0),
    Chart(ENTROPY, ("gate_entropy_mean", "gate_entropy_lowest"), "nats", True, each="layer"),
    Chart("loss", ("loss",), ""),
    Chart("step time", ("step_s",), "s", from_zero=True),
    Chart("bytes right", ("bytes_right",), "share", from_zero=True),
    Chart("grad norm", ("grad_norm",), "", from_zero=True),
)


def _of_run(chart: Chart, state: RunState, recorded: Collection[str]) -> Chart:
    """Returns a chart with the series and the unit that it has in this run."""
    is_over = state.state not in LIVE_STATES
    chart = replace(chart, is_over=is_over, old_s=oldest_s(state))
    if chart.title == ENTROPY:
        count = sum(name.startswith(LAYER) for name in recorded)
        return replace(chart, parts=tuple(f"{LAYER}{index}" for index in range(count)))
    if chart.names:
        figure = state.figures.get(chart.names[0])
        return replace(chart, unit=figure.unit) if figure else chart
    # Samples have both; a rank without them has ended, or no supervisor is alive.
    is_over = is_over or (bool(state.ranks) and all(rank.rss_mib is None for rank in state.ranks))
    numbers, each = [rank.rank for rank in state.ranks], "rank"
    series, measures = ("cpu_pct", "CPU") if chart.title == UTILISATION else ("rss_mib", "RSS")
    if state.gpus:
        numbers, each, measures = [gpu.index for gpu in state.gpus], "GPU", "GPU"
        series = "gpu_util_pct" if chart.title == UTILISATION else "gpu_mem_mib"
    names = tuple(f"{series}:{number}" for number in numbers[:BANDED])
    if len(numbers) > BANDED:
        measures += f" {'' if state.gpus else 'r'}{numbers[0]}–{numbers[BANDED - 1]}"
    return replace(chart, names=names, each=each, parts=names, measures=measures, is_over=is_over)


def of_run(state: RunState, recorded: Collection[str], choice: Sequence[str]) -> list[Chart]:
    """Returns the charts that the operator chose, or else the charts with data.

    If there are no such charts, returns the first `DEFAULT` charts. `recorded` has the names of the
    series that have points.
    """
    charts = {chart.title: _of_run(chart, state, recorded) for chart in CATALOG}
    if chosen := [charts[title] for title in choice if title in charts]:
        return chosen
    with_data = [c for c in charts.values() if any(name in recorded for name in c.names)]
    return with_data or [*charts.values()][:DEFAULT]
