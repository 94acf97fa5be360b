"""The random sources and the loader: repeated bytes, scored bytes, time limits, skipped data."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trainers.ranks import together
from trainers import build, loader, settings
from trainers.failures import DataError
from trainers.loader import Loader, open_on_all_ranks, open_source
from trainers.manifest import Manifest
from trainers.parallel import Single
from trainers.schema import DataSettings, Settings
from trainers.sequences import Recall, Synthetic

CPU = torch.device("cpu")


def drawn(seq_len: int = 64, **changes) -> DataSettings:
    return DataSettings(seq_len=seq_len, **changes)


@given(
    span=st.integers(2, 40), more=st.integers(0, 30), room=st.integers(0, 9),
    seed=st.integers(0, 99), world=st.integers(1, 3),
    first=st.integers(0, 50),
)  # fmt: skip
def test_recall_returns_a_span_at_its_distance_and_scores_exactly_its_bytes(
    span, more, room, seed, world, first
):
    """The scored bytes are those of the repeated span, except its first byte."""
    distance = span + more
    seq_len = max(span + distance - 1 + room, 2)
    data = drawn(seq_len, recall_span=span, recall_distance=distance)
    for rank in range(world):
        source = Recall(data, seed)
        source.position = first
        tokens, scored = source.read(3 * world, rank, world)
        assert tokens.shape == (3, seq_len + 1)
        assert scored is not None
        assert scored.sum(1).tolist() == [span - 1] * 3
        for row, mask in zip(tokens, scored, strict=True):
            predicted = mask.nonzero().flatten() + 1
            assert predicted.tolist() == list(range(predicted[0], predicted[0] + span - 1))
            assert predicted[0] > distance
            assert torch.equal(row[predicted], row[predicted - distance])
            assert row[predicted[0] - 1] == row[predicted[0] - 1 - distance]


@pytest.mark.parametrize("kind", [Synthetic, Recall])
def test_random_sources_give_every_rank_its_own_bytes_and_repeat_by_seed(kind):
    data = drawn(recall_span=16, recall_distance=32)
    whole = kind(data, 1).read(6, 0, 1)[0]
    for rank in range(2):
        assert torch.equal(kind(data, 1).read(6, rank, 2)[0], whole[rank::2])
    assert len({bytes(row.tolist()) for row in whole}) == 6
    for other in (kind(data, 2), kind(data, 1, held_out=True)):
        assert not torch.equal(other.read(6, 0, 1)[0], whole)


@pytest.mark.parametrize("kind", [Synthetic, Recall])
def test_a_random_source_goes_on_from_its_state(kind):
    data = drawn(recall_span=16, recall_distance=32)
    source, again = kind(data, 1), kind(data, 1)
    source.read(5, 0, 1)
    again.restore(source.state())
    assert torch.equal(again.read(3, 0, 1)[0], source.read(3, 0, 1)[0])
    prints = {kind(data, seed, held).fingerprint for seed in (1, 2) for held in (False, True)}
    assert len(prints) == 4
    with pytest.raises(DataError, match="is invalid"):
        again.restore({"fingerprint": source.fingerprint, "position": None})


class Hangs(Synthetic):
    """The third read never returns, as on a dead mount."""

    def read(self, count, rank, world):
        if self.position >= 2 * count:
            threading.Event().wait()
        return super().read(count, rank, world)


class HangsAtOnce(Synthetic):
    """The restore of a position never returns."""

    def restore(self, state):
        threading.Event().wait()


class Panic(BaseException):
    """A panic in a Rust library, which is no Exception."""


def small(**changes) -> Settings:
    overrides = {"data.timeout_s": 60, "data.prefetch": 2, "data.seq_len": 8} | changes
    return settings.resolve(None, {}, overrides).settings


def loader_of(kind, state=None, **changes) -> Loader:
    chosen = small(**changes)
    return Loader(kind(chosen.data, 0), chosen, 0, 1, CPU, state and Manifest(0, 0, state))


def test_every_fetch_has_a_time_limit_and_says_what_did_not_come():
    limit = {"data.timeout_s": 3}
    late = loader_of(Hangs, **limit)
    late.fetch(2)
    for broken in (late, loader_of(HangsAtOnce, late.state, **limit)):
        with pytest.raises(DataError, match="no batch from synthetic random bytes within 3 s"):
            broken.wait_for_first()


def test_a_source_that_hangs_ends_in_a_sentence_and_one_that_raises_in_its_error(monkeypatch):
    monkeypatch.setattr(loader, "_source", lambda *_: threading.Event().wait())
    with pytest.raises(DataError, match=r"no answer from synthetic within 0\.05 s"):
        open_source(small(**{"data.timeout_s": 0.05}))
    for error, raised in ((ZeroDivisionError, ZeroDivisionError), (Panic, DataError)):
        monkeypatch.setattr(loader, "_source", raising(error()))
        with pytest.raises(raised):
            open_source(small())
    monkeypatch.undo()
    assert isinstance(open_source(small()), Synthetic)


def raising(error: BaseException):
    def read(*_arguments):
        raise error

    return read


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (DataError("/data/x: Input/output error"), "Input/output error"),
        (Panic("a bug"), "cannot be read: Panic: a bug"),
    ],
)
def test_an_error_of_a_source_is_raised_by_fetch(monkeypatch, error, says):
    monkeypatch.setattr(Synthetic, "read", raising(error))
    with pytest.raises(DataError, match=says):
        loader_of(Synthetic).fetch()


def test_reading_ahead_is_bounded_and_the_state_is_what_training_took():
    ahead = loader_of(Synthetic)
    while ahead._ready.qsize() < 2:
        time.sleep(0.01)
    time.sleep(0.3)  # a third batch must not appear in this time
    assert ahead.state["position"] == 0
    assert ahead._ready.qsize() == 2
    batches = ahead.fetch(3)
    assert ahead.state["position"] == 3 * 8
    tokens = Synthetic(small().data, 0).read(40, 0, 1)[0].long()
    assert torch.equal(torch.cat([batch.inputs for batch in batches]), tokens[:24, :-1])
    assert torch.equal(torch.cat([batch.targets for batch in batches]), tokens[:24, 1:])
    later = loader_of(Synthetic, ahead.state)
    later.wait_for_first()
    assert later.state["position"] == 24
    assert torch.equal(later.fetch()[0].inputs, tokens[24:32, :-1])
    assert later.state["position"] == 32
    for each in (ahead, later):
        each.close()
        assert not each._thread.is_alive()


def test_the_data_of_named_steps_is_passed_over_on_every_rank():
    changes = {"data.skip": "2:4", "train.accumulate": 2, "train.batch_size": 4}
    chosen = small(**changes)
    tokens = Synthetic(chosen.data, 0).read(8 * 16, 0, 1)[0].long()
    for rank in range(2):
        skips = Loader(Synthetic(chosen.data, 0), chosen, rank, 2, CPU)
        taken = torch.cat([batch.inputs for batch in skips.fetch(4)])
        # A step is two micro-batches of eight sequences; steps 2 and 3 are skipped.
        expected = torch.cat((tokens[:16], tokens[48:64]))[rank::2, :-1]
        assert torch.equal(taken, expected)
        assert skips.state["position"] == 64
        skips.close()


class Slow(Synthetic):
    """A read takes 0.1 s."""

    def read(self, count, rank, world):
        time.sleep(0.1)
        return super().read(count, rank, world)


def test_data_that_is_left_out_for_longer_than_the_time_limit_is_no_missing_data():
    skips = loader_of(Slow, **{"data.timeout_s": 1.0, "data.skip": "1:31"})
    skips.wait_for_first()
    assert skips.fetch()
    assert skips.state["position"] == 31 * 8
    skips.close()


def test_skipped_data_is_that_of_the_named_steps_after_another_batch_and_a_second_resume():
    """Step 4 starts with sequence 12. In the former training, steps 5 and 6 have 16 to 23."""
    old = {"train.batch_size": 2, "train.accumulate": 2}
    tokens = Synthetic(small().data, 0).read(64, 0, 1)[0].long()

    def first(skips, batch_size, at, **more):
        chosen = small(**{"data.skip": skips, "train.batch_size": batch_size})
        source = Synthetic(chosen.data, 0)
        data = source.state() | {"position": at[1]} | more
        resumed = Manifest(at[0], 0, data, world=1, settings=old)
        load = Loader(source, chosen, 0, 1, CPU, resumed)
        inputs = [batch.inputs for batch in load.fetch(3)]
        begins = [(tokens[:, :-1] == each[0]).all(1).nonzero().item() for each in inputs]
        load.close()
        return begins, load.state

    begins, state = first("5:7", 4, (3, 12))
    assert begins == [12, 24, 28]
    begins, _ = first("5:7", 8, (3, 12))
    assert begins == [28, 36, 44]  # a batch with some of the skipped data is left out
    for at, begins in (((4, 16), [24, 28, 32]), ((5, 28), [28, 32, 36])):
        assert first("5:7", 4, at, skip=state["skip"])[0] == begins
    assert first("8:9", 4, (5, 28), skip=state["skip"])[0] == [28, 32, 40]


def test_held_out_data_that_do_not_come_in_time_end_the_training(monkeypatch):
    read, released = Synthetic.read, threading.Event()
    monkeypatch.setattr(Synthetic, "read", lambda *given: released.wait(60) and read(*given))
    given = {"eval.every": 1, "eval.batches": 1}
    with pytest.raises(DataError, match=r"no held-out batch from .* within 1 s"):
        build.draw_held_out(small(**given, **{"data.timeout_s": 1}), Single(CPU), pytest.fail)
    released.set()
    assert len(build.draw_held_out(small(**given), Single(CPU), pytest.fail)) == 1


def test_a_note_says_that_the_evaluation_reads_its_data_more_than_once(tmp_path):
    for name in "abcd":
        (tmp_path / f"{name}.txt").write_text(name * 300)
    text = {"data.source": "text", "data.path": str(tmp_path), "data.held_out": 0.5}
    said = []
    for batches in (9, 10):
        chosen = small(**text | {"eval.every": 1, "eval.batches": batches, "data.timeout_s": 60})
        assert len(build.draw_held_out(chosen, Single(CPU), said.append)) == batches
    (note,) = said  # 9 batches of 8 sequences of 8 tokens are less than 600 tokens
    assert "held-out part of text" in note
    assert "(80 sequences of 8)" in note


NO, ONE, OTHER = None, b"one", b"another"
RANKS = {
    "alike": ((ONE, ONE, ONE), ("", "", "")),
    "rank 2 has none": ((ONE, ONE, NO), ("rank 2 cannot", "rank 2 cannot", "no file with")),
    "rank 1 has others": ((ONE, OTHER, ONE), ("rank 1 finds other files",) * 3),
    "a panic on rank 1": (
        (ONE, b"bug", ONE),
        ("rank 1 cannot", "text ", "rank 1 cannot"),
    ),
}


class Panic(BaseException):
    """Stands for a panic of a Rust library, which is no Exception either."""


@pytest.mark.parametrize("case", RANKS)
def test_all_ranks_open_the_same_data_or_none_does(tmp_path, case, monkeypatch):
    contents, expected = RANKS[case]
    plain = loader._source

    def opens(chosen, held_out):
        if b"bug" in contents[int(chosen.data.path[-1])]:
            raise Panic("a panic")
        return plain(chosen, held_out)

    if b"bug" in contents:
        monkeypatch.setattr(loader, "_source", opens)
    for rank, content in enumerate(contents):
        (tmp_path / str(rank)).mkdir()
        if content:
            (tmp_path / str(rank) / "a.txt").write_bytes(content)

    def work(rank, parallel, member):
        del member
        folder = tmp_path / str(rank)
        chosen = small(**{"data.source": "text", "data.path": str(folder), "data.timeout_s": 60})
        assert open_on_all_ranks(chosen, parallel).position == 0

    ends = together([tmp_path / f"run{rank}" for rank in range(3)], work)
    for end, words in zip(ends, expected, strict=True):
        assert (end[2] if end else "").startswith(words)
        assert bool(end) == bool(words)
