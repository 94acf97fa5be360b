"""Generates tokens with a model: prefill, then one token at a time."""

import torch
from torch import Tensor

from nsa.model import Transformer


@torch.inference_mode()
def generate(
    model: Transformer,
    tokens: Tensor,
    count: int,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Returns `count` tokens `[B, count]` that follow `tokens` `[B, S]`, S ≥ 1.

    Temperature 0 selects the most probable token; otherwise tokens are drawn from the softmax of
    logits / temperature.
    """
    caches = model.caches()
    found = []
    for _ in range(count):
        logits = model(tokens, caches)[:, -1].float()
        if temperature == 0:
            tokens = logits.argmax(-1, keepdim=True)
        else:
            probabilities = (logits / temperature).softmax(-1)
            tokens = torch.multinomial(probabilities, 1, generator=generator)
        found.append(tokens)
    return torch.cat(found, dim=1) if found else tokens[:, :0]
