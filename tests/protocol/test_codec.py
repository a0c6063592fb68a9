"""Properties of the codec: messages round-trip, and any other bytes end in one named refusal."""

import dataclasses
import random
import time

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol import make_vectors

from mtplx import wire
from mtplx.errors import CODES, BadJobError, ProtocolError
from mtplx.job import PROMPT_FIELDS, Job, ModelLimits
from mtplx.messages import FROM_CLIENT, FROM_WORKER, MAGIC, TO_CLIENT, TO_WORKER, Wire

TABLES = [FROM_CLIENT, TO_CLIENT, FROM_WORKER, TO_WORKER]
LIMITS = ModelLimits(vocabulary=1000, context=64)
VALID = [make_vectors.frames_of(vector) for vector in make_vectors.valid_messages()]

uints = st.integers(0, 2**64 - 1)
finite = st.floats(-1e299, 1e299)
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
# What msgpack can say and MTX/1 cannot: ext types, timestamps, keys that are no strings.
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text()
    | st.binary()
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=4))
    | st.builds(msgpack.Timestamp, st.integers(0, 2**34), st.integers(0, 10**9 - 1)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=8) | st.integers(-5, 5) | st.binary(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)
BY_TYPE = {
    Wire.ID: st.binary(min_size=16, max_size=16),
    Wire.UINT: uints,
    Wire.FLOAT: finite,
    Wire.BOOL: st.booleans(),
    Wire.STR: st.text(),
    Wire.UINTS: st.lists(uints, max_size=5).map(tuple),
    Wire.STRS: st.lists(st.text(), max_size=5).map(tuple),
    Wire.STR_MAP: st.dictionaries(st.text(), st.text(), max_size=4),
    Wire.MAP: st.dictionaries(st.text(), plain, max_size=4),
    Wire.LOGPROBS: st.lists(st.lists(st.tuples(uints, finite), max_size=3).map(tuple), max_size=3).map(tuple),
    Wire.RAW: st.binary(max_size=64),
}


def messages_of(table):
    def of(kind):
        fields = {}
        for item in wire.fields_of(kind):
            some = BY_TYPE[item.wire]
            fields[item.name] = some if item.required else st.just(item.default) | some
        return st.builds(kind, **fields)

    return st.one_of([of(kind) for kind in table.values()])


@pytest.mark.parametrize("table", TABLES, ids=["from client", "to client", "from worker", "to worker"])
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_every_message_survives_the_wire(table, data):
    message = data.draw(messages_of(table))
    frames = wire.encode(message)
    assert wire.decode(frames, table) == message
    assert wire.encode(wire.decode(frames, table)) == frames


def decode_or_refuse(frames):
    """Decoding does one of two things; what else it does is a fault of the codec."""
    for table in TABLES:
        refusal = None
        try:
            message = wire.decode(frames, table)
        except ProtocolError as error:
            refusal = error
        if refusal is None:
            assert type(message) in table.values()
            # A message accepted is one that can be said: relays encode what they decoded.
            assert wire.encode(message)
            continue
        assert refusal.code in CODES
        assert refusal.field is not None
        assert len(str(refusal)) < 300
        assert refusal.job_id is None or len(refusal.job_id) == 16


def parse_or_refuse(body):
    """A body is a job, or refused by name."""
    refusal = None
    try:
        job = Job.parse(wire.unpack_body(body, 4096))
        job.check(LIMITS)
    except (ProtocolError, BadJobError) as error:
        refusal = error
    if refusal is None:
        assert Job.parse(wire.unpack_body(wire.pack_body(job.to_map()), 1 << 20)) == job
        return
    assert refusal.code in ("E_PROTOCOL", "E_TOO_LARGE", "E_BAD_JOB")
    assert refusal.field is not None
    assert str(refusal)


@given(st.lists(st.binary(max_size=40), max_size=6))
@settings(max_examples=300, deadline=None)
def test_any_frames_decode_or_are_refused(frames):
    decode_or_refuse(frames)


@given(st.integers(0, 255), anything, anything, st.integers(2, 5))
@settings(max_examples=500, deadline=None)
def test_any_msgpack_behind_a_good_start_decodes_or_is_refused(kind, header, body, count):
    decode_or_refuse([MAGIC, bytes([kind]), msgpack.packb(header), msgpack.packb(body), b""][:count])


@given(st.sampled_from(VALID), st.data())
@settings(max_examples=500, deadline=None)
def test_a_valid_message_with_one_field_of_any_value_decodes_or_is_refused(frames, data):
    place = data.draw(st.integers(2, len(frames) - 1))
    values = msgpack.unpackb(frames[place])
    values[data.draw(st.sampled_from([*values, "of_later"]))] = data.draw(anything)
    decode_or_refuse([*frames[:place], msgpack.packb(values), *frames[place + 1 :]])


@given(st.sampled_from(VALID), st.randoms(use_true_random=False))
@settings(max_examples=1000, deadline=None)
def test_a_valid_message_with_wounds_decodes_or_is_refused(frames, draw: random.Random):
    frames = list(frames)
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(len(frames))
        frame = bytearray(frames[place])
        match draw.randrange(4):
            case 0 if frame:
                frame[draw.randrange(len(frame))] = draw.randrange(256)
            case 1:
                del frame[draw.randint(0, len(frame)) :]
            case 2:
                frame[draw.randint(0, len(frame)) : 0] = draw.randbytes(3)
            case 3:
                other = draw.choice(draw.choice(VALID))
                frame[draw.randint(0, len(frame)) :] = other[draw.randint(0, len(other)) :]
        frames[place] = bytes(frame)
    decode_or_refuse(frames)
    if len(frames) > 3:
        parse_or_refuse(frames[3])


JOB_FIELDS = [field.name for field in dataclasses.fields(Job)]


@given(st.dictionaries(st.sampled_from([*JOB_FIELDS, "n", ""]), anything, max_size=4))
@settings(max_examples=500, deadline=None)
def test_any_map_is_a_job_or_refused_by_name(body):
    parse_or_refuse(msgpack.packb(body))


@given(st.sampled_from(PROMPT_FIELDS), st.sampled_from(JOB_FIELDS), anything)
@settings(max_examples=500, deadline=None)
def test_a_job_with_one_field_of_any_value_is_a_job_or_refused_by_name(prompt, field, value):
    good = {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}], "token_ids": [1, 2]}[prompt]
    parse_or_refuse(msgpack.packb({prompt: good, field: value}))


jobs = st.builds(
    Job,
    prompt=st.text(min_size=1),
    max_tokens=st.integers(1, 2**31 - 1),
    temperature=st.just(0.0) | st.floats(1e-4, 100),
    top_p=st.floats(1e-9, 1),
    top_k=st.integers(0, 2**31 - 1),
    min_p=st.floats(0, 1),
    seed=st.none() | uints,
    stop=st.lists(st.text(min_size=1, max_size=256), max_size=16).map(tuple),
    repetition_penalty=st.floats(1e-3, 100),
    presence_penalty=st.floats(-100, 100),
    frequency_penalty=st.floats(-100, 100),
    penalty_window=st.integers(0, 2**31 - 1),
    logit_bias=st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-1000, 1000), max_size=5),
    logprobs=st.integers(0, 20),
    speculation=st.sampled_from(["auto", "off"]),
    cache=st.sampled_from([True, False, "answers"]),
    metadata=st.dictionaries(st.text(min_size=1, max_size=20), st.text(max_size=20), max_size=5),
)


@given(jobs)
@settings(max_examples=200, deadline=None)
def test_every_job_survives_the_wire(job):
    assert Job.parse(wire.unpack_body(wire.pack_body(job.to_map()), 1 << 20)) == job


@pytest.mark.parametrize("items", [[1] * 70_000, [1] * 69_999 + [msgpack.Timestamp(0)]])
def test_a_timestamp_is_found_among_many_items(items):
    body = msgpack.packb({"token_ids": items})
    if items[-1] == 1:
        assert wire.unpack_body(body, 1 << 20) == {"token_ids": items}
    else:
        with pytest.raises(ProtocolError) as caught:
            wire.unpack_body(body, 1 << 20)
        assert caught.value.field == "token_ids"


def test_a_key_that_stands_twice_is_found_in_one_pass_however_late() -> None:
    """160,000 keys once took minutes; now the time grows with their number alone."""
    pairs = b"".join(msgpack.packb(f"k{n:06d}") + b"\x01" for n in range(160_000))
    body = b"\xdf" + (160_001).to_bytes(4, "big") + pairs + msgpack.packb("k159999") + b"\x02"

    began = time.process_time()
    with pytest.raises(ProtocolError, match="twice") as caught:
        wire.unpack_body(body, wire.MAX_FRAME_BYTES)

    assert caught.value.field == "k159999"
    assert time.process_time() - began < 5


@pytest.mark.parametrize("inner", [{}, []], ids=["maps", "lists"])
def test_a_job_of_a_million_containers_is_refused_by_name_without_looking_at_them_all(inner: object) -> None:
    body = msgpack.packb({"messages": [inner] * 1_000_000})

    began = time.process_time()
    with pytest.raises(ProtocolError, match="Too many"):
        wire.unpack_body(body, wire.MAX_FRAME_BYTES)

    assert time.process_time() - began < 5
