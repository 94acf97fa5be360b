"""The training loop: one for one process and for many, on the CPU and on GPUs."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsa.model import Transformer
from trainers import checkpoint, facts, guard, optim, precision
from trainers.contract.member import Member
from trainers.data import Batch, Loader, open_source
from trainers.guard import Guard
from trainers.parallel import Single, join
from trainers.phases import Phases
from trainers.report import Figures, Report
from trainers.settings import Settings
from trainers.votes import Row, Votes

DONE, RIGHT_REACHED = "done", "bytes_right reached"


@dataclass(slots=True)
class Training:
    """The parts that a step works with."""

    settings: Settings
    member: Member
    report: Report
    parallel: Single
    plain: Transformer
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: Loader
    phases: Phases
    votes: Votes
    guard: Guard


def train(settings: Settings, member: Member, report: Report) -> str:
    """Trains until the steps are done or all ranks agree to halt. Returns why it ended.

    Raises TrainingError and UsageError with one sentence; whatever else it raises is a bug.
    """
    member.pulse.set(0, "load")
    training = build(settings, member, report)
    try:
        began = time.perf_counter()
        training.loader.ready()
        about = training.loader.source.about
        report.say("loader_ready", 0, f"data: {about}", dt=time.perf_counter() - began)
        reason = run_steps(training)
        training.votes.collect(all_of_them=True)
        keep(training)
        if reason not in (DONE, RIGHT_REACHED):
            training.phases.enter(report.steps_done, "halt")
            report.say("halt", report.steps_done, f"halted: {reason}", reason=reason)
    finally:
        training.loader.close()
    # Not after an error: the others may be gone, and leaving would wait for them.
    training.parallel.close()
    return reason


def build(settings: Settings, member: Member, report: Report) -> Training:
    """Joins the other ranks and makes model, optimizer and loader."""
    parallel = join(settings, member)
    source = open_source(settings, member.run)
    loader = Loader(source, settings, parallel.rank, parallel.world, parallel.device)
    torch.manual_seed(settings.train.seed)
    plain = Transformer(settings.model).to(parallel.device)
    optimizer = optim.build(plain, settings.optim)
    name = facts.device_name(parallel.device)
    report.environment(
        facts.collect(parallel, plain, source),
        precision.peak_flops(name, settings.train.precision),
    )
    on_cuda = parallel.device.type == "cuda"
    return Training(
        settings, member, report, parallel, plain, parallel.wrap(plain), optimizer, loader,
        Phases(member.pulse, torch.cuda if on_cuda else None),
        Votes(parallel.reduce, parallel.device), Guard(settings.train.max_nonfinite_steps),
    )  # fmt: skip


def run_steps(t: Training) -> str:
    """Takes the steps. Returns why they ended; all ranks end at the same one."""
    for step in range(1, t.settings.train.steps + 1):
        t.report.begin(step)
        rate = optim.learning_rate(step, t.settings.train)
        batches = fetch(t, step)
        figures, stats = forward_backward(t, step, batches)
        t.phases.enter(step, "optimizer")
        norm, nonfinite = guard.clip(t.model, t.settings.optim.grad_clip)
        optim.set_learning_rate(t.optimizer, rate)
        guard.optimise(t.optimizer, nonfinite)
        t.phases.enter(step, "log")
        rows = agree(t, step, figures, nonfinite)
        t.report.end(step)
        right = log(t, step, rows, rate, norm, stats) if t.report.due(step) else None
        t.guard.judge(rows)
        reason = halt_reason(t, rows, right)
        if reason:
            return reason
    return DONE


def fetch(t: Training, step: int) -> list[Batch]:
    """Returns the micro-batches of a step."""
    t.phases.enter(step, "fetch")
    began = time.perf_counter()
    batches = t.loader.fetch(t.settings.train.accumulate)
    t.report.fetched(time.perf_counter() - began)
    return batches


def forward_backward(
    t: Training, step: int, batches: list[Batch]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Adds up gradients of the token-weighted mean loss. Returns this rank's figures and stats.

    The figures are float64 `[4]` on the device, as `votes.FIGURES`.
    """
    figures = torch.zeros(4, dtype=torch.float64, device=t.parallel.device)
    scale = t.parallel.scale(sum(batch.tokens_scored for batch in batches))
    wants_stats = t.report.due(step) and not t.settings.report.disable_aux_stats
    watched = t.plain.collect_stats if wants_stats else contextlib.nullcontext
    for number, batch in enumerate(batches, 1):
        with t.parallel.synced(t.model, last=number == len(batches)):
            t.phases.enter(step, "forward")
            with watched(), precision.autocast(t.settings.train.precision, t.parallel.device):
                logits = t.model(batch.inputs)
            loss, scored, right = score(logits, batch, t.settings.data.source == "recall")
            t.phases.enter(step, "backward")
            loss.backward(guard.seed_gradient(loss, scale))
        figures += torch.stack((loss.detach().double(), scored, torch.zeros_like(scored), right))
    return figures, t.plain.read_stats() if wants_stats else {}


def score(logits: Tensor, batch: Batch, count_right: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the loss sum in nats, how many predictions count, and how many are right."""
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    each = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
    counts = torch.ones_like(each) if batch.scored is None else batch.scored.flatten().to(each)
    right = torch.zeros((), dtype=torch.float64, device=logits.device)
    if count_right:
        hits = logits.detach().argmax(-1).flatten() == batch.targets.flatten()
        right = (hits * counts).sum(dtype=torch.float64)
    return (each * counts).sum(), counts.sum(dtype=torch.float64), right


def agree(t: Training, step: int, figures: Tensor, nonfinite: Tensor) -> list[Row]:
    """Sends this step's figures and returns the rows that all ranks now have in common.

    At a progress step that includes this step's own row; otherwise rows come one step late, and
    nothing waits for the slowest rank here.
    """
    figures[2] = nonfinite
    t.votes.cast(step, figures, t.member.halt_wish)
    rows = t.votes.collect(all_of_them=t.report.due(step))
    for row in rows:
        t.report.count_right(row.right, row.tokens)
    return rows


def log(
    t: Training, step: int, rows: list[Row], rate: float, norm: Tensor, stats: dict[str, Tensor]
) -> float | None:
    """Writes the progress record. Returns the share of copied bytes right since the last one."""
    extra = facts.memory(t.parallel.device) | {name: numbers(x) for name, x in stats.items()}
    skipped = t.guard.skipped + sum(row.nonfinite for row in rows)
    figures = Figures(rows[-1].loss, rate, norm.item(), skipped, t.phases.take(), extra)
    return t.report.progress(step, figures)


def numbers(values: Tensor) -> float | list[float]:
    """Returns a statistic as numbers of six digits after the point."""
    return values.double().round(decimals=6).tolist()


def halt_reason(t: Training, rows: list[Row], right: float | None) -> str:
    """Returns why all ranks stop here, "" when they do not; rests on agreed figures only."""
    wishes = [row.wish for row in rows if row.wish]
    if wishes:
        return wishes[0]
    enough = t.settings.train.stop_at_bytes_right
    return RIGHT_REACHED if enough and right is not None and right >= enough else ""


def keep(t: Training) -> None:
    """Saves the final checkpoint. Raises CheckpointError."""
    if not t.settings.checkpoint.at_end:
        return
    step = t.report.steps_done
    t.phases.enter(step, "save")
    began = time.perf_counter()
    position = checkpoint.Position(
        step, t.report.tokens_total, t.loader.position, t.loader.source.fingerprint
    )
    path = checkpoint.save(
        t.member.run, t.parallel, t.model, t.optimizer, position, t.report.values()
    )
    took = time.perf_counter() - began
    t.report.say("checkpoint", step, f"saved {path}", path=path.name, dt_s=took)
