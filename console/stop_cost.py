"""Computes what a stop costs a run: the completed steps that no checkpoint has."""

from __future__ import annotations

from console.model import RunState
from console.status_text import counted

IN_STEP = ("fetch", "forward", "backward", "optimizer", "step")
"""In these phases, the present step of a rank is not complete."""


def completed(step: int, phase: str) -> int:
    """Returns the last step that a rank in `phase` of `step` has completed, or 0 without one."""
    return max(0, step - (phase in IN_STEP))


def completed_of(state: RunState) -> int:
    """Returns the last step that a rank of a run has completed, or 0 if it is not known."""
    pulses = (rank.pulse for rank in state.ranks if rank.pulse)
    return max((completed(each.step, each.phase) for each in pulses), default=state.step or 0)


def lost_steps(done: int, saved: int, reports: bool) -> str:
    """Returns the steps that a stop loses, or "" if they are not known.

    `done` is the last completed step, or 0 if it is not known. `saved` is the step of the
    checkpoint from which a resume would continue, or 0 if there is none. `reports` says that the
    program records each checkpoint, as the trainers of this project do.
    """
    if not done or not (saved or reports):
        return ""
    if not saved:
        return f"all {counted(done, 'step')} (no checkpoint)"
    return f"{counted(max(0, done - saved), 'step')} (newest checkpoint: step {saved:,})"


def stop_cost(done: int, saved: int, reports: bool, phase: str) -> str:
    """Returns what a stop costs a run stalled in `phase`, or "" if not known; see `lost_steps`."""
    lost = lost_steps(done, saved, reports)
    in_save = "loses no step, but waits for the end of this save"
    halts = {"save": in_save, "halt": "was already requested"}
    halt = halts.get(phase, "saves first, but only when all ranks step again")
    return f"a stop costs {lost}" + f"; a halt {halt}" * reports if lost else ""
