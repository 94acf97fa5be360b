"""The compressed branch: attention to summaries of blocks (paper, eq. 7), which also scores them.

Its scores decide what is selected, so it computes in float32 from the blocks on, whatever the dtype
of the model and even under autocast. It is the smallest of the branches.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsa.precision import no_autocast, widen
from nsa.tables import cached_table


class BlockMLP(nn.Module):
    """phi of eq. 7: a block of tokens, each with its intra-block position added, to one vector.

    One hidden layer as wide as the head. It has no biases: a position table in front of a linear
    layer is one already. All groups share it; keys and values have one each.
    """

    def __init__(self, block_size: int, width: int) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(block_size, width))
        self.hidden = nn.Linear(block_size * width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Normal weights of standard deviation 1 / sqrt(fan-in); positions 0."""
        self.position.zero_()
        for layer in (self.hidden, self.out):
            layer.weight.normal_(std=layer.in_features**-0.5)

    def forward(self, blocks: Tensor) -> Tensor:
        """`[..., l, D]` → `[..., D]`, in float32 at least."""
        with no_autocast(blocks.device):
            placed = (widen(blocks) + widen(self.position)).flatten(-2)
            hidden = F.silu(F.linear(placed, widen(self.hidden.weight)))
            return F.linear(hidden, widen(self.out.weight))


class BlockMean(nn.Module):
    """phi as the mean over the block: no parameters."""

    def forward(self, blocks: Tensor) -> Tensor:
        """`[..., l, D]` → `[..., D]`, in float32 at least."""
        return widen(blocks).mean(-2)


def to_blocks(x: Tensor, size: int, stride: int) -> Tensor:
    """Cut `[B, G, S, D]` into whole blocks `[B, G, N, size, D]`; none where S < size."""
    if x.shape[-2] < size:
        # An empty cut of padded input keeps the branch in the graph: its gradients are 0, not None.
        return F.pad(x, (0, 0, 0, size - x.shape[-2])).unfold(-2, size, stride)[..., :0, :, :].mT
    return x.unfold(-2, size, stride).mT


@cached_table
def visibility(
    n_rows: int, n_blocks: int, stride: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Additive mask `[n_rows, n_blocks]`: row r, the token that completes block 0 plus r, sees
    block i iff it holds the block's last token or a later one: i · stride ≤ r."""
    row = torch.arange(n_rows, device=device)[:, None]
    block = torch.arange(n_blocks, device=device)[None, :]
    hidden = block * stride > row
    return torch.zeros(hidden.shape, device=device, dtype=dtype).masked_fill_(hidden, -torch.inf)


def attend_compressed(
    q: Tensor, k: Tensor, v: Tensor, size: int, stride: int
) -> tuple[Tensor, Tensor]:
    """Attention to compressed blocks, and the attention weights summed over each group's heads.

    `q` `[B, G, R, S, Dk]`, `k` `[B, G, N, Dk]`, `v` `[B, G, N, Dv]` → output `[B, G, R, S, Dv]` and
    p_cmp (eq. 8, summed over heads as in eq. 10) `[B, G, S, N]`, in float32 at least and without
    gradient. Tokens t < size - 1 see no block: their rows are exactly 0 and no gradient flows.
    """
    blind = min(size - 1, q.shape[3])
    with no_autocast(q.device):
        seeing = widen(q[:, :, :, blind:]) * q.shape[-1] ** -0.5
        scores = seeing.flatten(2, 3) @ widen(k).mT
        scores = scores.unflatten(2, seeing.shape[2:4])
        mask = visibility(seeing.shape[3], k.shape[2], stride, q.device, scores.dtype)
        weights = (scores + mask).softmax(-1)
        out = weights.flatten(2, 3) @ widen(v)
    out = out.unflatten(2, seeing.shape[2:4]).to(q.dtype)
    p_cmp = weights.detach().sum(2)
    return F.pad(out, (0, 0, blind, 0)), F.pad(p_cmp, (0, 0, blind, 0))
