"""The real trainer with one rank in a process group: `python -m tests.gpu.group_of_one …`.

`trainers` starts no group for one rank. Here the only rank joins a group, so that NCCL, the hooks
of DDP and the shards of FSDP2 run on a machine with one GPU.
"""

from __future__ import annotations

from trainers import build
from trainers.contract.member import Member
from trainers.entry import exit_now, main
from trainers.parallel import Ddp, Fsdp, Group, device_of
from trainers.schema import Settings


def group_of_one(settings: Settings, member: Member) -> Group:
    device = device_of(settings, member.local_rank)
    return (Fsdp if settings.train.strategy == "fsdp" else Ddp)(device, member, settings)


build.make_strategy = group_of_one

if __name__ == "__main__":
    exit_now(main())
