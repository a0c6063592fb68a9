"""What a producer hands to `submit`: a job and how to run it, checked before anything is sent."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, Self, TypedDict

from mtplx import wire
from mtplx.errors import BadJobError, JobError
from mtplx.job import Job
from mtplx.messages import Submit

# Far above any answer, and far below the largest number the wire holds.
MAX_CREDIT: Final = 2**53


Asked = Job | Mapping[str, Any] | str | None

TRACE_CONTEXT: Final = ("traceparent", "tracestate")


class SubmitArguments(TypedDict, total=False):
    """The keyword arguments of `submit`: its options, then the fields of a job (see docs/protocol.md)."""

    deadline_s: float | None
    queue_ttl_s: float | None
    finish: bool
    credit: int | None
    headers: Mapping[str, str] | None

    prompt: str
    messages: list[dict[str, str]] | tuple[Mapping[str, str], ...]
    token_ids: list[int] | tuple[int, ...]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    stop: list[str] | tuple[str, ...]
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    penalty_window: int
    logit_bias: Mapping[int, float] | Mapping[str, float]
    logprobs: int
    speculation: Literal["auto", "off"]
    cache: bool | Literal["answers"]
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitOptions:
    """How a job is submitted, apart from what it asks. Times in seconds, credit in chunks.

    Raises:
        BadJobError: naming the option that is wrong.
    """

    deadline_s: float | None = None
    queue_ttl_s: float | None = None
    finish: bool = False
    credit: int | None = None
    headers: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        _check_seconds("deadline_s", self.deadline_s)
        _check_seconds("queue_ttl_s", self.queue_ttl_s)
        if type(self.finish) is not bool:
            raise BadJobError(f"finish must be a bool, not {self.finish!r}.", field="finish")
        if self.credit is not None and (type(self.credit) is not int or not 1 <= self.credit <= MAX_CREDIT):
            # With 0 no chunk may ever come, and that would look like a silent broker.
            raise BadJobError(f"credit must be an integer of at least 1, not {self.credit!r}.", field="credit")
        if not isinstance(self.headers, Mapping | None):
            raise BadJobError(
                f"headers must be a map of strings, not {type(self.headers).__name__}.", field="headers"
            )
        for key, text in (self.headers or {}).items():
            _check_text(key)
            _check_text(text)
            if key not in TRACE_CONTEXT and not key.startswith("x-"):
                raise BadJobError(
                    f"headers has {key!r}; it may hold {', '.join(TRACE_CONTEXT)} and names that begin with x-.",
                    field="headers",
                )

    @classmethod
    def of(cls, arguments: dict[str, Any]) -> Self:
        """The options among *arguments*; they are taken out, and what is left are job fields."""
        return cls(**{item.name: arguments.pop(item.name) for item in fields(cls) if item.name in arguments})


def request_of(
    job: Job | Mapping[str, Any] | str | None, arguments: Mapping[str, Any]
) -> tuple[Job, SubmitOptions]:
    """The checked job and options behind the arguments of `submit`.

    Raises:
        BadJobError: naming the field or option.
    """
    left = dict(arguments)
    options = SubmitOptions.of(left)
    body: dict[str, Any]
    if isinstance(job, Job):
        body = job.to_map()
    elif isinstance(job, Mapping):
        body = dict(job)
    else:
        body = {} if job is None else {"prompt": job}
    return Job.parse({**body, **left}), options


def submit_of(job: Job, options: SubmitOptions, max_job_bytes: int | None) -> Submit:
    """The message for a checked job, under a fresh random id.

    Raises:
        JobError: E_TOO_LARGE, with both sizes in `detail`.
        BadJobError: the headers are too large.
    """
    body = wire.pack_body(job.to_map())
    if max_job_bytes is not None and len(body) > max_job_bytes:
        raise JobError(
            f"The job has {len(body)} bytes; this broker takes {max_job_bytes} (--max-job-bytes).",
            code="E_TOO_LARGE",
            field="body",
            detail={"bytes": len(body), "limit": max_job_bytes},
        )
    message = Submit(
        id=secrets.token_bytes(16),
        job=body,
        credit=options.credit,
        deadline_ms=_ms(options.deadline_s),
        queue_ttl_ms=_ms(options.queue_ttl_s),
        finish=options.finish,
        h=dict(options.headers) if options.headers else None,
    )
    size = len(wire.encode(message)[2])
    if size > wire.MAX_HEADER_BYTES:
        raise BadJobError(
            f"With these headers the message's own header has {size} bytes; {wire.MAX_HEADER_BYTES} travel.",
            field="headers",
        )
    return message


def _check_seconds(name: str, seconds: float | None) -> None:
    if seconds is None:
        return
    if type(seconds) not in (int, float) or not 0 < seconds < wire.MAX_UINT / 1000:
        raise BadJobError(f"{name} must be a number above 0, not {seconds!r}.", field=name)


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise BadJobError(f"headers must be strings, not {type(text).__name__}.", field="headers")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadJobError("headers have a lone surrogate, which is not text.", field="headers") from None


def _ms(seconds: float | None) -> int | None:
    return None if seconds is None else max(1, round(seconds * 1000))
