"""Several linear projections as one parameter and one product."""

from collections.abc import Mapping

from torch import Tensor, nn


class Projection(nn.Linear):
    """Named projections without bias; their weights are consecutive rows of one parameter.

    One large product is faster than several narrow products. In the backward, one product computes
    the gradient of the input, so this sum is rounded once, not after each projection.
    """

    def __init__(self, dim: int, widths: Mapping[str, int]) -> None:
        super().__init__(dim, sum(widths.values()), bias=False)
        self.widths = dict(widths)

    def split(self, y: Tensor) -> tuple[Tensor, ...]:
        """`[..., all widths]` → `[..., width]` of each projection, in order."""
        return y.split(list(self.widths.values()), dim=-1)

    def rows(self, x: Tensor) -> dict[str, Tensor]:
        """Returns the rows of each projection, by name; `x` is the weight, or a gradient of it."""
        return dict(zip(self.widths, x.split(list(self.widths.values())), strict=True))
