"""The loss of a batch, and the evaluation on a fixed set of held-out batches."""

from __future__ import annotations

import contextlib
import time

import torch
import torch.nn.functional as F
from torch import Tensor

from trainers import precision
from trainers.build import Training
from trainers.loader import Batch


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
    took = time.perf_counter() - began
    t.report.paused(took)
    t.report.evaluated(
        step, loss_sum / max(tokens, 1), int(tokens), right if recall else None, took
    )


def score(logits: Tensor, batch: Batch, count_right: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Returns three values: loss sum in nats, number of scored and number of right predictions."""
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    each = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
    counts = torch.ones_like(each) if batch.scored is None else batch.scored.flatten().to(each)
    right = torch.zeros((), dtype=torch.float64, device=logits.device)
    if count_right:
        hits = logits.detach().argmax(-1).flatten() == batch.targets.flatten()
        right = (hits * counts).sum(dtype=torch.float64)
    return (each * counts).sum(), counts.sum(dtype=torch.float64), right
