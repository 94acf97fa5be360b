"""The truth checks: watch rules that find impossible, contradictory or unexpected figures of a run.

They can only warn or dump. A truth check raises no alert if its figures are missing or unusable.
"""

from __future__ import annotations

import math
import re
from statistics import fmean

from console.diagnose.readings import History, Readings
from console.diagnose.rule import Measured, Rule
from console.diagnose.truth_history import LEAST_BUSY, SURELY, spent
from console.plan import Watch
from console.sources.pace import TIMED_PHASES
from console.sources.sanitize import clean
from trainers.contract import jsonl

RANDOM_SOURCE = "synthetic"
"""The `data.source` of uniform random bytes."""
LEAK_TOKENS, LEAST_RECORDS = 16_384, 3
"""Least numbers of tokens and of records over which a loss is compared with chance."""
SKIP_STEPS, SKIP_AFTER = 200, 50
"""Skipped steps are counted over at least `SKIP_STEPS` steps. The first `SKIP_AFTER` steps of an
attempt are left out, because they calibrate the loss scale."""
SIZE = re.compile(r"(?<![a-z0-9.])(\d{1,4}(?:\.\d{1,3})?)([mb])(?![a-z0-9])")
SIZES_DIFFER = 0.01
BUSY, LEAST_GB_S = 0.9, 1e-6
HOST_BOUND_SHARE = 0.7


def _random_loss(now: Readings, history: History, _watch: Watch) -> Measured | None:
    """Returns how far the loss on uniform random bytes is below chance, in nats."""
    batch = math.prod(history.number(f"train.{key}", 0) for key in ("batch_size", "accumulate"))
    tokens = batch * history.number("data.seq_len", 0) * len(now.progress)
    vocabulary = history.number("model.vocab_size", 0)
    if history.value("data.source") != RANDOM_SOURCE or not (tokens >= 1 and vocabulary >= 2):
        return None
    needed = max(LEAST_RECORDS, math.ceil(LEAK_TOKENS / tokens))
    losses = list(history.truth.losses)[-needed:]
    if len(losses) < needed:
        return None
    loss, chance = math.fsum(losses) / needed, math.log(vocabulary)
    text = (
        f"the loss on uniform random bytes is {loss:.4f} nats over {needed} records and chance is "
        f"{chance:.4f}: the model sees what it has to predict; check the attention mask and targets"
    )
    return Measured(chance - loss, text)


def _first_loss(_now: Readings, history: History, _watch: Watch) -> Measured | None:
    """Returns the difference between the first loss and the loss of a uniform guess, in nats."""
    first, vocabulary = history.truth.first, history.number("model.vocab_size", 0)
    if first is None or first.loss is None or not math.isfinite(first.loss) or not vocabulary >= 2:
        return None
    chance = math.log(vocabulary)
    side, check = "below", "targets, attention mask and initial weights"
    if first.loss > chance:
        side, check = "above", "the initialisation, and whether the loss is a mean over tokens"
    text = (
        f"the loss of step 1 is {first.loss:.2f} nats, {abs(first.loss - chance):.2f} {side} "
        f"ln({vocabulary:.0f}) = {chance:.2f} of an untrained model: check {check}"
    )
    return Measured(abs(first.loss - chance), text)


def _rank_zero_gradient(now: Readings, history: History, _watch: Watch) -> Measured | None:
    """Returns the largest number of consecutive records of one rank with gradient norm zero.

    The value is 0 if the newest gradient norm of every rank is zero.
    """
    counts = {r: n for r, n in history.truth.zero_norms.items() if r in now.progress}
    if len(counts) < 2 or min(counts.values()):
        return None if len(counts) < 2 else Measured(0.0)
    rank = max(counts, key=lambda each: counts[each])
    text = (
        f"the gradient norm of rank {rank} is zero in {counts[rank]} consecutive records and that "
        f"of rank {min(counts, key=lambda each: counts[each])} is not: check the data and the loss "
        f"mask of rank {rank}"
    )
    return Measured(float(counts[rank]), text)


def _dead_parameters(now: Readings, history: History, _watch: Watch) -> Measured | None:
    """Counts the parameters without a gradient in the first step of this attempt.

    Returns None if no record names one, or if a setting fixes the weights of the branches.
    """
    dead = now.progress[0].dead if 0 in now.progress else ()
    if not dead or history.is_gate_fixed:
        return None
    names = ", ".join(dead[:4]) + (f" and {len(dead) - 4} more" if len(dead) > 4 else "")
    text = (
        f"no gradient in the first step for {names}: these parameters do not train; check that the "
        "branch which uses them contributes to the loss"
    )
    return Measured(float(len(dead)), text)


def _same_batch(_now: Readings, history: History, _watch: Watch) -> Measured | None:
    if not history.truth.has_batches():
        return None
    count, ranks = history.truth.same_batches()
    text = (
        f"ranks {', '.join(map(str, ranks))} read the same batch in {count} consecutive records: "
        "the data is not divided by rank; check rank and world size in the sampler"
    )
    return Measured(float(count), text)


def _constant_figure(_now: Readings, history: History, _watch: Watch) -> Measured | None:
    compared = {name: same for name, same in history.truth.same.items() if same.added > 1}
    if not compared:
        return None
    name, same = max(compared.items(), key=lambda item: item[1].count)
    text = (
        f"{name} is exactly {same.value} in {same.count} consecutive records: weights or data do "
        "not change, or another figure is recorded; check optimizer, learning rate and the record"
    )
    return Measured(float(same.count), text)


def _skipped_steps(_now: Readings, history: History, _watch: Watch) -> Measured | None:
    found = history.truth.skipped_share(SKIP_STEPS, SKIP_AFTER)
    if found is None:
        return None
    text = (
        f"{100 * found[0]:.3g}% of the last {found[1]} steps were skipped and changed no weight: "
        "check train.lr, train.precision and optim.skip_spikes_sigma"
    )
    return Measured(found[0], text)


def _backend(now: Readings, _history: History, _watch: Watch) -> Measured | None:
    """Counts the attention branches in which a setting has no effect or a kernel is missing."""
    routes = jsonl.mapping(now.env, "backend")
    if not routes:
        return None
    others = {
        clean(str(branch), 20): clean(str(route), 120) for branch, route in list(routes.items())[:8]
        if isinstance(route, str) and route.endswith(")")
    }  # fmt: skip
    found = "; ".join(f"{branch} runs {route}" for branch, route in others.items())
    text = (
        f"a setting of the attention has no effect, or a kernel is missing: {found}; change the "
        "setting, or install what is missing"
    )
    return Measured(float(len(others)), text)


def _model_size(now: Readings, _history: History, _watch: Watch) -> Measured | None:
    """Returns the ratio, at least 1, between the model's size and the size in the config's name."""
    count = jsonl.number(now.env, "parameters") or 0.0
    counted = jsonl.number(now.env, "parameters_counted") or count
    name = jsonl.text(now.env, "config").rpartition("/")[2]
    sizes = {
        float(number) * (1e6 if unit == "m" else 1e9)
        for number, unit in SIZE.findall(re.sub(r"[-_]", " ", name[:200].lower()))
    } - {0.0}
    known = 1 <= count < math.inf and abs(counted - count) <= SIZES_DIFFER * count
    if not known or len(sizes) != 1:
        return None
    size = sizes.pop()
    text = (
        f"the config {clean(name, 80)} names {size / 1e6:,.0f} M parameters and the model has "
        f"{count:,.0f}: check --config and $CONFIG"
    )
    return Measured(max(size / count, count / size), text)


def _host_bound(now: Readings, history: History, _watch: Watch) -> Measured | None:
    """Returns the share of the time in which the GPUs are busy.

    Returns None if there are too few samples. Also returns None if rank 0's newest phase times do
    not add up to 70-101 % of its step time.
    """
    busy, progress = history.truth.busy, now.progress.get(0)
    if progress is None or not progress.step_s or len(busy) < LEAST_BUSY:
        return None
    shares = {phase: spent(progress, (phase,)) / progress.step_s for phase in TIMED_PHASES}
    if not HOST_BOUND_SHARE <= math.fsum(shares.values()) <= 1 + SIZES_DIFFER:
        return None
    phase = max(shares, key=lambda each: shares[each])
    used = fmean(share for share, _ in busy)
    text = (
        f"the GPUs are busy for {used:.0%} of a step, and {phase} takes {shares[phase]:.0%} of "
        "it: the GPUs wait for the host; try train.compile, a larger batch or a faster data source"
    )
    return Measured(used, text)


def _no_power(_now: Readings, history: History, _watch: Watch) -> Measured | None:
    """Returns power draw ÷ power limit of the GPUs, or 1 if their utilisation is below `BUSY`.

    Returns None while there are too few samples, or if a sample lacks the power.
    """
    busy = history.truth.busy
    powers = [power for _, power in busy if power is not None]
    if len(busy) < LEAST_BUSY or len(powers) < len(busy):
        return None
    used, drawn = fmean(share for share, _ in busy), fmean(powers)
    text = (
        f"the GPUs report {used:.0%} utilisation and draw {drawn:.0%} of their power limit, mean "
        f"of {len(busy)} samples: their kernels wait or are tiny; profile a step"
    )
    return Measured(drawn if used >= BUSY else 1.0, text)


def _imbalance(_now: Readings, history: History, _watch: Watch) -> Measured | None:
    """Returns the slowest rank's time in fetch and forward ÷ the time of the other ranks.

    In these phases a rank does not wait for other ranks. In two cases only fetch is compared: with
    FSDP, because a rank then waits in forward; and for a foreign program on a GPU, because it
    measures only how long the host takes to start the forward pass.
    """
    truth, strategy = history.truth, history.value("train.strategy")
    own = ("fetch", "forward")
    if strategy == "fsdp" or (strategy is None and truth.on_gpus()):
        own = ("fetch",)
    slow = truth.slow(own)
    return Measured(*slow) if slow else None


def _below_communication(now: Readings, history: History, _watch: Watch) -> Measured | None:
    """Returns step time ÷ the least time in which DDP can reduce the gradients of a step.

    That time follows from the bandwidth that the preflight measured. All micro-batches of a step
    share one reduction.
    """
    rate, ranks = (history.number(f"measured.allreduce_{key}", 0) for key in ("gb_s", "ranks"))
    step_s, count = history.truth.step_s(), jsonl.number(now.env, "parameters") or 0.0
    is_ddp = history.value("train.strategy") == "ddp" and 1 < ranks == len(now.progress)
    if not (is_ddp and step_s and LEAST_GB_S <= rate < math.inf and 1 <= count < math.inf):
        return None
    own = 8 if history.value("train.precision") == "fp64" else 4
    size_gb = count * (own if history.value("ddp.compress") in (None, "none") else 2) / 1e9
    least_s = size_gb / rate
    text = (
        f"a step takes {step_s:.3g} s and the all-reduce of {size_gb:.3g} GB of gradients at least "
        f"{least_s:.3g} s, at the {rate:.3g} GB/s of the preflight: a figure is wrong; check "
        "that all ranks reduce their gradients, or measure again (check PLAN --measure)"
    )
    return Measured(step_s / least_s, text)


def _late(_now: Readings, history: History, _watch: Watch) -> Measured | None:
    """Returns the time of all steps at the present pace ÷ the time that the plan expects."""
    hours, steps = history.number("expects.hours", 0), history.number("train.steps", 0)
    step_s = history.truth.step_s()
    if not (step_s and hours > 0 and steps >= 1):
        return None
    found = steps * step_s / 3600
    text = (
        f"{steps:,.0f} steps of {step_s:.3g} s take {found:.3g} h, and the plan expects {hours:g} "
        "h: check speed, batch and steps, or correct expects.hours in the plan"
    )
    return Measured(found / hours, text)


ROWS: tuple[Rule, ...] = (
    Rule("imbalance",
         "slowest rank's time in fetch and forward ÷ median of the others (with FSDP, or in a "
         "foreign program on GPUs: only fetch)", "ratio", 1.3, SURELY, 300.0, _imbalance),
    Rule("random_loss",
         "ln(vocabulary) − mean loss, on random bytes (a correct model has at most 0)",
         "nats", 0.02, 0.01, 0.0, _random_loss),
    Rule("first_loss", "difference of the loss of step 1 from ln(vocabulary)", "nats",
         1.0, 0.99, 0.0, _first_loss),
    Rule("rank_zero_gradient", "gradient norm of exactly zero on some ranks, not on all",
         "consecutive records", 3, 0, 0.0, _rank_zero_gradient),
    Rule("dead_parameters", "parameters whose gradient is missing or zero in the first step",
         "parameters", 1, 0, 0.0, _dead_parameters),
    Rule("same_batch", "the same batch on several ranks", "consecutive records",
         3, 0, 0.0, _same_batch),
    Rule("constant_figure", "loss or gradient norm with exactly the same value",
         "consecutive records", 20, 1, 0.0, _constant_figure),
    Rule("skipped_steps", "share of skipped steps, over at least the last 200 steps", "share",
         0.1, 0.05, 0.0, _skipped_steps),
    Rule("backend", "attention branches whose setting has no effect or whose kernel is missing",
         "cases", 1, 0, 0.0, _backend),
    Rule("model_size", "parameters ÷ size in the config's name (e.g. 125m), or the inverse",
         "ratio", 2.0, 1.9, 0.0, _model_size),
    Rule("host_bound", "share of a step in which the GPUs are busy", "share",
         0.3, 0.4, 60.0, _host_bound),
    Rule("no_power", "power ÷ power limit of GPUs with utilisation ≥ 90 %", "share",
         0.25, 0.3, 60.0, _no_power),
    Rule("below_communication", "step time ÷ shortest possible time to all-reduce the gradients",
         "ratio", 0.7, 0.8, 60.0, _below_communication),
    Rule("late", "time of all steps at the present pace ÷ the hours that the plan expects",
         "ratio", 1.5, 1.4, 60.0, _late),
)  # fmt: skip
