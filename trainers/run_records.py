"""Writes heartbeats, CSV, TensorBoard, log lines, env.json and metrics.json of a run.

All writes go through the recorder's thread, so no step waits for the disk. The figures are plain
numbers, so this module needs torch only for TensorBoard.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from nsa.config import flops_per_token, parameter_count
from trainers import manifest
from trainers.contract import VERSION, rundir
from trainers.contract.member import Member
from trainers.schema import Settings
from trainers.settings import Resolved

FIRST_STEPS = 5
LN2, LARGEST_EXPONENT = math.log(2), 700.0
PHASE_FIELDS = ("fetch", "forward", "backward", "optimizer")
FETCHES_KEPT = 200
PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / (1 << 20)
CSV_COLUMNS: Mapping[str, tuple[str, ...]] = {
    rundir.TRAINING_CSV: (
        "loss", "lr", "toks_per_s", "grad_norm", "tokens_total", "bytes_right", "skipped_steps",
        "gate_entropy_mean", "gate_max_gate", "gate_collapse_frac",
    ),
    "k_stats.csv": ("sel_entropy", "sel_forced_share", "sel_distance_mean", "sel_overlap"),
    "fallback_counters.csv": ("fb_total",),
    "val.csv": ("val_loss", "ppl"),
}  # fmt: skip
"""The columns of each CSV file after `step`. Scripts of the runbooks average the fourth column of
training.csv. In a run with one rank, this file is the second source of some watch rules."""
IN_SHARDS = ("k_stats.csv", "fallback_counters.csv")
"""Files whose names contain `_fsdp` with FSDP."""


class Csv:
    """Appends a row for each record that has a column of the file; a new file gets a header."""

    def __init__(self, member: Member, name: str, is_fsdp: bool):
        self._member, self._columns = member, CSV_COLUMNS[name]
        self._name = name.replace(".", "_fsdp.") if is_fsdp and name in IN_SHARDS else name
        has_file = (member.run / self._name).exists()
        self._header = "" if has_file else ",".join(("step", *self._columns)) + "\n"

    def add(self, step: int, fields: Mapping[str, Any]) -> None:
        if fields.keys().isdisjoint(self._columns):
            return
        row = [step, *(fields.get(name, "") for name in self._columns)]
        line = self._header + ",".join(map(str, row)) + "\n"
        self._header = ""
        self._member.recorder.put(self._member.run / self._name, line.encode())


class TensorBoard:
    """Writes the numbers of records as scalars, on the recorder's thread.

    Writes nothing while `Recorder.failing` is set. After an OSError of the event file, the next
    write opens a new event file.
    """

    def __init__(self, member: Member):
        from torch.utils.tensorboard import SummaryWriter

        self._member = member
        self._writer = functools.cache(lambda: SummaryWriter(str(member.run / "tb")))

    def add(self, step: int, fields: Mapping[str, Any]) -> None:
        self._member.recorder.call(lambda: self._write(step, dict(fields)), keep=False)

    def _write(self, step: int, fields: Mapping[str, Any]) -> None:
        if self._member.recorder.failing:
            return
        try:
            for name, value in fields.items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    self._writer().add_scalar(f"train/{name}", value, step)
            self._writer().flush()
        except OSError:
            self._writer.cache_clear()  # this writer would raise the same error forever
            raise


class Report:
    """Records the steps of this rank; rank 0 also writes the files of the whole run."""

    def __init__(self, resolved: Resolved, member: Member):
        self.settings: Settings = resolved.settings
        self._resolved, self._member = resolved, member
        self._tokens_per_step = self.settings.tokens_per_step * member.world
        seq_len = self.settings.data.seq_len
        self._flops_per_token = {
            name: flops_per_token(self.settings.model, seq_len, causal=name == "mfu_exact")
            for name in ("mfu", "mfu_exact")
        }
        self.peak_flops: float | None = None
        self.steps_done = self._resumed_step = 0
        self.tokens_total = self._tokens_before = 0
        """Tokens that all ranks have trained on, and the part of them before a resume."""
        self.first_loss: float | None = None
        self.batch_crc32 = ""
        """The checksum of the first micro-batch of the step, at steps with a progress record."""
        self._started = time.perf_counter()
        self._training_s = 0.0
        self._fetches: deque[float] = deque(maxlen=FETCHES_KEPT)
        self._right = self._scored = 0
        self._last: dict[str, Any] = {}
        self._sinks: list[Csv | TensorBoard] = []

    def resume(self, step: int, tokens_total: int, first_loss: float | None) -> None:
        """Continues from the figures in a checkpoint."""
        self.steps_done = self._resumed_step = step
        self.first_loss = first_loss
        self.tokens_total = self._tokens_before = tokens_total

    def values(self) -> dict[str, Any]:
        """Returns the plain value of each setting, for the checkpoint."""
        return {key: entry["value"] for key, entry in self._resolved.as_dict().items()}

    def write_environment(self, facts: Mapping[str, Any], peak_flops: float | None) -> None:
        """On rank 0, writes env.json and log lines, and prepares CSV and TensorBoard."""
        self.peak_flops = peak_flops
        if self._member.rank:
            return
        missing, config = "", self._resolved.config
        if peak_flops is None:
            device, precision = facts["device"]["name"], self.settings.train.precision
            missing = f"not available: the peak FLOP/s of {device} with {precision} is not known"
        write_document(
            self._member, rundir.ENV, host=rundir.host_name(),
            parameters=parameter_count(self.settings.model),
            flops_per_token=self._flops_per_token["mfu"],
            flops_per_token_exact=self._flops_per_token["mfu_exact"],
            peak_flops=peak_flops, mfu_missing=missing, tokens_per_step=self._tokens_per_step,
            config=config, **facts, settings=self._resolved.as_dict(),
        )  # fmt: skip
        toy = "no config named (--config or $CONFIG): training the built-in toy model"
        self._member.log(
            f"{f'config {config}' if config else toy}; {facts['parameters_counted']:,} parameters, "
            f"S {self.settings.data.seq_len:,}, {self._tokens_per_step:,} tokens per step"
        )
        if missing:
            self._member.log(f"MFU is {missing}")
        if not self.settings.report.disable_csv:
            is_fsdp = facts["strategy"] == "fsdp"
            self._sinks += [Csv(self._member, name, is_fsdp) for name in CSV_COLUMNS]
        if not self.settings.report.disable_tb:
            try:
                self._sinks.append(TensorBoard(self._member))
            except ImportError:
                self._member.log("TensorBoard is off: it is not installed (the extra tb)")

    def due(self, step: int) -> bool:
        """Returns whether `step` has a progress record."""
        every = self.settings.report.log_every
        is_early = step <= self._resumed_step + FIRST_STEPS
        return is_early or step % every == 0 or step == self.settings.train.steps

    def begin(self, step: int) -> None:
        """Marks the start of a step."""
        if self.due(step):
            self._member.record("step_start", step)

    def fetched(self, took_s: float) -> None:
        """Adds the time of one fetch."""
        self._fetches.append(took_s)

    def end(self, step: int, training_s: float) -> None:
        """Marks the end of a step; `training_s` is the time of all steps of this process."""
        self._training_s = training_s
        self.steps_done = step
        self.tokens_total += self._tokens_per_step

    def evaluated(
        self, step: int, loss: float, tokens: int, right: float | None, took_s: float
    ) -> None:
        """Records the loss on held-out data; with recall, also the fraction of right bytes."""
        fields: dict[str, Any] = {
            "loss": loss, "bits_per_byte": self._bits_per_byte(loss), "tokens": tokens,
            "dt_s": took_s,
        }  # fmt: skip
        if right is not None:
            fields["bytes_right"] = round(right / max(tokens, 1), 4)
        text = f"eval at step {step}: loss {loss:.4f} on {tokens:,} held-out tokens"
        self.record_event("eval", step, text, **fields)
        for sink in self._sinks:
            sink.add(step, {"val_loss": loss, "ppl": math.exp(min(loss, LARGEST_EXPONENT))})

    def saved(self, step: int, remain: Iterable[str]) -> None:
        """Records a checkpoint, and sentences on old checkpoints; any thread may call this."""
        name = manifest.name_of(step)
        self.record_event("checkpoint", step, f"saved {rundir.CHECKPOINTS}/{name}", path=name)
        for text in remain:
            self.record_event("note", step, text)

    def count_right(self, right: int, scored: int) -> None:
        """Adds the numbers of right and of scored predictions of a step."""
        self._right += right
        self._scored += scored

    def progress(
        self, step: int, *, loss: float, phases_s: Mapping[str, float], steps_s: list[float],
        **figures: Any,
    ) -> float | None:  # fmt: skip
        """Writes the progress record of a step. Returns the fraction of right bytes (recall only).

        `phases_s` and `steps_s` are the times since the last record, of all its phases and of each
        step. `figures` are added unchanged.
        """
        fields = self._fields(loss, phases_s, steps_s) | figures
        self._member.record("progress", step, **fields)
        self._member.record("step_end", step)
        self.first_loss = loss if self.first_loss is None else self.first_loss
        self._last = fields
        if self._member.rank == 0:
            self._log(step, fields)
            for sink in self._sinks:
                sink.add(step, {"fb_total": 0} | fields)
        self._right = self._scored = 0
        return fields.get("bytes_right")

    def _fields(
        self, loss: float, phases_s: Mapping[str, float], steps_s: list[float]
    ) -> dict[str, Any]:
        world, steps = self._member.world, len(steps_s)
        rate = self._tokens_per_step * steps / max(sum(steps_s), 1e-9)
        resident_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        fields: dict[str, Any] = {
            "loss": loss, "bits_per_byte": self._bits_per_byte(loss),
            "toks_per_s": round(rate, 2), "toks_per_s_rank": round(rate / world, 2),
            "tokens_total": self.tokens_total, **self._mfu(rate),
            "steps_dt_s": [round(duration, 6) for duration in steps_s],
            "rss_mib": round(resident_pages * PAGE_MIB, 1), "batch_crc32": self.batch_crc32,
            "dropped_records": self._member.recorder.dropped,
        }  # fmt: skip
        for name in PHASE_FIELDS:
            fields[f"dt_{name}_s"] = round(phases_s.get(name, 0.0) / steps, 6)
        fields["fetch_p50_ms"] = percentile_ms(self._fetches, 50)
        fields["fetch_p95_ms"] = percentile_ms(self._fetches, 95)
        if self.settings.data.source == "recall":
            fields["bytes_right"] = round(self._right / max(self._scored, 1), 4)
        return fields

    def _bits_per_byte(self, loss_nats: float) -> float | None:
        """Returns the loss in bits if the tokens are bytes, or else None."""
        return loss_nats / LN2 if self.settings.data.tokenizer == "byte" else None

    def _mfu(self, toks_per_s: float) -> dict[str, float | None]:
        """Returns the figures of `precision.MFU_FORMULA`, or None for each if no peak is known."""
        peak = self._member.world * (self.peak_flops or 0.0)
        flops = self._flops_per_token.items()
        return {name: each * toks_per_s / peak if peak else None for name, each in flops}

    def _log(self, step: int, fields: Mapping[str, Any]) -> None:
        right = f"  right {fields['bytes_right']:.3f}" if "bytes_right" in fields else ""
        self._member.log(
            f"step {step}/{self.settings.train.steps}  loss {fields['loss']:.4f}  "
            f"lr {fields['lr']:.1e}  grad {fields['grad_norm']:.2f}  "
            f"{fields['toks_per_s']:,.0f} tok/s  {fmean(fields['steps_dt_s']):.3f} s/step{right}"
        )

    def record_event(self, msg: str, step: int, text: str, **fields: Any) -> None:
        """Writes the record `msg` to the heartbeat, and `text` to the log."""
        self._member.record(msg, step, **fields)
        self._member.log(text)

    def metrics(self, reason: str, exit_code: int) -> None:
        """Writes metrics.json: steps, results, and the reason of the end."""
        kept = ("loss", "grad_norm", "bytes_right", "skipped_steps", "toks_per_s",
                "mfu", "mfu_exact")  # fmt: skip
        trained, took_s = self.tokens_total - self._tokens_before, self._training_s
        figures = {name: self._last.get(name) for name in kept} | {"training_s": took_s}
        figures["mean_toks_per_s"] = trained / took_s if took_s else None
        if not took_s:  # the figures of the attempt that trained stay
            before = rundir.read_json(self._member.run / rundir.METRICS) or {}
            if before.get("steps_done") == self.steps_done:
                figures |= {name: before.get(name) for name in figures}
        write_document(
            self._member, rundir.METRICS, steps_done=self.steps_done, reason=reason,
            exit_code=exit_code, steps_planned=self.settings.train.steps,
            tokens_total=self.tokens_total, first_loss=self.first_loss,
            wall_s=time.perf_counter() - self._started, **figures,
        )  # fmt: skip


def write_document(member: Member, name: str, **figures: Any) -> None:
    """On rank 0, queues env.json or metrics.json; on other ranks, does nothing."""
    if member.rank:
        return
    record = {
        "v": VERSION, "run": member.run_id, "attempt": member.attempt, "ts": time.time(),
        "world": member.world, **figures,
    }  # fmt: skip
    member.recorder.call(lambda: rundir.write_json(member.run / name, record))


def percentile_ms(seconds: Iterable[float], percent: int) -> float:
    """Returns a percentile of `seconds` in milliseconds, or 0 if there are none."""
    values = sorted(seconds)
    return round(values[round((len(values) - 1) * percent / 100)] * 1e3, 3) if values else 0.0
