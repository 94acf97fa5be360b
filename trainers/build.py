"""Builds the parts of a training: model, optimizer, loader, …; restores a checkpoint to resume."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from nsa.model import Transformer
from trainers import changes, checkpoint, faults, initial_weights, inventory, manifest, optim
from trainers.allocator import keep_freed_memory
from trainers.checkpoint import Parts
from trainers.contract import jsonl
from trainers.contract.member import Member
from trainers.failures import CheckpointError
from trainers.guard import Guard, Spikes
from trainers.inventory import Inventory
from trainers.loader import Batch, Loader, open_on_all_ranks, read_batch, within_limit
from trainers.manifest import Manifest
from trainers.parallel import Single, make_strategy
from trainers.precision import LossScale, allow_tf32, peak_flops, weights_dtype
from trainers.profiling import Profiler
from trainers.rejected_settings import recomputed
from trainers.run_records import Report
from trainers.saver import Saver
from trainers.schema import Settings
from trainers.settings import AUTO
from trainers.step_phases import Phases
from trainers.step_reduction import StepReduction


class Training:
    """The parts of a training.

    The constructor restores the checkpoint that `choose` returns, if there is one.
    """

    def __init__(self, settings: Settings, member: Member, report: Report):
        self.settings, self.member, self.report = settings, member, report
        self.parallel = parallel = make_strategy(settings, member)
        train, device = settings.train, parallel.device
        on_cuda = device.type == "cuda"
        source = open_on_all_ranks(settings, parallel)
        allow_tf32(train.tf32)
        if not on_cuda:
            keep_freed_memory()
        self.plain, self.model = make_model(settings, parallel)
        self.optimizer = optim.build(self.plain, settings.optim)
        self.loss_scale = LossScale(settings.scaler, train.precision == "fp16", device)
        self.spikes = Spikes(settings.optim.skip_spikes_sigma, device)
        random_bytes = settings.data.source == "synthetic"
        chance_nats = math.log(settings.model.vocab_size) if random_bytes else 0.0
        self.guard = Guard(train.max_nonfinite_steps, chance_nats)
        parts = Parts(parallel, self.plain, self.optimizer, self.loss_scale, self.spikes)
        resumed = resume(settings, member, report, parts, source.fingerprint)
        if resumed is not None:
            self.guard.skipped = jsonl.integer(resumed.report, "skipped_steps") or 0
        self.first_step = report.steps_done + 1
        faults.arm(settings, member, report, self.plain, source)
        report.write_environment(
            inventory.collect(parallel, self.plain, source, settings),
            peak_flops(inventory.device_name(device), train.precision, train.tf32),
        )
        self.loader = Loader(source, settings, parallel.rank, parallel.world, device, resumed)
        note = partial(report.record_event, "note", report.steps_done)
        for text in source.notes:
            note(text)
        self.held_out = draw_held_out(settings, parallel, note)
        cuda = torch.cuda if on_cuda else None
        self.phases = Phases(member.pulse, cuda, settings.report.nvtx)
        self.reduction = StepReduction(parallel.reduce, device)
        self.save_is_due = False
        """True while a periodic or requested checkpoint is due and its save has not started."""
        self.saver = Saver(
            member.run, parts, settings.checkpoint, member.home.is_there, report.saved
        )
        every = settings.report.memory_every
        self.inventory = Inventory(member, parallel, self.plain, self.optimizer, every)
        self.profiler = Profiler(member, report, settings.report)


def make_model(settings: Settings, parallel: Single) -> tuple[Transformer, nn.Module]:
    """Returns the model with its initial weights, and the module to call.

    The model is built on the meta device, so that with FSDP no rank allocates the whole model here.
    """
    train = settings.train
    with torch.device("meta"):
        plain = Transformer(settings.model, settings.attention)
    plain.to(weights_dtype(train.precision))
    if not (parallel.name == "ddp" and settings.ddp.disable_gc):
        plain.recompute = recomputed(train.recompute, settings.model.n_layers) or range(0)
    for layer in plain.attention_layers():
        layer.nvtx = settings.report.nvtx and parallel.device.type == "cuda"
    if train.compile:
        for block in plain.blocks:
            block.compile(fullgraph=True)
    torch.manual_seed(train.seed)
    model = parallel.wrap(plain) if parallel.sharded else None
    initial_weights.fill(plain, train.seed, parallel.device)
    return plain, model or parallel.wrap(plain)


def draw_held_out(settings: Settings, parallel: Single, note: Callable[[str], None]) -> list[Batch]:
    """Returns this rank's held-out batches, or [] if `eval.every` is 0. Raises DataError.

    If the batches repeat data, `note` is called with one sentence.
    """
    if not settings.eval.every:
        return []
    source = open_on_all_ranks(settings, parallel, held_out=True)
    count, device = settings.train.batch_size * parallel.world, parallel.device

    def read() -> Batch:
        return read_batch(source, count, parallel.rank, parallel.world, device)

    batches = [
        within_limit(read, "no held-out batch", source.about, settings.data).to(device)
        for _ in range(settings.eval.batches)
    ]
    if source.state().get("epoch"):
        note(
            f"{source.about} has fewer tokens than the evaluation reads ({source.position} "
            f"sequences of {settings.data.seq_len}), so it is read more than once; raise "
            "data.held_out or lower eval.batches"
        )
    return batches


def resume(
    settings: Settings, member: Member, report: Report, parts: Parts, stream: str
) -> Manifest | None:
    """Restores the checkpoint that `choose` returns on rank 0.

    `stream` is the fingerprint of the data. If the data changed and their change is allowed, the
    training reads the data from the beginning. Returns the manifest of the checkpoint, or None to
    start at step 1. Raises CheckpointError on all ranks if rank 0 cannot choose a checkpoint, or if
    a rank cannot read the chosen one. Raises UsageError for a change that is not allowed.
    """
    parallel = parts.parallel
    chosen = checkpoint.on_all_ranks(
        parallel, lambda: None if parallel.rank else choose(settings, member)
    )
    chosen = parallel.gather(chosen)[0]
    if chosen is None:
        if settings.checkpoint.resume:
            report.record_event(
                "resume", 0, f"{member.run} has no checkpoint to resume; starting at step 1"
            )
        return None
    path, skipped = chosen
    found = checkpoint.on_all_ranks(parallel, lambda: manifest.read(path))
    before = changes.compared(found.settings, found.world, jsonl.text(found.data, "fingerprint"))
    now = changes.compared(report.values(), parallel.world, stream)
    changed = changes.refuse(path, before, now, settings.checkpoint.allow_change)
    parts.state()  # allocates it; a lack of GPU memory is no error of the checkpoint
    checkpoint.on_all_ranks(parallel, lambda: checkpoint.load(path, parts))
    for error in () if parallel.rank else skipped:
        report.record_event(
            "checkpoint_skipped", found.step, f"not resumed: {error}", error=str(error)
        )
    report.resume(found.step, found.tokens_total, jsonl.number(found.report, "first_loss"))
    report.record_event("resume", found.step, f"resumed from {path}", path=str(path))
    if "data" not in changed:
        return found
    what = "; ".join(changed["data"])
    report.record_event(
        "note", found.step, f"the data have changed ({what}), so they are read from the beginning; "
        "data that were trained on before may now be held out",
    )  # fmt: skip
    return replace(found, data={})


def choose(settings: Settings, member: Member) -> tuple[Path, list[CheckpointError]] | None:
    """Returns a checkpoint and the errors of skipped checkpoints, or None to start at step 1.

    Only rank 0 calls this function. Raises CheckpointError.
    """
    named, step = settings.checkpoint.resume, settings.checkpoint.from_step
    if member.supervised and member.attempt > 1 and manifest.newest_first(member.run):
        # A later attempt continues from this run, even if the first attempt resumed another run.
        named, step = AUTO, 0
    if not named:
        return None
    run = member.run if named == AUTO else Path(named)
    if named == AUTO and not step and not manifest.newest_first(run):
        return None
    return manifest.choose(run, step)
