"""The settings that a resumed training may change, and the refusal of other changes.

A resumed training may not change the values in `GROUPS`, except those in `FREE` and those in the
groups that `checkpoint.allow_change` names. It may change all other values. The number of ranks may
change if the number of sequences per step stays the same, or if the group `batch` is allowed. This
module needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainers.contract import jsonl
from trainers.contract.errors import UsageError

FUNCTION, ALL, STREAM, SEQUENCES = "function", "all", "data stream", "sequences per step"
GROUPS: Mapping[str, tuple[str, ...]] = {
    FUNCTION: ("model.", "attention.force_branch", "attention.uniform_gate"),
    "precision": ("train.precision", "train.tf32", "ddp.compress"),
    "batch": (SEQUENCES,),
    "schedule": (
        "train.lr", "train.warmup_steps", "train.min_lr_ratio", "end of the schedule", "optim.",
    ),
    "data": (STREAM,),
}  # fmt: skip
"""For each group, the prefixes of the names of its values. `FUNCTION` must not change."""
FREE = ("model.init_std", "optim.fused")
BATCH = ("train.batch_size", "train.accumulate")


def allowed(text: str) -> frozenset[str] | None:
    """Returns the groups that a value of `checkpoint.allow_change` names; None if it is invalid."""
    groups = frozenset(GROUPS) - {FUNCTION}
    named = groups if text == ALL else frozenset(filter(None, text.split(",")))
    return named if named <= groups else None


def compared(settings: Mapping[str, Any], world: int, stream: str) -> dict[str, Any]:
    """Returns the values of `GROUPS` that are available, except those in `FREE`.

    `settings` is a mapping of values by key. `stream` is the fingerprint of the data, `key=value
    key=value`, or "" if no fingerprint is available.
    """
    found = {key: value for key, value in settings.items() if _group(key) and key not in FREE}
    sizes = [jsonl.integer(settings, key) for key in BATCH]
    if None not in sizes:
        found[SEQUENCES] = (sizes[0] or 0) * (sizes[1] or 0) * world
    if "train.min_lr_ratio" in settings and "train.steps" in settings:
        end = settings.get("train.schedule_steps") or settings["train.steps"]
        found["end of the schedule"] = end if settings["train.min_lr_ratio"] != 1 else "none"
    words = (word.partition("=") for word in stream.split())
    return found | {f"{STREAM}, {key}": value for key, _, value in words}


def refuse(
    path: Path, before: Mapping[str, Any], now: Mapping[str, Any], allow: str
) -> Mapping[str, list[str]]:
    """Returns the differences between `before` and `now` in words, by group.

    Both are results of `compared`; a value that only one of them has is ignored. Raises UsageError
    for a change in a group that `allow`, a value of `checkpoint.allow_change`, does not name.
    """
    changed: dict[str, list[str]] = {}
    for name in sorted(before.keys() & now.keys()):
        if before[name] != now[name]:
            found = f"{name} was {before[name]!r:.80} and is {now[name]!r:.80}"
            changed.setdefault(_group(name), []).append(found)
    refused = changed.keys() - (allowed(allow) or frozenset())
    if refused:
        what = "; ".join(each for group in sorted(refused) for each in changed[group])
        advice = "; restore these, or start a new run"
        if FUNCTION not in refused:
            advice += f"; or allow this with --allow-change {','.join(sorted(refused))}"
        raise UsageError(f"{path} cannot be resumed with other settings: {what}{advice}")
    return changed


def _group(name: str) -> str:
    """Returns the group of a value, or "" if it is in no group."""
    return next((group for group, names in GROUPS.items() if name.startswith(names)), "")
