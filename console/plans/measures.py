"""The values of the gates, measured from the totals of a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from console.sources.rank_totals import FIGURES, FIRST_LOSSES, LAST_STEPS, RankTotals
from console.sources.summary import Summary
from console.status_text import counted, number

OF_LAST_STEPS = ("toks_per_s", "step_ratio")
UNCOUNTED = "non-finite steps are not counted, and some steps have no record with a loss"


@dataclass(frozen=True, slots=True)
class Measured:
    """The value of a gate, or None. A gate with a `doubt` cannot pass.

    `window` names the records of the value, and `why` explains the value or its absence.
    """

    value: float | None
    window: str = ""
    why: str = ""
    doubt: str = ""


def steps_reached(s: Summary) -> Measured:
    """Returns the lowest last step of the ranks, if the sources of each rank agree.

    Ranks without a step are left out, except rank 0. A checkpoint that all ranks of a later
    run have loaded can raise the value to its step.
    """
    done: list[int] = []
    newest = [totals.attempts.get(totals.newest) for totals in s.ranks.values()]
    exits = [part.exit[0] for part in newest if part is not None and part.exit is not None]
    for rank, totals in sorted(s.ranks.items()):
        step, doubt = _steps_of(s, totals, exits)
        if doubt:
            return Measured(None, doubt=f"rank {rank}: {doubt}")
        if step or rank == 0:
            done.append(step)
    reached = max(min(done), s.loaded_step) if done else 0
    return Measured(float(reached) if s.of_rank(0).progress else None)


def _steps_of(s: Summary, totals: RankTotals, exits: list[int]) -> tuple[int, str]:
    """Returns two values: the last step of a rank, and a contradiction of its sources, or "".

    Not every step has a progress record, so the step of the exit record may be later. The later
    step counts only if the exit code is 0, and if the rank's pulse or another rank's exit record
    confirms it.
    """
    part, end = totals.attempts.get(totals.newest), s.ends.get((totals.newest, totals.rank))
    if part is None or part.exit is None:
        if end is not None and part is not None and part.step > end.step:
            return 0, f"its newest record has step {part.step}, its pulse step {end.step}"
        return totals.step, ""
    step, code = part.exit
    if part.start is None and step == 0:
        return totals.step, ""  # no step remained after the resume
    if end is not None and end.step != step:
        return 0, f"its exit record has step {step}, its pulse step {end.step}"
    if part.step > step:
        return 0, f"its newest record has step {part.step}, its exit record step {step}"
    confirmed = code == 0 and (end is not None or exits.count(step) > 1)
    return step if confirmed else min(step, totals.step), ""


def loss_finite(s: Summary) -> Measured:
    """Returns the sum, over all attempts, of the highest count of non-finite losses of a rank."""
    worst: dict[int, int] = {}
    first, doubt, known = "", "", False
    for attempt, rank, part, end in s.all_parts():
        by_pulse = end.nonfinite_steps if end is not None else -1
        count = max(part.counted or 0, part.bad_losses, by_pulse)
        worst[attempt] = max(count, worst.get(attempt, 0))
        has_losses = part.counted is not None or part.losses > 0
        known = known or (has_losses and rank == 0)
        if part.first_bad is not None and not first:
            first = f"first non-finite loss on record: step {part.first_bad} of attempt {attempt}"
        has_newest = part.exit is not None or (s.is_live and attempt == s.attempts)
        counts = has_newest and part.counts_at_last
        counts = counts or by_pulse >= 0 or not part.has_stepped(end)
        if (has_losses or rank == 0) and not counts and not part.every_loss_is_recorded(end):
            doubt = doubt or f"rank {rank}, attempt {attempt}: {UNCOUNTED}"
    total = sum(worst.values())
    return Measured(float(total) if known or total else None, "", first, doubt)


def loss_fall(s: Summary) -> Measured:
    """Returns by how much rank 0's loss fell, or nan if one of the last losses is not finite."""
    first = s.of_rank(0).first_losses
    newest = [
        (each.step, each.loss) for each in s.of_rank(0).newest_figures if each.loss is not None
    ]
    last = newest[-FIRST_LOSSES:]
    if min(len(first), len(last)) < FIRST_LOSSES or last[0][0] <= first[-1][0]:
        return Measured(None, why=f"{2 * FIRST_LOSSES} progress records are needed")
    before, after = (sum(loss for _, loss in each) / FIRST_LOSSES for each in (first, last))
    text = f"mean of the first {FIRST_LOSSES} records minus mean of the last {FIRST_LOSSES}"
    fall = before - after if math.isfinite(after) else math.nan
    return Measured(fall, text, f"{before:.3f} to {after:.3f}")


def bytes_right(s: Summary) -> Measured:
    found = [each for each in s.of_rank(0).newest_figures if each.bytes_right is not None]
    if not found:
        return Measured(None)
    return Measured(found[-1].bytes_right, f"record of step {found[-1].step}")


def grad_norm(s: Summary) -> Measured:
    totals = s.of_rank(0)
    doubt = _lacking(totals, totals.norms, "grad_norm")
    return Measured(totals.norm_min, f"lowest of {counted(totals.norms, 'record')}", doubt=doubt)


def _lacking(totals: RankTotals, found: int, name: str) -> str:
    """Returns how many records of a rank lack a value, or "" if no record lacks it."""
    missing, records = totals.expected - found, counted(totals.progress, "record")
    return f"rank {totals.rank}: {missing} of {records} without {name}" if missing > 0 else ""


def stalls(s: Summary) -> Measured:
    lost = "" if s.stalls is not None else "some stalls may not have been counted"
    return Measured(float(s.stalls_seen), doubt=lost)


def restarts(s: Summary) -> Measured:
    return Measured(None if s.attempts is None else float(s.attempts - 1))


def figure(s: Summary, name: str, ranks: range, worst: Callable[..., float], at: int) -> Measured:
    """Returns the worst value of one of the `FIGURES` among the ranks.

    `at` is a step, or 0 for the newest value.
    """
    each = [s.of_rank(rank) for rank in s.different(ranks)]
    found = {t.rank: t.figures_at(at) if at else t.figures() for t in each}
    if early := [rank for rank, figures in found.items() if figures is None]:
        return Measured(None, why=f"rank {early[0]} has no record at or after step {at}")
    values = {r: x for r, figures in found.items() if figures and (x := figures[name]) is not None}
    lacking, first = [rank for rank in found if rank not in values], found[0] or {}
    doubt = f"rank {lacking[0]} recorded no value" if lacking else ""
    *_, count = FIGURES[name]
    for totals in each if count else ():
        doubt = doubt or _lacking(totals, getattr(totals, count), name)
    when, why = f"at step {at}" if at else "", ""
    if name in OF_LAST_STEPS:
        when = f"last {first['steps'] or 0:.0f} steps {when}".rstrip()
        deviation = first["toks_per_s_stdev"]
        why = "" if deviation is None else f"standard deviation {number(deviation)} tok/s"
        doubt = doubt or _few(first["steps"])
    if not values:
        return Measured(None)
    is_known = not any(map(math.isnan, values.values()))
    return Measured(worst(values.values()) if is_known else math.nan, when, why, doubt)


def _few(steps: float | None) -> str:
    """Returns a text if `steps` is a number below `LAST_STEPS`, or ""."""
    enough = steps is None or steps >= LAST_STEPS
    return "" if enough else f"{LAST_STEPS} steps are needed, {steps:.0f} are known"


def heartbeats(s: Summary) -> Measured:
    """Counts the record numbers that are missing between records, over all ranks and attempts."""
    missing = sum(gap.count for *_, part, _ in s.all_parts() for gap in part.holes)
    return Measured(float(missing) if s.of_rank(0).progress else None)


def checkpoints(s: Summary) -> Measured:
    """Counts the checkpoints that rank 0 recorded in the surviving steps."""
    count = s.of_rank(0).saved_count
    lost = "a resume repeated all stored checkpoints, so their number is lost"
    return Measured(count, why=lost if count is None else "")


def loads(s: Summary) -> Measured:
    """Counts the loads of checkpoints: when a later attempt resumes, and after a save.

    A load after a save counts only if rank 0 recorded the checkpoint, and only if an event of the
    supervisor shows the load. This event must come from the attempt of the save, or from a later
    attempt. Only the newest surviving checkpoints are considered (`RankTotals.checkpoints`).
    """
    first = s.of_rank(0)
    resumed = first.loads
    saved = sum(first.saved_in(step) <= s.loaded.get(step, -1) for step in first.checkpoints)
    return Measured(float(resumed + saved), f"{resumed} at a resume, {saved} after the save")


def checkpoint_size(s: Summary) -> Measured:
    """Returns the size of the newest checkpoint if its files agree with its manifest."""
    files, recorded = s.files, max(s.of_rank(0).checkpoints, default=0)
    if files is None or files.checkpoint_mib is None or not recorded:
        why = files.checkpoint_doubt if files else "the checkpoints were not read"
        return Measured(None, why=why or "no checkpoint was recorded")
    doubt = "" if files.checkpoint == f"step_{recorded:08d}" else (
        f"the newest checkpoint is {files.checkpoint}, the newest record is of step {recorded}"
    )  # fmt: skip
    return Measured(files.checkpoint_mib, files.checkpoint, doubt=doubt)


def scaling(s: Summary) -> Measured:
    """Returns the speed per rank, divided by the speed of an earlier phase with one rank."""
    figures, files = s.of_rank(0).figures(), s.files
    rate = figures["toks_per_s"]
    if files is None or not files.single_toks_per_s or rate is None:
        return Measured(None, why=(
            "no earlier phase with one rank has a confirmed speed, or the speed of the last steps "
            "is not known"
        ))  # fmt: skip
    single = files.single_toks_per_s
    text = f"{number(rate)} tok/s on {counted(s.world, 'rank')}, {number(single)} tok/s on one"
    window, doubt = f"last steps, against {files.single}", _few(figures["steps"])
    return Measured(rate / s.world / single, window, text, doubt)


def log_errors(s: Summary) -> Measured:
    """Counts the lines of the logs that report an error of CUDA, a GPU or the collectives."""
    if s.files is None:
        return Measured(None, why="the logs were not read")
    return Measured(float(s.files.errors), "", s.files.first_error, s.files.log_doubt)


def without_hook(s: Summary) -> Measured:
    """Counts, over all attempts, how often a rank trained without a communication hook."""
    parts = [part for *_, part, end in s.all_parts() if part.has_stepped(end)]
    unknown = sum(part.hook is None for part in parts)
    doubt = f"{counted(unknown, 'start')} of ranks did not record a hook" if unknown else ""
    count = sum(part.hook == 0 for part in parts)
    return Measured(float(count) if count or (parts and not unknown) else None, why=doubt)


def _use_of_gpus(s: Summary) -> tuple[dict[int, float], float, Measured]:
    """Returns three values: the use of each GPU in %, the share of time without samples, a result.

    The share is that of the GPU with the least sampled time. The result has a window, an
    explanation and a doubt, but no value. If a sample lacks a GPU, this GPU counts as idle for the
    time of the sample. A step without a sample counts as idle, with the time of the longest of the
    newest steps.
    """
    longest_s = max((row.took_s for row in s.of_rank(0).steps), default=0.0)
    missing = 0
    for attempt, rank, part, end in s.all_parts():
        if rank == 0 and part.start is not None:
            done = max(part.step, part.exit[0] if part.exit else 0, end.step if end else 0)
            missing += max(0, done - part.start + 1 - s.gpus.covered.get(attempt, 0))
    whole_s = s.gpus.seconds + missing * longest_s
    if not 0 < whole_s < math.inf:
        return {}, 1.0, Measured(None)
    use = {index: 100 * busy_s / whole_s for index, busy_s in sorted(s.gpus.busy_s.items())}
    doubt = s.gpus.trouble or ("" if longest_s else "the durations of the steps are not recorded")
    if len(use) != s.world:
        counts = f"{counted(s.world, 'rank')} and {counted(len(use), 'GPU')}"
        doubt = f"{counts}: it is unknown which GPUs are used"
    words = ", ".join(f"GPU {index} {value:.0f} %" for index, value in use.items())
    without = 1 - min(s.gpus.seen_s.values(), default=0.0) / whole_s
    window = f"{whole_s:.0f} s of steps, {without:.0%} of it without a sample"
    return use, without, Measured(None, window, words, doubt)


def gpu_use(s: Summary) -> Measured:
    """Returns a lower bound of the mean use of the least used GPU while all ranks are in a step."""
    use, _, found = _use_of_gpus(s)
    return replace(found, value=min(use.values(), default=None))


def gpu_balance(s: Summary) -> Measured:
    """Returns an upper bound of the difference between the mean use of any two GPUs."""
    use, without, found = _use_of_gpus(s)
    spread = max(use.values()) - min(use.values()) + 100 * without if use else None
    return replace(found, value=spread)
