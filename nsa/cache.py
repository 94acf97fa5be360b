"""What a layer keeps of the tokens it has seen, so that the next one costs one query."""

from collections.abc import Iterable

import torch
from torch import Tensor

from nsa.config import NSAConfig


class Rows:
    """Growing `[B, G, T, D]`: written in place where no gradient is asked for, else copied."""

    def __init__(self) -> None:
        self._data: Tensor | None = None
        self._count = 0

    def append(self, x: Tensor, keep: int | None = None) -> None:
        """Add `[B, G, N, D]`, and keep only the last rows if so many are given."""
        if keep is not None:
            held = x if self._data is None else torch.cat((self.view(), x), dim=2)
            self._data = held[:, :, -keep:]
            self._count = self._data.shape[2]
            return
        count = self._count + x.shape[2]
        if self._data is None:
            self._data = x
        elif torch.is_grad_enabled():
            self._data = torch.cat((self.view(), x), dim=2)
        else:
            if count > self._data.shape[2]:
                room = x.new_empty(*x.shape[:2], 2 * count, x.shape[3])
                room[:, :, : self._count] = self.view()
                self._data = room
            self._data[:, :, self._count : count] = x
        self._count = count

    def view(self) -> Tensor:
        """`[B, G, T, D]`. Raises ValueError before the first row."""
        if self._data is None:
            raise ValueError("the cache holds no tokens; append some first.")
        return self._data[:, :, : self._count]


class Cache:
    """One layer's keys and values of the tokens before the next: rotated where attention wants
    them rotated, raw for the compressed block that is not complete."""

    def __init__(self, config: NSAConfig) -> None:
        self.config = config
        self.length = 0
        self.k_cmp, self.v_cmp = Rows(), Rows()
        self.k_blocks, self.v_blocks = Rows(), Rows()
        self.k_slc, self.v_slc = Rows(), Rows()
        self.k_win, self.v_win = Rows(), Rows()

    def append(self, kv: Iterable[Tensor]) -> None:
        """Take the tokens' keys and values of all branches, `[B, G, N, D]` each, in the order of
        `NSAttention.project`, and drop what no later token can use."""
        k_cmp, v_cmp, k_slc, v_slc, k_win, v_win = kv
        for held, x in ((self.k_slc, k_slc), (self.v_slc, v_slc)):
            held.append(x)
        for held, x in ((self.k_cmp, k_cmp), (self.v_cmp, v_cmp)):
            held.append(x, keep=self.config.block_size)
        for held, x in ((self.k_win, k_win), (self.v_win, v_win)):
            held.append(x, keep=self.config.window)
        self.length += k_cmp.shape[2]

    def append_blocks(self, k: Tensor, v: Tensor) -> None:
        """Take the compressed blocks that the last tokens completed, `[B, G, N, D]` each."""
        self.k_blocks.append(k)
        self.v_blocks.append(v)

    def completes_block(self) -> bool:
        """Whether the last token completes a compressed block."""
        behind = self.length - self.config.block_size
        return behind >= 0 and behind % self.config.block_stride == 0


class DenseCache:
    """The same for a layer of dense attention."""

    def __init__(self) -> None:
        self.length = 0
        self.k, self.v = Rows(), Rows()

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Take the tokens' rotated keys and values. Returns those of all tokens."""
        self.k.append(k)
        self.v.append(v)
        self.length += k.shape[2]
        return self.k.view(), self.v.view()
