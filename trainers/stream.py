"""Joins documents into an endless stream of sequences with a small, exact position.

Each document is tokenised and followed by the end token, if there is one. The documents are then
joined and cut into sequences of S + 1 tokens that overlap by one token. With gpt2, the end token is
`<|endoftext|>`. With bytes, it is a zero byte; but data.source=text has no end token with
data.documents=joined.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

from trainers import documents, tokenizer
from trainers.documents import Documents
from trainers.failures import DataError
from trainers.schema import DataSettings
from trainers.sequences import RankRows, Source, State, stack
from trainers.tokenizer import Tokenizer

END_OF_DOCUMENT = b"\0"
NO_TEXT = sys.maxsize
"""The epoch of a lane without text, which is later than all others."""


class Lane:
    """Every `lanes`-th file, repeated forever, as sequences of S + 1 tokens.

    A place is `[epoch, file, cursor, skip]`. The first three identify the piece that contains the
    next token; `skip` is the number of tokens of the piece before that token.
    """

    def __init__(self, docs: Documents, index: int, lanes: int, encoder: Tokenizer, seq_len: int):
        self._docs, self._files = docs, docs.files[index::lanes]
        self._encoder, self._seq_len = encoder, seq_len
        self.seek(0, 0, 0, 0)

    @property
    def epoch(self) -> int:
        """The epoch of the next sequence."""
        return self._marks[0][1][0]

    def seek(self, epoch: int, file: int, cursor: int, skip: int) -> None:
        """Moves to a place; the next `take` opens the file."""
        if min(epoch, file, cursor, skip) < 0 or file >= len(self._files):
            raise ValueError(f"no data: epoch {epoch}, file {file}, cursor {cursor}, token {skip}")
        self._pieces = self._walk(epoch, file, cursor)
        self._marks = deque([(0, (epoch, file, cursor))])
        self._data, self._start, self._end, self._at = b"", 0, 0, skip

    def take(self) -> bytes:
        """Returns the next S + 1 tokens; the last token is also the first of the next sequence.

        If the files have no text, returns b"" and moves to the epoch `NO_TEXT`.
        """
        width = self._encoder.kind.itemsize
        while self._end <= self._at + self._seq_len:
            place, tokens = next(self._pieces, ((NO_TEXT, 0, 0), b""))
            if not tokens:
                self.seek(*place, 0)
                return b""
            self._marks.append((self._end, place))
            done = min(self._at, self._end)
            self._data = self._data[(done - self._start) * width :] + tokens
            self._start, self._end = done, self._end + len(tokens) // width
        begin = (self._at - self._start) * width
        self._at += self._seq_len
        while len(self._marks) > 1 and self._marks[1][0] <= self._at:
            self._marks.popleft()
        return self._data[begin : begin + (self._seq_len + 1) * width]

    def place(self) -> list[int]:
        """Returns the place of the next sequence."""
        first, place = self._marks[0]
        return [*place, self._at - first]

    def _walk(
        self, epoch: int, file: int, cursor: int
    ) -> Iterator[tuple[tuple[int, int, int], bytes]]:
        """Yields `(epoch, file, cursor)` and the tokens of each piece that has tokens.

        Ends after a whole epoch without tokens.
        """
        while True:
            nothing = file == 0 and cursor == 0
            for number in range(file, len(self._files)):
                for at, data, ends in self._docs.read(self._files[number], cursor):
                    tokens = self._tokens(number, data, ends)
                    if tokens:
                        nothing = False
                        yield (epoch, number, at), tokens
                cursor = 0
            if nothing:
                return
            epoch, file = epoch + 1, 0

    def _tokens(self, file: int, data: bytes, ends: bool) -> bytes:
        try:
            return self._encoder.encode(data) + (self._encoder.end if ends else b"")
        except ValueError as error:
            raise DataError(
                f"{self._files[file]} cannot be tokenised: {error}; use data.tokenizer=byte"
            ) from error


class Stream(Source):
    """Documents in `lanes` parallel streams: sequence i comes from lane i % lanes.

    A lane that is in a later epoch than others waits for them, and the next lane has its turn. So
    each document is read once per epoch, whatever the sizes of the files. In the checkpoints of
    earlier versions, no lane waits; such a stream continues in its own order.

    Each rank reads all lanes and uses its part, so a position is valid for any number of ranks.
    """

    def __init__(self, data: DataSettings, seed: int, held_out: bool = False):
        self.seq_len = self.scored = data.seq_len
        separate = data.documents == "separate"
        end = b"" if data.source == "text" and not separate else END_OF_DOCUMENT
        self._words = tokenizer.build(data.tokenizer, end)
        if separate:
            self.end_token = int.from_bytes(self._words.end, sys.byteorder)
        docs = documents.find(data, seed, held_out)
        lanes = min(data.lanes, len(docs.files))
        self.about, self.notes = docs.about, docs.notes
        self.fingerprint = (
            f"source={data.source} seed={seed} seq_len={data.seq_len} tokenizer={data.tokenizer} "
            f"text_key={quote(data.text_key)} "
            f"lanes={lanes} held_out={data.held_out:g} part={'eval' if held_out else 'train'} "
            f"files={docs.digest} documents={data.documents}"
        )
        self._lanes = [Lane(docs, j, lanes, self._words, data.seq_len) for j in range(lanes)]
        self._waits = True

    def read(self, count: int, rank: int, world: int) -> RankRows:
        mine = []
        for index in range(self.position, self.position + count):
            sequence = self._take(index)
            if index % world == rank:
                mine.append(sequence)
        self.position += count
        return stack(mine, self.seq_len + 1, self._words.kind), None

    def _take(self, index: int) -> bytes:
        """Returns sequence `index`, which is the next one. Raises DataError if no lane has text."""
        first = index % len(self._lanes)
        turns = self._lanes[first:] + self._lanes[:first]
        while True:
            lane = min(turns, key=lambda lane: lane.epoch) if self._waits else turns[0]
            if lane.epoch == NO_TEXT:
                raise DataError(f"{self.about} contains no text; change data.path or data.held_out")
            if sequence := lane.take():
                return sequence

    def state(self) -> State:
        lanes = [lane.place() for lane in self._lanes]
        epoch = min(lane.epoch for lane in self._lanes)
        return super().state() | {"epoch": epoch, "lanes": lanes, "waits": self._waits}

    def seek(self, state: Mapping[str, Any]) -> None:
        self._waits = bool(state.get("waits"))
        for lane, place in zip(self._lanes, state["lanes"], strict=True):
            lane.seek(*map(int, place))
        super().seek(state)
