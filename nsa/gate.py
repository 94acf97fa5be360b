"""The attention gate: the weight of each branch per token and head (paper, eq. 5)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsa.config import N_BRANCHES
from nsa.precision import upcast_fp32


class Gate(nn.Module):
    """Branch weights per token and head from the layer's input, in the order cmp, sel, win.

    With "sigmoid" (the paper) the weights are independent. With "softmax" the weights add up to 1.
    `hidden` is the width of the hidden layer of an MLP that computes the logits (the paper, section
    3.2). If `hidden` is 0, the logits are linear in the input.
    """

    def __init__(self, dim: int, n_heads: int, kind: str, hidden: int = 0) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.kind = kind
        self.hidden = nn.Linear(dim, hidden, bias=False) if hidden else None
        self.proj = nn.Linear(hidden or dim, N_BRANCHES * n_heads)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`x` `[B, S, dim]` → weights and logits, each `[B, S, H, 3]`, in float32 or wider."""
        features = x if self.hidden is None else F.silu(self.hidden(x))
        logits = self.proj(features).unflatten(-1, (self.n_heads, N_BRANCHES))
        # A branch weight's gradient is a sum over Dv; in bfloat16 this sum would be rounded twice.
        logits = upcast_fp32(logits)
        return logits.sigmoid() if self.kind == "sigmoid" else logits.softmax(-1), logits


def fixed_gates(gates: Tensor, shares: tuple[float, ...]) -> Tensor:
    """Returns `shares` for all tokens and heads; `gates` `[B, S, H, 3]` get a gradient of 0."""
    # The device fills these tensors, because copying from the host would wait for the device.
    return gates * 0 + torch.stack([gates.new_full((), share) for share in shares])


def branch_shares(logits: Tensor, kind: str) -> Tensor:
    """Returns each branch's share of the weights, `[..., 3]`, in float32; the sum is 1.

    For the softmax gate, the shares are the weights. For the sigmoid gate, they are the weights
    divided by their sum, but computed from the logits, because all weights may be rounded to 0.
    """
    logits = logits.detach().float()
    return (F.logsigmoid(logits) if kind == "sigmoid" else logits).softmax(-1)


def gate_entropy(shares: Tensor) -> Tensor:
    """Returns the entropy in nats of branch shares: `[..., 3]` → `[...]`.

    It is ln 3 for equal shares, and 0 if one branch has all the weight.
    """
    return -(shares * shares.clamp_min(1e-30).log()).sum(-1)
