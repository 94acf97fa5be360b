"""Files of documents: the files that are read or held out, and the errors of broken files."""

from __future__ import annotations

import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.trainers.files import FORMATS, spoil, stream_of, text_from, write
from trainers import documents, settings
from trainers.documents import CHUNK_BYTES
from trainers.failures import DataError
from trainers.loader import Loader
from trainers.schema import DataSettings


@pytest.mark.parametrize("source", ["text", *FORMATS])
def test_what_is_held_out_is_never_trained_on_and_nothing_is_lost(tmp_path, source):
    texts = [f"<{i}>" for i in range(400)]
    if source == "text":
        for i, text in enumerate(texts):
            (tmp_path / f"{i}.txt").write_text(text)
    else:
        for i in range(0, 400, 100):
            write(tmp_path / f"{i}.{source}", texts[i : i + 100] + texts[:9])
    seen = []
    for part in (False, True):
        stream = stream_of(tmp_path, source, held_out=0.25, lanes=1, part=part)
        assert ("held-out" in stream.about) == part
        data = b""
        while stream.state()["epoch"] == 0:
            data += text_from(stream.read(1, 0, 1)[0])
        seen.append({text for text in texts if text.encode() in data})
    train, held = seen
    assert not train & held
    assert train | held == set(texts)
    assert 60 < len(held) < 140


@pytest.mark.parametrize("source", ["text", "jsonl"])
def test_the_held_out_part_has_a_document_of_each_file_in_turn(tmp_path, source):
    """A text has several pieces; many of the jsonl files have no held-out document."""
    for number in range(20):
        if source == "text":
            (tmp_path / f"{number}.txt").write_text(f"<{number} 0>" + "x\n" * CHUNK_BYTES + "(end)")
        else:
            write(tmp_path / f"{number}.jsonl", [f"<{number} {i}>(end)" for i in range(5)])
    held = stream_of(tmp_path, source, held_out=0.2, lanes=16, part=True, documents="separate")
    texts = []
    while held.state()["epoch"] == 0:
        texts.append(text_from(held.read(1, 0, 1)[0]))
    found = re.findall(rb"<(\d+) (\d)>[x\n]*\(end\)", b"".join(texts))
    once = list(dict.fromkeys(found))
    assert found == (once * 2)[: len(found)], "none is read twice before all are read"
    assert len(once) > 3
    assert len({file for file, _ in once[:4]}) == 4


def test_a_held_out_file_shorter_than_a_sequence_is_not_repeated_before_others_are_read(tmp_path):
    for name in "abcd":
        (tmp_path / f"{name}.txt").write_text(name * 300)
    held = stream_of(tmp_path, held_out=0.5, seq_len=500, part=True)
    first, second = (bytes(each.tolist()) for each in held.read(1, 0, 1)[0][0, :-1].split(300))
    assert {*first}.isdisjoint(second)


@pytest.mark.parametrize("source", ["jsonl.gz", "parquet"])
def test_files_without_documents_are_passed_over(tmp_path, source):
    """Programs that write files in parts write such files too; here, two of three streams."""
    texts = [f"<{i}>" + "." * 90 for i in range(9)]
    write(tmp_path / f"full.{source}", texts)
    for name in "ab":
        write(tmp_path / f"{name}.{source}", [])
    whole, stream = (stream_of(tmp_path, source) for _ in range(2))
    rows = whole.read(30, 0, 1)[0]
    assert text_from(rows).count(b"<") > 27
    assert whole.state()["epoch"] > 2
    for index in range(30):
        again = stream_of(tmp_path, source)
        again.restore(json.loads(json.dumps(stream.state())))
        assert torch.equal(again.read(1, 0, 1)[0], rows[index : index + 1])
        stream.read(1, 0, 1)
        assert again.state() == stream.state()


def test_a_single_file_is_trained_on_whole(tmp_path):
    (tmp_path / "only.txt").write_text("one file")
    whole = stream_of(tmp_path, held_out=0.3)
    assert whole.about.endswith("(1 files)")
    assert not whole.notes


def test_a_note_names_the_held_out_files_if_they_are_most_of_the_text(tmp_path):
    """One of two files is held out, whatever `data.held_out` is: here the one with the text."""
    (tmp_path / "corpus.txt").write_text("text " * 19_992)
    (tmp_path / "LICENSE").write_text("free " * 80)
    stream = stream_of(tmp_path, held_out=0.01)
    assert stream.about.endswith("(1 of 2 files)")
    (note,) = stream.notes
    assert "data.held_out=0.01 holds out 99.6 % of the text (" in note
    assert "corpus.txt)" in note
    assert note.endswith("data.held_out=0 (and eval.every=0), or divide the text into more files")
    assert not stream_of(tmp_path, held_out=0.01, part=True).notes
    assert not stream_of(tmp_path, held_out=0.0).notes
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text("text " * 20_000)
    assert not stream_of(tmp_path, held_out=0.01).notes


BROKEN = (
    "parquet cut", "parquet flipped", "parquet column", "jsonl.gz cut", "jsonl noise",
    "jsonl number", "jsonl key", "txt gone",
)  # fmt: skip


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_file_ends_in_one_sentence_that_names_it(tmp_path, how):
    spoil(tmp_path, how)
    ending = how.partition(" ")[0]
    source = stream_of(tmp_path, {"txt": "text"}.get(ending, ending))
    if how == "txt gone":
        (tmp_path / "bad.txt").unlink()
    chosen = settings.resolve(None, {}, {"data.seq_len": 100}).settings
    loader = Loader(source, chosen, 0, 1, torch.device("cpu"))
    with pytest.raises(DataError, match=f"bad.{ending} cannot be read") as caught:
        loader.fetch(100)
    assert "\n" not in str(caught.value)
    assert "then resume" in str(caught.value)
    assert "new run" not in str(caught.value)
    loader.close()


def test_a_note_names_linked_folders_which_the_pattern_does_not_enter(tmp_path):
    write(tmp_path / "elsewhere/part/b.jsonl", ["b"] * 99)
    folder = tmp_path / "data"
    write(folder / "real/a.jsonl", ["a"] * 99)
    for link in ("wiki", "real/books", ".hidden"):
        (folder / link).symlink_to(tmp_path / "elsewhere")
    for pattern in ("**/*", "**/*.jsonl", "real/**/*"):
        stream = stream_of(folder, "jsonl", pattern=pattern)
        assert stream.about.endswith("(1 files)")
        (note,) = stream.notes
        named = "real/books" if pattern.startswith("real") else "real/books, wiki"
        assert f"folders that are links: {named};" in note
    both = stream_of(folder, "jsonl", pattern="*/**/*")
    assert both.about.endswith("(2 files)")
    assert "folders that are links: real/books;" in both.notes[0]
    assert not stream_of(folder, "jsonl", pattern="*/*").notes
    (folder / "latest").symlink_to("real")
    assert "links: real/books, wiki;" in stream_of(folder, "jsonl", pattern="**/*").notes[0]
    with pytest.raises(DataError, match="folders that are links: real/books, wiki;"):
        stream_of(folder, "text", pattern="**/*.txt")


EMPTY = {
    "no file": ({}, {}, "data.path"),
    "another ending": ({"b.bin": b"x"}, {"pattern": "*.txt"}, "data.path"),
    "a pattern that is none": ({"a.txt": b"x"}, {"pattern": "x**"}, "data.path"),
    "nothing to hold out": ({"a.txt": b"x"}, {"held_out": 0.3, "part": True}, "is held out"),
}


@pytest.mark.parametrize("case", EMPTY)
def test_a_source_without_data_is_a_sentence(tmp_path, case):
    files, changes, words = EMPTY[case]
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    with pytest.raises(DataError, match=words) as caught:
        stream_of(folder, **changes)
    assert "\n" not in str(caught.value)


def test_rows_without_text_end_in_a_sentence_and_in_no_endless_loop(tmp_path):
    pq.write_table(pa.table({"text": pa.array([None] * 9, pa.string())}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="contains no text;"):
        stream_of(tmp_path, "parquet").read(1, 0, 1)


def test_pieces_of_text_cut_no_character(tmp_path):
    (tmp_path / "a.txt").write_text("日本語\n" * CHUNK_BYTES)
    data = DataSettings(source="text", path=str(tmp_path))
    docs = documents.find(data, 0, False)
    pieces = [data.decode() for _, data, _ in docs.read(docs.files[0], 0)]
    assert len(pieces) > 1
    assert "".join(pieces) == "日本語\n" * CHUNK_BYTES
