"""Compares the variants of a sweep from the records of its runs.

The runs of a sweep are interleaved, because other load on the machine changes the step times of the
runs. Such load only makes steps longer. So the figure of a run is computed from its fast steps, and
the figure of a variant from the faster half of its runs. An exact permutation test over the rounds
decides whether two variants differ. The test assumes that two variants without a difference could
have exchanged their runs in any round.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from console import status_text
from console.plan import LIMITS, NAME, Phase, Plan, highest_p
from console.plans import launch_facts
from console.plans.gate_check import poll_confirmed
from console.sources import json_documents, launches
from console.sources.pace import LONGEST_STEP_S
from console.sources.run import RunSource
from trainers.contract import flags, jsonl, rundir
from trainers.contract.errors import NotFoundError, UsageError

LAST_STEPS, WARM_UP_STEPS = 50, 5
"""Number of last steps in the mean that the runbooks use, and number of first steps ignored."""
LEAST_STEPS = WARM_UP_STEPS + LAST_STEPS // 2
"""Smallest number of steps of a run in a sweep."""
FAST_QUANTILE = 0.1
MAX_ROUNDS = int(LIMITS["rounds"][1])
MOST_TOKENS = 1e12
FACTS: Mapping[str, tuple[str, ...]] = {
    "parameters": ("model.",), "tokens_per_step": ("data.seq_len", "train."), "versions": (),
    "cuda": (), "device": ("train.device",), "threads_per_rank": ("OMP_NUM_THREADS",),
    "strategy": ("train.strategy",), "comm_backend": ("train.device",),
    "comm_hook": ("ddp.", "train.strategy"),
    "backend": ("attention.", "model.", "data.", "train.precision", "train.device",
                "train.batch_size", "OMP_NUM_THREADS"),
}  # fmt: skip
"""Keys of env.json that must agree; settings and flags with these prefixes may change a value."""
OF_RUN = ("git", "host", "world")
"""Keys of run.json that must agree. Settings and flags of libraries must agree too."""


@dataclass(frozen=True, slots=True)
class Run:
    """The measurements of one run, with its settings and facts."""

    name: str
    toks_per_s: float
    """The throughput at the step time `fast_s`."""
    mean_toks_per_s: float
    """The tokens of a step ÷ the mean time of the last `mean_steps` steps."""
    mean_steps: int
    facts: Mapping[str, Any]
    """The settings, the flags of libraries, and the values of `OF_RUN` and `FACTS`."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One variant: the settings and flags in which variants differ, and one run per round."""

    name: str
    changes: Mapping[str, str]
    runs: tuple[Run, ...]

    @property
    def toks_per_s(self) -> float:
        """Geometric mean of the throughput in the faster half of the runs."""
        return math.exp(_half([math.log(run.toks_per_s) for run in self.runs]))

    @property
    def spread(self) -> tuple[float, float]:
        """Mean and standard deviation of `mean_toks_per_s` over the runs."""
        means = [run.mean_toks_per_s for run in self.runs]
        return fmean(means), stdev(means)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of one sweep. `refusal` says why the variants cannot be compared, or is ""."""

    sweep: str
    variants: tuple[Variant, ...] = ()
    """The variants, the fastest first."""
    p_values: Mapping[tuple[str, str], float] | None = None
    refusal: str = ""

    @property
    def best(self) -> tuple[str, ...]:
        """The names of the fastest variant and of the variants that do not differ from it."""
        first, limit = self.variants[0].name, highest_p(len(self.variants))
        pairs = self.p_values or {}
        return tuple(v.name for v in self.variants if pairs.get((first, v.name), 1.0) > limit)

    @property
    def answer(self) -> str:
        """One sentence: which variants are the fastest, or why there is no comparison."""
        if self.refusal:
            return f"not compared: {self.refusal}"
        best = self.best
        rest = [variant for variant in self.variants if variant.name not in best]
        if not rest:
            return "no difference"
        slower = self.variants[0].toks_per_s / rest[0].toks_per_s - 1
        than = f"at least {slower:.1%} faster than {', '.join(v.name for v in rest)}"
        if len(best) == 1:
            return f"{best[0]} is {than}"
        return f"no difference between {' and '.join(best)}; {best[0]} is {than}"

    def lines(self) -> Iterator[str]:
        """Yields the answer, then a line for each variant if the variants were compared."""
        limit = highest_p(len(self.variants)) if self.variants else 0.0
        yield f"{self.sweep}: {self.answer}" + f" (a difference needs p ≤ {limit:.2g})" * bool(
            limit
        )
        for variant in () if self.refusal else self.variants:
            mean, deviation = variant.spread
            facts = variant.runs[0].facts
            routes = " ".join(f"{k}:{v}" for k, v in jsonl.mapping(facts, "backend").items())
            speeds = [run.toks_per_s for run in variant.runs]
            p = (self.p_values or {}).get((self.variants[0].name, variant.name))
            than = f"; p = {p:.2g} against {self.variants[0].name}" if p is not None else ""
            yield (
                f"  {variant.name:<12} {variant.toks_per_s:>10,.0f} tok/s in fast steps "
                f"({status_text.counted(len(speeds), 'run')}: {min(speeds):,.0f} to "
                f"{max(speeds):,.0f}){than}; last {variant.runs[0].mean_steps} steps {mean:,.0f} ± "
                f"{deviation:,.0f} tok/s; {routes}, hook {facts.get('comm_hook')}"
            )

    def as_dict(self) -> dict[str, Any]:
        """Returns the comparison as plain data."""
        return {
            "sweep": self.sweep, "answer": self.answer, "refusal": self.refusal,
            "best": [] if self.refusal else list(self.best),
            "variants": [
                {"name": v.name, "changes": dict(v.changes), "toks_per_s": v.toks_per_s,
                 "mean_toks_per_s": v.spread[0], "stdev_toks_per_s": v.spread[1],
                 "runs": [[r.name, r.toks_per_s, r.mean_toks_per_s] for r in v.runs],
                 "facts": {key: v.runs[0].facts[key] for key in FACTS}}
                for v in self.variants
            ],
            "p_values": [[*pair, p] for pair, p in (self.p_values or {}).items()],
        }  # fmt: skip


def check_variants(
    phases: Sequence[Phase], of_all: Mapping[str, str], sets: Mapping[str, str]
) -> None:  # fmt: skip
    """Raises UsageError if a value for all phases replaces one in which variants differ."""
    for name in dict.fromkeys(phase.sweep for phase in phases if phase.sweep):
        each = [_given(asdict(phase)) for phase in phases if phase.sweep == name]
        for word in (*of_all, *sets):
            if len({given.get(flags.OWN.get(word, word)) for given in each}) > 1:
                raise UsageError(
                    f"the variants of {name} differ in {word}, and the shell or an option sets it "
                    "for all of them; unset it, or launch another phase"
                )


def unchanged(plan: Plan, settings: Sequence[Mapping[str, Any]], sweep: str) -> str:
    """Returns a setting or flag in which the variants of a sweep differ, but not its runs, or "".

    For example, one variant sets the value that the other variants have by default. `settings` has
    the resolved settings of each phase.
    """
    runs = [
        ({name: str(value) for name, value in {**phase.flags, **phase.set}.items()}, held)
        for phase, held in zip(plan.phases, settings, strict=True) if sweep and phase.sweep == sweep
    ]  # fmt: skip
    for name in dict.fromkeys(name for given, _ in runs for name in given):
        key = flags.OWN.get(name, name)
        used = {str(held[key]["value"] if key in held else {**plan.env, **given}.get(name))
                for given, held in runs}  # fmt: skip
        if len({given.get(name) for given, _ in runs}) > 1 and len(used) == 1:
            return f"{key} is {used.pop()} in all variants of {sweep}"
    return ""


def fast_s(steps_s: Sequence[float]) -> float:
    """Returns the 10 % quantile of step times, because other load affects the fast steps least."""
    return sorted(steps_s)[int(FAST_QUANTILE * (len(steps_s) - 1))]


def p_value(first: Sequence[float], second: Sequence[float]) -> float:
    """Returns the probability of at least the observed difference, if the variants do not differ.

    `first` and `second` have the figures of two variants, one for each of at most `MAX_ROUNDS`
    rounds. The test exchanges the two figures of some rounds. It is exact, because it tries every
    selection of rounds and compares the difference of the faster halves each time.
    """
    pairs = [(math.log(a), math.log(b)) for a, b in zip(first, second, strict=True)]

    def difference(exchanged: Sequence[bool]) -> float:
        rows = [(b, a) if swap else (a, b) for (a, b), swap in zip(pairs, exchanged, strict=True)]
        return abs(_half([a for a, _ in rows]) - _half([b for _, b in rows]))

    observed = difference([False] * len(pairs)) - 1e-12
    # Exchanging all rounds changes nothing, so the first round is never exchanged.
    exchanges = itertools.product((False, True), repeat=len(pairs) - 1)
    reached = sum(difference((False, *each)) >= observed for each in exchanges)
    return reached / 2 ** (len(pairs) - 1)


def _half(values: Sequence[float]) -> float:
    """Returns the mean of the larger half of the values."""
    return fmean(sorted(values)[len(values) // 2 :])


def compare(sweep: str, variants: Sequence[Variant]) -> Comparison:
    """Returns the comparison of variants that have the same number of runs."""
    if refusal := _refusal(variants):
        return Comparison(sweep, refusal=refusal)
    ranked = sorted(variants, key=lambda variant: -variant.toks_per_s)
    figures = {v.name: [run.toks_per_s for run in v.runs] for v in ranked}
    p_values = {
        (a, b): p_value(figures[a], figures[b]) for a, b in itertools.combinations(figures, 2)
    }
    return Comparison(sweep, tuple(ranked), p_values)


def _refusal(variants: Sequence[Variant]) -> str:
    """Returns why the runs cannot be compared, or "".

    There are three reasons: a run lacks a fact; two runs differ in a key, and the variants do not
    explain this; the variants differ in a key that has one value in all runs.
    """
    first = variants[0].runs[0]
    variables = {key for variant in variants for key in variant.changes}
    for variant in variants:
        for run in variant.runs:
            for key in sorted({*first.facts, *run.facts, *FACTS}):
                causes = FACTS.get(key, ())
                may = key in variables or any(name.startswith(causes) for name in variables)
                a = variant.runs[0] if may else first
                if key in FACTS and key not in run.facts:
                    return f"{run.name} has no {key} in {rundir.ENV}"
                if a.facts.get(key) != run.facts.get(key):
                    values = f"{a.facts.get(key)!r} in {a.name} and {run.facts.get(key)!r}"
                    return f"{key} is {values} in {run.name}"
    for key in sorted(variables & first.facts.keys()):
        if all(variant.runs[0].facts.get(key) == first.facts[key] for variant in variants):
            return f"{key} is {first.facts[key]!r} in all runs, although the variants differ in it"
    return ""


# --- reading -------------------------------------------------------------------------------------


Planned = tuple[Path, Mapping[str, Any]]
"""The run directory of a phase, and the entry of the phase in plan.json."""


def sweeps(launch: Path) -> list[Comparison]:
    """Returns the comparison of each sweep of a launch, in the order of the plan.

    Raises NotFoundError if plan.json cannot be read, and UsageError if the plan has no sweep.
    """
    plan = rundir.read_json(launch / rundir.PLAN, below=launch)
    if plan is None:
        raise NotFoundError(f"{launch} has no readable {rundir.PLAN}")
    found: dict[str, dict[str, list[Planned]]] = {}
    for index, phase in enumerate(jsonl.entries(plan, "phases")):
        name, sweep, variant = (jsonl.text(phase, key) for key in ("name", "sweep", "variant"))
        if sweep and NAME.fullmatch(name):
            of_variant = found.setdefault(sweep, {}).setdefault(variant, [])
            of_variant.append((launch / f"{index}-{name}", phase))
    if not found:
        name = launches.launch_id(launch)
        raise UsageError(f"the plan of {name} has no sweep: no phase with 'variants'")
    return [_read(sweep, variants) for sweep, variants in found.items()]


def _read(sweep: str, planned: Mapping[str, Sequence[Planned]]) -> Comparison:
    rounds = {len(phases) for phases in planned.values()}
    is_whole = len(rounds) == 1 and max(rounds) <= MAX_ROUNDS and len(planned) > 1
    if not is_whole or 2 ** (1 - max(rounds)) > highest_p(len(planned)):
        return Comparison(sweep, refusal=f"the launch has only a part of the rounds in {sweep}")
    variants = []
    for name, phases in planned.items():
        runs = []
        for path, _ in phases:
            run = _measure(path)
            if isinstance(run, str):
                return Comparison(sweep, refusal=f"{path.name}: {run}")
            runs.append(run)
        variants.append(Variant(name, _changes(phases[0][1], planned), tuple(runs)))
    return compare(sweep, variants)


def _changes(phase: Mapping[str, Any], planned: Mapping[str, Sequence[Planned]]) -> dict[str, str]:
    """Returns the settings and flags of a variant whose values differ in another variant."""
    others = [_given(phases[0][1]) for phases in planned.values()]
    return {
        key: value for key, value in _given(phase).items()
        if any(other.get(key) != value for other in others)
    }  # fmt: skip


def _given(phase: Mapping[str, Any]) -> dict[str, str]:
    """Returns the settings and flags of a phase; a flag of a setting has the key of the setting."""
    given = {
        flags.OWN.get(name, name): str(value)
        for name, value in jsonl.mapping(phase, "flags").items()
    }
    return given | {key: str(value) for key, value in jsonl.mapping(phase, "set").items()}


def _measure(path: Path) -> Run | str:
    """Returns the measurements of a run, or why the run cannot be compared."""
    source = RunSource(path, reads="all")
    source.read_all()
    state = poll_confirmed(source)
    if state.state != "completed" or status_text.exit_code(state):
        why = status_text.no_go(state) or status_text.not_passed(state.gates)
        return f"it is {state.state}{f', {why}' if why else ''}; only runs that are go are compared"
    steps_s = [s for s in source.series.newest_steps_s(WARM_UP_STEPS) if 0 < s < LONGEST_STEP_S]
    run = json_documents.run_record(path)
    facts = rundir.read_json(path / rundir.ENV, below=path) or {}
    tokens = jsonl.number(facts, "tokens_per_step")
    if tokens is None or not 0 < tokens < MOST_TOKENS:
        return f"{rundir.ENV} has no valid tokens_per_step"
    if len(steps_s) < LEAST_STEPS - WARM_UP_STEPS:
        return (
            f"it has {len(steps_s)} step times after the first {WARM_UP_STEPS} steps, too few; a "
            f"run of a sweep needs at least {LEAST_STEPS} steps"
        )
    values, given = launch_facts.values(run), json_documents.flag_field(run, "value")
    library = {name: value for name, value in given.items() if name in flags.LIBRARY}
    of_run = {key: run.get(key) for key in OF_RUN}
    last_s = steps_s[-LAST_STEPS:]
    return Run(
        path.name, tokens / fast_s(steps_s), tokens / fmean(last_s), len(last_s),
        values | library | of_run | {key: facts[key] for key in FACTS if key in facts},
    )  # fmt: skip
