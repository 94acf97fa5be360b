"""The real trainer, in which a mode replaces one part; most of these parts are broken.

`python -m tests.trainers.ablated … MODE` accepts the options of `trainers.ddp` before the mode.
"""

from __future__ import annotations

import errno
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nsa import functional
from nsa.attention import NSAttention, merge_heads
from nsa.model import Block, Transformer
from trainers import loop, manifest
from trainers.entry import exit_now, main
from trainers.loader import Batch

plain_sum = functional.gated_sum
plain_forward, plain_score, plain_complete = Transformer.forward, loop.score, manifest.complete
plain_compile = Block.compile
calls: list[int] = []


def zero_of_all(layer: NSAttention) -> Tensor:
    """Returns 0, with a zero gradient for each parameter, so that DDP finds all of them used."""
    return torch.stack([(p * 0).sum() for p in layer.parameters()]).sum()


def no_attention(layer: NSAttention, x: Tensor, *_: None) -> Tensor:
    """The output of the attention is 0."""
    return x * 0 + zero_of_all(layer)


def first_value(layer: NSAttention, x: Tensor, *_: None) -> Tensor:
    """Each query gets the first value of the selected branch, as in the legacy system."""
    first = layer.project(x)[2][1][:, :, :1].repeat_interleave(
        layer.config.n_heads // layer.config.n_kv_groups, dim=1
    )
    return layer.out(merge_heads(first.expand(-1, -1, x.shape[1], -1))) + zero_of_all(layer)


def without_selected(gates: Tensor, cmp: Tensor, sel: Tensor, win: Tensor) -> Tensor:
    """The output of the selected branch is 0; its parameters stay in the graph."""
    return plain_sum(gates, cmp, sel * 0, win)


def nan_from_step_3(logits: Tensor, batch: Batch, count_right: bool) -> tuple[Tensor, ...]:
    """The loss of rank 1 is NaN from step 3 on; the logits are finite."""
    calls.append(1)
    loss, scored, right = plain_score(logits, batch, count_right)
    bad = len(calls) >= 3 and torch.distributed.get_rank() == 1
    return loss + (float("nan") if bad else 0.0), scored, right


def sees_the_next_byte(model: Transformer, tokens: Tensor) -> Tensor:
    """A leak: each input except the last is the byte that its position has to predict."""
    return plain_forward(model, tokens.roll(-1, dims=1))


def nan_at_step_3(model: Transformer, tokens: Tensor) -> Tensor:
    """Only the third forward pass computes NaN, on each rank."""
    calls.append(1)
    return plain_forward(model, tokens) * (float("nan") if len(calls) == 3 else 1.0)


def infinite_gradient_at_step_1(model: Transformer, tokens: Tensor) -> Tensor:
    """In step 1, the gradients of one parameter are infinite, and all others are finite."""
    calls.append(1)
    model.norm.weight.register_hook(lambda own: own + (math.inf if len(calls) == 1 else 0.0))
    return plain_forward(model, tokens)


def compile_without_code(block: Block, **choices: Any) -> None:
    """Dynamo traces the block, but no compiler runs, because compiling takes minutes."""
    plain_compile(block, backend="eager", **choices)


def bug(model: Transformer, tokens: Tensor) -> Tensor:
    """An error of the program."""
    raise ZeroDivisionError("a real bug")


def slow_after_20(model: Transformer, tokens: Tensor) -> Tensor:
    """From step 22 on, each forward pass takes 30 s, so that a kill ends the run there.

    The two evaluations up to step 20 call the model too.
    """
    calls.append(1)
    time.sleep(30 if len(calls) > 23 else 0)
    return plain_forward(model, tokens)


def hang(model: Transformer, tokens: Tensor) -> Tensor:
    """A step that does not end."""
    time.sleep(3600)
    return tokens


def bug_while_saving(*arguments: Any) -> None:
    """The completion of a save takes two seconds; the next forward pass raises an error."""
    Transformer.forward = bug
    time.sleep(2)
    plain_complete(*arguments)


def hang_while_saving(*arguments: Any) -> None:
    """The completion of a save takes two seconds; the next forward pass does not end."""
    Transformer.forward = hang
    time.sleep(2)
    plain_complete(*arguments)


def first_save_fails(*_: Any) -> None:
    """The completion of the first save fails, and that of the next saves does not."""
    manifest.complete = plain_complete
    raise OSError(errno.ENOSPC, "No space left on device")


MODES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "no_attention": (NSAttention, "forward", no_attention),
    "first_value": (NSAttention, "forward", first_value),
    "without_selected": (functional, "gated_sum", without_selected),
    "nan_from_step_3": (loop, "score", nan_from_step_3),
    "nan_at_step_3": (Transformer, "forward", nan_at_step_3),
    "infinite_gradient_at_step_1": (Transformer, "forward", infinite_gradient_at_step_1),
    "sees_the_next_byte": (Transformer, "forward", sees_the_next_byte),
    "slow_after_20": (Transformer, "forward", slow_after_20),
    "bug_while_saving": (manifest, "complete", bug_while_saving),
    "hang_while_saving": (manifest, "complete", hang_while_saving),
    "first_save_fails": (manifest, "complete", first_save_fails),
    "compile_without_code": (Block, "compile", compile_without_code),
}

if __name__ == "__main__":
    mode = sys.argv[-1]
    setattr(*MODES[mode])
    exit_now(main(sys.argv[1:-1]))
