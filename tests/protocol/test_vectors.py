"""The golden vectors are what the generator gives, and the codec does what they say."""

import json

import pytest
from protocol import make_vectors

from mtplx import wire
from mtplx.errors import CODES, BadJobError, ProtocolError
from mtplx.job import Job
from mtplx.messages import Submit

FILES = make_vectors.files()
VECTORS = {name.removesuffix(".json"): json.loads(text) for name, text in FILES.items()}


def named(group):
    return [pytest.param(vector, id=vector["name"]) for vector in VECTORS[group]]


def test_the_files_are_what_the_generator_gives():
    kept = {path.name: path.read_text() for path in make_vectors.HERE.iterdir()}
    assert kept == FILES, "run: python tests/protocol/make_vectors.py"


@pytest.mark.parametrize("vector", named("valid"))
def test_a_valid_message_decodes_to_its_fields_and_encodes_to_its_frames(vector):
    frames = make_vectors.frames_of(vector)
    message = wire.decode(frames, make_vectors.TABLES[vector["socket"]])
    assert make_vectors.kind_name(type(message)) == vector["kind"]
    assert wire.encode(message) == frames
    for name, value in vector["message"].items():
        told = getattr(message, name)
        if name == "job":
            told = wire.unpack_body(told, 4096)
        assert json.loads(json.dumps(make_vectors.jsonable(told))) == value


def test_every_kind_of_every_socket_has_a_vector():
    told = {(vector["socket"], vector["kind"]) for vector in VECTORS["valid"]}
    assert told == {
        (socket, make_vectors.kind_name(kind))
        for socket, table in make_vectors.TABLES.items()
        for kind in table.values()
    }


@pytest.mark.parametrize("vector", named("unknown_keys"))
def test_a_key_of_a_later_version_is_ignored(vector):
    message = wire.decode(make_vectors.frames_of(vector), make_vectors.TABLES[vector["socket"]])
    assert message == make_vectors.sample(type(message), full=False)


def refusal(vector):
    with pytest.raises(ProtocolError) as caught:
        wire.decode(make_vectors.frames_of(vector), make_vectors.TABLES[vector["socket"]])
    assert caught.value.code in CODES
    assert str(caught.value)
    assert len(str(caught.value)) < 300
    return caught.value


@pytest.mark.parametrize("vector", named("invalid_frames"))
def test_a_broken_frame_is_refused_with_its_code_and_place(vector):
    error = refusal(vector)
    assert (error.code, error.field) == (vector["code"], vector["field"])


def test_a_wrong_value_is_refused_with_the_name_of_its_field_and_the_id_of_its_job():
    for vector in VECTORS["invalid_fields"]:
        error = refusal(vector)
        assert (error.code, error.field) == (vector["code"], vector["field"]), vector["name"]
        frames = make_vectors.frames_of(vector)
        told = wire.unpack_body(frames[2], wire.MAX_HEADER_BYTES).get("id")
        assert error.job_id == (told if isinstance(told, bytes) and len(told) == 16 else None)


def test_a_wrong_job_is_refused_with_the_name_of_its_field():
    for vector in VECTORS["invalid_jobs"]:
        body = wire.unpack_body(bytes.fromhex(vector["body"]), 1 << 20)
        with pytest.raises(BadJobError) as caught:
            Job.parse(body)
        assert caught.value.field == vector["field"], body
        assert caught.value.field in str(caught.value), body
        assert len(str(caught.value)) < 600


def test_the_jobs_of_the_vectors_are_jobs():
    for vector in VECTORS["valid"]:
        if vector["kind"] in ("SUBMIT", "RUN"):
            message = wire.decode(make_vectors.frames_of(vector), make_vectors.TABLES[vector["socket"]])
            job = Job.parse(wire.unpack_body(message.job, 4096))
            assert wire.pack_body(job.to_map()) == message.job
            assert not isinstance(message, Submit) or job in (make_vectors.SMALL_JOB, make_vectors.LARGE_JOB)


def test_a_trajectory_sha256_is_over_little_endian_words():
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert VECTORS["hashes"][0] == {"ids": [], "sha256": empty}
    # sha256 of the bytes 01 00 00 00 02 00 00 00 03 00 00 00
    assert VECTORS["hashes"][2]["sha256"] == "4636993d3e1da4e9d6b8f87b79e8f7c6d018580d52661950eabc3845c5897a4d"
