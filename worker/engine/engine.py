"""What an engine is: one request at a time, one token per step. No sockets, no text, no job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from worker.engine.sample import Sampling
from worker.kv.prefix import Cache

# Called with (prompt ids read, prompt ids in all); it may raise Cancelled.
PrefillProgress = Callable[[int, int], None]


ROUTE: Final = "serial_b1"
"""What DONE calls a job of one row a step."""


def unheard(_done: int, _total: int) -> None:
    """Progress that nobody follows, as of a warm-up."""


def likeliest_first(ids: list[int], values: list[float]) -> list[tuple[int, float]]:
    """(id, log-probability) pairs, likeliest first, ties to the lower id."""
    return sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0]))


class Cancelled(Exception):  # noqa: N818 - it is an order, not a fault
    """Raised by a progress callback to end a prefill between two chunks."""


class NumericError(ArithmeticError):
    """The model produced NaN or infinite logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One answer to produce.

    prompt: ids of the prompt, at least one, all of them in the model's vocabulary.
    drawn: ids an earlier attempt already drew; they are read after the prompt and never drawn again.
    max_tokens: how many ids may be drawn at most, *drawn* not counted; the caller has cut it to context
        and capacity.
    cache: which rows of earlier requests may be reused: True, those that prefill wrote, so that the answer is that
        of a cold run; "answers", also those that drawing wrote; False, none, and none of this one are kept.
    owner: whose rows may be reused, and who may reuse these; compared byte for byte.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    drawn: tuple[int, ...] = ()
    cache: Cache = True
    owner: bytes = b""


@dataclass(frozen=True, slots=True)
class Step:
    """One drawn token; `logprobs` holds (id, log-probability) pairs, likeliest first, where asked for."""

    token: int
    logprobs: list[tuple[int, float]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """How the answer was computed.

    cached_tokens: leading ids of the prompt whose rows were reused.
    prefix_exact: whether a cold run would have written the same bits into these rows.
    widths: how many decode forwards ran with that many rows.
    drafting: what more there is to tell of drafts; empty where none were made.
    """

    route: str
    row_invariant: bool
    cached_tokens: int = 0
    prefix_exact: bool = True
    drafted: int = 0
    accepted_by_depth: tuple[int, ...] = ()
    verify_forwards: int = 0
    widths: dict[int, int] = field(default_factory=dict)
    drafting: dict[str, Any] = field(default_factory=dict)


class Engine(Protocol):
    """Runs one request at a time. All calls come from one thread, which alone touches the device.

    capacity: positions that one request may have, prompt, drawn ids and budget together; the caller sees to it.
    """

    capacity: int

    def warm_up(self) -> None:
        """Make every kernel a job may need; called once, before the first job."""

    def start(self, request: EngineRequest, progress: PrefillProgress) -> None:
        """Read the prompt and draw the first token; *progress* is called between chunks.

        Raises:
            Cancelled: as *progress* raised it; the request is over.
        """

    def step(self) -> Step:
        """The next token; at most `max_tokens` times after a `start`.

        Raises:
            NumericError: when the token was drawn from logits that are not numbers.
        """

    def stop(self) -> Figures:
        """End the request, whatever its state, and free what it held; may be called again."""

    def counts(self) -> dict[str, int] | None:
        """For health: what was reused of earlier prompts since the start; None where nothing ever is."""
