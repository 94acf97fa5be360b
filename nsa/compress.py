"""The compressed branch: attention to summaries of blocks (eq. 7), and their weights p_cmp (eq. 8).

p_cmp decides which blocks are selected. Therefore this branch always computes in float32 or wider,
also under autocast.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsa.attend import attend, causal_mask
from nsa.config import NSAConfig
from nsa.precision import no_autocast, upcast_fp32
from nsa.rope import rotate

Phi = Callable[[Tensor], Tensor]
"""A function of blocks `[..., l, D]` → `[..., D]`, in float32 or wider."""

Draw = Callable[[Tensor, float], None]
"""A function that fills a weight from a normal distribution with this standard deviation."""

CHUNK = 768
"""Most tokens in a chunk of the attention; blocks that no token of a chunk sees are left out."""
SCORE_CHUNK = 512
"""Most tokens in a chunk of the scores."""


def draw_normal(weight: Tensor, std: float) -> None:
    """Fills a weight with normal random numbers of the default generator of its device."""
    weight.normal_(std=std)


class BlockMLP(nn.Module):
    """phi of eq. 7 as an MLP: adds positions to a block of tokens, and maps the block to a vector.

    The MLP has one hidden layer as wide as the head. It has no biases; the positions act as
    a bias of this layer. All groups share one MLP for the keys and one for the values.
    """

    def __init__(self, block_size: int, width: int) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(block_size, width))
        self.hidden = nn.Linear(block_size * width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, draw: Draw = draw_normal) -> None:
        """Draws the weights with standard deviation 1 / sqrt(fan-in); sets the positions to 0."""
        self.position.zero_()
        for layer in (self.hidden, self.out):
            draw(layer.weight, layer.in_features**-0.5)

    def forward(self, blocks: Tensor) -> Tensor:
        """`[..., l, D]` → `[..., D]`, in float32 or wider."""
        with no_autocast(blocks.device):
            placed = (upcast_fp32(blocks) + upcast_fp32(self.position)).flatten(-2)
            hidden = F.silu(F.linear(placed, upcast_fp32(self.hidden.weight)))
            return F.linear(hidden, upcast_fp32(self.out.weight))


class BlockMean(nn.Module):
    """phi as the mean over the block, without parameters."""

    def forward(self, blocks: Tensor) -> Tensor:
        """`[..., l, D]` → `[..., D]`, in float32 or wider."""
        return upcast_fp32(blocks).mean(-2)


def make_phi(config: NSAConfig, width: int) -> nn.Module:
    """Returns the phi that the configuration names, for keys or values of this width."""
    return BlockMLP(config.block_size, width) if config.compress == "mlp" else BlockMean()


def to_blocks(x: Tensor, size: int, stride: int) -> Tensor:
    """Cuts `[B, G, S, D]` into complete blocks `[B, G, N, size, D]`; N is 0 if S < size."""
    if x.shape[-2] < size:
        # An empty cut of padded input keeps the branch in the graph, so its gradients are 0 and not
        # None.
        return F.pad(x, (0, 0, 0, size - x.shape[-2])).unfold(-2, size, stride)[..., :0, :, :].mT
    return x.unfold(-2, size, stride).mT


def summaries(
    k: Tensor, v: Tensor, phi: tuple[Phi, Phi], config: NSAConfig, base: float, first_block: int = 0
) -> tuple[Tensor, Tensor]:
    """Returns keys and values of the complete compressed blocks (eq. 7), `[B, G, N, D]`.

    `k` and `v` `[B, G, T, D]` are not rotated, and begin with the first token of block
    `first_block`. The results are in float32 or wider. Each key is rotated to the position of its
    block's last token.
    """
    size, stride = config.block_size, config.block_stride
    k_blocks, v_blocks = (
        each(to_blocks(x, size, stride)) for each, x in zip(phi, (k, v), strict=True)
    )
    return rotate(k_blocks, base, first_block * stride + size - 1, stride), v_blocks


def attend_compressed(
    q: Tensor, k: Tensor, v: Tensor, size: int, stride: int, first: int = 0
) -> Tensor:
    """Returns the attention of each token to the compressed blocks that the token sees.

    `first` is the position of the first token. The shapes are `q` `[B, H, S, Dk]`, `k`
    `[B, G, N, Dk]`, `v` `[B, G, N, Dv]` → `[B, H, S, Dv]`. The result is computed in float32 or
    wider, and has the dtype of `q`. Tokens t < size - 1 see no block, so their rows are exactly 0.
    """
    seeing = list(_seeing(q, k, size, stride, first, CHUNK))
    # All slices come from one split, because the gradient of each separate slice would be as large
    # as the whole tensor.
    lengths = [rows.stop - rows.start for rows, _, _ in seeing]
    blind = q.shape[2] - sum(lengths)
    cut = q.split([blind, *lengths], dim=2)
    pieces = [q.new_zeros(q.shape[0], blind, q.shape[1], v.shape[-1])]
    with no_autocast(q.device):
        for queries, (_, n, mask) in zip(cut[1:], seeing, strict=True):
            queries, keys, values = map(upcast_fp32, (queries, k[:, :, :n], v[:, :, :n]))
            pieces.append(attend(queries, keys, values, mask).transpose(1, 2).to(q.dtype))
    if len(pieces) == 1:
        # These sums keep the branch in the graph, so its gradients are 0 and not None.
        pieces[0] = pieces[0] + (q[..., :0].sum() + k.sum() + v.sum()).to(q.dtype)
    # In the layout [B, S, H, D], merging the heads needs no copy.
    return torch.cat(pieces, dim=1).transpose(1, 2)


def weights_in_chunks(
    q: Tensor, k: Tensor, size: int, stride: int, first: int = 0
) -> Iterator[tuple[slice, Tensor]]:
    """Yields p_cmp (eq. 8) chunk by chunk, summed over the heads of each group (eq. 10).

    Eq. 10 sums p_sel over the heads. p_sel is linear in p_cmp (eq. 9), so p_cmp can be summed
    instead. The scores have the factor 1 / sqrt(Dk) of the attention, which eq. 8 omits.

    Each item has two values: the slice of the chunk's tokens, and p_cmp `[B, G, tokens, n]` in
    float32 or wider. n is the number of blocks that the last token of the chunk sees. Shapes and
    `first` are as in `attend_compressed`. Tokens that see no block are left out. The caller must
    suspend gradients, because torch.compile accepts no generator that does so itself.
    """
    for rows, n, mask in _seeing(q, k, size, stride, first, SCORE_CHUNK):
        with no_autocast(q.device):
            queries, keys = upcast_fp32(q[:, :, rows]), upcast_fp32(k[:, :, :n])
            queries = (queries * q.shape[-1] ** -0.5).unflatten(1, (k.shape[1], -1))
            scores = (queries.flatten(2, 3) @ keys.mT).unflatten(2, queries.shape[2:4])
            weights = (scores if mask is None else scores.add_(mask)).softmax(-1)
        yield rows, weights.sum(2)


def _seeing(
    q: Tensor, k: Tensor, size: int, stride: int, first: int, chunk: int
) -> Iterator[tuple[slice, int, Tensor | None]]:
    """Yields chunks of the queries that see a block.

    Each item has three values: the rows of `q`, the number of blocks that the last row sees, and
    the mask (None for a single row). Block i begins with token i · d and ends with token
    i · d + l - 1. So token t sees it if i · d ≤ t - (l - 1). That is a causal mask with the key of
    block i at i · d, and the query of token t at t - (l - 1). For example, with l = 32 and d = 16,
    the query of token 47 is at 16, so it sees the blocks at 0 and 16.
    """
    begin, like = max(size - 1 - first, 0), upcast_fp32(k[:, :, :0])
    for start in range(begin, q.shape[2] if k.shape[2] else 0, chunk):
        end = min(start + chunk, q.shape[2])
        latest = first + start - (size - 1)  # a block that row `start` sees begins here or earlier
        n = min((latest + end - 1 - start) // stride + 1, k.shape[2])
        mask = causal_mask(latest, end - start, n, like, stride=stride) if end - start > 1 else None
        yield slice(start, end), n, mask
