"""The loss of a batch, and what of it was predicted right."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from trainers.data import Batch


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
