"""Rotary position embedding of each head (RoFormer, arXiv 2104.09864)."""

import torch
from torch import Tensor

from nsa.precision import upcast_fp32
from nsa.tables import cached_table


@cached_table
def rotary_table(
    count: int, dim: int, base: float, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns two values: the cosines and the sines of positions 0, 1, …, each `[count, dim]`.

    The first half of the sines has the opposite sign. Angles are computed in float64, because
    float32 angles of position 60,000 are wrong by up to 0.003 rad.
    """
    position = torch.arange(count, device=device, dtype=torch.float64)
    pair = torch.arange(0, dim, 2, device=device, dtype=torch.float64)
    angle = torch.outer(position, base ** (-pair / dim))
    both = torch.cat((angle, angle), dim=-1)
    sign = torch.ones(dim, device=device, dtype=torch.float64)
    sign[: dim // 2] = -1.0
    return both.cos().to(dtype), (both.sin() * sign).to(dtype)


def rotate(x: Tensor, base: float, first: int = 0, step: int = 1) -> Tensor:
    """Rotates `x` `[..., N, D]`, whose rows have the positions first, first + step, ….

    Pairs are (i, i + D/2). Low-precision input is rotated in float32; the result has the input's
    dtype.
    """
    wide = upcast_fp32(x)
    end = first + step * x.shape[-2]
    # One table covers all positions up to a power of two, so a decoder need not build a table for
    # each token.
    count = 1 << (end - 1).bit_length()
    table = rotary_table(count, x.shape[-1], base, x.device, wide.dtype)
    cos, sin = (values[first:end:step] for values in table)
    return _Rotation.apply(wide, cos, sin).to(x.dtype)


class _Rotation(torch.autograd.Function):
    """Rotates by one product and two in-place sums."""

    @staticmethod
    def forward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        out = x * cos
        out[..., :half].addcmul_(x[..., half:], sin[..., :half])
        out[..., half:].addcmul_(x[..., :half], sin[..., half:])
        return out

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _, *tables = inputs
        ctx.save_for_backward(*tables)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        cos, sin = ctx.saved_tensors
        return _Rotation.apply(grads[0], cos, -sin), None, None
