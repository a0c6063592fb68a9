"""Scripts for the worker double of `mtplx.testing`: who it is, which tokens, how fast, and which fault."""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Iterator
from enum import StrEnum
from functools import lru_cache
from typing import Any, NamedTuple

import msgpack

from mtplx import wire
from mtplx.job import Job
from mtplx.messages import MAGIC, Final, Run, WorkerChunk
from mtplx.trajectory import trajectory_sha256


class Fault(StrEnum):
    """What a script does instead of its next token.

    ABORT and EXIT end a process; a worker that is a thread closes its sockets without a word instead.
    """

    NONE = "none"
    ABORT = "abort"  # the process dies by SIGABRT
    EXIT = "exit"  # the process leaves with exit code 1
    FAIL = "fail"  # FAIL with `fail_code`
    HANG = "hang"  # no token ever again, deaf to CANCEL; beats go on without progress
    SILENT = "silent"  # the same, and no beats
    STALE = "stale"  # one chunk of the lease before, then on as if nothing was
    GAP = "gap"  # one chunk whose `first` skips a token, then on as if nothing was


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What the worker does with one job.

    tokens: how many it draws (never more than the job's budget); None echoes the words of the prompt.
    token_s, prefill_step_s: seconds each takes; 0 is as fast as it can.
    per_chunk: tokens in one chunk.  prefill_steps: looks for a cancel before the first token.
    finish_reason: None says `length` where the budget ended the answer, else `stop`.
    fault_after: tokens of the answer before the fault, earlier attempts included; -1 puts it before prefill.
    fault_attempts: the fault comes in this many attempts of a job; None, in each.
    speculation: figures that FINAL tells over its own, as `run.speculation` of DONE.
    seeded: the tokens of a counted answer depend on the job's seed and their index, not on the index alone.
    """

    tokens: int | None = None
    token_s: float = 0.0
    per_chunk: int = 1
    prefill_steps: int = 0
    prefill_step_s: float = 0.0
    finish_reason: str | None = None
    fault: Fault = Fault.NONE
    fault_after: int = 0
    fault_attempts: int | None = None
    fail_code: str = "E_INTERNAL"
    seeded: bool = False
    speculation: dict[str, Any] | None = None

    def faulty(self, attempt: int) -> bool:
        """Whether the fault comes in the attempt of that number, counted from 1."""
        return self.fault is not Fault.NONE and (self.fault_attempts is None or attempt <= self.fault_attempts)

    @classmethod
    def of_job(cls, job: Job, base: Script) -> Script:
        """The script in the job's metadata, over *base*; *base* itself where it has none."""
        asked = json.loads(job.metadata.get("script", "{}"))
        if "fault" in asked:
            asked["fault"] = Fault(asked["fault"])
        return dataclasses.replace(base, **asked)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Persona:
    """What the worker says of itself in READY. host, born: empty and 0 where its process must not be killed."""

    mode: str = "hyper"
    stage: str = "h0"
    model: str = "scripted"
    vocabulary: int = 1000
    context: int = 32768
    model_hash: str = "scripted"
    build_hash: str = "scripted"
    host: str = ""
    born: float = 0.0
    info: dict[str, Any] = dataclasses.field(
        default_factory=lambda: {"device": "none", "row_invariant": True, "width_executor": False}
    )


class Answer(NamedTuple):
    """All tokens of an answer, and the encoded body of each chunk from token *drawn* on."""

    ids: tuple[int, ...]
    drawn: int
    bodies: tuple[bytes, ...]


def prompt_words(job: Job) -> list[str]:
    """What counts as the prompt's tokens here: words, or the ids given."""
    if job.token_ids is not None:
        return [str(token) for token in job.token_ids]
    texts = [job.prompt or ""] if job.messages is None else [message["content"] for message in job.messages]
    return " ".join(texts).split()


def answer_of(job: Job, script: Script, vocabulary: int, seed: int = 0) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The ids and texts a ScriptedWorker gives: a function of prompt, script and *seed* alone, not of attempts."""
    if script.tokens is not None:
        count = min(script.tokens, job.max_tokens)
        return _seeded(count, vocabulary, seed) if script.seeded else _numbered(count, vocabulary)
    words = prompt_words(job)[: job.max_tokens]
    texts = tuple(word if index == 0 else f" {word}" for index, word in enumerate(words))
    return tuple(zlib.crc32(text.encode()) % vocabulary for text in texts), texts


@lru_cache(maxsize=8)
def _numbered(count: int, vocabulary: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    return tuple(index % vocabulary for index in range(count)), tuple(f"{index} " for index in range(count))


@lru_cache(maxsize=8)
def _seeded(count: int, vocabulary: int, seed: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    texts = tuple(f"{seed:x}.{index} " for index in range(count))
    return tuple(zlib.crc32(text.encode()) % vocabulary for text in texts), texts


@lru_cache(maxsize=8)
def encoded(ids: tuple[int, ...], texts: tuple[str, ...], drawn: int, per_chunk: int, logprobs: int) -> Answer:
    """The chunk bodies of an answer whose first *drawn* tokens are there, made before its first chunk leaves."""
    bodies = []
    for first in range(drawn, len(ids), per_chunk):
        some = ids[first : first + per_chunk]
        body: dict[str, Any] = {"ids": some, "text": "".join(texts[first : first + per_chunk])}
        if logprobs:
            body["logprobs"] = [[[token, -0.25 * rank] for rank in range(logprobs)] for token in some]
        bodies.append(bytes(msgpack.packb(body)))
    return Answer(ids, drawn, tuple(bodies))


def chunks(run: Run, answer: Answer, per_chunk: int) -> Iterator[tuple[int, list[bytes]]]:
    """The index of each chunk's first token, and its frames, at a tenth of the cost of `wire.encode`."""
    kind = bytes([WorkerChunk.KIND])
    pack = msgpack.Packer().pack
    common = {"id": run.id, "attempt": run.attempt, "lease": run.lease}
    # A map of five keys: three that never change, then `first` and `n`.
    start = b"\x85" + pack(common)[1:] + pack("first")
    for index, body in enumerate(answer.bodies):
        first = answer.drawn + index * per_chunk
        n = min(per_chunk, len(answer.ids) - first)
        yield first, [MAGIC, kind, start + pack(first) + b"\xa1n" + pack(n), body]


def chunk_of(run: Run, lease: int, first: int) -> list[bytes]:
    """The frames of a chunk that a well-behaved worker would not send."""
    return wire.encode(WorkerChunk(run.id, run.attempt, lease, first, 1, (0,), "?"))


def final_of(
    run: Run, job: Job, ids: tuple[int, ...], reason: str, *, spent: tuple[float, float], script: Script
) -> Final:
    """The FINAL of an attempt; *spent* are its seconds of prefill and decode."""
    plain = {"drafted": 0, "accepted_by_depth": [], "verify_forwards": 0, "widths": {"1": len(ids)}}
    return Final(
        id=run.id,
        attempt=run.attempt,
        lease=run.lease,
        finish_reason=reason,
        prompt_tokens=len(prompt_words(job)),
        cached_tokens=0,
        max_tokens_used=job.max_tokens,
        prefill_s=spent[0],
        decode_s=spent[1],
        sha256=trajectory_sha256(ids),
        route="serial_b1",
        row_invariant=True,
        speculation={**plain, **(script.speculation or {})},
    )
