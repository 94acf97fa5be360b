"""Measures the devices, the data and the attention of a plan before its launch.

`python -m trainers.device_probe REQUEST` reads the settings of the phases from a JSON file. Each
rank is one process. Rank 0 prints a JSON line when a check begins, and another with its result.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nsa.attention import NSAttention
from nsa.config import ModelConfig
from nsa.model import Block
from trainers import failures, fwe_smoke, inventory, settings
from trainers.entry import exit_now
from trainers.precision import allow_tf32, autocast, compute_dtype, weights_dtype
from trainers.schema import Settings

REPEATS, BATCHES = 6, 2
MATRIX, LARGEST_MIB = {"cuda": 8192, "cpu": 512}, {"cuda": 256, "cpu": 16}
"""By type of device: rows of the matrices; MiB of the vector that is summed over ranks."""
SLOW = 0.7
"""A rank is slow if its speed is below this share of the fastest rank's speed."""
COLLECTIVE_S, BATCH_S, CAUSALITY_S = 60.0, 30.0, 120.0
"""Time limits in seconds. The causality check divides its limit among the distinct layers."""
ROWS_AT_ONCE, CUTS_AT_ONCE = {"cuda": 16_384, "cpu": 4096}, 32
SEQUENTIAL_TOKENS, SHORT, FUTURE_SCALE = 96, 24, 8.0
"""Most tokens of the causality check if it computes token by token; number of tokens of the parity
check; scale of the changed tokens, because rounding can hide a small change."""
ROUNDING = {"fp64": 1e-12, "fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}
"""Largest accepted change of an output on the chunked route, relative to the largest output. On
this route, the changed tokens select other blocks, which changes the tiles and so the rounding."""
PARITY = {"fp64": 1e-9, "fp32": 1e-4, "tf32": 1e-2, "bf16": 5e-2, "fp16": 2e-2}
"""Largest accepted difference from float64, relative to the norm of the output in float64."""
Found = tuple[str, str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of the plan, and the device on which it is measured."""

    name: str
    settings: Settings
    device: torch.device

    def attention(self) -> Hashable:
        """Returns the settings on which the attention depends."""
        of, train = self.settings, self.settings.train
        shape = replace(of.model, n_layers=1), of.data.seq_len, of.data.documents, train.batch_size
        return of.attention, shape, train.precision, train.tf32


def distinct(phases: Sequence[Phase], key: Callable[[Phase], Hashable]) -> list[Phase]:
    """Returns one phase for each value of `key`."""
    return list({key(phase): phase for phase in phases}.values())


def best_s(device: torch.device, work: Callable[[], object]) -> float:
    """Returns the shortest time of several repetitions of `work`, including work of the device."""
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times)


def matmul(phase: Phase, world: int, store: Path, rank: int) -> Found:
    """Starts the group if there are several ranks; times a matrix product on each rank."""
    device, precision = phase.device, phase.settings.train.precision
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", init_method=f"file://{store}", rank=rank,
            world_size=world, timeout=timedelta(seconds=COLLECTIVE_S),
        )  # fmt: skip
    size = MATRIX[device.type]
    a = torch.randn(size, size, device=device).to(compute_dtype(precision))
    speeds = [round(2e-12 * size**3 / best_s(device, lambda: a @ a), 3)] * world
    if world > 1:
        dist.all_gather_object(speeds, speeds[0])
    kind = f"{inventory.device_name(device)}, {precision}, {size} × {size}"
    return compared(speeds, kind, device.type == "cuda")


def compared(speeds: Sequence[float], kind: str, on_cuda: bool) -> Found:
    """Compares the TFLOP/s of the ranks.

    On a CPU, where ranks share cores, a slow rank gives the result "unknown" instead of "fail".
    """
    slow = [str(rank) for rank, speed in enumerate(speeds) if speed < SLOW * max(speeds)]
    text = f"{', '.join(f'{speed:.3g}' for speed in speeds)} TFLOP/s by rank ({kind})"
    if slow:
        advice = "check their clocks, power and temperature" if on_cuda else "possibly other load"
        text += f"; rank {', '.join(slow)} is below {SLOW:.0%} of the fastest: {advice}"
    result = "pass" if not slow else "fail" if on_cuda else "unknown"
    return result, text, {"matmul_tflops": list(speeds)}


def all_reduce(phase: Phase, world: int) -> Found:
    """Checks a sum over all ranks, and times it; passes if there is only one rank."""
    if world == 1:
        return "pass", "one rank has nothing to reduce", {}
    mib = LARGEST_MIB[phase.device.type]
    x = torch.full((mib << 18,), dist.get_rank() + 1.0, device=phase.device)
    dist.all_reduce(x)
    right = (x == world * (world + 1) / 2).all().int()
    dist.all_reduce(right, dist.ReduceOp.MIN)
    if not right:
        return "fail", f"the sum over {world} ranks is wrong: do not train on these devices", {}
    rate = round((mib << 20) / best_s(phase.device, lambda: dist.all_reduce(x)) / 1e9, 3)
    text = f"{rate:.3g} GB/s for {mib} MiB over {world} ranks ({dist.get_backend()})"
    return "pass", text, {"allreduce_gb_s": rate, "allreduce_ranks": world}


def first_batch(phases: Sequence[Phase]) -> Found:
    """Fetches batches; phases with the same data settings and batch size share one check.

    The result is "unknown" if a source has notes, for example about folders that are not read.
    """
    texts, is_noted = [], False
    for phase in distinct(phases, lambda of: (of.settings.data, of.settings.train.batch_size)):
        data = phase.settings.data
        data = replace(data, timeout_s=min(data.timeout_s, BATCH_S))
        try:
            text, *notes = fwe_smoke.check(replace(phase.settings, data=data), BATCHES)
        except failures.TrainingError as error:
            return "fail", f"phase {phase.name!r}: {error}", {}
        texts += [text, *notes]
        is_noted |= bool(notes)
    return "unknown" if is_noted else "pass", "; ".join(texts), {}


def make_layer(phase: Phase, model: ModelConfig | None = None) -> Any:
    """Returns an attention layer with random weights and the routes of the phase.

    A call with several tokens uses the routes of the phase's model, even if `model` has other
    blocks or another window.
    """
    of, device, train = phase.settings, phase.device, phase.settings.train
    allow_tf32(train.tf32)
    torch.manual_seed(train.seed)
    layer = Block(model or of.model, of.attention).attn
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    if isinstance(layer, NSAttention):
        planned = inventory.planned_routes(device, of)
        usual = layer.routes  # the routes of a call with one token
        layer.routes = lambda x, first=0: usual(x, first) if x.shape[-2] == 1 else planned
    return layer.to(device, weights_dtype(train.precision))


def causality(phases: Sequence[Phase]) -> Found:
    """Checks that no output of a layer depends on a later token, for each distinct layer.

    For each cut, all tokens after the cut change. No output up to the cut may change, except by
    `ROUNDING` on the chunked route. The gradient of these outputs must be zero after the cut. The
    cuts come in an order that spreads them evenly, because a time limit may end the check. If a
    limit of time or tokens leaves cuts unchecked, the result is "unknown".
    """
    chosen, texts, whole = distinct(phases, Phase.attention), dict[str, None](), True
    for phase in chosen:
        layer, length = make_layer(phase), phase.settings.data.seq_len
        batched = phase.settings.attention.prefill_batched
        tokens = length if batched else min(length, SEQUENTIAL_TOKENS)
        x = torch.randn(1, tokens, phase.settings.model.dim).to(layer.out.weight)
        future = FUTURE_SCALE * torch.randn_like(x)
        cuts = sorted(range(tokens - 1), key=lambda cut: cut * 0.6180339887 % 1)
        at_once = max(1, min(CUTS_AT_ONCE, ROWS_AT_ONCE[phase.device.type] // tokens))
        done, until = 0, time.monotonic() + CAUSALITY_S / len(chosen)
        while done < len(cuts) and (not done or time.monotonic() < until):
            some = torch.tensor(cuts[done : done + at_once], device=phase.device)
            if leak := find_leak(phase, layer, x, future, some):
                return "fail", f"phase {phase.name!r}: {leak}; do not train with this code", {}
            done += len(some)
        whole = whole and done == len(cuts) and tokens == length
        texts[f"{done:,} of {length - 1:,} cuts"] = None
    text = f"no output depends on a later token, {', '.join(texts)}"
    limits = f"{CAUSALITY_S:g} s, and {SEQUENTIAL_TOKENS} tokens if prefill_batched is off"
    rest = "" if whole else f"; the others were not checked (limits: {limits})"
    return "pass" if whole else "unknown", f"{text}{rest}", {}


def find_leak(phase: Phase, layer: Any, x: Tensor, future: Tensor, cuts: Tensor) -> str:
    """Returns a sentence if an output up to a cut depends on a later token, or else ""."""
    past = torch.arange(x.shape[1], device=x.device) <= cuts[:, None]
    same = x.repeat(len(cuts), 1, 1).requires_grad_()
    changed = torch.where(past.unsqueeze(-1), x, future)
    is_chunked = isinstance(layer, NSAttention) and layer.routes(x)["sel"].name == "chunked"
    share = ROUNDING[phase.settings.train.precision] if is_chunked else 0.0

    def moved() -> Tensor:
        with torch.no_grad():
            found = (out - layer(changed)).abs().amax(-1) * past
        return (~(found <= share * out.detach().abs().max())).nonzero()

    with autocast(phase.settings.train.precision, x.device):
        out = layer(same)
        places = moved()
        if not len(places):
            kept = (out.float() * past.unsqueeze(-1)).square().sum()
            (gradient,) = torch.autograd.grad(kept, same)
            for cut, token in (gradient.abs().amax(-1) * ~past).nonzero():
                return f"outputs up to {cuts[cut]} have a gradient at the later token {token}"
            return ""
    cut, row = places[0]
    return f"output {row} of {x.shape[1]} changes with the tokens after {cuts[cut]}"


def parity(phases: Sequence[Phase]) -> Found:
    """Compares each distinct NSA layer, on its routes and device, with float64 on the CPU.

    Dense layers are not compared. If a phase has dense layers and no comparison fails, the result
    is "unknown".
    """
    texts, dense = dict[str, None](), list[str]()
    for phase in distinct(phases, Phase.attention):
        train = phase.settings.train
        if phase.settings.model.attention == "dense":
            dense.append(f"phase {phase.name!r}: dense attention is not compared")
            continue
        kind = "tf32" if train.tf32 and train.precision == "fp32" else train.precision
        error = difference(phase)
        text = f"the output differs from float64 by {error:.1e} ({kind}, {SHORT} tokens)"
        if not error <= PARITY[kind]:
            return "fail", f"phase {phase.name!r}: {text}; the limit is {PARITY[kind]:g}", {}
        texts[text] = None
    return "unknown" if dense else "pass", ", ".join((*texts, *dense)), {}


def difference(phase: Phase) -> float:
    """Returns the difference of a layer's output from float64, relative to the norm in float64.

    In float64 the CPU computes one query after the other. Every block is selected, because rounding
    could change a selection. The window is shorter than the sequence, except on the route `causal`,
    which has no window.
    """
    of = phase.settings
    routes = make_layer(phase).routes(torch.empty(1, of.data.seq_len, 1))
    window = SHORT if routes["win"].name == "causal" else SHORT // 4
    nsa = replace(
        of.model.nsa, block_size=4, block_stride=2, select_block_size=4, n_select=SHORT,
        window=window,
    )  # fmt: skip
    model = replace(of.model, nsa=nsa)
    layer = make_layer(phase, model)
    right = NSAttention(model, replace(of.attention, prefill_batched=False)).double()
    right.load_state_dict(layer.state_dict())
    x = torch.randn(1, SHORT, model.dim)
    with torch.no_grad():
        expected = right(x.double())
        with autocast(of.train.precision, phase.device):
            found = layer(x.to(layer.out.weight)).cpu()
    return float((found - expected).norm() / expected.norm())


def main(path: Path) -> None:
    """Starts the ranks and makes the checks; after the all-reduce, only rank 0 continues."""
    request = json.loads(path.read_bytes())
    world = request["world"]
    read = {name: settings.section(Settings, "", values, name)
            for name, values in request["phases"].items()}  # fmt: skip
    # A process that has used CUDA or torch's threads cannot be forked safely.
    rank = next((number for number in range(1, world) if os.fork() == 0), 0)
    wanted = next(iter(read.values())).train.device
    on_cuda = wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available())
    device = torch.device("cuda", rank) if on_cuda else torch.device("cpu")
    phases = [Phase(name, each, device) for name, each in read.items()]
    store = path.with_name("store")
    checks: dict[str, Callable[[], Found]] = {
        "matmul": partial(matmul, phases[0], world, store, rank),
        "all-reduce": partial(all_reduce, phases[0], world),
        "first batch": partial(first_batch, phases), "causality": partial(causality, phases),
        "parity": partial(parity, phases),
    }  # fmt: skip
    for row, check in list(checks.items())[: 2 if rank else None]:
        say(rank, {"row": row})
        try:
            result, text, figures = check()
        except Exception as error:  # any error of torch, of a driver or of the data
            result, text, figures = "fail", failures.classify(error)[1], {}
        say(rank, {"row": row, "result": result, "text": text, "figures": figures})
    exit_now(0)


def say(rank: int, record: dict[str, Any]) -> None:
    """Prints a JSON line on rank 0; other ranks print nothing."""
    if rank == 0:
        sys.stdout.write(f"{json.dumps(record)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
