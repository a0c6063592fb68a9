"""Prompts on their way in: templates that refuse, templates that are missing, and exactly one begin token."""

from __future__ import annotations

import pytest
from tiny_models import Kind, make_llama

from mtplx.errors import BadJobError
from mtplx.job import Job
from worker.engine.load import load
from worker.text import encode_prompt

BEGIN = 0


def encode(loaded, body):
    return encode_prompt(loaded.tokenizer, Job.parse(body))


def messages(*contents, role="user"):
    return {"messages": [{"role": role, "content": content} for content in contents]}


@pytest.mark.parametrize("body", [{"prompt": "the fox"}, {"prompt": "<s>the fox"}, {"prompt": "<s><s>the fox"}])
def test_a_prompt_gets_exactly_one_begin_token(tiny, body):
    ids = encode(tiny, body)
    assert (ids[0], ids.count(BEGIN)) == (BEGIN, 1)
    assert tiny.tokenizer.decode(ids[1:]) == "the fox"


@pytest.mark.parametrize("template", ["{{ bos_token }}", "", "{{ bos_token }}{{ bos_token }}"])
def test_messages_get_exactly_one_begin_token_whatever_the_template_does(tmp_path, template):
    body = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    loaded = load(make_llama(tmp_path, Kind(template=template + body)))
    ids = encode(loaded, messages("the fox"))
    assert (ids[0], ids.count(BEGIN)) == (BEGIN, 1)


def test_a_tokenizer_without_a_begin_token_gets_none(tmp_path):
    loaded = load(make_llama(tmp_path, Kind(begin=False)))
    assert BEGIN not in encode(loaded, {"prompt": "the fox"})


def test_token_ids_are_taken_as_they_are(tiny):
    assert encode(tiny, {"token_ids": [5, 0, 0, 7]}) == [5, 0, 0, 7]


def test_a_template_that_raises_is_the_callers_error_with_its_message(tiny):
    with pytest.raises(BadJobError, match="no oracle speaks here") as caught:
        encode(tiny, messages("hm", role="oracle"))
    assert (caught.value.field, caught.value.code) == ("messages", "E_BAD_JOB")
    assert encode(tiny, messages("the fox"))[-1] == 3


@pytest.mark.parametrize(
    "fault", ["{{ messages[9].content }}", "{{ messages[0].content + 1 }}", "{{ 1 // 0 }}", "{% if %}"]
)
def test_a_template_that_fails_in_its_own_way_is_the_callers_error_too(tmp_path, fault):
    loaded = load(make_llama(tmp_path, Kind(template=fault)))
    with pytest.raises(BadJobError) as caught:
        encode(loaded, messages("the fox"))
    assert caught.value.field == "messages"


def test_messages_without_a_template_are_refused_by_name(tmp_path):
    loaded = load(make_llama(tmp_path, Kind(template=None)))
    with pytest.raises(BadJobError, match="no chat template") as caught:
        encode(loaded, messages("the fox"))
    assert caught.value.field == "messages"


def test_two_system_messages_and_empty_content_are_up_to_the_template(tiny):
    assert encode(tiny, messages("", "", role="system"))


def test_a_template_that_leaves_nothing_is_refused(tmp_path):
    loaded = load(make_llama(tmp_path, Kind(template="{{ '' }}", begin=False)))
    with pytest.raises(BadJobError, match="no tokens"):
        encode(loaded, messages("the fox"))
