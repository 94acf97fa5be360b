"""Several linear projections as one parameter and one product."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Projection(nn.Linear):
    """Named projections without bias; their weights are consecutive rows of one parameter.

    One large product is faster than several narrow products. It also sums the gradient of the input
    inside the product, so this gradient is not rounded after each projection.
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


def joined_weights(state: Mapping[str, Any], layer: str, name: str, parts: list[str]) -> Any:
    """Returns a state dict in which a layer's separate projections are one parameter.

    Checkpoints that are older than `Projection` have one weight per projection. `layer` is the
    prefix of the layer's names, `name` the name of the Projection, and `parts` the names of its
    projections. A state dict that lacks one of these projections is returned unchanged.
    """
    old = [f"{layer}{part}.weight" for part in parts]
    if not all(key in state for key in old):
        return state
    kept = {key: value for key, value in state.items() if key not in old}
    return kept | {f"{layer}{name}.weight": torch.cat([state[key] for key in old])}


def accept_separate_weights(layer: nn.Module, name: str) -> None:
    """Makes `load_state_dict` of a layer accept the separate weights of its Projection `name`."""

    def hook(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        parts = list(getattr(module, name).widths)
        whole = joined_weights(state, prefix, name, parts)
        if whole is not state:
            state.clear()
            state.update(whole)

    layer.register_load_state_dict_pre_hook(hook)
