"""Computes what a stop costs a run: the completed steps that no checkpoint has."""

from __future__ import annotations

from console.model import RunState
from console.status_text import counted

IN_STEP = ("fetch", "forward", "backward", "optimizer", "step")
"""In these phases, the present step of a rank is not complete."""


def completed(step: int, phase: str) -> int | None:
    """Returns the last step that a rank in `phase` of `step` has completed.

    The result is 0 in the first step, and None if `step` is 0: no step is known.
    """
    return step - (phase in IN_STEP) if step else None


def completed_of(state: RunState) -> int | None:
    """Returns the last step that a rank of a run has completed, or None if it is not known."""
    pulses = [rank.pulse for rank in state.ranks if rank.pulse]
    if not pulses:
        return state.step or None
    found = [completed(each.step, each.phase) for each in pulses]
    return max((done for done in found if done is not None), default=None)


def lost_steps(done: int | None, saved: int, reports: bool) -> str:
    """Returns the steps that a stop loses, or "" if they are not known.

    `done` is the last completed step, or None if it is not known. `saved` is the step of the
    checkpoint from which a resume would continue, or 0 if there is none. `reports` says that the
    program records each checkpoint, as the trainers of this project do.
    """
    if done is None or not (saved or reports):
        return ""
    if not saved:
        lost = f"all {counted(done, 'step')}" if done else "no completed step"
        return f"{lost} (no checkpoint)"
    return f"{counted(max(0, done - saved), 'step')} (newest checkpoint: step {saved:,})"


def stop_cost(done: int | None, saved: int, reports: bool, phase: str) -> str:
    """Returns what a stop costs a run stalled in `phase`, or "" if not known; see `lost_steps`."""
    lost = lost_steps(done, saved, reports)
    in_save = "loses no step, but waits for the end of this save"
    halts = {"save": in_save, "halt": "was already requested"}
    halt = halts.get(phase, "saves first, but only when all ranks step again")
    return f"a stop costs {lost}" + f"; a halt {halt}" * reports if lost else ""
