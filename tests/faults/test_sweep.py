"""Calls on files of a run fail, one site after the other, as in the tests of SQLite.

A run without a failure shows the call sites: the name of a call, and a file in the launch or live
directory. Each site then fails with EIO, and with ENOSPC, EMFILE or half a write if that can occur:
at the first call, the second, the last, or all. A later course repeats at most some of the failures
at the sites of the first course. `make test` runs a sample, `make faults` all cases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.fakes import errors
from tests.fakes.errors import Failure
from tests.faults.saves import KINDS, Saves
from tests.faults.sweep import COURSES, Outcome, Sweep, run_all
from tests.trainers.runs import Run, latest_checkpoint, small
from trainers import manifest

RUN, LIMIT_S = "*-one", 1800
SAMPLE = {
    "to the end": (
        Failure("write", f"{RUN}/events.jsonl", "ENOSPC", lasting=True),
        Failure("write", f"{RUN}/events.jsonl", errors.SHORT),
        Failure("rename", f"{RUN}/supervisor.json", "EIO", 2),
        Failure("create", f"{RUN}/.stackdump_rank*_*.txt.tmp-*-*", "EMFILE"),
        Failure("fstat", RUN, "EIO", lasting=True),
        Failure("fstat", "live/stack_rank*.txt", "EIO"),
        Failure("stat", "live", "EIO"),
    ),
    "a gate fails": (Failure("read", f"{RUN}/heartbeat_rank*.jsonl", "EIO"),),
    "halt": (
        Failure("utime", f"{RUN}/.HALT", "EIO"),
        Failure("read", f"{RUN}/heartbeat_rank*.jsonl", "EIO", lasting=True),
        Failure("list", RUN, "EIO"),
    ),
    "restart": (
        Failure("mkdir", f"{RUN}/logs/attempt*", "ENOSPC"),
        Failure("fstat", "live", "EIO", 2),
    ),
    "TERM": (Failure("open", "lock", "EMFILE", lasting=True),),
    "files grow": (
        Failure("write", f"{RUN}/.samples_*.jsonl.*.gz.tmp", errors.SHORT),
        Failure("write", f"{RUN}/history_*s.jsonl", "ENOSPC"),
        Failure("truncate", f"{RUN}/logs/attempt*/rank*.log", "EIO"),
    ),
    "a stall": (Failure("rename", f"{RUN}/verdicts/*.json", "EIO", lasting=True),),
    "taken over": (
        Failure("open", "plan_state.json", "EIO"),
        Failure("rename", "live", "EIO"),
        Failure("write", "supervisor.log", "ENOSPC", lasting=True),
    ),
}
SAMPLE_OF_SAVES = (
    ("new", Failure("write", "run/checkpoints/.latest.tmp-*-*", errors.SHORT)),
    ("new", Failure("write", "run/checkpoints/.step_*.tmp/__*_*.distcp", "ENOSPC", 2)),
    ("new", Failure("sync", "run/checkpoints/.latest.tmp-*-*", "EIO")),
    ("new", Failure("list", "run/checkpoints", "EIO", 3)),
    ("again", Failure("rename", "run/checkpoints/step_*", "EIO")),
    ("again", Failure("rename", "run/checkpoints/step_*", "EIO", lasting=True)),
    ("background", Failure("create", "run/checkpoints/.latest.tmp-*-*", "EMFILE")),
)


IN_A_TRAINING = {
    "write, ENOSPC": Failure("write", "checkpoints/.step_00000002.tmp/__*_*.distcp", "ENOSPC"),
    "create, EMFILE": Failure("create", "checkpoints/.step_00000002.tmp/.metadata.tmp", "EMFILE"),
    "sync, EIO": Failure("sync", "checkpoints/.latest.tmp-*-*", "EIO", 2),
    "rename, EIO": Failure("rename", "checkpoints/step_00000002", "EIO"),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    return errors.build(tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="module")
def known(tmp_path_factory, library) -> frozenset[tuple[str, str]]:
    """The call sites of the first course; that course has all failures at these sites."""
    return frozenset(Sweep(COURSES[0], tmp_path_factory.mktemp("known") / "run", library).record())


def words(sites: int, injected: Iterable[Failure], missed: int) -> str:
    """Returns the counts of a sweep in words."""
    counts = Counter(failure.number for failure in injected)
    told = ", ".join(f"{number} {count}" for number, count in counts.items())
    late = f", {missed} calls did not come again" if missed else ""
    return f"{counts.total()} failures at {sites} call sites: {told}{late}"


def wrong(found: Iterable[Outcome]) -> list[tuple[str, str]]:
    return [(str(each.failure), text) for each in found for text in each.wrong]


@pytest.mark.fault("z", "sample")
def test_a_call_that_fails_harms_no_rank_and_makes_nothing_untrue(scene, tmp_path, library):
    sweeps = [Sweep(course, tmp_path / course.mode, library) for course in COURSES]
    cases = [
        (sweep, failure)
        for course, sweep in zip(COURSES, sweeps, strict=True) for failure in SAMPLE[course.name]
    ]  # fmt: skip
    found = run_all(cases)
    assert all(each.failed for each in found), found
    assert not wrong(found)
    scene.note(words(len(cases), [failure for _, failure in cases], 0))


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.fault("z")
@pytest.mark.parametrize("name", SAMPLE)
def test_whatever_call_fails_no_rank_is_harmed_and_nothing_is_untrue(
    scene, tmp_path, library, known, name
):
    course = next(each for each in COURSES if each.name == name)
    sweep = Sweep(course, tmp_path / "cases", library)
    sites = sweep.record()
    chosen = errors.failures(sites, () if course is COURSES[0] else known, course.has_few)
    found = run_all((sweep, failure) for failure in chosen)
    assert not wrong(found)
    missed = sum(not each.failed for each in found)
    assert missed <= len(found) // 20
    states = ", ".join(f"{n} {name}" for name, n in Counter(e.state for e in found).most_common())
    scene.note(f"{words(len(sites), chosen, missed)}; said to be: {states}")


@pytest.mark.fault("z", "checkpoint save, sample")
def test_a_save_that_fails_loses_no_verified_checkpoint(scene, tmp_path, library):
    saves = Saves(tmp_path / "saves", library)
    try:
        found = [(str(failure), saves.save(kind, failure)) for kind, failure in SAMPLE_OF_SAVES]
    finally:
        saves.close()
    assert all(said["failed"] for _, said in found), found
    assert not [(name, said["wrong"]) for name, said in found if said["wrong"]]
    scene.note(words(len(found), [failure for _, failure in SAMPLE_OF_SAVES], 0))


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.fault("z", "checkpoint save")
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_call_of_a_save_fails_no_verified_checkpoint_is_lost(
    scene, tmp_path, library, kind
):
    saves = Saves(tmp_path / "saves", library)
    try:
        sites = saves.sites(kind)
        chosen = errors.failures(sites)
        found = [(str(failure), saves.save(kind, failure)) for failure in chosen]
    finally:
        saves.close()
    assert not [(name, said["wrong"]) for name, said in found if said["wrong"]]
    missed = sum(not said["failed"] for _, said in found)
    assert missed <= len(found) // 20
    scene.note(words(len(sites), chosen, missed))


@pytest.mark.slow
@pytest.mark.fault("z", "checkpoint save of a training")
@pytest.mark.parametrize("name", IN_A_TRAINING)
def test_a_training_records_a_save_that_fails_and_goes_on(scene, tmp_path, library, name):
    control = tmp_path / "control"
    errors.write(control, IN_A_TRAINING[name], armed=True)
    changes = small(train__steps=4, checkpoint__every=1, checkpoint__background="off")
    flags = errors.environment(library, control, tmp_path / "run", tmp_path / "calls")
    run = Run(tmp_path, changes, nproc=1, flags=flags).done()
    assert errors.counts(control)[1] == 1
    (failed,) = run.records(0, "checkpoint_failed")
    assert failed["step"] == 2
    assert [record["step"] for record in run.records(0, "checkpoint")] == [1, 3, 4]
    newest = latest_checkpoint(run.path)
    assert newest is not None
    assert manifest.verify(newest).step == 4
    scene.note(failed["error"])
