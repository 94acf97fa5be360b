"""Errors of a training or a command, with their exit codes; this module needs no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable

from trainers.contract.errors import ContractError

DONE, BUG, NONFINITE, OUT_OF_MEMORY, DATA, CONFIG, COLLECTIVE, CHECKPOINT = (
    0, 1, 10, 11, 12, 13, 14, 15,
)  # fmt: skip


class TrainingError(Exception):
    """An error of a training; the message is one sentence for the operator."""

    exit_code = BUG


class NonFiniteError(TrainingError):
    """Loss or gradients were non-finite in too many steps in a row."""

    exit_code = NONFINITE


class DataError(TrainingError):
    """The data are missing, unusable or too late."""

    exit_code = DATA


class LeakError(TrainingError):
    """The model predicts random data better than chance, so it sees its targets."""

    exit_code = DATA


class CollectiveError(TrainingError):
    """The ranks cannot join their process group."""

    exit_code = COLLECTIVE


class CheckpointError(TrainingError):
    """A checkpoint is missing or damaged, or could not be written or read."""

    exit_code = CHECKPOINT


BY_NAME: dict[str, tuple[int, str]] = {
    "OutOfMemoryError": (
        OUT_OF_MEMORY,
        "out of GPU memory; lower train.batch_size or data.seq_len, or set train.recompute to all",
    ),
    "MemoryError": (OUT_OF_MEMORY, "out of host memory; lower train.batch_size or data.seq_len"),
    "DistBackendError": (COLLECTIVE, "a collective failed"),
    "DistNetworkError": (COLLECTIVE, "the ranks cannot reach each other"),
    "DistStoreError": (COLLECTIVE, "the rendezvous store does not answer"),
}  # fmt: skip
"""Exit code and sentence by class of exception; class names need no import of torch."""

HOST_MEMORY_SIGN = "DefaultCPUAllocator: can't allocate memory"
"""Text in the RuntimeError of torch's CPU allocator."""

COLLECTIVE_SIGNS = ("gloo", "NCCL")
"""Texts by which `classify` recognises the RuntimeError of a failed collective."""


def command(name: str, work: Callable[[], str]) -> int:
    """Prints the result of `work`, or a sentence for its error. Returns the exit code.

    Errors other than ContractError and TrainingError are raised.
    """
    try:
        sys.stdout.write(f"{work()}\n")
    except (ContractError, TrainingError) as error:
        code, sentence = classify(error)
        sys.stderr.write(f"{name}: {sentence}\n")
        return code
    return DONE


def reason(error: BaseException) -> str:
    """Returns the first line of an error's text, or the error's class if there is no text.

    The text of an error of the hub may begin with a line that has only the id of the request.
    """
    lines = (line for line in str(error).splitlines() if line.strip())
    named = (line for line in lines if not line.startswith("(Request ID"))
    return next(named, type(error).__name__)[:200]


def classify(error: BaseException) -> tuple[int, str]:
    """Returns two values for an error: exit code and sentence. `BUG` means an unexpected error."""
    if isinstance(error, TrainingError):
        return error.exit_code, str(error)
    if isinstance(error, ContractError):
        return CONFIG, str(error)
    first_line = (str(error).splitlines() or [""])[0][:300]
    for cls in type(error).__mro__:
        if cls.__name__ in BY_NAME:
            code, sentence = BY_NAME[cls.__name__]
            return code, f"{sentence}: {first_line}"
    if isinstance(error, RuntimeError) and HOST_MEMORY_SIGN in str(error):
        return OUT_OF_MEMORY, BY_NAME["MemoryError"][1]
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in COLLECTIVE_SIGNS):
        return COLLECTIVE, f"a collective failed: {first_line}"
    return BUG, f"{type(error).__name__}: {first_line}"
