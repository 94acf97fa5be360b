"""The checks of the settings of each phase: they are those that the plan means."""

from __future__ import annotations

from dataclasses import asdict

from console.plans import launch_facts
from console.plans.case import Case, Found
from console.status_text import size
from trainers import settings
from trainers.contract.plan import Phase

KEYS = {
    "parameters": ("model.",),
    "seq_len": ("data.seq_len",),
    "tokens_per_step": ("train.batch_size", "train.accumulate", "data.seq_len"),
}
"""The beginnings of the settings that each expected fact depends on."""


def config(case: Case, index: int) -> Found:
    """Checks the settings of a phase against the facts that the plan expects.

    A difference that `--set` made on purpose is a warning.
    """
    phase, resolved = case.plan.phases[index], case.settings[index]
    if not resolved:
        return "pass", "a foreign program, not checked"
    found = launch_facts.figures(resolved, phase.nproc)
    text = (
        f"{len(resolved)} settings are valid: {found.parameters:,} parameters, sequences of "
        f"{found.seq_len:,}, {found.tokens_per_step:,} tokens per step, checkpoints of "
        f"{size(found.checkpoint_bytes)}"
    )
    expected = {name: fact for name, fact in asdict(phase.expects).items() if fact is not None}
    wrong = {name: fact for name, fact in expected.items() if getattr(found, name) != fact}
    if not wrong:
        return "pass", f"{text}{', as the plan expects' if expected else ''}"
    said = "; ".join(
        f"{name} is {getattr(found, name):,}, and the plan expects {fact:,}"
        for name, fact in wrong.items()
    )
    chosen = {
        key for key, entry in resolved.items()
        if entry["origin"] == settings.COMMAND_LINE and key.startswith(_keys(wrong))
    }  # fmt: skip
    if chosen and all(_is_chosen(name, chosen) for name in wrong):
        return "unknown", f"{said}; changed by --set {', '.join(sorted(chosen))}"
    return "fail", f"{said}; {_source(phase)}"


def _keys(names: dict[str, int]) -> tuple[str, ...]:
    return tuple(key for name in names for key in KEYS[name])


def _is_chosen(name: str, chosen: set[str]) -> bool:
    return any(key.startswith(KEYS[name]) for key in chosen)


def _source(phase: Phase) -> str:
    config = phase.config or "no config, which trains the built-in toy"
    return f"the phase uses {config}; correct its config, set or nproc, or expects in the plan"
