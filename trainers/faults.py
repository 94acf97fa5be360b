"""Faults inside a real trainer, set with `NSA_DRILL` or `train.drill`, to practise recovery.

The faults occur in hooks of the model and in the source's read. The training loop has no code for
the faults, and a training without drills has none of these hooks.
`trainers.contract.drill_kinds` has the kinds and the grammar.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from trainers.contract.drill_kinds import KINDS, Drill, Place, parse
from trainers.contract.member import Member
from trainers.run_records import Report
from trainers.schema import Settings
from trainers.sequences import RankRows, Source

WRITTEN_S = 10.0
"""Longest time in seconds that a drill waits until its record is written."""
_leaked: list[bytes] = []


def arm(
    settings: Settings, member: Member, report: Report, model: nn.Module, source: Source
) -> None:
    """Records this rank's drills; adds those that are not past to the model and the source."""
    mine: list[Drill] = []
    last: dict[Drill, int] = {}
    sequences_per_step = settings.train.batch_size * settings.train.accumulate * member.world
    plain = source.read

    def record(drill: Drill, state: str, text: str) -> None:
        report.record_event("drill", member.pulse.step, text, drill=str(drill), state=state)

    def happen(place: Place, step: int, on: Any) -> Any:
        """Calls each due drill with `on`. Returns `on`, or the logits that the drills changed."""
        for drill in mine:
            kind = KINDS[drill.kind]
            now = step == drill.step or (kind.lasts and step > drill.step)
            if kind.place != place or not now or last.get(drill) == step:
                continue
            if drill not in last:
                record(drill, "fires", "a drill fires")
                written = threading.Event()
                member.recorder.call(written.set)
                written.wait(WRITTEN_S)
            last[drill] = step
            changed = DRILLS[drill.kind](drill.amount, on)
            on = on if changed is None else changed
        return on

    def before_forward(*_: Any) -> None:
        happen("forward", member.pulse.step, member)

    def read(count: int, rank: int, world: int) -> RankRows:  # in the loader's thread
        happen("loader", source.position // sequences_per_step + 1, source)
        return plain(count, rank, world)

    for drill in parse(settings.train.drill, "train.drill"):
        if drill.rank not in (None, member.rank):
            continue
        is_past = drill.step <= report.steps_done and not KINDS[drill.kind].lasts
        if is_past or (member.attempt > 1 and not drill.every_attempt):
            record(drill, "rests", f"drill {drill} is skipped: its step or its attempt is past")
        else:
            # The log does not name a fault to come, because operators read the log.
            record(drill, "armed", "a drill is armed")
            mine.append(drill)
    if mine:
        model.register_forward_pre_hook(before_forward)
        model.register_forward_hook(
            lambda _model, _inputs, logits: happen("logits", member.pulse.step, logits)
        )
        source.read = read


def _raise(_amount: None, _member: Member) -> NoReturn:
    raise ValueError("drill raise: an intended fault in the forward pass")


def _out_of_memory(_amount: None, _member: Member) -> NoReturn:
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB "
        "of which 1.31 GiB is free. (a drill)"
    )


def _sleep(amount: float, _where: Member | Source) -> None:
    time.sleep(amount)


def _spin(amount: float, _member: Member) -> None:
    end = time.monotonic() + amount
    while time.monotonic() < end:
        pass


def _hold_gil(amount: float, _member: Member) -> None:
    """Holds the GIL and waits `amount` seconds for a mutex; no signal handler ends this wait."""
    native, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    part, whole = math.modf(time.time() + amount)
    native.pthread_mutex_lock(mutex)
    until = (ctypes.c_long * 2)(int(whole), int(part * 1e9))
    native.pthread_mutex_timedlock(mutex, until)


def _leak(amount: float, _member: Member) -> None:
    _leaked.append(b"\1" * int(amount * (1 << 20)))


def _sleep_in_backward(amount: float, logits: Tensor) -> Tensor:
    logits.register_hook(lambda _gradient: time.sleep(amount))
    return logits


def _infinite_gradient(_amount: None, logits: Tensor) -> Tensor:
    def spoil(gradient: Tensor) -> Tensor:
        spoiled = gradient.clone()
        spoiled[0, 0, 0] = math.inf
        return spoiled

    logits.register_hook(spoil)
    return logits


DRILLS: dict[str, Callable[[Any, Any], Any]] = {
    "raise": _raise,
    "exit": lambda _amount, _member: os._exit(7),
    "oom": _out_of_memory,
    "kill": lambda _amount, _member: os.kill(os.getpid(), signal.SIGKILL),
    "segv": lambda _amount, _member: ctypes.string_at(0),
    "stop": lambda _amount, _member: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": _sleep,
    "spin": _spin,
    "gil": _hold_gil,
    "backward": _sleep_in_backward,
    "loader": _sleep,
    "nan": lambda _amount, logits: logits * math.nan,
    "inf_grad": _infinite_gradient,
    "slow": _sleep,
    "leak": _leak,
}
"""The function of each kind. Its first argument is the amount; its second argument is the member,
the source or the logits. A function that gets the logits returns logits."""
