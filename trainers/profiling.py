"""Profiles steps with torch.profiler; the audit reports the SDPA kernels of the first step."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from nsa.profiler_ranges import PREFIX
from trainers.contract import rundir
from trainers.contract.member import Member
from trainers.rejected_settings import step_range
from trainers.run_records import Report
from trainers.schema import ReportSettings

FOLDER, REQUESTED_STEPS, EXPORT_TIMEOUT_S = "profiles", 3, 60.0
KERNELS = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_scaled_dot_product_attention_math": "math",
    "_scaled_dot_product_fused_attention_overrideable": "overrideable",
    "_flash_attn_forward": "flash-attn",
}
"""Short names of the attention operators; a key is an operator without its namespace."""


class Profiler:
    """Profiles the steps that the settings or an operator's request select."""

    def __init__(self, member: Member, report: Report, settings: ReportSettings):
        self._member, self._report = member, report
        self._planned, self._requested = step_range(settings.profile) or range(0), range(0)
        self._audit = settings.sdpa_audit and member.rank == 0
        """True while the report of the first step's kernels is due."""
        self._open: Any = None
        self._first = 0
        """The first step of the open profile."""
        self._exporting: threading.Thread | None = None

    def request(self, step: int) -> None:
        """Selects the next `REQUESTED_STEPS` steps; a profile that is open then includes them."""
        self._requested = range(step + 1, step + 1 + REQUESTED_STEPS)

    def begin(self, step: int) -> None:
        """Opens a profile that is due; the audit of the first step precedes a profile."""
        if self._open is None and (self._audit or self._selects(step)):
            self._first, self._open = step, torch.profiler.profile(record_shapes=True)
            self._open.start()

    def end(self, step: int) -> None:
        """Closes the profile that ends with this step."""
        if self._open is not None and (self._audit or not self._selects(step + 1)):
            self._close(step)

    def close(self) -> None:
        """Closes an open profile early; waits at most `EXPORT_TIMEOUT_S` for the newest trace."""
        if self._open is not None:
            self._close(self._report.steps_done)
        if self._exporting is not None:
            self._exporting.join(EXPORT_TIMEOUT_S)

    def _selects(self, step: int) -> bool:
        return step in self._planned or step in self._requested

    def _close(self, step: int) -> None:
        profile, self._open = self._open, None
        profile.stop()
        if self._audit:
            called = kernels_called(profile.events())
            text = f"kernels of SDPA in step {step}: {called}"
            self._report.record_event("sdpa_audit", step, text, called=called)
            self._audit = False
            return
        name = f"steps{self._first}-{step}_rank{self._member.rank}.json"
        # Writing a trace takes seconds, so a thread does it.
        self._exporting = threading.Thread(
            target=self._export, args=(profile, step, name), daemon=True
        )
        self._exporting.start()

    def _export(self, profile: Any, step: int, name: str) -> None:
        path = self._member.run / FOLDER / name
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            profile.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            self._report.record_event("note", step, f"cannot write the profile {path}: {error}")
        else:
            self._report.record_event(
                "profile", step, f"wrote the profile {path}", path=f"{FOLDER}/{name}"
            )


def dump_out_of_memory(member: Member) -> None:
    """Writes the CUDA allocator's summary after an out-of-memory error."""
    if not torch.cuda.is_available():
        return
    summary, path = torch.cuda.memory_summary(), member.run / f"oom_rank{member.rank}.txt"
    member.recorder.call(lambda: rundir.write_atomic(path, summary))


def kernels_called(events: Iterable[Any]) -> dict[str, dict[str, int]]:
    """Returns the number of calls of each kernel by branch, from a profile's events.

    A branch without SDPA has {}. Calls outside of the branches are under "elsewhere".
    """
    found: dict[str, Counter[str]] = {}
    for event in events:
        if event.name.startswith(PREFIX):
            found.setdefault(event.name.removeprefix(PREFIX), Counter())
        kernel = KERNELS.get(event.name.rpartition("::")[2])
        if kernel is not None:
            found.setdefault(_branch(event), Counter())[kernel] += 1
    return {branch: dict(found[branch]) for branch in sorted(found)}


def _branch(event: Any) -> str:
    while event is not None and not event.name.startswith(PREFIX):
        event = event.cpu_parent
    return "elsewhere" if event is None else event.name.removeprefix(PREFIX)
