"""The window branch through the package flash-attn (CUDA, bf16 or fp16)."""

import importlib

from torch import Tensor


def attend_flash_attn(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """The window branch; shapes as in `nsa.window.attend_window`. Raises ImportError.

    flash-attn expects `[B, S, H, D]` and expands key heads itself. Its window does not include the
    query, so (w - 1, 0) means w tokens.
    """
    flash_attn_func = importlib.import_module("flash_attn").flash_attn_func
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = flash_attn_func(
        q, k, v, dropout_p=0.0, softmax_scale=None, causal=True, window_size=(window - 1, 0)
    )
    return out.transpose(1, 2)
