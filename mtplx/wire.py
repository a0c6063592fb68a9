"""Bytes to messages and back: MTX/1 frames, decoded strictly.

    frame 0   "MTX" + version byte
    frame 1   one kind byte
    frame 2   msgpack map, string keys, at most 64 KiB; unknown keys are ignored
    frame 3   msgpack body, for the kinds that have one

Every fault in the bytes of a peer becomes one ProtocolError that names the field; nothing else escapes.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, get_type_hints

import msgpack

from mtplx.errors import ProtocolError
from mtplx.fields import BODY, Wire
from mtplx.messages import MAGIC, VERSION, Message

MAX_HEADER_BYTES: Final = 64 * 1024
# A frame above this ends the connection inside libzmq; limits below it can be answered.
MAX_FRAME_BYTES: Final = 16 * 1024 * 1024
MAX_UINT: Final = 2**64 - 1
# Maps and lists in one value. A whole coalesced chunk with log-probabilities has about 90,000; a job has one
# for each message, and each costs the broker's loop about a microsecond.
MAX_CONTAINERS: Final = 200_000
MAX_JOB_CONTAINERS: Final = 20_000

_MSGPACK_ERRORS = (ValueError, msgpack.exceptions.UnpackException)
_MISSING: Final = object()
_LOOKED_INTO: Final = frozenset((list, msgpack.Timestamp))


class Field(NamedTuple):
    """One key of a message: what the codec and the documents need to know of it."""

    name: str
    wire: Wire
    in_body: bool
    default: Any
    meaning: str

    @property
    def required(self) -> bool:
        """True where the key must be present."""
        return self.default is _MISSING


def fields_of(kind: type[Message]) -> tuple[Field, ...]:
    """The wire fields of a message class, in order of definition."""
    hints = get_type_hints(kind, include_extras=True)
    found = []
    for item in dataclasses.fields(kind):
        notes = hints[item.name].__metadata__
        default = _MISSING if item.default is dataclasses.MISSING else item.default
        found.append(Field(item.name, notes[0], BODY in notes, default, notes[-1]))
    return tuple(found)


def encode(message: Message) -> list[bytes]:
    """The frames of *message*, without the routing id."""
    plan = _plan(type(message))
    frames = [MAGIC, plan.kind, _pack(message, plan.header)]
    if plan.raw is not None:
        frames.append(getattr(message, plan.raw))
    elif plan.body:
        frames.append(_pack(message, plan.body))
    return frames


def decode(frames: Sequence[bytes], kinds: Mapping[int, type[Message]]) -> Message:
    """The message in *frames*, which a peer of the socket with table *kinds* sent.

    Raises:
        ProtocolError: code E_PROTOCOL, E_VERSION, E_UNKNOWN_KIND or E_TOO_LARGE. `job_id` is set
            where the header still told the job. `speaks_mtx` tells whether an answer makes sense.
    """
    plan = _plan(_kind_of(frames, kinds))
    wanted = 4 if plan.raw is not None or plan.body else 3
    header = _unpack_map(frames[2], "header", MAX_HEADER_BYTES) if len(frames) > 2 else {}
    try:
        if len(frames) != wanted:
            raise ProtocolError(
                f"This kind has {wanted} frames after the routing id, not {len(frames)}.", field="frames"
            )
        values = _values(plan.read_header, header)
        if plan.raw is not None:
            values[plan.raw] = frames[3]
        elif plan.body:
            values |= _values(plan.read_body, _unpack_map(frames[3], "body", MAX_FRAME_BYTES))
    except ProtocolError as error:
        told = header.get("id")
        error.job_id = told if type(told) is bytes and len(told) == 16 else None
        raise
    return plan.build(**values)


def unpack_body(data: bytes, limit: int) -> dict[str, Any]:
    """The map in an opaque body (the job of SUBMIT and RUN), decoded as strictly as a header."""
    return _unpack_map(data, "body", limit, MAX_JOB_CONTAINERS)


def pack_body(body: Mapping[str, Any]) -> bytes:
    """The bytes of an opaque body."""
    return bytes(msgpack.packb(body))


def speaks_mtx(frames: Sequence[bytes]) -> bool:
    """True where the sender can read an answer: it said MTX, or is a REQ socket that may be told."""
    return any(frame[:3] == MAGIC[:3] for frame in frames[:2])


# Name, what reads it, and its default, looked up once for each kind and not for each message.
_Reading = tuple[str, Callable[[str, Any], Any], Any]


class _Plan(NamedTuple):
    kind: bytes
    build: Callable[..., Message]
    header: tuple[Field, ...]
    body: tuple[Field, ...]
    raw: str | None
    read_header: tuple[_Reading, ...]
    read_body: tuple[_Reading, ...]


_PLANS: dict[type[Message], _Plan] = {}


def _plan(kind: type[Message]) -> _Plan:
    plan = _PLANS.get(kind)
    if plan is None:
        plan = _PLANS[kind] = _plan_of(kind)
    return plan


def _plan_of(kind: type[Message]) -> _Plan:
    known = fields_of(kind)
    raw = next((item.name for item in known if item.wire is Wire.RAW), None)
    header = tuple(item for item in known if not item.in_body)
    body = tuple(item for item in known if item.in_body and item.wire is not Wire.RAW)
    return _Plan(bytes([kind.KIND]), kind, header, body, raw, _readings(header), _readings(body))


def _readings(items: tuple[Field, ...]) -> tuple[_Reading, ...]:
    return tuple((item.name, _READERS[item.wire], item.default) for item in items)


def _kind_of(frames: Sequence[bytes], kinds: Mapping[int, type[Message]]) -> type[Message]:
    if frames and not frames[0]:
        raise ProtocolError("An empty first frame: use a DEALER socket, not REQ.", field="frames")
    if not frames or frames[0][:3] != MAGIC[:3] or len(frames[0]) != 4:
        raise ProtocolError("The first frame is not MTX and a version byte.", field="magic")
    if frames[0][3] != VERSION:
        raise ProtocolError(
            f"Version {frames[0][3]} is not spoken here; speak version {VERSION}.",
            field="version",
            code="E_VERSION",
            detail={"supported": [VERSION]},
        )
    if len(frames) < 2 or len(frames[1]) != 1:
        raise ProtocolError("The second frame must be one kind byte.", field="kind")
    kind = kinds.get(frames[1][0])
    if kind is None:
        raise ProtocolError(
            f"Kind 0x{frames[1][0]:02x} is not known on this socket.", field="kind", code="E_UNKNOWN_KIND"
        )
    return kind


def _pack(message: Message, items: tuple[Field, ...]) -> bytes:
    values = {}
    for item in items:
        value = getattr(message, item.name)
        if value is not None and value is not item.default:
            values[item.name] = value
    return bytes(msgpack.packb(values))


def _unpack_map(data: bytes, place: str, limit: int, containers: int = MAX_CONTAINERS) -> dict[str, Any]:
    if len(data) > limit:
        raise ProtocolError(
            f"The {place} has {len(data)} bytes; at most {limit} are taken.",
            field=place,
            code="E_TOO_LARGE",
            detail={"bytes": len(data), "limit": limit},
        )
    try:
        value = msgpack.unpackb(
            data,
            strict_map_key=True,
            object_pairs_hook=_Strict(containers).pairs,
            ext_hook=_refuse_ext,
            use_list=True,
        )
    except ProtocolError:
        raise
    except _MSGPACK_ERRORS as error:
        why = str(error) or type(error).__name__
        raise ProtocolError(f"The {place} is not one valid msgpack value: {why}"[:200], field=place) from None
    if type(value) is not dict:
        raise ProtocolError(f"The {place} must be a map.", field=place)
    return value


class _Strict:
    """The hooks of one decoding; `left` bounds how many maps and lists it may hold, and so its time."""

    __slots__ = ("left",)

    def __init__(self, containers: int) -> None:
        self.left = containers

    def pairs(self, pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
        """A map's pairs as a dict, with string keys that stand once."""
        self._count(1)
        built = dict(pairs)
        for key, value in built.items():
            if type(key) is not str:
                raise ProtocolError("Map keys must be strings.", field="key")
            if type(value) in _LOOKED_INTO:
                self._look_into(key, value)
        if len(built) != len(pairs):
            counted = Counter(key for key, _ in pairs)
            twice = next(key for key, times in counted.items() if times > 1)
            raise ProtocolError(f"The key {twice[:64]} stands twice.", field=twice[:64])
        return built

    def _look_into(self, key: str, value: Any) -> None:
        # msgpack decodes ext type -1 by itself, past ext_hook.
        open_lists = [value]
        while open_lists:
            item = open_lists.pop()
            if type(item) is msgpack.Timestamp:
                _refuse_ext(-1, b"", key)
            # A prompt may be millions of ids: only the kinds of items are looked at one by one.
            if set(map(type, item)) & _LOOKED_INTO:
                inner = [one for one in item if type(one) in _LOOKED_INTO]
                self._count(len(inner))
                open_lists.extend(inner)

    def _count(self, containers: int) -> None:
        self.left -= containers
        if self.left < 0:
            raise ProtocolError("Too many maps and lists in one message.", field="body")


def _refuse_ext(code: int, _data: bytes, key: str = "ext") -> Any:
    raise ProtocolError(f"Ext type {code}: only plain msgpack types are taken.", field=key[:64])


def _values(readings: tuple[_Reading, ...], told: Mapping[str, Any]) -> dict[str, Any]:
    values = {}
    for name, read, default in readings:
        if name in told:
            values[name] = read(name, told[name])
        elif default is _MISSING:
            raise ProtocolError(f"The key {name} is missing.", field=name)
        else:
            values[name] = default
    return values


def _wrong(name: str, wire: Wire) -> ProtocolError:
    return ProtocolError(f"The key {name} must be {wire.value}.", field=name)


def _id(name: str, value: Any) -> bytes:
    if type(value) is not bytes or len(value) != 16:
        raise _wrong(name, Wire.ID)
    return value


def _uint(name: str, value: Any) -> int:
    if type(value) is not int or value < 0:
        raise _wrong(name, Wire.UINT)
    return value


def _float(name: str, value: Any) -> float:
    # NaN and infinities are no measurement; they fail both comparisons.
    if type(value) not in (float, int) or not -1e300 < value < 1e300:
        raise _wrong(name, Wire.FLOAT)
    return float(value)


def _exactly(kind: type, wire: Wire) -> Callable[[str, Any], Any]:
    def read(name: str, value: Any) -> Any:
        if type(value) is not kind:
            raise _wrong(name, wire)
        return value

    return read


def _list_of(kind: type, wire: Wire) -> Callable[[str, Any], tuple[Any, ...]]:
    def read(name: str, value: Any) -> tuple[Any, ...]:
        if type(value) is not list or any(type(one) is not kind for one in value):
            raise _wrong(name, wire)
        if kind is int and value and min(value) < 0:
            raise _wrong(name, wire)
        return tuple(value)

    return read


def _str_map(name: str, value: Any) -> dict[str, str]:
    if type(value) is not dict or any(type(one) is not str for one in value.values()):
        raise _wrong(name, Wire.STR_MAP)
    return value


def _logprobs(name: str, value: Any) -> tuple[tuple[tuple[int, float], ...], ...]:
    if type(value) is not list:
        raise _wrong(name, Wire.LOGPROBS)
    for token in value:
        if type(token) is not list or any(type(pair) is not list or len(pair) != 2 for pair in token):
            raise _wrong(name, Wire.LOGPROBS)
    return tuple(tuple((_uint(name, token), _float(name, logprob)) for token, logprob in one) for one in value)


_READERS: dict[Wire, Callable[[str, Any], Any]] = {
    Wire.ID: _id,
    Wire.UINT: _uint,
    Wire.FLOAT: _float,
    Wire.BOOL: _exactly(bool, Wire.BOOL),
    Wire.STR: _exactly(str, Wire.STR),
    Wire.UINTS: _list_of(int, Wire.UINTS),
    Wire.STRS: _list_of(str, Wire.STRS),
    Wire.STR_MAP: _str_map,
    Wire.MAP: _exactly(dict, Wire.MAP),
    Wire.LOGPROBS: _logprobs,
}
