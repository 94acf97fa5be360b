"""The training loop, for one process and for several, on the CPU and on GPUs."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainers import guard, inventory, manifest, optim, precision
from trainers.build import Training
from trainers.contract.member import Member
from trainers.contract.rundir import CHECKPOINT_NOW, CHECKPOINTS, PROFILE_NOW
from trainers.export import export
from trainers.failures import CheckpointError
from trainers.loader import Batch
from trainers.manifest import Manifest
from trainers.profiling import dump_out_of_memory
from trainers.run_records import Report
from trainers.schema import Settings
from trainers.step_reduction import FIGURES, Row

DONE, RIGHT_REACHED = "done", "bytes_right reached"


def train(settings: Settings, member: Member, report: Report) -> str:
    """Trains until the steps are done, enough bytes are right, or all ranks agree to halt.

    Returns the reason of the end. A resumed training without a further step ends as done.
    Raises TrainingError and UsageError with one sentence, and other exceptions, which
    `failures.classify` describes.
    """
    member.pulse.nonfinite_steps = 0
    member.pulse.set(0, "load")
    try:
        return run_to_end(Training(settings, member, report))
    except torch.OutOfMemoryError:
        dump_out_of_memory(member)
        raise


def run_to_end(training: Training) -> str:
    """Makes the steps and the last save, and closes the training. Returns the reason of the end."""
    report = training.report
    try:
        began = time.perf_counter()
        if training.first_step <= training.settings.train.steps:
            training.loader.wait_for_first()
        report.record_event(
            "loader_ready", 0, f"data: {training.loader.source.about}",
            dt=time.perf_counter() - began, comm_hook=training.parallel.comm_hook,
        )  # fmt: skip
        reason = run_steps(training)
        rows = training.reduction.finish(include_newest=True)
        count_skipped(training, rows)
        training.guard.check(rows)
        halted = reason not in (DONE, RIGHT_REACHED)
        save_final(training, halted)
        if halted:
            training.phases.enter(report.steps_done, "halt")
            report.record_event("halt", report.steps_done, f"halted: {reason}", reason=reason)
    finally:
        finish_save(training)
        training.profiler.close()
        training.inventory.close()
        training.loader.close()
    return reason


def run_steps(t: Training) -> str:
    """Trains step by step. Returns the reason of the end; all ranks end at the same step."""
    for step in range(t.first_step, t.settings.train.steps + 1):
        t.report.begin(step)
        t.inventory.begin(step)
        t.profiler.begin(step)
        rate = optim.learning_rate(step, t.settings.train)
        batches = fetch(t, step)
        figures, stats = forward_backward(t, step, batches)
        t.phases.enter(step, "optimizer")
        t.loss_scale.unscale(t.model)
        if step == t.first_step:
            # This precedes the clip, which makes finite gradients 0 if the norm is infinite.
            report_dead_parameters(t, step)
        norm, nonfinite = guard.clip(t.model, t.settings.optim.grad_clip)
        spike = t.spikes.detect(norm, nonfinite)
        optim.set_learning_rate(t.optimizer, rate)
        guard.optimise(t.optimizer, torch.maximum(nonfinite, spike))
        lowered = t.loss_scale.update(nonfinite)
        t.phases.enter(step, "log")
        figures[3:] = torch.stack((nonfinite, spike, lowered))
        rows = reduce_figures(t, step, figures)
        t.report.end(step, t.phases.training_s())
        right = log(t, step, rows, rate, norm, stats) if t.report.due(step) else None
        t.guard.check(rows)
        t.inventory.end(step)
        t.profiler.end(step)
        # A halt comes before a due evaluation, because torchrun may kill a halting rank after 30 s.
        if reason := next((row.halt_reason for row in rows if row.halt_reason), ""):
            return reason
        run_requests(t, step, rows)
        if 0 < t.settings.train.stop_at_bytes_right <= (right or 0):
            return RIGHT_REACHED
    return DONE


def fetch(t: Training, step: int) -> list[Batch]:
    """Returns the micro-batches of a step."""
    t.phases.enter(step, "fetch")
    began, epoch = time.perf_counter(), t.loader.state.get("epoch")
    batches = t.loader.fetch(t.settings.train.accumulate)
    t.report.fetched(time.perf_counter() - began)
    if t.report.due(step):
        t.report.batch_crc32 = batches[0].crc32()
    now = t.loader.state.get("epoch")
    if now != epoch:
        t.member.log(f"data: end of {t.loader.source.about}; epoch {now} begins")
    return batches


def forward_backward(
    t: Training, step: int, batches: list[Batch]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Accumulates the gradients of the token-weighted mean loss over the micro-batches.

    Returns two values: this rank's `FIGURES` (float64, on the device), of which only the first
    three are set; and the statistics of the attention, which are {} if none are due.
    """
    figures = torch.zeros(len(FIGURES), dtype=torch.float64, device=t.parallel.device)
    scale = t.parallel.scale(sum(batch.tokens_scored for batch in batches))
    wants_stats = t.report.due(step) and not t.settings.report.disable_aux_stats
    watched = t.plain.collect_stats if wants_stats else contextlib.nullcontext
    for number, batch in enumerate(batches, 1):
        with t.parallel.micro_batch(t.model, last=number == len(batches)):
            t.phases.enter(step, "forward")
            with watched(), precision.autocast(t.settings.train.precision, t.parallel.device):
                logits = t.model(*batch.arguments)
            loss, scored, right = score(logits, batch, t.settings.data.source == "recall")
            t.phases.enter(step, "backward")
            loss.backward(guard.seed_gradient(loss, t.loss_scale.scale * scale))
        figures[:3] += torch.stack((loss.detach().double(), scored, right))
    return figures, t.plain.read_stats() if wants_stats else {}


def report_dead_parameters(t: Training, step: int) -> None:
    """Reports the parameters whose gradient is missing or zero in this process's first step."""
    dead = guard.dead_parameters(t.plain)
    if dead:
        names = ", ".join(dead[:8]) + (f" and {len(dead) - 8} more" if len(dead) > 8 else "")
        text = f"no or zero gradient in step {step}: {names}"
        t.report.record_event("dead_parameters", step, text, parameters=dead[:64])


def reduce_figures(t: Training, step: int, figures: Tensor) -> list[Row]:
    """Starts to reduce this step's figures. Returns the rows whose sums are due.

    The row of a step is due one step later, so that this function need not wait for the slowest
    rank. But the row of this step is due now if the step has a progress record, if a save is due,
    which depends on it, or if an evaluation is due, whose time must not contain this step.
    """
    every = t.settings.checkpoint.every
    t.save_is_due |= every > 0 and step % every == 0
    # Ranks may see a file at different steps, so only rank 0 requests a checkpoint or profile.
    requests = frozenset() if t.parallel.rank else t.member.new_requests()
    t.reduction.start(step, figures, requests | {t.member.halt_reason})
    is_due = t.report.due(step) or t.save_is_due or evaluation_is_due(t, step)
    rows = t.reduction.finish(include_newest=is_due)
    count_skipped(t, rows)
    for row in rows:
        t.report.count_right(row.right, row.tokens)
    return rows


def count_skipped(t: Training, rows: list[Row]) -> None:
    """Counts skipped steps; the pulse gets the number of steps with a non-finite loss.

    The pulse remains after a rank is killed.
    """
    t.guard.count(rows)
    t.member.pulse.nonfinite_steps = t.guard.nonfinite_loss


def log(
    t: Training, step: int, rows: list[Row], rate: float, norm: Tensor, stats: dict[str, Tensor]
) -> float | None:
    """Writes a progress record. Returns the share of right bytes since the last record, or None."""
    extra: dict[str, Any] = dict(inventory.memory(t.parallel.device))
    extra |= {name: x.double().round(decimals=6).tolist() for name, x in stats.items()}
    if fallbacks := t.plain.fallbacks():
        extra["fb_total"] = fallbacks.total()
    phases_s, steps_s = t.phases.take()
    return t.report.progress(
        step, loss=rows[-1].loss, lr=rate, grad_norm=norm.item(), skipped_steps=t.guard.skipped,
        overflow_steps=t.guard.overflow, scale_lowered_steps=t.guard.scale_lowered,
        spike_steps=t.guard.spikes,
        phases_s=phases_s, steps_s=steps_s, **extra,
    )  # fmt: skip


def evaluation_is_due(t: Training, step: int) -> bool:
    """Returns whether an evaluation follows this step; it is so on all ranks."""
    return bool(t.held_out) and step % t.settings.eval.every == 0


@torch.no_grad()
def evaluate(t: Training, step: int) -> None:
    """Records the token-weighted mean loss on the held-out batches of all ranks.

    The evaluation runs uncompiled, because a second compilation without gradients takes minutes.
    """
    compiled = t.settings.train.compile
    eager = torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()
    t.phases.enter(step, "eval")
    began = time.perf_counter()
    recall = t.settings.data.source == "recall"
    figures = torch.zeros(3, dtype=torch.float64, device=t.parallel.device)
    for batch in t.held_out:
        with eager, precision.autocast(t.settings.train.precision, t.parallel.device):
            logits = t.model(*batch.arguments)
        figures += torch.stack([part.double() for part in score(logits, batch, recall)])
    t.parallel.reduce(figures)()
    loss_sum, tokens, right = figures.tolist()
    t.report.evaluated(
        step, loss_sum / max(tokens, 1), int(tokens), right if recall else None,
        time.perf_counter() - began,
    )  # fmt: skip


def score(logits: Tensor, batch: Batch, count_right: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Returns loss sum in nats, scored predictions, right predictions (0 without `count_right`)."""
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    each = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
    counts = torch.ones_like(each) if batch.scored is None else batch.scored.flatten().to(each)
    right = torch.zeros((), dtype=torch.float64, device=logits.device)
    if count_right:
        hits = logits.detach().argmax(-1).flatten() == batch.targets.flatten()
        right = (hits * counts).sum(dtype=torch.float64)
    return (each * counts).sum(), counts.sum(dtype=torch.float64), right


def run_requests(t: Training, step: int, rows: list[Row]) -> None:
    """Evaluates, profiles and saves if this is due or requested; all ranks do the same."""
    requests = frozenset().union(*(row.asked for row in rows))
    if PROFILE_NOW in requests:
        t.profiler.request(step)
    if evaluation_is_due(t, step):
        evaluate(t, step)
    report_failed(t, step, t.saver.collect())
    settings = t.settings.checkpoint
    saves_at_end = settings.at_end or settings.export != ""
    final = saves_at_end and step == t.settings.train.steps
    t.save_is_due |= CHECKPOINT_NOW in requests
    # Weights may be unusable after a non-finite step, so a save waits (`Guard.in_a_row`).
    if CHECKPOINT_NOW in requests and t.guard.in_a_row:
        text = "the requested checkpoint is saved after the next finite step"
        t.report.record_event("note", step, text)
    is_finite = not t.guard.in_a_row and any(row.step == step for row in rows)
    if t.save_is_due and is_finite and not final:
        save(t, step)
        t.save_is_due = False


def save(t: Training, step: int) -> None:
    """Waits for the previous save; then saves a checkpoint, or starts a background save."""
    t.phases.enter(step, "save")
    report_failed(t, step, t.saver.collect(wait_s=None))
    try:
        if t.saver.in_background:
            t.saver.save_async(position(t))
        else:
            t.saver.save(position(t))
    except CheckpointError as error:
        report_failed(t, step, [error])


def save_final(t: Training, halted: bool) -> None:
    """Waits for a background save, saves the final checkpoint, and exports the model if asked to.

    Without `checkpoint.at_end`, only a training that was halted or exports its model saves. A
    process that made no step saves only if its directory lacks the checkpoint of the present step.
    After a non-finite step, the weights may be unusable, so no old checkpoint is removed. Raises
    CheckpointError.
    """
    step, target = t.report.steps_done, t.settings.checkpoint.export
    t.phases.enter(step, "save")
    report_failed(t, step, t.saver.collect(wait_s=None))
    if t.settings.checkpoint.at_end or target or halted:
        saved = t.member.run / CHECKPOINTS / manifest.name_of(step)
        # Rank 0 decides, because it chose the checkpoint; the other ranks may use other paths.
        if step >= t.first_step or not t.parallel.gather(saved.is_dir())[0]:
            saved = t.saver.save(position(t), keeps_all=t.guard.in_a_row > 0)
            if t.guard.in_a_row:
                text = f"the weights of {saved.name} may be unusable: the last step was not finite"
                t.report.record_event("note", step, text)
        if target and t.parallel.rank == 0:
            export(saved, Path(target))


def finish_save(t: Training) -> None:
    """Waits for a background save that still runs, for a limited time."""
    if t.saver.busy:
        t.member.pulse.set(t.report.steps_done, "save")
    report_failed(t, t.report.steps_done, t.saver.finish())


def position(t: Training) -> Manifest:
    """Returns the manifest for a checkpoint of the present step, without its files."""
    figures = {"first_loss": t.report.first_loss, "skipped_steps": t.guard.skipped}
    return Manifest(
        t.report.steps_done, t.report.tokens_total, t.loader.state,
        report=figures, settings=t.report.values(),
    )  # fmt: skip


def report_failed(t: Training, step: int, errors: list[CheckpointError]) -> None:
    """Records the errors of saves; `Report.saved` records the checkpoints."""
    for error in errors:
        t.report.record_event("checkpoint_failed", step, str(error), error=str(error))
