"""Tokenizers: bytes, or GPT-2's byte pairs from tiktoken and its cached files.

A tokenizer converts one piece of text to tokens of `kind`, in the machine's byte order.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from trainers.contract import data_access
from trainers.failures import DataError

UNKNOWN = "�".encode()
"""Text of the tokens that only pad the vocabulary to a round size."""


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A tokenizer; `end` is the token after a document, or b"" if there is none."""

    kind: torch.dtype
    end: bytes
    encode: Callable[[bytes], bytes]
    """Returns the tokens of a text. Raises ValueError."""
    decode: Callable[[list[int]], bytes] = bytes
    """Returns the text of tokens; a token without text becomes U+FFFD."""


def gpt2(encoding: Any) -> Tokenizer:
    """Returns GPT-2's tokenizer; `<|endoftext|>` (50256) follows each document."""

    def encode(text: bytes) -> bytes:
        # JSON may contain half a UTF-16 pair, which tiktoken replaces by U+FFFD.
        unicode = text.decode("utf-8", "surrogatepass")
        return array("H", encoding.encode_ordinary(unicode)).tobytes()

    def text_of(token: int) -> bytes:
        try:
            return encoding.decode_single_token_bytes(token)
        except KeyError:
            return UNKNOWN

    def decode(tokens: list[int]) -> bytes:
        return b"".join(map(text_of, tokens))

    return Tokenizer(torch.uint16, array("H", [encoding.eot_token]).tobytes(), encode, decode)


def build(name: str, end_of_document: bytes) -> Tokenizer:
    """Returns a tokenizer; `end_of_document` follows each document of the byte tokenizer.

    For gpt2, raises DataError if tiktoken is not installed or cannot use its cached files.
    """
    if name == "byte":
        return Tokenizer(torch.uint8, end_of_document, lambda text: text)
    try:
        import tiktoken  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise DataError(
            "data.tokenizer=gpt2 needs tiktoken, which is not installed; pip install "
            "'nsa-console[gpt2]', or use data.tokenizer=byte"
        ) from None
    if why := data_access.gpt2_problem():
        raise DataError(
            f"{why}; set TIKTOKEN_CACHE_DIR to a folder, fill it on a machine with a network by "
            "python -c 'import tiktoken; tiktoken.get_encoding(\"gpt2\")'; or use "
            "data.tokenizer=byte"
        )
    return gpt2(tiktoken.get_encoding("gpt2"))
