"""No gate passes over the damaged records of a random history if the true value breaks its bound.

A history is built from random steps, with the records that its processes would write. The second
test damages records, pulses, counts, samples and the files of gates.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from console.plans import gates
from console.sources.gate_files import GateFiles
from console.sources.summary import Summary
from console.sources.tail import Tail
from tests.console.plans.extras import GPUS, MARKS, MEMORY, Extras
from tests.console.plans.histories import Written
from trainers.contract import heartbeat, jsonl
from trainers.contract.pulse import Pulse

Records = list[dict[str, Any]]
NAN_SHARE = 0.02
CHECKPOINTS = ("checkpoints_at_least", "checkpoints_loaded_at_least")
UNITS = ("steps", "stalls", "restarts", "MiB", "checkpoints", "loads")
"""Units of whole numbers."""


@dataclass
class Truth:
    """The true figures of a history."""

    world: int
    nonfinite: int = 0
    stalls: int = 0
    attempts: int = 0
    norms: list[float] = field(default_factory=list)
    figures: Records = field(default_factory=list)
    """The figures that rank 0 recorded in the surviving steps, in order."""
    memory: list[tuple[int, float]] = field(default_factory=list)
    """Step and memory of each record of a surviving step, for all ranks."""
    steps: int = 0
    is_known: bool = False
    """True if a progress record shows whether the loss of some step was finite."""
    completed: bool = False
    extras: Extras = field(default_factory=lambda: Extras(random.Random(0), "ours", 1))

    def values(self) -> dict[str, float | None]:
        """Returns the true value of each gate; None for a gate without a value."""
        few = self.figures
        return {
            "steps_done": self.steps,
            "loss_finite": self.nonfinite if self.is_known else None,
            "grad_norm_above": min(self.norms, default=None),
            "no_stall": self.stalls,
            "stalls_at_most": self.stalls,
            "restarts_at_most": self.attempts - 1,
            "loss_falls": self.fall(),
            "bytes_right": few[-1]["bytes_right"] if few else None,
            MEMORY: max((value for _, value in self.memory), default=None),
        } | self.extras.values()

    def fall(self) -> float | None:
        """Returns by how much the loss fell, nan if it is not finite at the end, or None."""
        losses = [each["loss"] for each in self.figures if each["loss"] is not None]
        first = [place for place, loss in enumerate(losses) if math.isfinite(loss)][:5]
        if len(first) < 5 or len(losses) - 5 <= first[-1]:
            return None
        fall = sum(losses[place] for place in first) / 5 - sum(losses[-5:]) / 5
        return fall if math.isfinite(fall) else math.nan

    def cut(self, step: int) -> None:
        self.figures = [each for each in self.figures if each["step"] < step]
        self.memory = [each for each in self.memory if each[0] < step]
        self.extras.cut(step)


@dataclass
class Remains:
    """The records of each rank, last pulses, counts, samples and files that a history leaves."""

    records: dict[int, Records]
    ends: list[tuple[int, int, Pulse | None]] = field(default_factory=list)
    attempts: int | None = 0
    stalls: int | None = 0
    samples: Records = field(default_factory=list)
    files: GateFiles | None = None


class History:
    """Draws the attempts of a program of one `kind`.

    A program of the kind "ours" may leave out steps, and records the step from which it resumed.
    The other kinds record each step. A "plain" program does not count non-finite steps.
    """

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.kind = rng.choice(("ours", "joined", "plain"))
        self.every = rng.choice((1, 3, 7)) if self.kind == "ours" else 1
        self.truth = Truth(world=rng.choice((1, 1, 2)))
        self.extras = self.truth.extras = Extras(rng, self.kind, self.truth.world)
        self.left = Remains({rank: [] for rank in range(self.truth.world)})
        begins, attempts = (0, 0, rng.randint(1, 30), 95, 100, 495), rng.choice((1, 1, 2, 3, 4))
        self.begin = done = rng.choice(begins) if self.kind == "ours" else 0
        for number in range(1, attempts + 1):
            resumed = rng.choice((self.begin, done, rng.randint(self.begin, done)))
            done = max(self.begin, self.attempt(number, resumed, last=number == attempts))
        self.left.attempts, self.left.stalls = self.truth.attempts, self.truth.stalls
        self.left.samples, self.left.files = self.extras.samples, self.extras.files()

    def attempt(self, number: int, resumed: int, last: bool) -> int:
        """Adds an attempt that starts after step `resumed`; returns the last surviving step."""
        rng, truth = self.rng, self.truth
        truth.attempts += 1
        truth.stalls += rng.random() < 0.15
        count = rng.choice((0, 1, rng.randint(0, 14), rng.randint(0, 14)))
        end = rng.choice(("killed", "error")) if not last or rng.random() < 0.2 else "done"
        if end == "done" and not resumed:
            count = max(count, 1)
        joined = [rng.random() > 0.1 or end == "done" for _ in range(truth.world)]
        if end != "done" and not any(joined):
            self.left.ends += [(number, rank, None) for rank in range(truth.world)]
            return truth.steps
        ranks = [Written(rank, number) for rank in range(truth.world) if joined[rank]]
        self.extras.begin(number)
        for each in ranks:
            each.add("boot", 0)
        begin = 0
        if len(ranks) < truth.world:
            count = 0  # the other ranks wait for the missing rank in the first collective
        elif self.kind == "ours" and (resumed or rng.random() < 0.5):
            truth.cut(resumed + 1)
            truth.steps = min(truth.steps, resumed)
            self.extras.resume(resumed)
            begin = resumed
            for each in ranks:
                each.add("resume", resumed)
        has_hook = self.kind == "ours" and len(ranks) == truth.world
        for each in ranks if has_hook else ():
            each.add("loader_ready", 0, comm_hook=self.extras.hook)
        bad = self.take_steps(ranks, resumed, count, end == "done")
        self.finish(ranks, number, resumed + count, count, end, bad)
        began = {each.rank: begin for each in ranks if any(x["step"] for x in each.records)}
        self.extras.begins = began | self.extras.begins
        for each in ranks:
            self.left.records[each.rank] += each.records
        self.left.ends += [(number, r, None) for r in range(truth.world) if not joined[r]]
        truth.completed = end == "done"
        return truth.steps

    def take_steps(self, ranks: list[Written], resumed: int, count: int, done: bool) -> int:
        """Adds `count` steps; returns the number of steps with a non-finite loss."""
        rng, truth, bad = self.rng, self.truth, 0
        for step in range(resumed + 1, resumed + count + 1):
            if step == resumed + 1:
                truth.cut(step)
            final = step == resumed + count and done
            self.extras.step(step)
            loss = math.nan if rng.random() < NAN_SHARE else rng.uniform(1, 5)
            is_recorded = not (final and self.kind != "ours")
            if not is_recorded:
                loss = rng.uniform(1, 5)  # such a program does not record the loss of its last step
            bad += not math.isfinite(loss)
            truth.steps = step
            if (step <= 5 and self.kind == "ours") or step % self.every == 0 or final:
                self.record(ranks, step, loss, bad, is_recorded)
                self.extras.times = []
        truth.nonfinite += bad
        return bad

    def record(
        self, ranks: list[Written], step: int, loss: float, bad: int, is_recorded: bool
    ) -> None:
        rng, truth = self.rng, self.truth
        count = {} if self.kind == "plain" else {"nonfinite_loss_steps": bad}
        for each in ranks:
            if self.kind == "ours":
                each.add("step_start", step)
                if rng.random() < 0.1 and step > self.begin + 2:
                    each.add("checkpoint", step - 2)
                    if each.rank == 0:
                        self.extras.saved.add(step - 2)
            figures = {
                "grad_norm": rng.choice((0.5, 1.0, rng.random())), "bytes_right": rng.random(),
                "toks_per_s": rng.uniform(50, 150), "gpu_mem_reserved": rng.choice((10, 20, 30)),
            }  # fmt: skip
            speed, mib = figures["toks_per_s"], figures["gpu_mem_reserved"]
            figures |= self.extras.record(step, each.rank, speed, mib)
            losses = {"loss": loss} if is_recorded else {}
            truth.is_known = truth.is_known or is_recorded or bool(count)
            each.add("progress", step, **figures, **losses, **count)
            truth.memory.append((step, figures["gpu_mem_reserved"]))
            if each.rank == 0:
                truth.norms.append(figures["grad_norm"])
                seen = {"loss": loss if is_recorded else None}
                truth.figures.append(figures | seen | {"step": step})

    def finish(
        self, ranks: list[Written], number: int, step: int, count: int, end: str, bad: int
    ) -> None:
        """Ends the ranks. If a rank is killed or fails after a step, it is in the next step."""
        counted = -1 if self.kind == "plain" else bad
        figures = {} if self.kind == "plain" else {"nonfinite_loss_steps": bad}
        at = step if end == "done" or not count else step + 1
        if not count and self.kind != "ours":
            at = 0  # such a program has not begun a step
        has_hook = self.kind == "ours" and len(ranks) == self.truth.world
        self.extras.finish(len(ranks) if at or count else 0, has_hook)
        for each in ranks:
            pulse = each.pulse(at, counted)
            if end != "killed":
                each.add("exit", at, exit_code=int(end == "error"), **figures)
                pulse = each.pulse(at, counted)
            self.left.ends.append((number, each.rank, pulse))


def encode(records: Records) -> list[bytes]:
    return [jsonl.encode(record) for record in records]


def drop(rng: random.Random, lines: list[bytes]) -> list[bytes]:
    begin = rng.randrange(len(lines))
    return lines[:begin] + lines[begin + rng.choice((1, 1, 3)) :]


def truncate(rng: random.Random, lines: list[bytes]) -> list[bytes]:
    whole = b"".join(lines)
    return [whole[: rng.randrange(len(whole))]]


def garble(rng: random.Random, lines: list[bytes]) -> list[bytes]:
    place = rng.randrange(len(lines))
    return [*lines[:place], lines[place][: rng.randrange(len(lines[place]))], *lines[place + 1 :]]


def delay(rng: random.Random, lines: list[bytes]) -> list[bytes]:
    late = list(lines)
    line = late.pop(rng.randrange(len(late)))
    late.insert(rng.randint(0, len(late)), line)
    return late


def lie(rng: random.Random, lines: list[bytes]) -> list[bytes]:
    """Puts an absurd number, attempt or step into one record."""
    place = rng.randrange(len(lines))
    record = jsonl.decode(lines[place]) or {}
    key, value = rng.choice((("attempt", 10**6), ("attempt", 2**60), ("n", 10**9), ("step", 2**62)))
    return [*lines[:place], jsonl.encode(record | {key: value}), *lines[place + 1 :]]


HARMLESS = {
    "none": lambda rng, lines: lines,
    "noise": lambda rng, lines: [x for line in lines for x in (line, b'{"v":1}\n', b"\xff[\n")],
    "read twice": lambda rng, lines: lines + lines,
}
HARMFUL = {
    "drop": drop, "truncate": truncate, "garble": garble, "delay": delay, "lie": lie,
    "gone": lambda rng, lines: [],
}  # fmt: skip


def damage_samples(rng: random.Random, left: Remains) -> None:
    """May drop, delay or falsify samples, and may change the contents of the files of gates."""
    samples, files = list(left.samples), left.files
    for _ in range(rng.choice((0, 1, 1, 3))):
        if samples:
            place = rng.randrange(len(samples))
            late = samples.pop(place)
            how = rng.choice(("drop", "delay", "mono", "attempt", "truncate", "head"))
            if how == "delay":
                samples.insert(rng.randint(0, len(samples)), late)
            elif how in ("mono", "attempt"):
                samples.insert(place, late | {how: 10**6})
            elif how != "drop":
                samples = samples[:place] if how == "truncate" else samples[place:]
    left.samples = samples
    assert files is not None
    partly = replace(files, errors=0, log_doubt="rank0.log is too long")
    older = replace(files, checkpoint="step_00000000", checkpoint_mib=9e9)
    left.files = rng.choice((files, files, None, partly, older))


def read(folder: Path, left: Remains, files: dict[int, bytes], rng: random.Random) -> Summary:
    """Returns the sums of the remains; reads the files in small portions, in a random order."""
    summary = Summary(len(files), left.attempts, left.stalls)
    tails = {}
    for rank, data in files.items():
        path = folder / f"heartbeat_rank{rank}.jsonl"
        path.write_bytes(data)
        tails[rank] = Tail(path, heartbeat.accept)
    while tails:
        rank = rng.choice(list(tails))
        before = tails[rank].offset
        for record in tails[rank].poll(rng.choice((500, 10_000))):
            summary.add(record)
        if tails[rank].offset == before:
            del tails[rank]
    for number, rank, pulse in left.ends:
        summary.take_end(number, rank, pulse)
    for sample in left.samples:
        summary.gpus.add(sample)
    summary.files = left.files
    return summary


def bounds_around(
    rng: random.Random, extras: Extras, values: dict[str, float | None]
) -> dict[str, Any]:
    """Returns for each gate True, or a number close to the true value (to 0 without a value).

    If the run resumed another run, its share of the number is close to the true value.
    """
    found: dict[str, Any] = {name: True for name, r in gates.RULES.items() if r.bound == "yes"}
    for name, value in values.items():
        step = 1 if gates.RULES[name].unit in UNITS else 1e-6
        if name not in found:
            found[name] = (value or 0) + rng.choice((-2, -1, 0, 0, 1, 2)) * step
        if name in CHECKPOINTS and 0 < extras.resumed_at < extras.reached:
            whole = Fraction(extras.reached, extras.reached - extras.resumed_at)
            found[name] = math.ceil(found[name] * whole)
    found[MEMORY] = {"bound": found[MEMORY], "at": list(MARKS)}
    if rng.random() < 0.3:
        del found["steps_done"]
    return found


def same(value: float, truth: float) -> bool:
    return value == truth or (math.isnan(value) and math.isnan(truth))


def keeps(name: str, value: float | None, bounds: dict[str, Any], extras: Extras) -> bool:
    """Returns whether a true value keeps the bound of a gate, which may be one at a step."""
    name = name.partition("@")[0]
    bound, sign = gates.demand(bounds[name]).bound, gates.BOUNDS[gates.RULES[name].bound][1]
    if name in CHECKPOINTS:
        bound = extras.needed(bound, bounds.get("steps_done", 0))
    return value is not None and sign(value, 0.0 if bound is True else bound)


@given(st.integers(0, 2**32))
@settings(max_examples=150)
def test_over_whole_records_a_gate_passes_exactly_when_the_truth_keeps_its_bound(
    tmp_path_factory, seed
):
    rng = random.Random(seed)
    history = History(rng)
    left, values, extras = history.left, history.truth.values(), history.extras
    harm = HARMLESS[rng.choice(list(HARMLESS))]
    files = {r: b"".join(harm(rng, encode(x))) for r, x in left.records.items()}
    summary = read(tmp_path_factory.mktemp("h"), left, files, rng)
    bounds = bounds_around(rng, extras, values)
    any_record = summary.of_rank(0).progress > 0
    values |= extras.at_marks()
    found = gates.evaluate(summary, bounds)
    assert {gate.name for gate in found} | {"steps_done"} == values.keys()
    for gate in found:
        truth = keeps(gate.name, values[gate.name], bounds, extras)
        assert gate.result != "pass" or truth, gate
        if history.truth.completed and any_record and gate.name not in GPUS:
            assert (gate.result == "pass") == truth, gate
            assert None in (gate.value, values[gate.name]) or same(gate.value, values[gate.name])


@given(st.integers(0, 2**32), st.sampled_from(sorted(HARMFUL)), st.booleans())
@settings(max_examples=400)
def test_no_gate_passes_whose_bound_the_truth_breaks(tmp_path_factory, seed, harm, pulses_lost):
    rng = random.Random(seed)
    history = History(rng)
    left, values, extras = history.left, history.truth.values(), history.extras
    hurt = rng.choice(list(left.records))
    files = {}
    for rank, records in left.records.items():
        lines = encode(records)
        if lines and (rank == hurt or rng.random() < 0.3):
            lines = HARMFUL[harm](rng, lines)
        files[rank] = b"".join(lines)
    if pulses_lost:
        left.ends = [each for each in left.ends if rng.random() < 0.5]
    left.stalls = rng.choice((left.stalls, left.stalls, None))
    left.attempts = rng.choice((left.attempts, left.attempts, None))
    lost = sum(files[rank].count(b"\n") - len(each) for rank, each in left.records.items())
    values["heartbeats_complete"] = -lost or (1 if harm == "garble" else 0)
    damage_samples(rng, left)
    folder, bounds = tmp_path_factory.mktemp("h"), bounds_around(rng, extras, values)
    values |= extras.at_marks()
    found = gates.evaluate(read(folder, left, files, rng), bounds)
    for gate in found:
        truth = keeps(gate.name, values.get(gate.name), bounds, extras)
        assert gate.result != "pass" or truth, (harm, gate)
    again = tmp_path_factory.mktemp("h")
    assert gates.evaluate(read(again, left, files, rng), bounds) == found, "another interleaving"
