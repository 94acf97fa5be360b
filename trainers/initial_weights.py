"""Initial weights: each random parameter has its own generator.

The seed of the run and the name of the parameter seed the generator. So the weights depend neither
on the number of ranks nor on the strategy. A rank that has only a shard of a parameter draws the
whole parameter, one parameter at a time.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from nsa.model import Transformer


@torch.no_grad()
def set_whole(target: Tensor, whole: Tensor) -> None:
    """Copies a whole tensor into `target`, or this rank's shard of it if `target` is sharded."""
    whole = whole.to(target.device, target.dtype)
    if isinstance(target, DTensor):
        whole = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(whole)


@torch.no_grad()
def fill(model: Transformer, seed: int, device: torch.device) -> None:
    """Allocates on `device` the parameters of a model on the meta device; sets their values."""
    model.to_empty(device=device)
    names = {id(p): name for name, p in model.named_parameters()}

    def draw(weight: Tensor, std: float) -> None:
        digest = hashlib.sha256(f"{seed} {names[id(weight)]}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
        set_whole(weight, torch.empty(weight.shape).normal_(std=std, generator=generator))

    model.reset_parameters(draw)
