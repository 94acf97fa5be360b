"""Tokens of gpt2, and the errors if its files are missing or damaged."""

from __future__ import annotations

import hashlib

import pytest
import tiktoken
import torch

from trainers import tokenizer
from trainers.contract import data_access
from trainers.failures import DataError


def test_gpt2_that_is_not_at_hand_is_told_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    with pytest.raises(DataError, match=r"not (installed|in).*data\.tokenizer=byte"):
        tokenizer.build("gpt2", b"")


def test_gpt2_files_that_are_damaged_are_told_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    for url in data_access.GPT2_FILES:
        (tmp_path / hashlib.sha1(url.encode()).hexdigest()).write_bytes(b"garbage")
    with pytest.raises(DataError, match="are damaged"):
        tokenizer.build("gpt2", b"")


def bytewise() -> tokenizer.Tokenizer:
    """Returns the tokenizer gpt2 with an encoding of bytes only, because its files are missing."""
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
