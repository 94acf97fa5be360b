"""The decoding cache of a layer: stored keys and values, so that a new token costs one query."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nsa.config import NSAConfig

SMALLEST_BUFFER = 64
"""Least number of rows in a buffer, unless `keep` is set."""


class Rows:
    """Rows `[B, G, n, D]` in a buffer with spare room, so that most appends copy only the new rows.

    If the buffer has no room for new rows, a larger buffer replaces it, with room for a quarter
    more rows than needed, and for at least `capacity` rows. With `keep`, the buffer has room for
    2 · `keep` rows, and only the last `keep` rows stay after an `append`.
    """

    def __init__(self, keep: int | None = None, capacity: int = 0) -> None:
        self._keep, self._capacity = keep, capacity
        self._buffer: Tensor | None = None
        self._begin = self._end = 0

    def check(self, new: Tensor) -> None:
        """Raises an error if the rows `new` cannot be stored.

        Raises RuntimeError if `new` needs a gradient. Raises ValueError if the number of sequences
        or of groups, the width or the dtype of `new` differs from the stored rows.
        """
        if new.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("a decoding cache stores no gradients; use torch.no_grad().")
        if self._buffer is not None:
            kept, given = ((*x.shape[:2], x.shape[3], x.dtype) for x in (self._buffer, new))
            if kept != given:
                raise ValueError(
                    f"the cache is for (sequences, groups, width, dtype) {kept}, not {given}."
                )

    def joined(self, new: Tensor) -> Tensor:
        """Returns the stored rows and `new` as one tensor. Raises the errors of `check`."""
        self.check(new)
        return torch.cat((self.rows, new), dim=2) if self._end else new

    def append(self, new: Tensor) -> Tensor:
        """Returns the stored rows and `new` as one tensor; `check` must accept `new`."""
        if self._keep is not None and new.shape[2] > self._keep:
            both = self.joined(new)
            self.clear()
            self.append(both[:, :, -self._keep :])
            return both
        if self._buffer is None or self._end + new.shape[2] > self._buffer.shape[2]:
            self._buffer = self._larger(new)
        self._buffer[:, :, self._end : self._end + new.shape[2]] = new
        self._end += new.shape[2]
        both = self.rows
        self._begin = max(self._begin, self._end - (self._keep or self._end))
        return both

    @property
    def rows(self) -> Tensor:
        """The stored rows, as a view."""
        assert self._buffer is not None, "nothing was appended"
        return self._buffer[:, :, self._begin : self._end]

    def clear(self) -> None:
        """Drops all rows; the next rows may have any shape."""
        self._buffer, self._begin, self._end = None, 0, 0

    def _larger(self, new: Tensor) -> Tensor:
        """Returns a buffer that begins with the stored rows and has room for the new rows."""
        count = self._end - self._begin
        rows = count + new.shape[2]
        room = 2 * self._keep if self._keep else max(rows * 5 // 4, SMALLEST_BUFFER, self._capacity)
        with torch.inference_mode(False), torch.no_grad():
            buffer = new.new_empty(*new.shape[:2], room, new.shape[3])
            if self._buffer is not None:
                buffer[:, :, :count] = self.rows
        self._begin, self._end = 0, count
        return buffer


class Cache:
    """The cached keys and values of one layer.

    `kv` has six tensors: keys and values of the compressed, the selected and the window branch. The
    keys of the compressed branch are not rotated. The compressed branch keeps its last l rows, and
    the window branch its last w rows. `blocks` are the keys and values of all complete compressed
    blocks. Without a `config`, `kv` are the rotated keys and the values of dense attention. Memory
    for `capacity` tokens is reserved at the first append; a longer sequence reserves more.
    """

    def __init__(self, config: NSAConfig | None, capacity: int = 0) -> None:
        self.config, self.length = config, 0
        self._kv = [Rows(None, capacity) for _ in range(2)]
        self._blocks: list[Rows] = []
        if config is not None:
            size, window = config.block_size, config.window
            self._kv = [Rows(size), Rows(size), *self._kv, Rows(window), Rows(window)]
            self._blocks = [Rows(None, -(-capacity // config.block_stride)) for _ in range(2)]

    @property
    def kv(self) -> list[Tensor]:
        return [rows.rows for rows in self._kv]

    @property
    def blocks(self) -> list[Tensor]:
        return [rows.rows for rows in self._blocks]

    def check_config(self, config: NSAConfig | None) -> None:
        """Raises ValueError unless the cache is for this configuration (None: dense attention)."""
        if self.config != config:
            own, other = (found or "dense attention" for found in (self.config, config))
            raise ValueError(f"the cache is for {own}, not for {other}; make a new cache.")

    def joined(self, kv: Sequence[Tensor]) -> list[Tensor]:
        """Returns the cached and the new rows of the first tensors, and appends nothing.

        Raises the errors of `Rows.check`.
        """
        return [rows.joined(new) for rows, new in zip(self._kv, kv, strict=False)]

    def append(self, kv: Sequence[Tensor], blocks: Sequence[Tensor] = ()) -> list[Tensor]:
        """Appends the next tokens, and the compressed blocks that they complete, if any.

        Returns the cached and the new rows of each tensor in `kv`. Raises the errors of
        `Rows.check`; then nothing is appended. After another error, `length` is -1 until `reset`.
        """
        pairs = [*zip(self._kv, kv, strict=True), *zip(self._blocks, blocks, strict=False)]
        for rows, new in pairs:
            rows.check(new)
        length, self.length = self.length, -1  # stays so if an append fails or is interrupted
        found = [rows.append(new) for rows, new in pairs]
        self.length = length + kv[0].shape[2]
        return found[: len(kv)]

    def reset(self) -> None:
        """Makes the cache empty, for the next document."""
        self.length = 0
        for rows in (*self._kv, *self._blocks):
            rows.clear()
