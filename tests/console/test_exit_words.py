"""The sentence on an end, and whether the next attempt would end in the same way."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console import rank_end
from console.rank_end import OomCounts, OomEvidence, RankEnd
from console.run_state import Facts, decide
from console.supervisor.restart import is_permanent, signature
from trainers import failures

OOM_2 = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 22.00 MiB. GPU 0 has a total "
    "capacity of 23.65 GiB of which 11.06 MiB is free. Including non-PyTorch memory, this process "
    "has 23.60 GiB memory in use."
)
OOM_CPU = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't "
    "allocate memory: you tried to allocate 80000000000 bytes. Error code 12 (Cannot allocate)"
)
PEER_TEXTS = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer "
    "[127.0.0.1]:38032",
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:589] Read error "
    "[192.168.70.92]:25266: Connection reset by peer",
    "RuntimeError: Application timeout caused pair closure",
    "RuntimeError: [buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
    "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, remote process exited or "
    "there was a network error, NCCL version 2.26.2",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting",
    "RuntimeError: NCCL communicator was aborted on rank 3.",
    "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=56693)",
    "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely "
    "closed. Did the remote server shutdown or crash?",
    "NCCL WARN Net : Call to recv from 10.200.84.247<58355> failed : Broken pipe",
    "socketProgress: Connection closed by remote peer host<55912>",
)  # fmt: skip


def ended(*ends, **facts):
    given = {"torchrun_code": 1, "order": tuple(end.rank for end in ends)} | facts
    return Facts(spawned=True, over=True, world=max(2, len(ends)), ends=ends, **given)


def why(*ends, **facts):
    return decide(ended(*ends, **facts))[1]


@pytest.mark.parametrize("text", PEER_TEXTS)
def test_the_error_of_a_lost_peer_is_never_the_cause(text):
    lost, cause = RankEnd(0, 1, None, 8, log=text), RankEnd(1, 7, None, 8, log="ValueError: broken")
    assert why(lost, cause).startswith(
        "rank 1: ValueError: broken at step 8 (code 7); rank 0 exited earlier"
    )
    assert signature(ended(lost)) == ""


def test_a_broken_pipe_of_its_own_output_is_a_cause():
    assert not rank_end.lost_peer("BrokenPipeError: [Errno 32] Broken pipe")


def test_the_abort_of_nccls_watchdog_is_secondary_and_a_native_crash_or_a_kill_is_not():
    watchdog = RankEnd(0, None, "SIGABRT", 8, log=f"c10::DistBackendError: {PEER_TEXTS[4]}")
    crash = RankEnd(
        1, None, "SIGABRT", 8, log="std::out_of_range: map::at", crashed_in="f (m.py:3)"
    )
    sentence = why(watchdog, crash)
    assert sentence == (
        "rank 1 crashed in native code (SIGABRT) at step 8, in f (m.py:3): "
        "std::out_of_range: map::at; rank 0 exited earlier, in a failed collective"
    )
    killed, lost = replace(watchdog, signal="SIGKILL"), RankEnd(1, 14, None, 8, PEER_TEXTS[0])
    assert why(lost, killed).startswith("rank 0 was killed by SIGKILL at step 8")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (OOM_2, "out of GPU memory: asked for 22.00 MiB"),
        ("RuntimeError: CUDA error: out of memory", "out of GPU memory"),
        (OOM_CPU, "out of host memory: asked for 80000000000 bytes"),
        ("MemoryError", "out of host memory"),
        ("ValueError: out of range", ""),
    ],
)  # fmt: skip
def test_out_of_memory_has_sizes(text, words):
    assert rank_end.out_of_memory(text) == words


def test_out_of_gpu_memory_of_our_trainer_has_advice_and_that_of_a_foreign_program_has_none():
    named = f"{failures.BY_NAME['OutOfMemoryError'][1]}: " + OOM_2.partition(": ")[2]
    assert rank_end.OOM_ADVICE in named
    state, sentence = decide(ended(RankEnd(1, 11, None, 3, named)))
    assert state == "failed"
    assert sentence == (
        f"rank 1: out of GPU memory: asked for 22.00 MiB at step 3 (code 11); {rank_end.OOM_ADVICE}"
    )
    foreign = why(RankEnd(1, 1, None, 3, log=OOM_2, raised_at="train.py:41", is_ours=False))
    assert foreign == (
        "rank 1: out of GPU memory: asked for 22.00 MiB (train.py:41) at step 3 (code 1)"
    )


@pytest.mark.parametrize("code", rank_end.NAMED_CODES)
def test_an_exit_code_of_a_foreign_program_has_no_meaning(code):
    own = RankEnd(1, code, None, 3, log=f"SystemExit: {code}", is_ours=False)
    state, sentence = decide(ended(RankEnd(0, None, "SIGTERM", 3), own))
    assert state == "crashed"
    assert sentence.startswith(f"rank 1: SystemExit: {code} at step 3 (code {code})")
    assert signature(ended(own))
    silent = replace(own, log="", last_record="progress")
    text = "rank 1: no reason recorded, its last record says progress, see the log of rank 1"
    assert decide(ended(silent)) == ("crashed", f"{text} at step 3 (code {code})")
    assert not is_permanent(ended(replace(own, error="an error")))
    assert why(replace(own, log=PEER_TEXTS[0]), RankEnd(0, 7, None, 3)).startswith("rank 0: ")


def counted(cgroup, host):
    return OomEvidence(OomCounts(0 if cgroup is not None else None, 3), OomCounts(cgroup, host))


@pytest.mark.parametrize(
    ("oom", "sentence", "signed"),
    [
        (counted(1, 4), "rank 1 was killed by the kernel at step 5: out of host memory "
         "(cgroup oom_kill 0 → 1)", "signal:SIGKILL:out of host memory"),
        (counted(None, 4), "rank 1 was killed by SIGKILL at step 5, probably by the kernel: the "
         "host ran out of memory (host-wide oom_kill 3 → 4)", ""),
        (counted(0, 4), "rank 1 was killed by SIGKILL at step 5", ""),
        (counted(0, 3), "rank 1 was killed by SIGKILL at step 5", ""),
        (None, "rank 1 was killed by SIGKILL at step 5", ""),
    ],
)  # fmt: skip
def test_a_kill_is_the_kernels_only_where_a_counter_shows_it(oom, sentence, signed):
    facts = ended(RankEnd(1, None, "SIGKILL", 5), oom=oom)
    assert (decide(facts)[1], signature(facts)) == (sentence, signed)


def test_a_kill_of_a_loader_follows_the_error_of_its_rank():
    lost = "RuntimeError: DataLoader worker (pid(s) 812) exited unexpectedly"
    sentence = why(RankEnd(0, 1, None, 5, log=lost), oom=counted(1, 4))
    assert sentence.startswith(
        f"rank 0: {lost} at step 5 (code 1); the kernel killed a process because"
    )


def test_ranks_killed_at_once_blame_nobody_and_ranks_killed_one_after_the_other_do():
    ends = [RankEnd(rank, None, "SIGKILL", 5, ts=100.0 + rank / 10) for rank in (0, 1)]
    assert why(*ends).startswith(
        "all 2 ranks were killed by SIGKILL at the same time: probably from outside"
    )
    assert "by the kernel at the same time" in why(*ends, oom=counted(2, 5))
    assert why(ends[0], replace(ends[1], ts=103.0)).startswith("rank 0 was killed by SIGKILL")
    assert why(ends[0], replace(ends[1], killed_after_failure=True)).startswith(
        "rank 0 was killed by SIGKILL"
    )


def test_a_term_from_outside_is_named():
    assert "SIGTERM at step 5 (not sent by the supervisor)" in why(RankEnd(0, None, "SIGTERM", 5))


def test_a_rank_that_exited_first_with_code_0_is_to_blame_only_where_the_others_lost_it():
    left, lost = RankEnd(0, 0, None, 5), RankEnd(1, 14, None, 6, PEER_TEXTS[0])
    assert why(left, lost).startswith("rank 0 exited first (code 0) at step 5, while the others")
    assert decide(ended(left, lost))[0] == "crashed"
    assert why(lost, left).startswith("rank 1: ")
    seen = replace(lost, ts=100.0)  # a busy supervisor may see the two ends in any order
    assert why(seen, replace(left, ts=100.2)).startswith("rank 0 exited first (code 0) at step 5")
    assert why(seen, replace(left, ts=103.0)).startswith("rank 1: ")
    assert why(left, RankEnd(1, None, "SIGTERM", 6)).startswith("rank 1 was killed by SIGTERM")
    ended_by_torchrun = RankEnd(2, None, "SIGTERM", 6)
    assert why(left, lost, ended_by_torchrun).startswith("rank 0 exited first (code 0) at step 5")
    assert why(left, lost, RankEnd(2, 3, None, 6)).startswith("rank 2: ")


def test_an_unobserved_end_has_no_exit_code():
    unknown = RankEnd(1, None, None, 12, last_record="progress")
    assert why(unknown, torchrun_code=None) == (
        "rank 1 ended at step 12; exit code not available; its last record says progress"
    )
    assert "; no record" in why(replace(unknown, last_record=""), torchrun_code=None)
    assert why(RankEnd(0, 14, None, 12, PEER_TEXTS[0]), unknown).startswith(
        "rank 1 ended at step 12"
    )
    assert signature(ended(unknown)) == ""


@pytest.mark.parametrize(
    ("end", "permanent"),
    [
        (RankEnd(0, 13, None, 0, "train.steps must be at least 1"), True),
        (RankEnd(0, 1, None, 0, "ModuleNotFoundError: No module named 'nsa'"), True),
        (RankEnd(0, 13, None, 0, "train.steps must be at least 1", observed=False), False),
        (RankEnd(0, 13, None, 0), False),
        (RankEnd(0, 2, None, 0), False),
        (RankEnd(0, 1, None, 0, log="ModuleNotFoundError: No module named 'nsa'"), False),
        (
            RankEnd(0, 1, None, 0, log="trainers.contract.errors.UsageError: no run directory"),
            False,
        ),
        (RankEnd(0, 10, None, 9, "loss stayed non-finite for 5 steps"), False),
        (RankEnd(0, 1, None, 9, log="ValueError: ImportError: x"), False),
        (RankEnd(0, None, "SIGSEGV", 9), False),
    ],
)
@pytest.mark.decision("reject-restart", "true")
@pytest.mark.decision("reject-restart", "absent")
def test_only_permanent_errors_refuse_a_restart(end, permanent):
    assert is_permanent(ended(end)) is permanent


def test_good_and_requested_ends_have_no_signature():
    good = (RankEnd(0, 0, None, 9), RankEnd(1, 0, None, 9))
    assert signature(Facts(spawned=True, over=True, world=2, torchrun_code=0, ends=good)) == ""
    assert signature(ended(RankEnd(0, 7, None, 9), requested="stop")) == ""
    assert signature(Facts(failure="torchrun cannot be started: x")) == ""


WORD = st.from_regex(r"[g-zG-Z]{3,8}", fullmatch=True)
VARYING = st.one_of(
    st.integers(-(10**12), 10**12).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(str),
    st.integers(0, 2**64).map(hex),
    st.tuples(st.integers(0, 255), st.integers(1, 65535)).map(lambda p: f"10.0.0.{p[0]}:{p[1]}"),
)  # fmt: skip


@given(st.lists(WORD, min_size=1, max_size=6), st.data())
def test_a_signature_has_no_numbers_and_differs_for_other_words(words, data):
    def facts(rank):
        text = " ".join(f"{word} {data.draw(VARYING)}" for word in words)
        return ended(RankEnd(rank, 7, None, data.draw(st.integers(1, 99)), f"ValueError: {text}"))

    first, second = signature(facts(0)), signature(facts(1))
    assert first == second
    other = signature(
        ended(RankEnd(0, 7, None, 1, "ValueError: " + " ".join(f"{w}q 1" for w in words)))
    )
    assert other != first
    assert not re.search(r"\d", first.removeprefix("exit:7"))


@given(st.text(), st.text())
def test_any_text_gives_a_sentence_and_a_bounded_signature(error, log):
    facts = ended(RankEnd(0, 1, None, 3, error[:400], log[:300]))
    assert decide(facts)[1]
    assert len(signature(facts)) < 400
    is_permanent(facts)
