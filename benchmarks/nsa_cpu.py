"""NSA against dense attention on the CPU: whole training steps, one long layer, peak memory.

The contenders of a timing take turns, so that a lasting load on the machine slows all of them.
Ratios of times are ratios of medians. On a shared machine, CPU seconds vary less than wall seconds.
With several threads, CPU seconds include the time in which threads spin at the end of a parallel
region; NSA has more of these regions than dense attention.

    python -m benchmarks.nsa_cpu            # all but --decode, ten minutes on two idle cores
    python -m benchmarks.nsa_cpu --quick    # two layers instead of twelve, two rounds
    python -m benchmarks.nsa_cpu --decode   # prefill and decoding, against a loop over tokens
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.common import RESULTS, ROOT, median, publish, table
from nsa.attention import DenseAttention, NSAttention, routes_of
from nsa.backends import Switches, in_words
from nsa.config import ModelConfig, flops_per_token, parameter_count
from nsa.model import Transformer
from trainers.allocator import keep_freed_memory
from trainers.settings import resolve

THREADS = 2
TARGETS = {512: "≥ 0.90", 2048: "≥ 0.90"}
LAYER_TOKENS, LAYER_TARGET = 8192, "≥ 1.3"
MEMORY_TOKENS, MEMORY_TARGET = 2048, "≤ 1.2"
PROMPT, DECODED, DECODE_TARGET = 4096, 256, "≥ 5"
LOOP_COMMIT = "9c43e2b"
"""The last commit that continued a sequence token by token, with one `cat` per token."""
DECODE = """
import dataclasses, json, resource, sys, time
from pathlib import Path
import torch
from nsa.model import Transformer
from trainers.settings import resolve

threads, layers, prompt, decoded, block = map(int, sys.argv[1:])
torch.set_num_threads(threads)
config = resolve(Path("configs/m7c_125m.yaml"), {}).settings.model
model = Transformer(dataclasses.replace(config, n_layers=layers))
tokens = torch.randint(config.vocab_size, (1, prompt + decoded))
with torch.inference_mode():
    model(tokens[:, :64])
    caches, found = model.caches(), []
    wall, cpu = time.perf_counter(), time.process_time()
    for part in (*tokens[:, :prompt].split(block, 1), *tokens[:, prompt:].split(1, 1)):
        found.append(model(part, caches))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    error = (torch.cat(found, 1) - model(tokens)).abs().max().item()
print(json.dumps([wall, cpu, peak, error]))
"""
"""The program of `decoding`; it runs in this commit and in `LOOP_COMMIT`."""
Times = list[tuple[float, float]]


def models() -> dict[str, ModelConfig]:
    """Returns three configurations: M7C, and dense models of nearly its size and of its shape."""
    sparse, matched = (
        resolve(ROOT / "configs" / f"{name}.yaml", {}).settings.model
        for name in ("m7c_125m", "dense_125m")
    )
    same = dataclasses.replace(sparse, attention="dense")
    return {"nsa": sparse, "dense, matched": matched, "dense, same shape": same}


def train_step(config: ModelConfig, seq_len: int) -> Callable[[], None]:
    """Returns a function: one training step of a model, on one sequence of random bytes."""
    torch.manual_seed(0)
    model = Transformer(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(config.vocab_size, (1, seq_len + 1))

    def step() -> None:
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def layer_step(layer: nn.Module, seq_len: int, dim: int) -> Callable[[], None]:
    """Returns a function: forward and backward of an attention layer with its projections."""
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    x, weight = torch.randn(2, 1, seq_len, dim)
    x.requires_grad_()

    def step() -> None:
        layer(x).backward(weight)
        layer.zero_grad()
        x.grad = None

    return step


def in_turn(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, Times]:
    """Returns wall and CPU seconds of each step; a first round is added and not counted."""
    times: dict[str, Times] = {name: [] for name in steps}
    for count in range(rounds + 1):
        for name, step in steps.items():
            wall, cpu = time.perf_counter(), time.process_time()
            step()
            if count:
                times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return times


def medians(times: Times) -> tuple[float, float]:
    walls, cpus = zip(*times, strict=True)
    return median(walls), median(cpus)


def rows_of(
    times: dict[str, Times], what: str, seq_len: int, targets: dict[str, str]
) -> list[tuple[object, ...]]:
    """Returns a row per contender: its speeds, and the speeds of the first ÷ those of the row."""
    found = []
    first = medians(next(iter(times.values())))
    for name, each in times.items():
        wall, cpu = medians(each)
        found.append((
            what, seq_len, name, f"{seq_len / wall:.0f}", f"{seq_len / cpu:.0f}",
            f"{wall / first[0]:.2f}", f"{cpu / first[1]:.2f}", targets.get(name, ""),
        ))  # fmt: skip
    return found


def peak_mib(name: str, layers: int) -> float:
    """Returns the peak RSS (MiB) of a process that trains one model for two steps."""
    command = [sys.executable, "-m", "benchmarks.nsa_cpu", "--peak", name, "--layers", str(layers)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    return float(done.stdout)


def print_peak(name: str, layers: int) -> None:
    step = train_step(dataclasses.replace(models()[name], n_layers=layers), MEMORY_TOKENS)
    step()
    step()
    # ru_maxrss is not used, because it begins at the size of the parent process.
    status = Path("/proc/self/status").read_text().splitlines()
    print(next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM:")))


def decoding(layers: int, rounds: int) -> str:
    """Returns a table of prefill and decoding; `LOOP_COMMIT` prefills token by token."""
    with tempfile.TemporaryDirectory() as former:
        archive = f"git archive {LOOP_COMMIT} | tar x -C {former}"
        subprocess.run(["bash", "-o", "pipefail", "-c", archive], cwd=ROOT, check=True)
        cases = {
            "blocks of 1,024": (ROOT, PROMPT, 1024),
            f"one by one, {LOOP_COMMIT}": (Path(former), PROMPT, 1),
            "blocks of 1,024, twice the prompt": (ROOT, 2 * PROMPT, 1024),
        }
        found: dict[str, list[list[float]]] = {name: [] for name in cases}
        for _ in range(rounds):
            for name, (tree, prompt, block) in cases.items():
                words = map(str, (1, layers, prompt, DECODED, block))
                command = [sys.executable, "-c", DECODE, *words]
                done = subprocess.run(command, capture_output=True, text=True, cwd=tree, check=True)
                found[name].append(json.loads(done.stdout))
    rows: list[tuple[object, ...]] = []
    ours = [median(each) for each in zip(*found["blocks of 1,024"], strict=True)]
    for name, (_, prompt, _) in cases.items():
        wall, cpu, peak, error = (median(each) for each in zip(*found[name], strict=True))
        target = DECODE_TARGET if LOOP_COMMIT in name else ""
        rows.append((
            name, f"{prompt} + {DECODED}", f"{wall:.1f}", f"{cpu:.1f}", f"{wall / ours[0]:.1f}",
            f"{cpu / ours[1]:.1f}", target, f"{peak:.0f}", f"{error:.0e}",
        ))  # fmt: skip
    header = (
        "prefill", "tokens", "wall s", "CPU s", "time ÷ blocks, wall", "time ÷ blocks, CPU",
        "target", "peak RSS MiB", "largest error of a logit",
    )  # fmt: skip
    return table(header, rows)


def measure(layers: int, rounds: int) -> str:
    configs = {n: dataclasses.replace(c, n_layers=layers) for n, c in models().items()}
    sparse, dense = configs["nsa"], configs["dense, same shape"]
    steps = {
        "nsa": layer_step(NSAttention(sparse), LAYER_TOKENS, sparse.dim),
        "dense": layer_step(DenseAttention(dense), LAYER_TOKENS, dense.dim),
    }
    # The layers run first, before a model uses the heap.
    layer = rows_of(
        in_turn(steps, 2 * rounds + 1), "attention layer", LAYER_TOKENS, {"dense": LAYER_TARGET}
    )
    rows: list[tuple[object, ...]] = []
    for seq_len, target in TARGETS.items():
        steps = {name: train_step(config, seq_len) for name, config in configs.items()}
        targets = {"dense, matched": target}
        rows += rows_of(in_turn(steps, rounds), "training step", seq_len, targets)
    rows += layer
    header = (
        "what", "S", "contender", "tok/s", "tok per CPU s", "nsa ÷ row, wall", "nsa ÷ row, CPU",
        "target",
    )  # fmt: skip
    peaks = {name: peak_mib(name, layers) for name in ("nsa", "dense, matched")}
    ratio = peaks["nsa"] / peaks["dense, matched"]
    memory = table(
        ("peak RSS of a training step", "MiB", "nsa ÷ row", "target"),
        [
            ("nsa", f"{peaks['nsa']:.0f}", "", ""),
            ("dense, matched", f"{peaks['dense, matched']:.0f}", f"{ratio:.2f}", MEMORY_TARGET),
        ],
    )
    return f"{table(header, rows)}\n\n{memory}"


def about(configs: dict[str, ModelConfig]) -> str:
    """Returns the sizes of the contenders, and the routes of NSA."""
    lines = [
        f"`{name}`: {parameter_count(config):,} parameters, "
        f"{flops_per_token(config, 2048, causal=True) / 1e6:.0f} MFLOP per token at S=2048, causal."
        for name, config in configs.items()
    ]
    cpu = torch.device("cpu")
    for seq_len in (*TARGETS, LAYER_TOKENS):
        routes = in_words(routes_of(configs["nsa"], seq_len, cpu, torch.float32, Switches()))
        lines.append(f"Routes at S={seq_len}: {'; '.join(map(' '.join, routes.items()))}.")
    return "\n".join(f"- {line}" for line in lines)


def keep_other_machines(path: Path, before: str) -> None:
    """Appends the results of other CPU models from the text `before` to the new file."""
    found: dict[str, str] = {}
    for result in re.split(r"\n(?=# )", f"{path.read_text()}\n{before}"):
        if machine := re.search(r" Machine: ([^,]+),", result):
            found.setdefault(machine[1], result.strip())
    path.write_text("\n\n".join(found.values()) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="2 layers and 2 rounds")
    parser.add_argument("--decode", action="store_true", help="prefill and decoding only")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    keep_freed_memory()  # as the trainers do on the CPU
    if arguments.peak:
        print_peak(arguments.peak, arguments.layers)
        return
    if arguments.decode:
        publish(
            "nsa_decode",
            f"Prefill of {PROMPT} tokens and decoding of {DECODED}, on the CPU",
            decoding(2, 1),
            "M7C with two layers, fp32, B=1, one thread, one run per row. The error is the largest "
            "difference of a logit from that of one forward over all tokens. Under load, only the "
            "CPU seconds can be compared.",
            "nsa_cpu",
        )
        return
    path = RESULTS / "nsa_cpu.md"
    before = path.read_text() if path.exists() else ""
    layers, rounds = (2, 2) if arguments.quick else (arguments.layers, arguments.rounds)
    publish(
        "nsa_cpu",
        "NSA against dense attention on the CPU",
        measure(layers, rounds),
        f"fp32, B=1, {THREADS} threads, {layers} layers, medians of {rounds} rounds in turn "
        f"({2 * rounds + 1} of the layer), freed memory kept as by the trainers. A ratio of speeds "
        f"above 1 means that NSA is faster.\n\n{about(models())}",
    )
    keep_other_machines(path, before)


if __name__ == "__main__":
    main()
