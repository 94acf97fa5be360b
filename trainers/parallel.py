"""Strategies for one or several ranks: single process, DDP, FSDP2.

A strategy wraps the model, selects when gradients are reduced and sums small vectors over ranks.
Each rank multiplies its loss sum by `scale`, so that the reduced gradient is that of the
token-weighted mean loss over all ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from nsa.model import Transformer
from trainers.contract.errors import UsageError
from trainers.contract.member import Member
from trainers.failures import CollectiveError
from trainers.precision import AUTOCAST
from trainers.schema import Settings

Value = TypeVar("Value")
SAFE_BUCKET_MB = 2
NORM_DTYPES = "Mismatch dtype between input and weight"
"""Start of torch's warning that a norm is not fused, because its weight has another type."""


class Single:
    """The strategy for one process, and the interface of the other strategies."""

    name, backend, comm_hook, sharded = "single", "none", "none", False
    rank, world = 0, 1

    def __init__(self, device: torch.device):
        self.device = device

    def wrap(self, model: nn.Module) -> nn.Module:
        """Returns the module to call."""
        return model

    def micro_batch(self, model: nn.Module, last: bool) -> AbstractContextManager[object]:
        """Returns the context of a micro-batch; gradients are reduced only in the `last` one."""
        return nullcontext()

    def scale(self, tokens: int) -> float:
        """Returns the factor for a rank's loss sum, if all ranks together score `tokens`."""
        # The reduction averages gradients over ranks; the factor `world` makes that a sum.
        return self.world / tokens

    def reduce(self, vector: Tensor) -> Callable[[], object]:
        """Starts to sum `vector` over ranks in place. Returns a function that waits for the sum."""
        return lambda: None

    def gather(self, value: Value) -> list[Value]:
        """Returns the values of all ranks, in the order of the ranks."""
        return [value]


class Group(Single):
    """Several ranks in one process group; the common part of DDP and FSDP."""

    def __init__(self, device: torch.device, member: Member, settings: Settings):
        super().__init__(device)
        self._member, self._settings = member, settings
        self.rank, self.world = member.rank, member.world
        on_cuda = device.type == "cuda"
        self.backend = "nccl" if on_cuda else "gloo"
        try:
            dist.init_process_group(
                self.backend, timeout=timedelta(minutes=settings.ddp.timeout_min),
                device_id=device if on_cuda else None,
            )  # fmt: skip
        except (RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise CollectiveError(
                f"rank {member.rank} of {member.world} cannot join the process group: {reason}"
            ) from error

    def reduce(self, vector: Tensor) -> Callable[[], object]:
        self._member.pulse.collectives += 1
        return cast(dist.Work, dist.all_reduce(vector, async_op=True)).wait

    def gather(self, value: Value) -> list[Value]:
        self._member.pulse.collectives += 1
        values = [value] * self.world
        dist.all_gather_object(values, value)
        return values


class Ddp(Group):
    """DDP: model replicas; gradients are averaged in buckets while the backward still runs."""

    name = "ddp"

    def __init__(self, device: torch.device, member: Member, settings: Settings):
        super().__init__(device, member, settings)
        self.comm_hook = settings.ddp.compress

    def wrap(self, model: nn.Module) -> nn.Module:
        settings, pulse = self._settings.ddp, self._member.pulse
        # The embedding's gradient comes last; then this rank waits for buckets of other ranks.
        next(model.parameters()).register_post_accumulate_grad_hook(
            lambda _: pulse.count_collective()
        )
        wrapped = DistributedDataParallel(
            model,
            device_ids=[self.device.index] if self.device.type == "cuda" else None,
            bucket_cap_mb=SAFE_BUCKET_MB if settings.safe_mode else settings.bucket_mb,
            find_unused_parameters=settings.find_unused,
            static_graph=settings.static_graph,
            gradient_as_bucket_view=not settings.safe_mode,
        )
        if settings.compress != "none":
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

            hook = getattr(default_hooks, f"{settings.compress}_compress_hook")
            wrapped.register_comm_hook(None, hook)
        return wrapped

    def micro_batch(self, model: nn.Module, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last else cast(DistributedDataParallel, model).no_sync()


class Fsdp(Group):
    """FSDP2: shards parameters, gradients and optimizer state.

    Each block is one unit; the other layers together are one unit. With bf16 or fp16, the ranks
    gather the weights of the blocks in this type and reduce the gradients in fp32. Activations
    between the blocks stay in fp32, as with DDP.
    """

    name, sharded = "fsdp", True

    def __init__(self, device: torch.device, member: Member, settings: Settings):
        super().__init__(device, member, settings)
        self.prepare(settings)

    def prepare(self, settings: Settings) -> None:
        """Divides the ranks into groups. Raises UsageError."""
        self._settings = settings
        groups, inside = settings.fsdp.replicas, self.world // settings.fsdp.replicas
        if groups * inside != self.world:
            raise UsageError(
                f"fsdp.replicas={groups} does not divide {self.world} ranks; use a divisor"
            )
        if groups > 1:
            names, shape = ("replicate", "shard"), (groups, inside)
        else:
            names, shape = ("shard",), (inside,)
        self._mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=names)

    def wrap(self, model: nn.Module) -> nn.Module:
        mixed, whole = MixedPrecisionPolicy(), MixedPrecisionPolicy()
        if dtype := AUTOCAST.get(self._settings.train.precision):
            mixed = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
            warnings.filterwarnings("ignore", NORM_DTYPES, UserWarning)
        for unit in (*cast(Transformer, model).blocks, model):
            fully_shard(
                unit, mesh=self._mesh, mp_policy=whole if unit is model else mixed,
                reshard_after_forward=self._settings.fsdp.sharding == "full",
            )  # fmt: skip
        return model

    @contextmanager
    def micro_batch(self, model: nn.Module, last: bool) -> Iterator[None]:
        cast(FSDPModule, model).set_requires_gradient_sync(last)
        yield


def device_of(settings: Settings, local_rank: int) -> torch.device:
    """Returns this rank's device. Raises UsageError if the chosen device is not available."""
    choice = settings.train.device
    if choice == "cpu" or (choice == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise UsageError(
            f"local rank {local_rank} has no GPU, {count} are visible; start fewer ranks or set "
            "train.device=cpu"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def make_strategy(settings: Settings, member: Member) -> Single:
    """Returns the strategy of this run: `Single` for one rank, or that of `train.strategy`."""
    device = device_of(settings, member.local_rank)
    if member.world == 1:
        return Single(device)
    return (Fsdp if settings.train.strategy == "fsdp" else Ddp)(device, member, settings)
