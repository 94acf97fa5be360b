"""Documents: their bytes, their fingerprint, and positions for any number of ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as limits
from hypothesis import strategies as st

from tests.trainers.files import FORMATS, stream_of, text_from, write
from tests.trainers.runs import Run, small
from trainers import changes, documents
from trainers.contract.errors import UsageError
from trainers.documents import CHUNK_BYTES
from trainers.failures import DATA, DataError
from trainers.loader import read_batch
from trainers.schema import DataSettings
from trainers.sequences import State
from trainers.stream import END_OF_DOCUMENT, Lane

AWKWARD = {
    "crlf.txt": b"one\r\ntwo\rthree\n\r\n",
    "latin.txt": "Grüße".encode("latin-1") + bytes(range(256)),
    "nul.txt": b"\0\0a\0",
    "empty.txt": b"",
    "bom.txt": "\ufeffx".encode("utf-16"),
    "ctrl-z.txt": b"a\x1ab\x85\xe2\x80\xa8c",
    "chunk.txt": b"\n" * CHUNK_BYTES,
    "sub/long.txt": bytes(i * 7 % 251 for i in range(2 * CHUNK_BYTES + 13)),
    "sub/no-newline.txt": b"end",
}
WORDS = ["", "a\r\nb\n", "Grüße \u2028\x00", "\ufeff", "日本語 🙂", "x" * 999, "{}", " \t\n"]
TEXTS = [f"{i} {WORDS[i % len(WORDS)]}" for i in range(90)] + [""]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("text")
    (path / "sub").mkdir()
    (path / ".hidden").write_bytes(b"never")
    for name, data in AWKWARD.items():
        (path / name).write_bytes(data)
    return path


def old(state: State) -> State:
    """Returns the state as versions wrote it in which no lane waited for the others."""
    return {key: value for key, value in state.items() if key != "waits"}


@pytest.mark.parametrize("lanes", [1, 3])
def test_text_is_the_bytes_on_disk_and_begins_again_at_the_end(folder, lanes):
    """The three streams are those of an old checkpoint, in which sequence i is of i % lanes."""
    source = stream_of(folder, lanes=lanes)
    if lanes > 1:
        source.restore(old(source.state()))
    files = source._lanes[0]._docs.files
    assert sum(len(Path(file).read_bytes()) for file in files) == sum(map(len, AWKWARD.values()))
    on_disk = [b"".join(Path(f).read_bytes() for f in files[j::lanes]) for j in range(lanes)]
    assert source.state()["epoch"] == 0
    rows, mask = source.read(2 * lanes * max(map(len, on_disk)) // 100 + lanes, 0, 1)
    assert mask is None
    assert source.state()["epoch"] == 2
    for lane, expected in enumerate(on_disk):
        stream = text_from(rows[lane::lanes])
        assert len(stream) > 1.9 * len(expected)
        assert stream == (expected * (len(stream) // len(expected) + 1))[: len(stream)]


def test_files_of_unequal_size_are_all_read_once_before_one_begins_again(tmp_path):
    counts = {"a": 30, "b": 3, "c": 11}
    for name, count in counts.items():
        write(tmp_path / f"{name}.jsonl", [f"<{name}{i}>" + "." * 90 for i in range(count)])
    source = stream_of(tmp_path, "jsonl")
    for epoch in (1, 2, 3):
        data = b""
        while source.state()["epoch"] < epoch:
            data += bytes(source.read(1, 0, 1)[0][0, :-1].tolist())
        for name, count in counts.items():
            # The last sequence of each stream may begin the next epoch, and end in it.
            assert count - 2 <= data.count(f"<{name}".encode()) <= count + 2


@pytest.mark.parametrize("ending", FORMATS)
def test_documents_are_joined_with_a_zero_byte_and_nothing_else_is_changed(tmp_path, ending):
    write(tmp_path / f"a.{ending}", TEXTS)
    source = stream_of(tmp_path, ending)
    expected = b"".join(text.encode() + END_OF_DOCUMENT for text in TEXTS)
    stream = text_from(source.read(2 * len(expected) // 100, 0, 1)[0])
    assert stream == (expected * 3)[: len(stream)]


@pytest.mark.parametrize(
    "kind", [pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())], ids=str
)
def test_a_parquet_column_may_be_of_any_kind_of_text_and_have_nulls(tmp_path, kind):
    column = pa.array(["a", None, "b"], pa.string()).cast(kind)
    pq.write_table(pa.table({"body": column}), tmp_path / "a.parquet")
    source = stream_of(tmp_path, "parquet", text_key="body", seq_len=4)
    assert text_from(source.read(2, 0, 1)[0]) == b"a\0b\0a\0b\0"


sizes = st.lists(st.integers(0, 60), min_size=1, max_size=6)


@limits(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    source=st.sampled_from(("text", *FORMATS)), files=st.lists(sizes, min_size=1, max_size=5),
    lanes=st.integers(1, 4), seq_len=st.integers(2, 40), rows=st.integers(1, 4),
    legs=st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=4
    ),
    is_old=st.booleans(),
)  # fmt: skip
def test_a_stop_at_any_position_and_any_world_after_it_lose_and_repeat_nothing(
    tmp_path_factory, source, files, lanes, seq_len, rows, legs, is_old
):
    """Each leg is a run of `world` ranks; the next leg continues from the state of rank 0.

    The first leg may continue from an old checkpoint, in which sequence i is of i % lanes.
    """
    path = tmp_path_factory.mktemp("files")
    for number, lengths in enumerate(files):
        texts = [chr(65 + number) * length for length in lengths]
        if source == "text":
            (path / f"{number}.txt").write_text("\n".join(texts) + "\n")
        else:
            write(path / f"{number}.{source}", texts, rows)
    options = {"lanes": lanes, "seq_len": seq_len}
    total = sum(count * steps for _world, count, steps in legs)
    unbroken = stream_of(path, source, **options)
    state, first = old(unbroken.state()) if is_old else unbroken.state(), 0
    unbroken.restore(state)
    whole = unbroken.read(total + 1, 0, 1)[0]
    for world, count, steps in legs:
        ranks = [stream_of(path, source, **options) for _ in range(world)]
        parts = []
        for rank, each in enumerate(ranks):
            each.restore(json.loads(json.dumps(state)))
            parts.append([each.read(count, rank, world)[0] for _ in range(steps)])
        taken = whole[first : first + count * steps]
        for rank, part in enumerate(parts):
            if part:
                assert torch.equal(torch.cat(part), taken[(rank - first) % world :: world])
        states = [each.state() for each in ranks]
        assert all(other == states[0] for other in states)
        state, first = states[0], first + count * steps
        assert state["position"] == first


class Pairs:
    """A tokenizer whose tokens have two bytes, like those of gpt2."""

    kind = torch.uint16
    end = b"\xff\xff"

    def encode(self, text: bytes) -> bytes:
        return text + b"\0" * (len(text) % 2)


@given(lengths=sizes, stop=st.integers(0, 9), seq_len=st.integers(2, 9))
@limits(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_wide_tokens_are_packed_and_resumed_like_bytes(tmp_path_factory, lengths, stop, seq_len):
    path = tmp_path_factory.mktemp("wide")
    write(path / "a.jsonl", ["ä" * length for length in lengths])
    data = DataSettings(source="jsonl", path=str(path), held_out=0.0)
    docs = documents.find(data, 0, False)
    lane, later = (Lane(docs, 0, 1, Pairs(), seq_len) for _ in range(2))
    taken = [lane.take() for _ in range(stop)]
    expected = b"".join(b"\xc3\xa4" * length + b"\xff\xff" for length in lengths)
    stream = b"".join(sequence[: 2 * seq_len] for sequence in taken)
    assert stream == (expected * (len(stream) // len(expected) + 1))[: len(stream)]
    later.seek(*lane.place())
    assert [later.take() for _ in range(3)] == [lane.take() for _ in range(3)]


@pytest.mark.parametrize("source", ["text", "jsonl", "parquet"])
def test_going_on_reads_neither_former_files_nor_the_beginning_of_this_one(tmp_path, source):
    """Former files and the first bytes of the present file are overwritten before the resume."""
    ending = {"text": "txt"}.get(source, source)
    for number in range(3):
        path = tmp_path / f"{number}.{ending}"
        texts = [f"{number} {i} " + os.urandom(200).hex() + "\n" for i in range(900)]
        if source == "text":
            path.write_text("".join(texts))
        else:
            write(path, texts, rows=100)
    source_of = lambda: stream_of(tmp_path, source, lanes=1)  # noqa: E731
    before = source_of()
    total = sum(file.stat().st_size for file in tmp_path.iterdir())
    before.read(total // 2 // 100, 0, 1)
    state = before.state()
    _epoch, file, cursor, _skip = state["lanes"][0]
    assert cursor > 0
    order = [Path(name) for name in before._lanes[0]._docs.files]
    for passed in order[:file]:
        passed.write_bytes(b"\xff" * passed.stat().st_size)
    data = bytearray(order[file].read_bytes())
    data[4:10_000] = b"\xff" * 9_996
    order[file].write_bytes(data)
    after = source_of()
    after.restore(state)
    assert torch.equal(after.read(50, 0, 1)[0], before.read(50, 0, 1)[0])


CHANGED = {
    "seed": {"seed": 1},
    "seq_len": {"seq_len": 50},
    "lanes": {"lanes": 2},
    "held_out": {"held_out": 0.4},
    "files": {"pattern": "*"},
    "documents": {"documents": "separate"},
}


@pytest.mark.parametrize("case", CHANGED)
def test_other_data_has_another_fingerprint_which_says_what_changed(folder, case):
    sources = stream_of(folder), stream_of(folder, **CHANGED[case])
    before, now = (changes.compared({}, 1, source.fingerprint) for source in sources)
    with pytest.raises(UsageError, match=rf"settings: data stream, {case} was '[^;]*; restore"):
        changes.refuse(folder, before, now, "")


@pytest.mark.parametrize(
    "change", [{"lanes": [[0, 0, 0, 0]]}, {"lanes": [[0, 99, 0, 0]] * 3}, {"lanes": "abc"},
               {"lanes": [[0, 0, -5, 0]] * 3}, {"position": "x"}],
    ids=str,
)  # fmt: skip
def test_a_position_that_no_source_wrote_is_refused(folder, change):
    source = stream_of(folder)
    with pytest.raises(DataError, match="is invalid"):
        source.restore(source.state() | change)


def test_a_run_says_when_its_data_begin_again_and_ends_with_12_when_they_break(tmp_path):
    folder = tmp_path / "docs"
    write(folder / "a.jsonl", ["x" * 600])
    options = {
        "data.source": "jsonl", "data.path": str(folder), "data.held_out": 0,
        "train.steps": 1_000_000,
    }  # fmt: skip
    run = Run(tmp_path, small(**options), nproc=1)
    run.until(lambda: "epoch 1 begins" in run.text())
    with (folder / "a.jsonl").open("a") as stream:
        stream.write("not JSON\n")
    assert run.wait() == DATA
    assert "a.jsonl cannot be read" in run.text()
    assert "Traceback" not in run.text()


@pytest.mark.parametrize("source", ["text", "jsonl"])
def test_separate_documents_end_with_their_token_and_with_their_row(source, tmp_path):
    for i in range(3):
        text = "ab" * (i + 1)
        content = text if source == "text" else f'{{"text": "{text}"}}\n'
        (tmp_path / f"{i}.{'txt' if source == 'text' else source}").write_text(content)
    joined, separate = (
        stream_of(tmp_path, source, seq_len=10, lanes=1, documents=kind)
        for kind in ("joined", "separate")
    )
    assert read_batch(joined, 2, 0, 1, torch.device("cpu")).cu_seqlens is None
    batch = read_batch(separate, 2, 0, 1, torch.device("cpu"))
    assert batch.inputs.shape == batch.targets.shape == (1, 20)
    data = batch.inputs[0].tolist()
    assert data.count(0) >= 3
    expected = [i + 1 for i in range(20) if data[i] == 0 or i in (9, 19)]
    assert batch.cu_seqlens == (0, *expected)
    assert batch.arguments == (batch.inputs, (), batch.cu_seqlens)
    assert torch.equal(batch.targets[0, :9], batch.inputs[0, 1:10])
    assert separate.fingerprint != joined.fingerprint


def test_a_run_trains_on_separate_documents_and_evaluates_them(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "data.jsonl").write_text("".join(f'{{"text": "{i} abc"}}\n' for i in range(400)))
    (data / "linked").symlink_to(tmp_path)
    changes = small(
        data__source="jsonl", data__path=str(data), data__documents="separate",
        data__held_out=0.2, train__steps=3, eval__every=3, eval__batches=8,
        checkpoint__at_end=False,
    )  # fmt: skip
    run = Run(tmp_path, changes, nproc=1).done()
    losses = [record["loss"] for record in run.records(0, "progress")]
    assert len(losses) == 3
    assert all(loss < 7 for loss in losses)
    assert run.records(0, "eval")
    assert len(run.records(0, "note")) == 2, (
        "a folder is not read, and the 80 held-out documents have less than 1,024 tokens"
    )
    backend = json.loads((run.path / "env.json").read_text())["backend"]
    assert backend.pop("for") == "a document of 32 tokens"
    assert set(backend) == {"cmp", "sel", "win"}
