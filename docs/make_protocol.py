# ruff: noqa: INP001 - a script beside the page it fills
"""Fills the tables of docs/protocol.md from the code: `python docs/make_protocol.py`.

What stands between `<!-- begin NAME -->` and `<!-- end NAME -->` is replaced; the rest is written by hand.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from dataclasses import fields
from pathlib import Path

import msgpack

# This checkout's code, whichever is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mtplx import wire
from mtplx.errors import CODES, BadJobError
from mtplx.job import PROMPT_FIELDS, Job
from mtplx.messages import FROM_CLIENT, FROM_WORKER, TO_CLIENT, TO_WORKER, Message, Wire

PAGE = Path(__file__).parent / "protocol.md"
EXCHANGE = PAGE.parent.parent / "tests" / "protocol" / "vectors" / "exchange.json"

JOB_MEANINGS = {
    "prompt": "Text to go on from, tokenized as it is.",
    "messages": "A conversation, put through the model's chat template. `content` may be empty, `role` may not.",
    "token_ids": "The prompt as token ids of this model.",
    "max_tokens": "Most tokens drawn; cut to what context and KV memory leave (`run.max_tokens_used` in DONE).",
    "temperature": "0 takes the most likely token.",
    "top_p": "Keeps the most likely tokens that together reach this probability; 1 keeps all.",
    "top_k": "Keeps this many tokens; 0 keeps all.",
    "min_p": "Keeps tokens at least this likely relative to the most likely one; 0 keeps all.",
    "seed": "Decides all draws. Absent: the broker draws one; ADMITTED and DONE tell it.",
    "stop": "The text ends before the first of these. At most 16 of at most 256 characters.",
    "repetition_penalty": "Divides or multiplies the logits of ids seen; 1 is off.",
    "presence_penalty": "Subtracted once from the logits of ids seen.",
    "frequency_penalty": "Subtracted from the logits of ids seen, times their count.",
    "penalty_window": "The penalties look at this many last ids of prompt and answer; 0 is all.",
    "logit_bias": "Added to the logits. Keys are ids in decimal, values from -1000 to 1000; at most 1024.",
    "logprobs": "Reports this many most likely ids per token; 0 is off.",
    "speculation": "`off` draws without drafts. The text is the same.",
    "cache": "Reuse of rows of earlier prompts: true, also of answers (`answers`), or nothing is kept (false).",
    "metadata": "The producer's own notes, carried with the job. At most 16 entries, 4096 bytes in all.",
}


def kind_name(kind: type[Message]) -> str:
    """The name of a kind on this page: GiveCredit is GIVE_CREDIT."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).upper()


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def kinds(table: dict[int, type[Message]]) -> str:
    """One section for each kind of a socket's table."""
    return "\n\n".join(_kind(kind) for kind in table.values())


def _kind(kind: type[Message]) -> str:
    known = wire.fields_of(kind)
    count = 4 if any(item.in_body for item in known) else 3
    rows = [
        [f"`{item.name}`", "body" if item.in_body else "header", item.wire.value, _presence(item), item.meaning]
        for item in known
    ]
    raw = next((item.name for item in known if item.wire is Wire.RAW), None)
    note = f"\n\nThe body frame is `{raw}` itself, not a map around it." if raw else ""
    shown = _table(["key", "in", "type", "if absent", "meaning"], rows) if rows else "An empty header map."
    return f"#### {kind_name(kind)} `0x{kind.KIND:02x}`, {count} frames\n\n{inspect.getdoc(kind)}{note}\n\n{shown}"


def _presence(item: wire.Field) -> str:
    if item.required:
        return "refused"
    return "none" if item.default is None else f"`{json.dumps(item.default)}`"


def job_fields() -> str:
    """The fields of a job; the rule is what the refusal of a wrong value says."""
    rows = []
    for item in fields(Job):
        default = item.default if item.default_factory is not dict else {}
        absent = (
            "-" if item.name in PROMPT_FIELDS else ("drawn" if default is None else f"`{json.dumps(default)}`")
        )
        rows.append([f"`{item.name}`", _rule(item.name), absent, JOB_MEANINGS[item.name]])
    return _table(["field", "must be", "if absent", "meaning"], rows)


def _rule(name: str) -> str:
    body = {name: None} if name in PROMPT_FIELDS else {"prompt": "Hi", name: None}
    try:
        Job.parse(body)
    except BadJobError as error:
        rule = error.message.removeprefix(f"{name} must be ").removesuffix(", not null.")
        return rule.replace("'", '"').replace("True", "true").replace("False", "false")
    raise AssertionError(f"null was taken for {name}")


def codes() -> str:
    """The closed list of error codes."""
    rows = [
        [f"`{name}`", code.at_fault, "yes" if code.retryable else "no", code.meaning]
        for name, code in CODES.items()
    ]
    return _table(["code", "at fault", "retryable", "meaning"], rows)


def example() -> str:
    """The exchange of the golden vectors, frame by frame."""
    lines = []
    for vector in json.loads(EXCHANGE.read_text()):
        lines.append(f"{vector['from']:<8}  {vector['kind']}")
        for index, frame in enumerate(map(bytes.fromhex, vector["frames"])):
            lines += [f"    {index}  {frame.hex()}"] + ([f"       {_told(frame)}"] if index > 1 else [])
    return "```text\n" + "\n".join(lines) + "\n```"


def _told(frame: bytes) -> str:
    values = msgpack.unpackb(frame)
    return json.dumps({key: one.hex() if isinstance(one, bytes) else one for key, one in values.items()})


def sections() -> dict[str, str]:
    """The generated sections by name."""
    return {
        "from_client": kinds(FROM_CLIENT),
        "to_client": kinds(TO_CLIENT),
        "from_worker": kinds(FROM_WORKER),
        "to_worker": kinds({kind: one for kind, one in TO_WORKER.items() if kind not in TO_CLIENT}),
        "job_fields": job_fields(),
        "codes": codes(),
        "example": example(),
    }


def filled(page: str) -> str:
    """*page* with every generated section replaced.

    Raises:
        ValueError: a section of the code has no place on the page.
    """
    for name, text in sections().items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        before, found, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"The page has no place for {name}.")
        page = f"{before}{begin}\n\n{text}\n\n{end}{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
    sys.stdout.write(f"{PAGE} written\n")
