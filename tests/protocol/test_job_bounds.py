"""Ids are held against the loaded model before anything runs: an id beyond it crashes MLX's CPU build."""

import pytest

from mtplx.errors import BadJobError
from mtplx.job import Job, ModelLimits
from mtplx.request import SubmitOptions, request_of

V = 304
LIMITS = ModelLimits(vocabulary=V, context=512)


def refusal(body):
    with pytest.raises(BadJobError) as caught:
        Job.parse(body).check(LIMITS)
    return caught.value


@pytest.mark.parametrize("token", [V, V + 6, 999_999, 2**31 - 1])
def test_a_bias_beyond_the_vocabulary_is_refused_with_both_numbers(token):
    error = refusal({"prompt": "Hi", "logit_bias": {str(token): 1.0}})
    assert error.field == "logit_bias"
    assert error.detail == {"id": token, "vocabulary": V}
    assert str(token) in str(error)
    assert str(V - 1) in str(error)


@pytest.mark.parametrize("token", [V, V + 6, 5_000, 100_000])
def test_a_prompt_id_beyond_the_vocabulary_is_refused(token):
    error = refusal({"token_ids": [1, token]})
    assert error.field == "token_ids"
    assert error.detail == {"id": token, "vocabulary": V}


@pytest.mark.parametrize("body", [{"token_ids": [1, -7]}, {"prompt": "Hi", "logit_bias": {"-1": 1.0}}])
def test_a_negative_id_is_refused_whatever_the_model(body):
    with pytest.raises(BadJobError) as caught:
        Job.parse(body)
    assert caught.value.field in ("token_ids[1]", "logit_bias")


def test_the_last_id_of_the_vocabulary_is_taken():
    Job.parse({"token_ids": [0, V - 1], "logit_bias": {str(V - 1): -1000, "0": 1000}}).check(LIMITS)


@pytest.mark.parametrize(("length", "taken"), [(510, True), (511, True), (512, False), (513, False)])
def test_a_prompt_of_ids_must_leave_one_position_for_the_answer(length, taken):
    body = {"token_ids": [1] * length}
    if taken:
        Job.parse(body).check(LIMITS)
    else:
        error = refusal(body)
        assert error.detail == {"prompt_tokens": length, "context": 512}
        assert str(length) in str(error)
        assert "512" in str(error)


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
@pytest.mark.parametrize("field", ["prompt", "stop", "metadata"])
def test_half_a_surrogate_pair_is_no_text(text, field):
    value = {"prompt": text, "stop": [text], "metadata": {"k": text}}[field]
    body = {"prompt": "Hi"} | {field: value}
    with pytest.raises(BadJobError) as caught:
        Job.parse(body)
    assert caught.value.field.startswith(field)


@pytest.mark.parametrize("key", [7, "7"])
def test_a_wrong_bias_is_named_by_its_id_however_the_key_is_written(key):
    with pytest.raises(BadJobError) as caught:
        Job.parse({"prompt": "Hi", "logit_bias": {key: None}})
    assert caught.value.field == "logit_bias[7]"


@pytest.mark.parametrize("headers", ["x-a", 5, ["x-a"], {1: "a"}, {"x-a": 1}, {"x-a": "\ud800"}])
def test_headers_that_are_no_map_of_texts_are_a_bad_job(headers):
    with pytest.raises(BadJobError) as caught:
        request_of("Hi", {"headers": headers})
    assert caught.value.field == "headers"


@pytest.mark.parametrize("name", ["evil", "Traceparent", "x", ""])
def test_headers_hold_trace_context_and_names_of_ones_own(name):
    SubmitOptions(headers={"traceparent": "00-1-2-01", "tracestate": "a=b", "x-mine": "1"})
    with pytest.raises(BadJobError, match="headers"):
        SubmitOptions(headers={name: "1"})
