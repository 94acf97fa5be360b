"""Figures for other tools, derived from progress records: training.csv and TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainers.contract.member import Member
from trainers.contract.rundir import TRAINING_CSV

TENSORBOARD = "tb"
CSV_COLUMNS = (
    "step", "loss", "lr", "grad_norm", "toks_per_s", "tokens_total", "bytes_right",
    "skipped_steps",
)  # fmt: skip


class Csv:
    """Appends a row per progress record; the header stands where the file begins."""

    def __init__(self, member: Member):
        self._member = member
        if not (member.run / TRAINING_CSV).exists():
            member.append(TRAINING_CSV, (",".join(CSV_COLUMNS) + "\n").encode())

    def add(self, step: int, fields: Mapping[str, Any]) -> None:
        row = [step, *(fields.get(name, "") for name in CSV_COLUMNS[1:])]
        self._member.append(TRAINING_CSV, (",".join(map(str, row)) + "\n").encode())


class TensorBoard:
    """Writes every number of a progress record as a scalar, on the recorder's thread."""

    def __init__(self, member: Member):
        from torch.utils.tensorboard import SummaryWriter

        self._member = member
        self._writer: Any = None
        self._make = lambda: SummaryWriter(str(member.run / TENSORBOARD))

    def add(self, step: int, fields: Mapping[str, Any]) -> None:
        self._member.recorder.call(lambda: self._write(step, dict(fields)))

    def _write(self, step: int, fields: Mapping[str, Any]) -> None:
        if self._writer is None:
            self._writer = self._make()
        for name, value in fields.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                self._writer.add_scalar(f"train/{name}", value, step)
        self._writer.flush()
