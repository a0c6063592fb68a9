"""The messages between broker and worker; `messages.py` has all others, and gives these on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from mtplx.fields import (
    BODY,
    BOOL,
    FLOAT,
    ID,
    STR,
    UINT,
    Attempt,
    Count,
    Epoch,
    First,
    Headers,
    JobId,
    Lease,
    LogprobsField,
    Message,
    Text,
    TokenIds,
    Wire,
)

# --- worker to broker


@dataclass(frozen=True, slots=True)
class Ready(Message):
    """The worker has a warm model and no job; answered by ACCEPTED or ERROR."""

    KIND: ClassVar[int] = 0x21
    worker_id: Annotated[bytes, ID, "Drawn at each start of the worker."]
    pid: Annotated[int, UINT, "Process id on its machine."]
    mode: Annotated[str, STR, "Scheduler mode; must equal the broker's."]
    stage: Annotated[str, STR, "Hyper stage in force: `h0`, `h1` or `h2`; empty in serial mode."]
    model: Annotated[str, STR, "Name of the loaded model."]
    vocabulary: Annotated[int, UINT, "Token ids are below this."]
    context: Annotated[int, UINT, "Most positions of a job, prompt and answer; why: `info.context_why`."]
    info: Annotated[dict[str, Any], Wire.MAP, "For health: `device`, `dtype`, `row_invariant`, `versions` etc."]
    epoch: Epoch = 0
    model_hash: Annotated[str, STR, "Hex: of weights, tokenizer, chat template; empty unknown."] = ""
    build_hash: Annotated[str, STR, "Hex: of number type, MLX, device and lane; empty unknown."] = ""
    host: Annotated[str, STR, "The running system, the same for all of its processes; empty unknown."] = ""
    born: Annotated[float, FLOAT, "Start of its process in seconds, as its system counts them; 0 unknown."] = 0.0


@dataclass(frozen=True, slots=True)
class WorkerChunk(Message):
    """Tokens drawn since the last one; every token is reported."""

    KIND: ClassVar[int] = 0x22
    id: JobId
    attempt: Attempt
    lease: Lease
    first: First
    n: Count
    ids: TokenIds
    text: Text
    logprobs: LogprobsField = None


@dataclass(frozen=True, slots=True)
class Final(Message):
    """The attempt ended as asked or by cancel."""

    KIND: ClassVar[int] = 0x23
    id: JobId
    attempt: Attempt
    lease: Lease
    finish_reason: Annotated[str, STR, BODY, "`stop`, `length` or `cancelled`."]
    prompt_tokens: Annotated[int, UINT, BODY, "Tokens of the prompt."]
    cached_tokens: Annotated[int, UINT, BODY, "Prompt tokens whose rows were reused."]
    max_tokens_used: Annotated[int, UINT, BODY, "The budget after it was cut to what fits."]
    prefill_s: Annotated[float, FLOAT, BODY, "Seconds from the start of the attempt to its first token."]
    decode_s: Annotated[float, FLOAT, BODY, "Seconds from the first token to the last."]
    sha256: Annotated[str, STR, BODY, "As in DONE."]
    route: Annotated[str, STR, BODY, "`serial_b1`, or the width executor's name."]
    row_invariant: Annotated[bool, BOOL, BODY, "Whether rows are computed alike for every width."]
    speculation: Annotated[dict[str, Any], Wire.MAP, BODY, "As `run.speculation` of DONE."]
    prefix_exact: Annotated[bool, BOOL, BODY, "Whether the reused rows are those a cold run would write."] = True


@dataclass(frozen=True, slots=True)
class Fail(Message):
    """The attempt ended in an error."""

    KIND: ClassVar[int] = 0x24
    id: JobId
    attempt: Attempt
    lease: Lease
    code: Annotated[str, STR, "One of the error codes."]
    message: Annotated[str, STR, "A sentence for people."]
    field: Annotated[str | None, STR, "The offending job field."] = None
    detail: Annotated[dict[str, Any] | None, Wire.MAP, "Numbers behind the message."] = None


@dataclass(frozen=True, slots=True)
class WorkerBeat(Message):
    """Sent on a clock by a thread of its own, over a connection of its own."""

    KIND: ClassVar[int] = 0x25
    worker_id: Annotated[bytes, ID, "As in READY."]
    progress: Annotated[int, UINT, "Grows with every prefill chunk and every token."]
    lease: Annotated[int | None, UINT, "The lease that runs, if any."] = None
    phase: Annotated[str, STR, "`idle`, `prefill` or `decode`."] = "idle"
    done: Annotated[int, UINT, "As in PROGRESS."] = 0
    total: Annotated[int, UINT, "As in PROGRESS."] = 0
    epoch: Epoch = 0
    prefix: Annotated[dict[str, Any] | None, Wire.MAP, "Counts of reuse; see What health tells."] = None
    width: Annotated[int, UINT, "Rows of the latest decode forward, its own speculative ones included."] = 1


@dataclass(frozen=True, slots=True)
class WorkerBye(Message):
    """The worker leaves after the job it runs, if any; answered by QUIET."""

    KIND: ClassVar[int] = 0x26
    worker_id: Annotated[bytes, ID, "As in READY."]


# --- broker to worker


@dataclass(frozen=True, slots=True)
class Run(Message):
    """Runs one attempt; no other RUN follows before its FINAL or FAIL."""

    KIND: ClassVar[int] = 0xA1
    id: JobId
    attempt: Attempt
    lease: Lease
    seed: Annotated[int, UINT, "The seed in force."]
    job: Annotated[bytes, Wire.RAW, BODY, "The job as submitted."]
    h: Headers = None


@dataclass(frozen=True, slots=True)
class Drawn(Message):
    """Comes before the RUN of its lease where earlier attempts drew tokens: the attempt goes on behind them."""

    KIND: ClassVar[int] = 0xA6
    lease: Lease
    ids: TokenIds


@dataclass(frozen=True, slots=True)
class CancelRun(Message):
    """Ends the attempt within one decode step or prefill chunk; FINAL follows."""

    KIND: ClassVar[int] = 0xA2
    lease: Lease


@dataclass(frozen=True, slots=True)
class Quiet(Message):
    """No more jobs will come: the broker stops, or the worker said BYE."""

    KIND: ClassVar[int] = 0xA3


@dataclass(frozen=True, slots=True)
class BrokerBeat(Message):
    """The broker lives. No answer."""

    KIND: ClassVar[int] = 0xA4


@dataclass(frozen=True, slots=True)
class Accepted(Message):
    """The worker is the one worker from here on."""

    KIND: ClassVar[int] = 0xA5
    boot_id: Annotated[bytes, ID, "As in WELCOME."]
    beat_ms: Annotated[int, UINT, "How often the worker must beat."]
    epoch: Epoch = 0
