"""Initial weights of a sharded model, without the whole model in the memory of any rank.

The model is built on the meta device, where a tensor has no memory. Meanwhile `InitialWeights`
records how each weight is initialised. After sharding, `fill` repeats this for one weight at a time
and keeps this rank's shard. The weights equal those of a model that was built as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

Model = TypeVar("Model", bound=nn.Module)
ATEN = torch.ops.aten
INITIALISERS = (
    ATEN.normal_.default, ATEN.uniform_.default, ATEN.fill_.Scalar, ATEN.zero_.default,
)  # fmt: skip


class InitialWeights(TorchDispatchMode):
    """Records the calls of `INITIALISERS`; a call on a part is recorded for the whole weight."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: dict[int, list[Callable[[Tensor], object]]] = {}
        self._named: dict[str, list[Callable[[Tensor], object]]] = {}
        self._recorded: list[Tensor] = []
        """Keeps the weights, so that no other tensor gets the id of their memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        result = func(*args, **given)
        if func not in INITIALISERS or not result.is_meta:
            return result
        rest, state = args[1:], torch.get_rng_state()
        place = result.size(), result.stride(), result.storage_offset()

        def repeat(whole: Tensor) -> None:
            torch.set_rng_state(state)
            func(whole.as_strided(*place), *rest, **given)

        memory = result.untyped_storage()
        calls = self._calls.setdefault(memory._cdata, [])
        if result.nbytes == memory.nbytes():
            calls.clear()
        calls.append(repeat)
        self._recorded.append(result)
        # The next weight continues after these numbers, as in a model that is built as a whole.
        func(torch.empty(result.shape, dtype=result.dtype, device="cpu"), *rest, **given)
        return result

    def build(self, make: Callable[[], Model]) -> Model:
        """Returns the module that `make` builds, on the meta device."""
        with self, torch.device("meta"):
            model = make()
        if any(True for _ in model.buffers()):
            raise TypeError("a buffer would lose its values on the meta device")
        self._named = {
            name: self._calls[p.untyped_storage()._cdata] for name, p in model.named_parameters()
        }
        return model

    @torch.no_grad()
    def fill(self, model: nn.Module, device: torch.device) -> None:
        """Allocates this rank's shards on `device` and sets their values."""
        first: dict[int, str] = {}
        everywhere = model.named_parameters(remove_duplicate=False)
        shared = [(name, first.setdefault(id(p), name)) for name, p in everywhere]
        model.to_empty(device=device)
        for name, original in shared:
            if name != original:
                owner, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(owner), attribute, model.get_parameter(original))
        state = torch.get_rng_state()
        for name, p in model.named_parameters():
            whole = torch.empty(p.shape)
            for repeat in self._named[name]:
                repeat(whole)
            sharded = cast(DTensor, p)
            p.copy_(
                distribute_tensor(
                    whole.to(p.device, p.dtype), sharded.device_mesh, sharded.placements,
                    src_data_rank=None,
                )
            )  # fmt: skip
        torch.set_rng_state(state)
