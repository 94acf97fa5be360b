"""Generates tokens with a model: prefill in blocks, then one token at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nsa.cache import Cache
from nsa.model import Transformer

PREFILL_TOKENS = 1024
"""Most tokens in a block of the prefill; bounds the memory of logits and activations."""


@torch.inference_mode()
def generate(
    model: Transformer, tokens: Tensor, count: int, temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:  # fmt: skip
    """Returns `count` tokens `[B, count]` that follow `tokens` `[B, S]`, S ≥ 1.

    Temperature 0 selects the most probable token; otherwise tokens are drawn from the softmax of
    logits / temperature.
    """
    caches = model.caches(tokens.shape[1] + count)
    found = []
    for _ in range(count):
        logits = next_logits(model, tokens, caches)[:, -1].float()
        if temperature == 0:
            tokens = logits.argmax(-1, keepdim=True)
        else:
            probabilities = (logits / temperature).softmax(-1)
            tokens = torch.multinomial(probabilities, 1, generator=generator)
        found.append(tokens)
    return torch.cat(found, dim=1) if found else tokens[:, :0]


def next_logits(model: Transformer, tokens: Tensor, caches: Sequence[Cache]) -> Tensor:
    """Returns the logits `[B, 1, V]` after `tokens` `[B, S]`, which follow the cached tokens."""
    *former, last = tokens.split(PREFILL_TOKENS, dim=1)
    for block in former:
        model(block, caches)
    return model(last, caches)[:, -1:]
