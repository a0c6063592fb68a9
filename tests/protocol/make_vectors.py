"""Golden vectors of MTX/1, made from mtplx/messages.py: `python tests/protocol/make_vectors.py` writes them.

A client in any language can be checked against the files without a broker. Frames are hex. In `message`,
bytes are {"hex": ...}, and integers above 2^53 are {"uint": "decimal"} since JSON readers round them.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import msgpack

# This checkout's code, whichever is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from protocol.bad_jobs import bad_jobs

from mtplx import messages as m
from mtplx import wire
from mtplx.job import Job
from mtplx.messages import FROM_CLIENT, FROM_WORKER, MAGIC, TO_CLIENT, TO_WORKER, Message, Submit, Wire
from mtplx.trajectory import trajectory_sha256

HERE = Path(__file__).parent / "vectors"
TABLES = {"from_client": FROM_CLIENT, "to_client": TO_CLIENT, "from_worker": FROM_WORKER, "to_worker": TO_WORKER}

ID = bytes(range(16))
BOOT = bytes(range(16, 32))
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SMALL_JOB = Job(prompt="Hi")
LARGE_JOB = Job(
    messages=({"role": "system", "content": ""}, {"role": "user", "content": "Warum ist der Himmel blau? 🌈"}),
    max_tokens=16,
    temperature=0.8,
    top_p=0.95,
    top_k=40,
    min_p=0.05,
    seed=2**64 - 1,
    stop=("\n\n", "END"),
    repetition_penalty=1.1,
    presence_penalty=-0.5,
    frequency_penalty=0.5,
    penalty_window=0,
    logit_bias={0: -1000.0, 17: 2.5},
    logprobs=2,
    speculation="off",
    cache="answers",
    metadata={"team": "blue"},
)

# What each wire type looks like where a field has no better example below.
LEAST: dict[Wire, Any] = {
    Wire.ID: ID,
    Wire.UINT: 0,
    Wire.FLOAT: 0.0,
    Wire.BOOL: False,
    Wire.STR: "",
    Wire.UINTS: (),
    Wire.STRS: (),
    Wire.STR_MAP: {},
    Wire.MAP: {},
    Wire.LOGPROBS: (),
    Wire.RAW: wire.pack_body(SMALL_JOB.to_map()),
}
MOST: dict[Wire, Any] = {
    **LEAST,
    Wire.UINT: 3,
    Wire.FLOAT: 0.25,
    Wire.BOOL: True,
    Wire.STR: "text",
    Wire.UINTS: (1, 2**31 - 1),
    Wire.STRS: ("a", "b"),
    Wire.STR_MAP: {"traceparent": TRACE, "x-team": "blue"},
    Wire.MAP: {"n": 1, "s": "text", "f": 0.5, "l": [1, 2], "m": {"none": None}},
    Wire.LOGPROBS: (((1, -0.25), (7, -1.5)), ((2, -0.125), (9, -2.5))),
    Wire.RAW: wire.pack_body(LARGE_JOB.to_map()),
}
EXAMPLES: dict[str, Any] = {
    "boot_id": BOOT,
    "versions": (1,),
    "ids": (464, 6766),
    "n": 2,
    "text": "The sky 🌈",
    "seed": 2**64 - 1,
    "sha256": trajectory_sha256((464, 6766)),
    "outcome": "length",
    "finish_reason": "length",
    "code": "E_QUEUE_FULL",
    "message": "The line is full (1000 jobs); come back in 1.5 s.",
    "mode": "hyper",
    "stage": "h0",
    "model": "smollm2-135m",
    "route": "serial_b1",
    "phase": "decode",
    "worker": "busy",
    "usage": {"prompt_tokens": 12, "cached_tokens": 0, "completion_tokens": 2},
    "timings": {"queue_wait_s": 0.5, "prefill_s": 0.25, "time_to_first_token_s": 0.75, "decode_s": 0.125},
    "limits": {
        "max_job_bytes": 4194304,
        "queue_jobs": 1000,
        "queue_bytes": 268435456,
        "retain_s": 600,
        "orphan_s": 10,
    },
}


def kind_name(kind: type[Message]) -> str:
    """The name of a kind in the documents: GiveCredit is GIVE_CREDIT."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).upper()


def sample(kind: type[Message], *, full: bool) -> Message:
    """A message with only what must be there, or with everything."""
    values = {}
    for item in wire.fields_of(kind):
        if full:
            values[item.name] = EXAMPLES.get(item.name, MOST[item.wire])
        elif item.required:
            values[item.name] = LEAST[item.wire]
    return kind(**values)


def jsonable(value: Any) -> Any:
    """*value* as the vectors write it."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, list | tuple):
        return [jsonable(one) for one in value]
    if isinstance(value, dict):
        return {key: jsonable(one) for key, one in value.items()}
    if type(value) is int and value > 2**53:
        return {"uint": str(value)}
    return value


def _hex(frames: list[bytes]) -> list[str]:
    return [frame.hex() for frame in frames]


def valid_messages() -> list[dict[str, Any]]:
    """Every kind of every socket, at its smallest and at its fullest."""
    found = []
    for socket, table in TABLES.items():
        for kind in table.values():
            for full in (False, True):
                message = sample(kind, full=full)
                named = {
                    item.name: jsonable(
                        wire.unpack_body(getattr(message, item.name), 4096)
                        if item.wire is Wire.RAW
                        else getattr(message, item.name)
                    )
                    for item in wire.fields_of(kind)
                }
                found.append(
                    {
                        "name": f"{socket}: {kind_name(kind)} {'full' if full else 'minimal'}",
                        "socket": socket,
                        "kind": kind_name(kind),
                        "frames": _hex(wire.encode(message)),
                        "message": named,
                    }
                )
    return found


def _wrong_values(good: Wire) -> list[Any]:
    """Values of other types, and of the right type out of range."""
    wrong: dict[Wire, list[Any]] = {
        Wire.ID: [bytes(15), bytes(17), "0123456789abcdef", 7],
        Wire.UINT: [-1, 1.0, True, "1"],
        Wire.FLOAT: ["1", True, float("nan"), float("inf")],
        Wire.BOOL: [1, "true"],
        Wire.STR: [b"text", 1],
        Wire.UINTS: [1, [1, -1], [1, "2"], [True], {"0": 1}],
        Wire.STRS: ["a", [1], [b"a"]],
        Wire.STR_MAP: [[], {"traceparent": 1}, {"traceparent": b"00"}],
        Wire.MAP: [[], "m"],
        Wire.LOGPROBS: ["", {}, [1], ["ab"], [[[1, -0.5, 2]]], [[["1", -0.5]]], [[[1, float("nan")]]]],
    }
    return [*wrong[good], None]


def wrong_types() -> list[dict[str, Any]]:
    """Each field of each kind with each wrong value."""
    found = []
    for socket, table in TABLES.items():
        for kind in table.values():
            frames = wire.encode(sample(kind, full=False))
            for item in wire.fields_of(kind):
                if item.wire is Wire.RAW:
                    continue
                place = 3 if item.in_body else 2
                for value in _wrong_values(item.wire):
                    values = {**msgpack.unpackb(frames[place]), item.name: value}
                    bad = [*frames[:place], msgpack.packb(values), *frames[place + 1 :]]
                    shown = "null" if value is None else f"{type(value).__name__} {value!r}"
                    found.append(_refused(f"{kind_name(kind)}.{item.name} is {shown}", socket, bad, item.name))
                if item.required:
                    values = msgpack.unpackb(frames[place])
                    del values[item.name]
                    bad = [*frames[:place], msgpack.packb(values), *frames[place + 1 :]]
                    found.append(_refused(f"{kind_name(kind)}.{item.name} is missing", socket, bad, item.name))
    return found


def _refused(name: str, socket: str, frames: list[bytes], field: str, code: str = "E_PROTOCOL") -> dict[str, Any]:
    return {"name": name, "socket": socket, "frames": _hex(frames), "code": code, "field": field}


def wrong_frames() -> list[dict[str, Any]]:
    """Faults below the fields: framing, msgpack, sizes, versions, kinds."""
    submit = wire.encode(Submit(ID, wire.pack_body(SMALL_JOB.to_map())))
    cancel = [MAGIC, b"\x03", b"\x81\xa2id\xc4\x10" + ID]
    body = submit[3]
    start = b"\x82\xa2id\xc4\x10" + ID + b"\xa1x"  # a header with one more key to come, which nobody knows

    def with_header(value: bytes) -> list[bytes]:
        return [MAGIC, b"\x03", value]

    rows: list[tuple[str, list[bytes], str, str]] = [
        ("REQ delimiter", [b"", *cancel], "frames", "E_PROTOCOL"),
        ("no frame", [], "magic", "E_PROTOCOL"),
        ("another protocol", [b"MDPC01", b"\x01"], "magic", "E_PROTOCOL"),
        ("magic without version", [b"MTX", *cancel[1:]], "magic", "E_PROTOCOL"),
        ("another version", [b"MTX\x02", *cancel[1:]], "version", "E_VERSION"),
        ("version zero", [b"MTX\x00", *cancel[1:]], "version", "E_VERSION"),
        ("no kind", [MAGIC], "kind", "E_PROTOCOL"),
        ("kind of two bytes", [MAGIC, b"\x03\x00", cancel[2]], "kind", "E_PROTOCOL"),
        ("unknown kind", [MAGIC, b"\x7f", cancel[2]], "kind", "E_UNKNOWN_KIND"),
        ("kind of the worker's socket", [MAGIC, b"\x21", cancel[2]], "kind", "E_UNKNOWN_KIND"),
        ("no header", [MAGIC, b"\x03"], "frames", "E_PROTOCOL"),
        ("one frame too many", [*cancel, b""], "frames", "E_PROTOCOL"),
        ("no body", submit[:3], "frames", "E_PROTOCOL"),
        ("two bodies", [*submit, body], "frames", "E_PROTOCOL"),
        ("empty header", with_header(b""), "header", "E_PROTOCOL"),
        ("header is a list", with_header(b"\x90"), "header", "E_PROTOCOL"),
        ("header is nil", with_header(b"\xc0"), "header", "E_PROTOCOL"),
        ("header cut short", with_header(cancel[2][:-1]), "header", "E_PROTOCOL"),
        ("trailing byte", with_header(cancel[2] + b"\x00"), "header", "E_PROTOCOL"),
        ("byte that msgpack never uses", with_header(start + b"\xc1"), "header", "E_PROTOCOL"),
        ("bad UTF-8", with_header(start + b"\xa1\xff"), "header", "E_PROTOCOL"),
        ("lone surrogate", with_header(start + b"\xa3\xed\xa0\x80"), "header", "E_PROTOCOL"),
        ("duplicate key", with_header(b"\x82" + (b"\xa2id\xc4\x10" + ID) * 2), "id", "E_PROTOCOL"),
        ("duplicate key in a nested map", with_header(start + b"\x82\xa1k\x01\xa1k\x02"), "k", "E_PROTOCOL"),
        ("integer key", with_header(b"\x82\xa2id\xc4\x10" + ID + b"\x01\x01"), "header", "E_PROTOCOL"),
        ("binary key", with_header(b"\x82\xa2id\xc4\x10" + ID + b"\xc4\x01x\x01"), "key", "E_PROTOCOL"),
        ("ext type", with_header(start + b"\xd4\x05\x00"), "ext", "E_PROTOCOL"),
        ("timestamp", with_header(start + b"\xd6\xff\x00\x00\x00\x00"), "x", "E_PROTOCOL"),
        ("timestamp in lists", with_header(start + b"\x91\x91\xd6\xff\x00\x00\x00\x00"), "x", "E_PROTOCOL"),
        ("lists 2000 deep", with_header(start + b"\x91" * 2000 + b"\xc0"), "header", "E_PROTOCOL"),
        ("maps 2000 deep", with_header(start + b"\x81\xa1k" * 2000 + b"\xc0"), "header", "E_PROTOCOL"),
        ("list that claims 4 Gi items", with_header(start + b"\xdd\xff\xff\xff\xff"), "header", "E_PROTOCOL"),
        ("text that claims 4 GiB", with_header(start + b"\xdb\xff\xff\xff\xff"), "header", "E_PROTOCOL"),
    ]
    found = [_refused(name, "from_client", frames, field, code) for name, frames, field, code in rows]
    large = start + b"\xc6" + (65536).to_bytes(4, "big") + bytes(65536)
    found.append(
        {
            "name": "header above 64 KiB",
            "socket": "from_client",
            "frames": [MAGIC.hex(), "03", {"hex": large[:-65536].hex(), "then_zeros": 65536}],
            "code": "E_TOO_LARGE",
            "field": "header",
        }
    )
    return found


EXCHANGE: list[Message] = [
    m.Hello(versions=(1,), client="example 1"),
    m.Welcome(1, BOOT, 2000, EXAMPLES["limits"], "mtplx-broker 0.1.0"),
    m.Submit(ID, wire.pack_body({"prompt": "Hi there", "max_tokens": 2})),
    m.Admitted(ID, admit_seq=0, position=0, boot_id=BOOT, seed=7),
    m.Started(ID, attempt=1, model="scripted", queue_wait_s=0.25),
    m.Chunk(ID, attempt=1, seq=0, first=0, n=1, ids=(464,), text="Hi"),
    m.Chunk(ID, attempt=1, seq=1, first=1, n=1, ids=(6766,), text=" there"),
    m.Done(
        ID,
        seq=2,
        outcome="length",
        text="Hi there",
        usage=EXAMPLES["usage"],
        timings=EXAMPLES["timings"],
        seed=7,
        sha256=trajectory_sha256((464, 6766)),
        run={
            "model": "scripted",
            "route": "serial_b1",
            "attempt": 1,
            "max_tokens_used": 2,
            "row_invariant": True,
            "prefix_exact": True,
        },
    ),
    m.Ack(ID),
]


def exchange() -> list[dict[str, Any]]:
    """One job from HELLO to ACK."""
    return [
        {
            "from": "producer" if type(message) in FROM_CLIENT.values() else "broker",
            "kind": kind_name(type(message)),
            "frames": _hex(wire.encode(message)),
        }
        for message in EXCHANGE
    ]


def frames_of(vector: dict[str, Any]) -> list[bytes]:
    """The frames of a vector; one may be written as hex and a run of zero bytes."""
    return [
        bytes.fromhex(frame)
        if isinstance(frame, str)
        else bytes.fromhex(frame["hex"]) + bytes(frame["then_zeros"])
        for frame in vector["frames"]
    ]


def unknown_keys() -> list[dict[str, Any]]:
    """Headers and bodies with keys of a later version: they decode as if those were absent."""
    found = []
    for socket, table in TABLES.items():
        for kind in table.values():
            frames = wire.encode(sample(kind, full=False))
            header = {**msgpack.unpackb(frames[2]), "of_later": {"a": [1, None, b"b"]}}
            frames = [*frames[:2], msgpack.packb(header), *frames[3:]]
            found.append(
                {
                    "name": f"{socket}: {kind_name(kind)} with a key of later",
                    "socket": socket,
                    "kind": kind_name(kind),
                    "frames": _hex(frames),
                }
            )
    return found


def hashes() -> list[dict[str, Any]]:
    """Trajectories and their SHA-256."""
    rows: list[tuple[int, ...]] = [(), (0,), (1, 2, 3), (464, 6766, 318, 4171), (2**32 - 1, 0, 2**31)]
    return [{"ids": list(ids), "sha256": trajectory_sha256(ids)} for ids in rows]


def files() -> dict[str, str]:
    """Name and text of every vector file."""
    groups = {
        "valid": valid_messages(),
        "unknown_keys": unknown_keys(),
        "invalid_frames": wrong_frames(),
        "invalid_fields": wrong_types(),
        "invalid_jobs": bad_jobs(),
        "exchange": exchange(),
        "hashes": hashes(),
    }
    return {
        f"{name}.json": "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]\n"
        for name, rows in groups.items()
    }


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    for file, text in files().items():
        (HERE / file).write_text(text)
        sys.stdout.write(f"{HERE / file}: {len(text)} bytes\n")
