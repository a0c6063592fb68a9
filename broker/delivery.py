"""What is next for the reader of a job: a chunk of what it has not got yet, or the last word."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from broker import words
from broker.journal import Journal
from broker.record import Piece, Record
from mtplx.messages import Chunk, Done, Error

# Keeps a coalesced chunk far below the frame limit, even with 20 log-probabilities a token.
MAX_CHUNK_TOKENS: Final = 4096


def window(record: Record, journal: Journal, first: int, most: int) -> list[Piece]:
    """Pieces of the answer from token *first* on, until they have *most* tokens; [] where none begins there.

    Raises:
        JournalError: the answer is in the journal alone, and cannot be read.
    """
    if record.answer is None:
        return []
    if record.answer.spilled:
        return journal.pieces(record, first, most)
    return record.answer.window(first, most)


def has_place(record: Record, journal: Journal, tokens: int) -> bool:
    """Whether a reader that has *tokens* of the answer can go on from there.

    Raises:
        JournalError: as `window`.
    """
    return tokens == record.tokens or bool(window(record, journal, tokens, 1))


def next_chunk(record: Record, journal: Journal) -> tuple[Chunk | Error, int] | None:
    """Undelivered pieces as one chunk, and the cursor after it; None where there are none.

    An ERROR in its place ends the stream of a reader whose place in the answer is no longer one.

    Raises:
        JournalError: as `window`.
    """
    reading = record.reading
    if reading.tokens >= record.tokens:
        return None
    pieces = window(record, journal, reading.tokens, MAX_CHUNK_TOKENS)
    if not pieces:
        return words.answer_lost(record), reading.tokens
    first, ids, text, logprobs = pieces[0]
    if len(pieces) > 1:
        ids = tuple(token for piece in pieces for token in piece.ids)
        text = "".join(piece.text for piece in pieces)
        if logprobs is not None:
            logprobs = tuple(one for piece in pieces for one in piece.logprobs or ())
    attempt = max(record.attempts, 1)
    return Chunk(record.id, attempt, reading.next_seq, first, len(ids), ids, text, logprobs), first + len(ids)


def final_word(record: Record, journal: Journal) -> Done | Error:
    """The last word, telling this reader how many chunks it was sent.

    Raises:
        JournalError: as `window`.
    """
    assert record.last_word is not None
    if isinstance(record.last_word, Error):
        return record.last_word
    if record.reading.tokens > record.tokens:
        # It has more than the journal kept, and the job ended before it got there again.
        return words.answer_lost(record)
    spilled = record.answer is not None and record.answer.spilled
    word = journal.last_word(record) if spilled else record.last_word
    return replace(word, seq=record.reading.next_seq) if isinstance(word, Done) else word
