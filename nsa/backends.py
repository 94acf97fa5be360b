"""The table of routes by branch, and the switches of the operator, without torch."""

import functools
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from nsa.config import ModelConfig

BRANCHES = ("cmp", "sel", "win")
MASKED_UP_TO = {"cpu": 512}
"""Most keys for which several queries use masks in the selected branch, by device type."""
MASKED_UP_TO_ELSEWHERE = 4096
FLASH_ATTN_INSTALLED = importlib.util.find_spec("flash_attn") is not None
"""Found once at the import: the search takes 0.1 ms, and torch.compile cannot trace it."""
FLASH_ATTN_LARGEST_HEAD = 256
FOLDED_UP_TO = 1024
"""Largest number of keys that a query may see in a route with folded heads (`Route.folded`)."""


def _switch(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    """The operator's choices for A/B runs; they select how the attention is computed.

    Only the ablations `force_branch` and `uniform_gate` change the result by more than rounding.
    """

    prefill_batched: bool = _switch(
        True, "Compute many queries together; off: compute one query after the other."
    )
    sel_ranges: bool = _switch(
        False, "Compute the selected branch from merged ranges of tokens, not from block indices."
    )
    force_branch: Literal["none", "cmp", "sel", "win"] = _switch(
        "none", "Ablation: use this branch alone, for all tokens and heads."
    )
    uniform_gate: bool = _switch(False, "Ablation: weight all branches by 1/3.")
    flash_only: bool = _switch(False, "Let SDPA use only its flash kernel.")
    no_flash: bool = _switch(False, "Allow SDPA every kernel except flash.")
    use_fa2: bool = _switch(False, "Compute the window branch with the package flash-attn.")

    def __post_init__(self) -> None:
        if self.flash_only and self.no_flash:
            raise ValueError("flash_only and no_flash exclude each other; unset one of them.")
        if self.uniform_gate and self.force_branch != "none":
            raise ValueError(
                f"uniform_gate uses all branches, force_branch={self.force_branch} only one; "
                "unset one of them."
            )

    @property
    def fixed_gate(self) -> tuple[float, ...] | None:
        """The weights that an ablation sets for cmp, sel and win; None without an ablation."""
        if self.uniform_gate:
            return (1 / 3,) * len(BRANCHES)
        if self.force_branch == "none":
            return None
        return tuple(float(branch == self.force_branch) for branch in BRANCHES)


@dataclass(frozen=True, slots=True)
class Case:
    """The facts on which the choice of the routes depends."""

    config: ModelConfig
    seq_len: int
    device: str
    """Type of the device, as torch calls it."""
    dtype: str
    """Name of the dtype of queries, keys and values as in torch, for example "bfloat16"."""
    switches: Switches
    flash_attn: bool
    """True where the package flash-attn is installed."""
    first: int = 0
    """Position of the first of the `seq_len` queries; the keys begin at position 0."""
    batch: int = 1
    threads: int = 0
    """Threads of torch on the CPU; 0 if not known, for example while torch.compile traces."""

    @property
    def total(self) -> int:
        """The number of keys."""
        return self.first + self.seq_len

    @property
    def sequential(self) -> bool:
        return not self.switches.prefill_batched and self.seq_len > 1

    @property
    def selects_all(self) -> bool:
        """True if every query selects all blocks that have begun."""
        nsa = self.config.nsa
        return not self.seq_len or self.total <= nsa.n_select * nsa.select_block_size


@dataclass(frozen=True, slots=True)
class Route:
    """The way in which a branch is computed."""

    name: str
    why: str
    fallback: str = ""
    """Why `flash_only` or `use_fa2` cannot have its effect on the route, or ""."""
    no_flash: bool = False
    """True if SDPA's flash kernel cannot compute the route, although `flash_only` is on."""
    folded: bool = False
    """True if the heads of a group are rows of one product. This concerns the whole window branch,
    and the causal part of another branch. It is done only on a CPU with at least one group in the
    batch per thread, because the kernel's backward assigns whole groups to threads."""


@dataclass(frozen=True, slots=True)
class _Rule:
    branch: str
    name: str
    why: str
    applies: Callable[[Case], bool]


def _masks_are_faster(case: Case) -> bool:
    return case.seq_len == 1 or case.total <= MASKED_UP_TO.get(case.device, MASKED_UP_TO_ELSEWHERE)


_RULES = (
    _Rule("all", "causal", "dense attention", lambda c: c.config.attention == "dense"),
    _Rule("cmp", "none", "the sequence is shorter than a compressed block",
          lambda c: c.total < c.config.nsa.block_size),
    _Rule("cmp", "sequential", "prefill_batched is off", lambda c: c.sequential),
    _Rule("cmp", "masked", "a mask of tokens by blocks, in chunks of tokens", lambda c: True),
    _Rule("sel", "sequential", "prefill_batched is off", lambda c: c.sequential),
    _Rule("sel", "ranges", "sel_ranges is on", lambda c: c.switches.sel_ranges),
    _Rule("sel", "causal", "every query selects all blocks", lambda c: c.selects_all),
    _Rule("sel", "masked", "masks are faster for so few tokens", _masks_are_faster),
    _Rule("sel", "chunked", "computes selected blocks only, in bounded memory", lambda c: True),
    _Rule("win", "sequential", "prefill_batched is off", lambda c: c.sequential),
    _Rule("win", "flash-attn", "use_fa2 is on",
          lambda c: c.switches.use_fa2 and not _flash_attn_refusal(c)),
    _Rule("win", "causal", "the window covers the sequence",
          lambda c: c.total <= c.config.nsa.window),
    _Rule("win", "banded", "SDPA over chunks of tokens", lambda c: True),
)  # fmt: skip
"""The first rule of a branch that applies decides; a rule for `all` excludes the other branches."""

_FLASH_ATTN_NEEDS: tuple[tuple[str, Callable[[Case], bool]], ...] = (
    ("flash-attn is not installed", lambda c: c.flash_attn),
    ("flash-attn computes whole sequences, not the next tokens", lambda c: c.first == 0),
    ("prefill_batched is off", lambda c: not c.sequential),
    ("flash-attn needs a CUDA device", lambda c: c.device == "cuda"),
    ("flash-attn needs bf16 or fp16", lambda c: c.dtype in ("bfloat16", "float16")),
    ("flash-attn needs equal d_k and d_v", lambda c: c.config.d_k == c.config.d_v),
    (f"flash-attn needs a d_k of at most {FLASH_ATTN_LARGEST_HEAD}",
     lambda c: c.config.d_k <= FLASH_ATTN_LARGEST_HEAD),
)  # fmt: skip


@functools.lru_cache(maxsize=256)
def effective(case: Case) -> dict[str, Route]:
    """Returns the route of each branch: `cmp`, `sel` and `win`, or `all` for dense attention."""
    routes: dict[str, Route] = {}
    for rule in _RULES:
        if rule.branch in routes or "all" in routes or not rule.applies(case):
            continue
        no_flash = _sdpa_refusal(case, rule.name)
        reason = "; ".join(filter(None, (no_flash, _fa2_refusal(case, rule.branch))))
        routes[rule.branch] = Route(
            rule.name, rule.why, reason, bool(no_flash), _folds_heads(case, rule.name)
        )
    return routes


def _folds_heads(case: Case, route: str) -> bool:
    """Returns whether a route folds heads into rows (see `Route.folded`)."""
    config = case.config
    longest = {
        "causal": case.total,
        "banded": config.nsa.window,
        "chunked": config.nsa.n_select * config.nsa.select_block_size,
    }.get(route, FOLDED_UP_TO + 1)
    enough_groups = 0 < case.threads <= case.batch * config.n_kv_groups
    one_kernel = config.d_k == config.d_v and config.n_heads > config.n_kv_groups
    few = case.first == 0 < longest <= FOLDED_UP_TO
    allowed = case.device == "cpu" and not case.switches.no_flash
    return allowed and few and one_kernel and enough_groups


def _flash_attn_refusal(case: Case) -> str:
    return next((reason for reason, met in _FLASH_ATTN_NEEDS if not met(case)), "")


def _fa2_refusal(case: Case, branch: str) -> str:
    if not case.switches.use_fa2 or branch == "cmp" or branch == "sel":
        return ""
    if branch == "all":
        return "flash-attn computes the window branch only"
    return _flash_attn_refusal(case)


def _sdpa_refusal(case: Case, route: str) -> str:
    """Returns why SDPA cannot use its flash kernel although flash_only is on, or ""."""
    if not case.switches.flash_only or route in ("none", "flash-attn"):
        return ""
    if case.config.d_k != case.config.d_v:
        return "SDPA's flash kernel needs equal d_k and d_v"
    if case.device != "cpu":
        if case.dtype not in ("bfloat16", "float16"):
            return "SDPA's flash kernel needs bf16 or fp16 on this device"
        if route != "causal" or (case.first and case.seq_len > 1):
            return "SDPA's flash kernel supports no mask on this device"
    return ""


def in_words(routes: Mapping[str, Route]) -> dict[str, str]:
    """Returns a text for each route."""
    return {
        branch: f"{route.name}{', heads folded' if route.folded else ''}"
        f"{f' ({route.fallback})' if route.fallback else ''}"
        for branch, route in routes.items()
    }
