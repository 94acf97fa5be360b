"""Tokens of gpt2, and the errors if its files are missing or damaged."""

from __future__ import annotations

import hashlib

import pytest
import tiktoken
import torch
from tiktoken.load import read_file_cached
from tiktoken_ext import openai_public

from trainers import tokenizer
from trainers.contract import data_access
from trainers.failures import DataError


@pytest.mark.parametrize("damage", ["", "missing", "garbage", "no cache"])
def test_a_training_with_gpt2_begins_only_with_files_that_tiktoken_need_not_download(
    tmp_path, monkeypatch, damage
):
    texts = {url: url.encode() for url in data_access.GPT2_FILES}
    hashes = {url: hashlib.sha256(text).hexdigest() for url, text in texts.items()}
    monkeypatch.setattr(data_access, "GPT2_FILES", hashes)
    folder = "" if damage == "no cache" else str(tmp_path)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", folder)
    monkeypatch.setenv("DATA_GYM_CACHE_DIR", str(tmp_path))
    for url, text in texts.items():
        (file := tmp_path / hashlib.sha1(url.encode()).hexdigest()).write_bytes(text)
        assert folder == "" or read_file_cached(url, hashes[url]) == text
    if damage == "garbage":
        file.write_bytes(b"garbage")
    elif damage == "missing":
        file.unlink()
    assert bool(data_access.gpt2_problem()) == bool(damage)
    if damage:
        with pytest.raises(DataError, match=r"(damaged in|is empty).*data\.tokenizer=byte"):
            tokenizer.build("gpt2", b"")


def test_the_hashes_of_gpt2_are_those_of_tiktoken(monkeypatch):
    asked = {}
    monkeypatch.setattr(
        openai_public, "data_gym_to_mergeable_bpe_ranks", lambda **given: asked.update(given)
    )
    openai_public.gpt2()
    files = {asked[f"{each}_file"]: asked[f"{each}_hash"] for each in ("vocab_bpe", "encoder_json")}
    assert files == data_access.GPT2_FILES


def bytewise() -> tokenizer.Tokenizer:
    """Returns the tokenizer gpt2 with an encoding of bytes only, which needs no files."""
    encoding = tiktoken.Encoding(
        "bytes", pat_str=r"(?s).", mergeable_ranks={bytes([i]): i for i in range(256)},
        special_tokens={"<|endoftext|>": 50_256},
    )  # fmt: skip
    return tokenizer.gpt2(encoding)


def test_gpt2_ends_each_document_with_its_end_token():
    words = bytewise()
    tokens = torch.frombuffer(bytearray(words.encode("ä<".encode()) + words.end), dtype=words.kind)
    assert tokens.tolist() == [0xC3, 0xA4, ord("<"), 50_256]
    assert words.decode(tokens.tolist()).decode() == "ä<<|endoftext|>"
    assert words.decode([50_303, ord("<")]).decode() == "�<"
    with pytest.raises(ValueError, match="utf-8"):
        words.encode(b"\xff")


def test_gpt2_replaces_half_a_pair_of_utf_16_as_tiktoken_does():
    """JSON may have such a text, for example half an emoji at the end of a cut text."""
    tokens = torch.frombuffer(
        bytearray(bytewise().encode("a\ud83db".encode("utf-8", "surrogatepass"))),
        dtype=torch.uint16,
    )
    assert tokens.tolist() == [ord("a"), *"\ufffd".encode(), ord("b")]
