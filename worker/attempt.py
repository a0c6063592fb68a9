"""One try of a job as the loop sees it: what goes in, and what comes out. No engine, no sockets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mtplx.job import Job

# Called with the phase (`prefill` or `decode`), how many tokens of it are done, and of how many.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try of a job: the seed in force, and the ids that earlier tries have already drawn."""

    job: Job
    seed: int
    drawn: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens as they were drawn. *first* is the index of the first one in the answer, counted from 0.

    `text` is what they release, empty while it is held back; `logprobs` has one list of pairs per id.
    """

    first: int
    ids: tuple[int, ...]
    text: str
    logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Final:
    """The end of an attempt. Seconds are counted from its start; decode from the first token to the last.

    max_tokens_used: the budget after it was cut to what fits the context.
    first_token_s: None when the attempt was cancelled before it had a token.
    sha256: over all ids of the answer, those of earlier tries included (see `mtplx.trajectory`).
    prefix_exact: whether a cold run would have written the same bits into the rows of the cached tokens.
    """

    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    max_tokens_used: int
    prefill_s: float
    first_token_s: float | None
    decode_s: float
    sha256: str
    route: str
    row_invariant: bool
    prefix_exact: bool = True
    speculation: dict[str, Any] = field(default_factory=dict)
