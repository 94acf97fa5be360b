"""Generates tokens with a model: prefill in blocks, then one token at a time."""

import torch
from torch import Tensor

from nsa.model import Transformer

PREFILL_TOKENS = 1024
"""Tokens of a block of the prefill. The block size bounds the memory of logits and activations."""


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
    caches = model.caches(tokens.shape[1] + count)
    found = []
    for _ in range(count):
        *former, last = tokens.split(PREFILL_TOKENS, dim=1)
        for block in former:
            model(block, caches)
        logits = model(last, caches)[:, -1].float()
        if temperature == 0:
            tokens = logits.argmax(-1, keepdim=True)
        else:
            probabilities = (logits / temperature).softmax(-1)
            tokens = torch.multinomial(probabilities, 1, generator=generator)
        found.append(tokens)
    return torch.cat(found, dim=1) if found else tokens[:, :0]
