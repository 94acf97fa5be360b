"""NSA against dense attention on a GPU: layers by route, training steps, and where the time goes.

The contenders run one after the other in one process; times of layers and steps are medians between
CUDA events. Products are bf16 under autocast over fp32 weights, as with `train.precision=bf16`.

    python -m benchmarks.nsa_gpu
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.common import median, publish, table
from benchmarks.nsa_cpu import models
from nsa.attention import DenseAttention, NSAttention
from nsa.backends import Route
from nsa.config import ModelConfig, flops_per_token, parameter_count
from nsa.model import Transformer
from nsa.profiler_ranges import PREFIX
from trainers.precision import peak_flops

LAYER_TOKENS = (2048, 8192, 32768)
ROUTES = ("masked", "chunked", "ranges")
STEP_TOKENS, BATCHES = 2048, (2, 8)
GIB = 1 << 30


def layer_step(layer: nn.Module, seq_len: int, dim: int) -> Callable[[], None]:
    """Returns a function: forward and backward of an attention layer with its projections."""
    torch.manual_seed(0)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    x, weight = torch.randn(2, 1, seq_len, dim, device="cuda")
    x.requires_grad_()

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            out = layer(x)
        out.backward(weight)
        layer.zero_grad()
        x.grad = None

    return step


def train_step(config: ModelConfig, batch: int, compiled: bool) -> Callable[[], None]:
    """Returns a function: one training step of a model on random bytes."""
    torch.manual_seed(0)
    model = Transformer(config).cuda()
    if compiled:
        for block in model.blocks:
            block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(config.vocab_size, (batch, STEP_TOKENS + 1), device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(tokens[:, :-1])
        F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measured(step: Callable[[], None], rounds: int) -> tuple[float, float]:
    """Returns the median time of a step in ms and its peak memory in GiB; NaN if out of memory."""
    try:
        step()
        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(rounds):
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record()
            step()
            ended.record()
            torch.cuda.synchronize()
            times.append(begun.elapsed_time(ended))
        return median(times), torch.cuda.max_memory_allocated() / GIB
    except torch.OutOfMemoryError:
        return float("nan"), float("nan")
    finally:
        torch.cuda.empty_cache()


def layers(rounds: int) -> str:
    """Returns the table of layers: forward and backward by length and route."""
    configs, rows = models(), []
    for seq_len in LAYER_TOKENS:
        contenders: dict[str, nn.Module] = {"dense": DenseAttention(configs["dense, same shape"])}
        for route in ROUTES:
            if route == "masked" and seq_len > LAYER_TOKENS[1]:
                continue  # its mask has an entry for each pair of tokens
            contenders[f"nsa, sel {route}"] = layer = NSAttention(configs["nsa"])
            usual = layer.routes
            layer.routes = lambda x, first=0, usual=usual, route=route: {
                **usual(x, first), "sel": Route(route, "benchmark"),
            }  # fmt: skip
        found = {}
        for name, layer in contenders.items():
            step = layer_step(layer.cuda(), seq_len, configs["nsa"].dim)
            found[name] = measured(step, rounds)
            layer.cpu()
        for name, (took_ms, peak_gib) in found.items():
            ratio = found["dense"][0] / took_ms
            rows.append((seq_len, name, f"{took_ms:.2f}", f"{ratio:.3f}", f"{peak_gib:.2f}"))
    return table(("S", "layer", "ms", "speed ÷ dense", "peak GiB"), rows)


def steps(rounds: int) -> str:
    """Returns the table of training steps: eager, and for the last batch also compiled."""
    rows = []
    peak = peak_flops(torch.cuda.get_device_name(), "bf16")
    for batch in BATCHES:
        for compiled in (False, True)[: 1 + (batch == BATCHES[-1])]:  # compiling takes a minute
            for name, config in models().items():
                if name == "dense, same shape":
                    continue
                took_ms, peak_gib = measured(train_step(config, batch, compiled), rounds)
                print(batch, compiled, name, took_ms, peak_gib, file=sys.stderr, flush=True)
                rate = batch * STEP_TOKENS / took_ms * 1e3
                mfu = [
                    f"{100 * flops_per_token(config, STEP_TOKENS, causal) * rate / peak:.1f}"
                    if peak else "-" for causal in (False, True)
                ]  # fmt: skip
                rows.append((
                    batch, "compiled" if compiled else "eager", name, f"{took_ms:.1f}",
                    f"{rate:,.0f}", *mfu, f"{peak_gib:.2f}",
                ))  # fmt: skip
    header = ("batch", "blocks", "model", "ms", "tok/s", "MFU % usual count", "MFU % exact pairs",
              "peak GiB")  # fmt: skip
    return table(header, rows)


def kernels(seq_len: int = STEP_TOKENS) -> str:
    """Returns the table of the twelve kernels of an NSA layer that use most time on the device."""
    config = models()["nsa"]
    step = layer_step(NSAttention(config).cuda(), seq_len, config.dim)
    step()
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as found:
        step()
        torch.cuda.synchronize()
    averages = [each for each in found.key_averages() if each.self_device_time_total > 0
                and not each.key.startswith(("aten::", PREFIX))]  # fmt: skip
    total = sum(each.self_device_time_total for each in averages) or 1
    averages.sort(key=lambda each: -each.self_device_time_total)
    rows = [
        (each.key[:70].replace("|", "/"), each.count, f"{each.self_device_time_total / 1e3:.2f}",
         f"{100 * each.self_device_time_total / total:.0f}")
        for each in averages[:12]
    ]  # fmt: skip
    return table((f"kernel of one layer, S={seq_len}", "calls", "ms", "%"), rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("nsa_gpu needs a CUDA device", file=sys.stderr)
        return 2
    torch.backends.cuda.matmul.allow_tf32 = False
    sizes = ", ".join(f"`{name}` {parameter_count(c):,} parameters" for name, c in models().items())
    parts = []
    for part in (kernels, lambda: layers(arguments.rounds), lambda: steps(arguments.rounds)):
        parts.append(part())
        print(parts[-1], flush=True)
    publish(
        "nsa_gpu", "NSA against dense attention on a GPU", "\n\n".join(parts),
        f"{torch.cuda.get_device_name()}, torch's CUDA {torch.version.cuda}, bf16 autocast over "
        f"fp32 weights, batch 1 for layers, medians of {arguments.rounds} between CUDA events. "
        f"A ratio above 1 means that NSA is faster. {sizes}.",
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
