"""Real ranks of one gloo group in forked processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.trainers.runs import CONFIG, small
from trainers import failures, settings
from trainers.contract.member import Member
from trainers.parallel import Fsdp, Group, make_strategy
from trainers.schema import Settings

TIMEOUT_MIN = 4.0
"""Time limit of a collective, so that a test fails if not all ranks call the collective."""
LIMIT_S = 300.0
Work = Callable[[int, Group, Member], Any]


def together(
    runs: list[Path], work: Work, variables: Mapping[str, str] | None = None,
    first_only: bool = False,
) -> list[Any]:  # fmt: skip
    """Returns the result of `work` on each rank; for an exception its class, exit code and text.

    `runs` has the run directory of each rank. With `first_only`, returns only the result of rank 0.
    """
    fork, children = multiprocessing.get_context("fork"), []
    with own_port() as port:
        for rank, run in enumerate(runs):
            mine = dict(variables or {}) | named(rank, len(runs), port)
            answers, answer = fork.Pipe(duplex=False)
            child = fork.Process(target=_rank, args=(rank, run, work, mine, answer))
            child.start()
            answer.close()
            children.append((child, answers))
        try:
            return [_answer(answers) for _, answers in (children[:1] if first_only else children)]
        finally:
            for child, _ in children:
                child.kill()
                child.join()


@contextlib.contextmanager
def own_port() -> Iterator[int]:
    """Yields a port for rank 0; an open socket keeps other processes from getting the port."""
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        yield kept.getsockname()[1]


def named(rank: int, world: int, port: int) -> dict[str, str]:
    """Returns the variables that describe a rank's place in the group."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def sharded(parallel: Group, resolved: Settings) -> Fsdp:
    """Returns FSDP2 in the process group of another strategy."""
    shards = Fsdp.__new__(Fsdp)
    shards.__dict__.update(parallel.__dict__)
    shards.prepare(resolved)
    return shards


def _answer(answers: Any) -> Any:
    assert answers.poll(LIMIT_S), f"a rank gave no answer within {LIMIT_S:g} s"
    return answers.recv()


def _rank(rank: int, run: Path, work: Work, variables: dict[str, str], answer: Any) -> None:
    os.environ.update(variables)
    try:
        run.mkdir(parents=True, exist_ok=True)
        resolved = settings.resolve(CONFIG, {}, small(ddp__timeout_min=TIMEOUT_MIN)).settings
        member = Member(run, variables)
        parallel = make_strategy(resolved, member)
        assert isinstance(parallel, Group)
        result = work(rank, parallel, member)
    except Exception as error:
        code, sentence = failures.classify(error)
        if code == failures.BUG:
            traceback.print_exc()
        result = type(error).__name__, code, sentence
    answer.send(result)
    os._exit(0)
