"""Loss on held-out data: the same few batches every time, never trained on."""

from __future__ import annotations

import time

import torch

from trainers import precision
from trainers.build import Training
from trainers.scoring import score


@torch.no_grad()
def evaluate(t: Training, step: int) -> None:
    """Records the token-weighted mean loss of all ranks' held-out batches."""
    t.phases.enter(step, "eval")
    began = time.perf_counter()
    recall = t.settings.data.source == "recall"
    figures = torch.zeros(3, dtype=torch.float64, device=t.parallel.device)
    for batch in t.held_out:
        with precision.autocast(t.settings.train.precision, t.parallel.device):
            logits = t.model(batch.inputs)
        figures += torch.stack([part.double() for part in score(logits, batch, recall)])
    t.parallel.reduce(figures)()
    loss_sum, tokens, right = figures.tolist()
    took = time.perf_counter() - began
    t.report.paused(took)
    t.report.evaluated(
        step, loss_sum / max(tokens, 1), int(tokens), right if recall else None, took
    )
