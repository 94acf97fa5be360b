"""Which kernels of SDPA one step really called, by branch: `NSA_SDPA_AUDIT`.

Read from a profiler's trace of the step, so it tells what ran, not what was meant to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from nsa.marks import PREFIX

KERNELS = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_scaled_dot_product_attention_math": "math",
    "_scaled_dot_product_fused_attention_overrideable": "overrideable",
    "_flash_attn_forward": "flash-attn",
}
"""Operators that a forward ends in, without their namespace, and what they are called here."""


def kernels_called(events: Iterable[Any]) -> dict[str, dict[str, int]]:
    """Returns how often each kernel ran in each branch, from a profile's events; a branch that is
    computed without SDPA has none."""
    found: dict[str, Counter[str]] = {}
    for event in events:
        if event.name.startswith(PREFIX):
            found.setdefault(event.name.removeprefix(PREFIX), Counter())
        kernel = KERNELS.get(event.name.rpartition("::")[2])
        if kernel is not None:
            found.setdefault(_branch(event), Counter())[kernel] += 1
    return {branch: dict(found[branch]) for branch in sorted(found)}


def in_words(called: dict[str, dict[str, int]]) -> str:
    """Returns "cmp.masked: none; sel.masked: flash ×4"."""
    parts = (
        f"{branch}: "
        + (", ".join(f"{kernel} ×{count}" for kernel, count in kernels.items()) or "none")
        for branch, kernels in called.items()
    )
    return "; ".join(parts) or "no kernel of SDPA was called"


def _branch(event: Any) -> str:
    while event is not None:
        if event.name.startswith(PREFIX):
            return event.name.removeprefix(PREFIX)
        event = event.cpu_parent
    return "elsewhere"
