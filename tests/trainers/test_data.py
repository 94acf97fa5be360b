"""Data: bytes exactly as on disk, shares that add up, spans that return beyond the window."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from tests.trainers.runs import ROOT, environment
from trainers import settings
from trainers.data import Loader, Recall, Synthetic
from trainers.failures import DataError
from trainers.settings import DataSettings
from trainers.text import CHUNK_BYTES, TextFiles, list_files

CPU = torch.device("cpu")
AWKWARD = {
    "crlf.txt": b"one\r\ntwo\rthree\n\r\n",
    "latin.txt": "Grüße".encode("latin-1") + bytes(range(256)),
    "nul.txt": b"\0\0a\0",
    "empty.txt": b"",
    "bom.txt": "\ufeffx".encode("utf-16"),
    "ctrl-z.txt": b"a\x1ab\x85\xe2\x80\xa8c",
    "sub/long.txt": bytes(i * 7 % 251 for i in range(2 * CHUNK_BYTES + 13)),
    "sub/no-newline.txt": b"end",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("text")
    (path / "sub").mkdir()
    (path / ".hidden").write_bytes(b"never")
    for name, data in AWKWARD.items():
        (path / name).write_bytes(data)
    return path


def text_of(folder: Path, tmp_path: Path, lanes: int = 3, seed: int = 0) -> TextFiles:
    data = DataSettings(source="text", path=str(folder), seq_len=100, lanes=lanes)
    return TextFiles(data, seed, tmp_path)


@pytest.mark.parametrize("lanes", [1, 3])
def test_text_is_the_bytes_on_disk_and_begins_again_at_the_end(folder, tmp_path, lanes):
    source = text_of(folder, tmp_path, lanes)
    assert sum(len(file.read_bytes()) for file in source.files) == sum(map(len, AWKWARD.values()))
    on_disk = [b"".join(f.read_bytes() for f in source.files[j::lanes]) for j in range(lanes)]
    count = 2 * lanes * max(map(len, on_disk)) // 100
    rows, mask = source.read(0, count, 0, 1)
    assert mask is None
    for lane, expected in enumerate(on_disk):
        mine = rows[lane::lanes]
        stream = bytes(mine[:, :-1].flatten().tolist())
        assert len(stream) > 1.9 * len(expected)
        assert stream == (expected * (len(stream) // len(expected) + 1))[: len(stream)]
        assert torch.equal(mine[:-1, -1], mine[1:, 0]), "every byte is predicted once"


def test_reading_text_leaves_nothing_behind_and_connects_nowhere(folder, tmp_path):
    program = f"""
import sys
touched = []
def watch(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo"):
        touched.append(event)
    if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        touched.append(str(arguments[0]))
sys.addaudithook(watch)
from pathlib import Path
from trainers.settings import DataSettings
from trainers.text import TextFiles
run = Path({str(tmp_path / "run")!r})
run.mkdir()
TextFiles(DataSettings(source="text", path={str(folder)!r}), 0, run).read(0, 50, 0, 1)
outside = [t for t in touched if not t.startswith(str(run)) and not t.endswith((".pyc", "null"))
           and ".pyc." not in t and not t.isdigit()]
assert not outside, outside
assert not list(run.iterdir()), list(run.iterdir())
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, cwd=ROOT, env=environment(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "home").rglob("*"))


@limits(max_examples=25)
@given(world=st.integers(1, 5), counts=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_shares_of_text_are_disjoint_complete_and_do_not_depend_on_the_world(
    folder, tmp_path, world, counts
):
    """Whatever ranks and micro-batches share the stream, together they see what one sees."""
    whole = text_of(folder, tmp_path).read(0, sum(counts), 0, 1)[0]
    for rank in range(world):
        source, first, parts = text_of(folder, tmp_path), 0, []
        for count in counts:
            parts.append(source.read(first, count, rank, world)[0])
            first += count
        assert torch.equal(torch.cat(parts), whole[rank::world])


def test_a_position_in_text_is_reached_by_walking(folder, tmp_path):
    whole = text_of(folder, tmp_path).read(0, 3000, 0, 1)[0]
    late = text_of(folder, tmp_path).read(2990, 10, 0, 1)[0]
    assert torch.equal(late, whole[2990:])


def test_the_default_text_is_python_source_of_a_fixed_list(tmp_path):
    files = list_files(DataSettings(source="text"))
    assert len(files) > 100
    assert {file.suffix for file in files} == {".py"}
    assert sum(file.stat().st_size for file in files) > 1_000_000


@pytest.mark.parametrize("content", [{}, {"a.txt": b""}, {"b.bin": b"x"}])
def test_a_folder_without_bytes_is_told_in_a_sentence(tmp_path, content):
    for name, data in content.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=str(tmp_path)):
        TextFiles(
            DataSettings(source="text", path=str(tmp_path), pattern="*.txt"), 0, tmp_path
        ).read(0, 1, 0, 1)


@given(
    span=st.integers(2, 40), more=st.integers(0, 30), room=st.integers(0, 9),
    seed=st.integers(0, 99), world=st.integers(1, 3), first=st.integers(0, 50),
)  # fmt: skip
def test_recall_returns_a_span_at_the_distance_and_scores_exactly_its_bytes(
    span, more, room, seed, world, first
):
    """Every scored byte equals the one `distance` before it; nothing else is scored."""
    distance = span + more
    seq_len = max(span + distance - 1 + room, 2)
    source = Recall(seq_len, seed, span, distance)
    for rank in range(world):
        tokens, scored = source.read(first, 3 * world, rank, world)
        assert tokens.shape == (3, seq_len + 1)
        assert scored is not None
        assert scored.sum(1).tolist() == [span - 1] * 3
        for row, mask in zip(tokens, scored, strict=True):
            predicted = mask.nonzero().flatten() + 1
            assert predicted.tolist() == list(range(predicted[0], predicted[0] + span - 1))
            assert predicted[0] > distance
            assert torch.equal(row[predicted], row[predicted - distance])
            assert row[predicted[0] - 1] == row[predicted[0] - 1 - distance]


def test_random_sources_give_every_rank_its_own_bytes_and_repeat_by_seed():
    for source, again, other in (
        (Synthetic(64, 1), Synthetic(64, 1), Synthetic(64, 2)),
        (Recall(64, 1, 16, 32), Recall(64, 1, 16, 32), Recall(64, 2, 16, 32)),
    ):
        whole = source.read(0, 6, 0, 1)[0]
        shares = [again.read(0, 6, rank, 2)[0] for rank in range(2)]
        assert torch.equal(shares[0], whole[0::2])
        assert torch.equal(shares[1], whole[1::2])
        assert len({bytes(row.tolist()) for row in whole}) == 6
        assert not torch.equal(other.read(0, 6, 0, 1)[0], whole)


def test_synthetic_bytes_are_uniform():
    counts = torch.bincount(Synthetic(1024, 3).read(0, 512, 0, 1)[0].flatten().long())
    expected = counts.sum() / 256
    assert ((counts - expected).abs() < 6 * expected.sqrt()).all()


class Hangs(Synthetic):
    """A source whose third read never comes back, like a file on a dead mount."""

    def read(self, first, count, rank, world):
        if first >= 2 * count:
            threading.Event().wait()
        return super().read(first, count, rank, world)


class Breaks(Synthetic):
    def read(self, first, count, rank, world):
        raise OSError(5, "Input/output error", "/data/x")


def loader(source, **changes) -> Loader:
    overrides = {"data.timeout_s": 0.2, "data.prefetch": 2} | changes
    return Loader(source, settings.resolve(None, {}, overrides).settings, 0, 1, CPU)


def test_every_fetch_has_a_time_limit_and_says_what_did_not_come():
    late = loader(Hangs(8, 0))
    late.fetch(2)
    began = time.monotonic()
    with pytest.raises(DataError, match=r"no batch of synthetic random bytes came within 0\.2 s"):
        late.fetch()
    assert time.monotonic() - began < 2


def test_a_source_that_breaks_is_told_by_fetch():
    with pytest.raises(DataError, match="Input/output error"):
        loader(Breaks(8, 0)).fetch()


def test_reading_ahead_is_bounded_and_the_position_is_what_training_took():
    source = Synthetic(8, 0)
    ahead = loader(source)
    time.sleep(0.3)
    assert ahead.position == 0
    assert ahead._ready.qsize() == 2
    batches = ahead.fetch(3)
    assert ahead.position == 3 * 8
    tokens = source.read(0, 24, 0, 1)[0].long()
    assert torch.equal(torch.cat([batch.inputs for batch in batches]), tokens[:, :-1])
    assert torch.equal(torch.cat([batch.targets for batch in batches]), tokens[:, 1:])
    ahead.close()
    assert not ahead._thread.is_alive()
