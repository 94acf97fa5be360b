"""The truth checks: a fault raises only its own alert; healthy runs raise no such alert."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from console.diagnose import truth
from console.diagnose.rank_evidence import RankEvidence
from console.diagnose.readings import setting_values
from console.diagnose.rules import RULES
from console.diagnose.truth_history import TruthHistory
from console.model import Gpu
from console.sources.pace import Pace, progress_of
from tests.console.diagnose.watched import Watched
from trainers.contract import VERSION

SETTINGS = {
    "data.source": "synthetic", "data.seq_len": 512, "train.batch_size": 8, "train.accumulate": 1,
    "train.strategy": "ddp", "model.vocab_size": 256, "attention.use_fa2": False,
    "attention.force_branch": "none", "attention.uniform_gate": False,
}  # fmt: skip
ENV = {
    "v": VERSION, "attempt": 1, "config": "configs/m7c_125m.yaml", "run": "base-1/0-train",
    "parameters": 81_894_576, "parameters_counted": 81_894_576,
    "backend": {"cmp": "masked", "sel": "chunked", "win": "banded"},
}  # fmt: skip
GPU = Gpu(0, "H100", "ok", util_pct=97.0, power_w=520.0, power_limit_w=700.0,
          mem_used_mib=31_000.0, mem_total_mib=80_000.0)  # fmt: skip
RANKS, SECONDS, UNTIL_SLOW = 2, 130, 340
CHANCE = math.log(256)
Change = Callable[[dict[str, Any]], object]


@dataclass
class Told:
    """A run, as the differences of its records, documents and GPUs from those of a healthy run."""

    record: Change = lambda record: None
    settings: dict[str, Any] = field(default_factory=dict)
    env: dict[str, Any] = field(default_factory=dict)
    gpu: dict[str, Any] = field(default_factory=dict)
    ranks: int = RANKS
    phase: str = "forward"
    dead: list[str] = field(default_factory=list)
    first_step: int = 1
    jitter: float = 0.1
    others: dict[str, Any] = field(default_factory=dict)
    """Changed figures of four more GPUs of the host; if empty, the host lacks these GPUs."""
    seconds: int = SECONDS


def record_of(rank: int, step: int, rng: random.Random) -> dict[str, Any]:
    """Returns a healthy record of a GPU run on random bytes."""
    parts = {"fetch": 0.02, "forward": 0.3, "backward": 0.4, "optimizer": 0.05}
    return {
        "v": VERSION, "attempt": 1, "rank": rank, "step": step, "msg": "progress", "ts": 1.0,
        "host": f"node{rank // 2}", "loss": CHANCE + rng.uniform(-0.005, 0.02),
        "grad_norm": rng.uniform(0.5, 2), "skipped_steps": step // 400,
        "batch_crc32": f"{rng.getrandbits(32):08x}", "gpu_mem_reserved": 30_000,
        "steps_dt_s": [1.0],
        **{f"dt_{phase}_s": share for phase, share in parts.items()},
    }  # fmt: skip


def alerts(told: Told) -> dict[str, str]:
    """Returns the open alerts on a run in which each rank writes a record every second."""
    rng, paces = random.Random(4), [Pace() for _ in range(told.ranks)]
    run = Watched(settings=SETTINGS | told.settings)
    gpus = [replace(GPU, index=i, **told.gpu) for i in range(told.ranks)]
    gpus += [replace(GPU, index=90 + i, **told.others) for i in range(4 * bool(told.others))]
    env = {key: value for key, value in (ENV | told.env).items() if value is not None}
    found: dict[str, str] = {}
    for second in range(told.seconds):
        step = told.first_step + second
        for rank, pace in enumerate(paces):
            record = record_of(rank, step, rng)
            for phase in ("fetch", "forward", "backward"):
                record[f"dt_{phase}_s"] *= math.exp(rng.gauss(0, told.jitter))
            told.record(record)
            if second == 0 and rank == 0 and told.dead:
                pace.add(record | {"msg": "dead_parameters", "parameters": told.dead}, 1, 0.0, 1.0)
            pace.add(record, 1, float(second), 1.0)
        seen = tuple(
            RankEvidence(rank, 1, "R", step, told.phase, 0.0) for rank in range(told.ranks)
        )
        fresh = [each for pace in paces for each in pace.take_fresh()]
        for change in run.poll(*fresh, ranks=seen, gpus=tuple(gpus), env=env):
            if change.kind == "raise":
                found[change.rule.name] = change.text
            elif change.kind == "clear":
                del found[change.rule.name]
    return found


def only(rank: int, **fields: Any) -> Change:
    return lambda record: record.update(fields) if record["rank"] == rank else None


def each(**fields: Any) -> Change:
    return lambda record: record.update(fields)


def slow(ranks: set[int], phase: str, times: float) -> Change:
    """Returns a change that adds the same time to `phase` on `ranks` and to backward on others."""

    def change(record: dict[str, Any]) -> None:
        excess = 0.3 * (times - 1)
        own = record["rank"] in ranks
        record[f"dt_{phase}_s" if own else "dt_backward_s"] += excess
        record["steps_dt_s"] = [1.0 + excess]

    return change


def skipping(every: int) -> Change:
    return lambda record: record.update(skipped_steps=record["step"] // every)


def stepwise(record: dict[str, Any]) -> None:
    """Changes a record so that all ranks read the same batch."""
    record["batch_crc32"] = f"{record['step']:08x}"


TRUE = {
    "imbalance": (
        Told(slow({1}, "forward", 2.0), seconds=UNTIL_SLOW, jitter=0.0),
        "rank 1 takes 1.9 times as long as the other ranks in fetch and forward, mostly in forward "
        "(0.6 s against 0.3 s, median of 16 records); the others wait for it in backward; ",
    ),
    "random_loss": (
        Told(lambda r: r.update(loss=r["loss"] - 0.1)), "over 3 records and chance is 5.5452",
    ),
    "first_loss": (Told(each(loss=9.1)), "3.55 above ln(256) = 5.55"),
    "rank_zero_gradient": (
        Told(only(1, grad_norm=0.0)), "norm of rank 1 is zero in 3 consecutive records",
    ),
    "dead_parameters": (
        Told(dead=["blocks.0.w_k_cmp", "blocks.1.w_k_cmp"]),
        "for blocks.0.w_k_cmp, blocks.1.w_k_cmp: these parameters do not train",
    ),
    "same_batch": (Told(stepwise), "ranks 0, 1 read the same batch in 3 consecutive"),
    "constant_figure": (
        Told(each(loss=CHANCE)), "loss is exactly 5.545177444479562 in 20 consecutive records",
    ),
    "skipped_steps": (Told(skipping(4), seconds=270), "25% of the last 200 steps were skipped"),
    "backend": (
        Told(env={"backend": {"win": "banded (flash-attn is not installed)", "sel": "chunked"}}),
        "win runs banded (flash-attn is not installed)",
    ),
    "model_size": (
        Told(env={"parameters": 254_499, "parameters_counted": 254_499}),
        "the config m7c_125m.yaml names 125 M parameters and the model has 254,499",
    ),
    "host_bound": (Told(gpu={"util_pct": 12.0, "power_w": 130.0}), "busy for 12% of a step, and"),
    "no_power": (
        Told(gpu={"power_w": 110.0}), "report 97% utilisation and draw 16% of their power limit",
    ),
    "below_communication": (
        Told(settings={"measured.allreduce_gb_s": 0.2, "measured.allreduce_ranks": 2}),
        "a step takes 1 s and the all-reduce of 0.328 GB of gradients at least 1.64 s, at the 0.2 "
        "GB/s of the preflight: ",
    ),
    "late": (
        Told(settings={"expects.hours": 2.0, "train.steps": 20_000}),
        "20,000 steps of 1 s take 5.56 h, and the plan expects 2 h: ",
    ),
}  # fmt: skip


def test_every_truth_check_has_a_fault_and_can_only_warn():
    assert TRUE.keys() == {rule.name for rule in truth.ROWS}
    assert all(RULES[name].corroborate is None for name in TRUE)


@pytest.mark.parametrize("name", TRUE)
def test_a_fault_raises_its_own_alert_only(name):
    told, words = TRUE[name]
    found = alerts(told)
    assert list(found) == [name]
    assert words in found[name]
    assert ": " in found[name] or "; " in found[name]  # what to do follows


FOREIGN = dict.fromkeys(SETTINGS)
BACKEND = {"backend": {"win": "banded (flash-attn is not installed)"}}
HEALTHY = {
    "a healthy run": Told(),
    "one rank": Told(ranks=1),
    "idle GPUs on the host": Told(others={"mem_used_mib": 1.0, "util_pct": 0.0, "power_w": 60.0}),
    "other jobs on the host": Told(gpu={"util_pct": 60.0}, others={"util_pct": 0.0}),
    "settings without a vocabulary": Told(settings={"model.vocab_size": None}),
    "a foreign program": Told(
        lambda r: r.update(loss=r["loss"] - 1), settings=FOREIGN, env=dict.fromkeys(ENV)
    ),
    "a learning run on text": Told(
        lambda r: r.update(loss=r["loss"] / (1 + r["step"] / 300)),
        settings={"data.source": "text"},
    ),
    "a resumed run on text": Told(
        lambda r: r.update(loss=r["loss"] - 4), settings={"data.source": "text"}, first_step=4001
    ),
    "a loss that the program rounds": Told(each(loss=5.55, grad_norm=1.0)),
    "a loss in half precision": Told(each(loss=5.53125, grad_norm=0.10003662109375)),
    "a first loss that is a little high": Told(lambda r: r.update(loss=r["loss"] + 0.6)),
    "calibration of the loss scale": Told(
        lambda r: r.update(skipped_steps=min(r["step"], 30) + r["step"] // 50)
    ),
    "an ablation": Told(dead=["gate.w"], settings={"attention.uniform_gate": True}),
    "no gradient on all ranks, which is another rule": Told(each(grad_norm=0.0)),
    "a program without checksums": Told(each(batch_crc32=None)),
    "two ranks with the same batch once in a while": Told(
        lambda r: stepwise(r) if r["step"] % 3 == 0 else None
    ),
    "counts of parameters that contradict each other": Told(env={"parameters": 254_499}),
    "a config without a size": Told(env={"config": "configs/tiny_cpu.yaml", "parameters": 250_000,
                                         "parameters_counted": 250_000}),
    "an evaluation with idle GPUs": Told(gpu={"util_pct": 5.0}, phase="eval"),
    "GPUs that other jobs use": Told(gpu={"util_pct": 5.0, "mem_used_mib": 90.0}),
    "idle GPUs without phases": Told(
        each(dt_forward_s=None, dt_backward_s=None), gpu={"util_pct": 9.0}
    ),
    "a GPU without a power sensor": Told(gpu={"power_w": None}),
    "little power with little utilisation": Told(gpu={"util_pct": 60.0, "power_w": 100.0}),
    "ranks of uneven steps": Told(jitter=1.0, seconds=UNTIL_SLOW),
    "a slow rank whose excess is a small part of the step": Told(
        lambda r: r.update(dt_forward_s=0.6 if r["rank"] else 0.3, steps_dt_s=[9.0]),
        seconds=UNTIL_SLOW,
    ),
    "a difference within the noise": Told(
        slow({1}, "forward", 2.0), jitter=1.5, seconds=UNTIL_SLOW
    ),
    "waits in the forward of FSDP": Told(
        slow({1}, "forward", 2.0), settings={"train.strategy": "fsdp"}, seconds=UNTIL_SLOW
    ),
    "a slow network with compression and accumulation": Told(
        settings={"measured.allreduce_gb_s": 0.2, "measured.allreduce_ranks": 2,
                  "ddp.compress": "bf16", "train.accumulate": 4},
    ),
    "another number of ranks than was measured": Told(
        settings={"measured.allreduce_gb_s": 0.001, "measured.allreduce_ranks": 4},
    ),
    "FSDP, which reduces shards": Told(
        settings={"measured.allreduce_gb_s": 0.2, "measured.allreduce_ranks": 2,
                  "train.strategy": "fsdp"},
    ),
    "a plan that expects a little less time": Told(
        settings={"expects.hours": 4.0, "train.steps": 20_000}
    ),
    "a few slow steps at the start": Told(
        lambda r: r.update(steps_dt_s=[90.0 if r["step"] < 8 else 1.0]),
        settings={"expects.hours": 5.0, "train.steps": 20_000},
    ),
    "garbage in the figures": Told(
        each(loss="nan", grad_norm="x", skipped_steps="inf", batch_crc32=7, dt_forward_s=-3,
             gpu_mem_reserved=True, steps_dt_s=[-1e9, "x"], host=7),
        env={"backend": "x", "parameters": "many", "run": 7, "config": [1]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_what_a_healthy_run_says_raises_nothing(name):
    assert alerts(HEALTHY[name]).keys() <= {"zero_gradient", "non_finite"}


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", 1e308, -1e308, 5e-324, 1 << 62, None, "x"])
def test_no_figure_makes_a_check_raise(value):
    figures = dict.fromkeys(
        ("loss", "grad_norm", "skipped_steps", "batch_crc32", "gpu_mem_reserved", "host",
         "dt_fetch_s", "dt_forward_s", "dt_backward_s"), value,
    )  # fmt: skip
    number = float(value) if value not in (None, "x") else None
    sensors = dict.fromkeys(("util_pct", "power_w", "power_limit_w"), number)

    def change(record: dict[str, Any]) -> None:
        """Puts the figure into all records of rank 1, and into every second record of rank 0."""
        if record["rank"] or record["step"] % 2:
            record.update(figures, steps_dt_s=[value])

    documents = dict.fromkeys(("config", "run", "parameters", "backend"), value)
    measured = ("measured.allreduce_gb_s", "measured.allreduce_ranks", "expects.hours")
    known = dict.fromkeys((*SETTINGS, *measured, "train.steps"), number)
    for settings in (known | {"data.source": "synthetic", "train.strategy": "ddp"}, {}):
        alerts(Told(change, settings, documents, sensors, seconds=40))
        alerts(Told(settings=settings, gpu=sensors, seconds=40))


def test_figures_of_the_preflight_and_of_the_plan_are_read_from_run_json():
    run = {"settings": {"train.steps": {"value": 5}}, "expects": {"hours": 3.0},
           "machine": {"measured": {"allreduce_gb_s": 7.5}}}  # fmt: skip
    assert setting_values(run) == {
        "train.steps": 5, "expects.hours": 3.0, "measured.allreduce_gb_s": 7.5,
    }  # fmt: skip
    assert setting_values(run | {"machine": [], "expects": "x"}) == {"train.steps": 5}


def test_a_poll_with_many_records_of_each_rank_keeps_the_newest_steps_of_all():
    history = TruthHistory()
    for first in (1, 101, 201):
        records = [
            progress_of({"rank": rank, "step": step, "steps_dt_s": [0.3], "batch_crc32": "aa"})
            for rank in (0, 1) for step in range(first, first + 100)
        ]  # fmt: skip
        history.update(records, (), ())
    assert history.same_batches() == (48, (0, 1))
    assert history.step_s() == pytest.approx(0.3)
