"""Builds all parts of a training (model, optimizer, loader, …); restores a named checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from nsa.model import Transformer
from trainers import (
    changes,
    checkpoint,
    drills,
    initial_weights,
    inventory,
    manifest,
    optim,
    precision,
)
from trainers.allocator import keep_freed_memory
from trainers.checkpoint import Parts
from trainers.contract import jsonl, rundir
from trainers.contract.member import Member
from trainers.failures import CheckpointError
from trainers.guard import Guard, Spikes
from trainers.inventory import Inventory
from trainers.loader import Batch, Loader, open_on_all_ranks, read_batch
from trainers.manifest import Manifest
from trainers.parallel import Single, make_strategy
from trainers.phases import Phases
from trainers.precision import LossScale
from trainers.profiling import Profiler
from trainers.report import Report
from trainers.saver import Saver
from trainers.schema import Settings
from trainers.settings import AUTO
from trainers.step_reduction import StepReduction


@dataclass(slots=True)
class Training:
    """The parts of a training that a step uses."""

    settings: Settings
    member: Member
    report: Report
    parallel: Single
    plain: Transformer
    model: nn.Module
    optimizer: torch.optim.AdamW
    loss_scale: LossScale
    loader: Loader
    held_out: list[Batch]
    phases: Phases
    reduction: StepReduction
    guard: Guard
    spikes: Spikes
    saver: Saver
    profiler: Profiler
    first_step: int


def build(settings: Settings, member: Member, report: Report) -> Training:
    """Returns the parts of a training; restores a checkpoint if the settings name one."""
    train, parallel = settings.train, make_strategy(settings, member)
    source = open_on_all_ranks(settings, member.run, parallel)
    precision.allow_tf32(train.tf32)
    if parallel.device.type == "cpu":
        keep_freed_memory()
    plain, model = make_model(settings, parallel)
    optimizer = optim.build(plain, settings.optim)
    loss_scale = LossScale(settings.scaler, train.precision == "fp16", parallel.device)
    spikes = Spikes(settings.optim.skip_spikes_sigma, parallel.device)
    parts = Parts(parallel, plain, optimizer, loss_scale, spikes)
    resumed = resume(settings, member, report, parts, source.fingerprint)
    drills.arm(settings, member, report, plain, source)
    name = inventory.device_name(parallel.device)
    report.write_environment(
        inventory.collect(parallel, plain, source, settings),
        precision.peak_flops(name, train.precision),
    )
    on_cuda = parallel.device.type == "cuda"
    return Training(
        settings, member, report, parallel, plain, model, optimizer, loss_scale,
        Loader(source, settings, parallel.rank, parallel.world, parallel.device,
               resumed and resumed.data),
        draw_held_out(settings, member.run, parallel),
        Phases(member.pulse, torch.cuda if on_cuda else None, settings.report.nvtx),
        StepReduction(parallel.reduce, parallel.device), Guard(train.max_nonfinite_steps),
        spikes,
        Saver(member.run, parts, settings.checkpoint, member.home.is_there),
        Profiler(
            member, report, settings.report, on_cuda,
            Inventory(member, parallel, plain, optimizer, settings.report.memory_every),
        ),
        report.steps_done + 1,
    )  # fmt: skip


def make_model(settings: Settings, parallel: Single) -> tuple[Transformer, nn.Module]:
    """Returns the model with its initial weights, and the module to call.

    The model is built on the meta device, so that no rank allocates more than its shards.
    """
    train = settings.train
    with torch.device("meta"):
        plain = Transformer(settings.model, settings.attention)
    plain.to(precision.weights_dtype(train.precision))
    if train.recompute == "all" and not (parallel.name == "ddp" and settings.ddp.disable_gc):
        plain.recompute = range(settings.model.n_layers)
    for layer in plain.attention_layers():
        layer.nvtx = settings.report.nvtx and parallel.device.type == "cuda"
    if train.compile:
        for block in plain.blocks:
            block.compile(fullgraph=True)
    torch.manual_seed(train.seed)
    if parallel.sharded:
        model = parallel.wrap(plain)
        initial_weights.fill(plain, train.seed, parallel.device)
        return plain, model
    initial_weights.fill(plain, train.seed, parallel.device)
    return plain, parallel.wrap(plain)


def draw_held_out(settings: Settings, run: Path, parallel: Single) -> list[Batch]:
    """Returns this rank's held-out batches, or [] if `eval.every` is 0. Raises DataError."""
    if not settings.eval.every:
        return []
    source = open_on_all_ranks(settings, run, parallel, held_out=True)
    count, device = settings.train.batch_size * parallel.world, parallel.device
    batches = [
        read_batch(source, count, parallel.rank, parallel.world, device)
        for _ in range(settings.eval.batches)
    ]
    return [batch if device.type == "cpu" else batch.to(device) for batch in batches]


def resume(
    settings: Settings, member: Member, report: Report, parts: Parts, stream: str
) -> Manifest | None:
    """Restores the checkpoint that rank 0 finds for `checkpoint.resume`.

    `stream` is the fingerprint of the data. If the data changed and this is allowed, they start
    from the beginning. Raises CheckpointError, and UsageError for a change that is not allowed.
    """
    parallel = parts.parallel
    restored = checkpoint.choose_on_all_ranks(parallel, lambda: choose(settings, member))
    if restored is None:
        if settings.checkpoint.resume:
            report.record_event(
                "resume", 0, f"{member.run} has no checkpoint to resume; starting at step 1"
            )
        return None
    path, found, skipped = restored
    before = changes.compared(
        found.settings, found.world, jsonl.text(found.data, "fingerprint")
    )  # fmt: skip
    now = changes.compared(report.values(), parallel.world, stream)
    unknown, changed = changes.refuse(path, before, now, settings.checkpoint.allow_change)
    checkpoint.on_all_ranks(parallel, lambda: checkpoint.load(path, parts))
    for error in skipped:
        report.record_event(
            "checkpoint_skipped", found.step, f"not resumed: {error}", error=str(error)
        )
    report.resume(found.step, found.tokens_total, found.report)
    text = f"resumed from {path}"
    if unknown:
        text += f"; not compared, because only one side has it: {', '.join(unknown)}"
    report.record_event("resume", found.step, text, path=str(path), not_compared=unknown)
    return replace(found, data={}) if "data" in changed else found


def choose(settings: Settings, member: Member) -> tuple[Path, list[CheckpointError]] | None:
    """Returns the checkpoint to resume from, or None to start at step 1; only for rank 0.

    Raises CheckpointError, or OSError if the checkpoints of this run cannot be listed.
    """
    named, step = settings.checkpoint.resume, settings.checkpoint.from_step
    if member.supervised and member.attempt > 1 and manifest.newest_first(member.run):
        # A later attempt continues from this run, even if the first attempt resumed another run.
        named, step = AUTO, 0
    if not named:
        return None
    run = member.run if named == AUTO else Path(named)
    if manifest.step_of(run) is not None and run.parent.name == rundir.CHECKPOINTS:
        step, run = manifest.step_of(run) or 0, run.parent.parent
    if named == AUTO and not step and not manifest.newest_first(run):
        return None
    return manifest.choose(run, step)
