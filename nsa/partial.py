"""Attention to a part of the keys, forward and backward, for callers that combine the parts.

A part returns its output and its log-sum-exp, from which the caller computes the part's weight.
The backward of a part needs only the log-sum-exp and the output over *all* keys, because the
probabilities are exp(score - lse). On the CPU both directions use torch's flash kernels; other
devices, and shapes that these kernels do not support, use plain matrix products.
"""

import torch
from torch import Tensor

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend_part(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, flash: bool
) -> tuple[Tensor, Tensor]:
    """Returns two values: the output `[N, M, Dv]` and the log-sum-exp `[N, M]`.

    Each query must see at least one key.

    `q` is `[N, M, Dk]`, `k` is `[N, T, Dk]`, `v` is `[N, T, Dv]` (float32 or float64), `bias` is
    `[M, T]`.
    """
    if flash and _flash_serves(q, v):
        out, lse = _flash(*(x.unsqueeze(1) for x in (q, k, v)), attn_mask=bias)
        return out.squeeze(1), lse.squeeze(1)
    scores = _scores(q, k, bias)
    lse = scores.logsumexp(-1)
    return scores.sub_(lse.unsqueeze(-1)).exp_() @ v, lse


def attend_part_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    bias: Tensor | None, flash: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns what this part of the keys contributes to the gradients of q, k and v.

    `grad` and `out` `[N, M, Dv]` and `lse` `[N, M]` are over all keys; a query whose lse is +inf
    contributes nothing.
    """
    if flash and _flash_serves(q, v):
        tensors = (x.unsqueeze(1) for x in (grad, q, k, v, out, lse))
        found = _flash_backward(*tensors, 0.0, False, attn_mask=bias)
        return tuple(x.squeeze(1) for x in found)  # pyright: ignore[reportReturnType]
    p = _scores(q, k, bias).sub_(lse.unsqueeze(-1)).exp_()
    grad_scores = (grad @ v.mT).sub_((grad * out).sum(-1, keepdim=True)).mul_(p)
    grad_scores.mul_(q.shape[-1] ** -0.5)
    return grad_scores @ k, grad_scores.mT @ q, p.mT @ grad


def _flash_serves(q: Tensor, v: Tensor) -> bool:
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1]


def _scores(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    return scores if bias is None else scores.add_(bias)
