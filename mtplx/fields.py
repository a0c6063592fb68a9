"""What messages are made of: their base, the kinds of field, and the fields that many of them share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated, ClassVar


class Wire(Enum):
    """Wire types; the value is the name used in the documents."""

    ID = "bin 16"
    UINT = "uint"
    FLOAT = "float"
    BOOL = "bool"
    STR = "str"
    UINTS = "[uint]"
    STRS = "[str]"
    STR_MAP = "{str: str}"
    MAP = "{str: any}"
    LOGPROBS = "[[[uint, float]]]"
    RAW = "msgpack"


BODY = "body"
ID, UINT, FLOAT, BOOL, STR = Wire.ID, Wire.UINT, Wire.FLOAT, Wire.BOOL, Wire.STR

JobId = Annotated[bytes, ID, "The job, drawn at random by the producer."]
Attempt = Annotated[int, UINT, "Number of the try on a worker, from 1."]
Lease = Annotated[int, UINT, "The right to run this attempt; messages of an older lease change nothing."]
# A worker's name for what it holds from one READY to the next: what is late is told by it.
Epoch = Annotated[int, UINT, "Number of the READY, counted by the worker from 1; a repeated READY keeps it."]
First = Annotated[int, UINT, "Index of the first token in the answer, from 0."]
Count = Annotated[int, UINT, "How many tokens."]
TokenIds = Annotated[tuple[int, ...], Wire.UINTS, BODY, "Token ids, in order."]
Text = Annotated[str, STR, BODY, "Text these tokens release; empty while it is held back."]
# A list per token, of (id, log-probability) pairs, most likely first.
Logprobs = tuple[tuple[tuple[int, float], ...], ...]
LogprobsField = Annotated[
    Logprobs | None, Wire.LOGPROBS, BODY, "Per token the most likely ids with the log-softmax of the raw logits."
]
Headers = Annotated[dict[str, str] | None, Wire.STR_MAP, "Trace context (`traceparent`, `tracestate`) and `x-*`."]
Credit = Annotated[int | None, UINT, "How many chunks may be sent unasked; absent = no limit."]


@dataclass(frozen=True, slots=True)
class Message:
    """The base of all messages."""

    KIND: ClassVar[int]
