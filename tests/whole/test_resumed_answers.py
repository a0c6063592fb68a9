"""The real worker goes on with an answer that another worker process began: the same ids, the same text, the same end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import load_tokenizer
from protocol.bare_broker import BareBroker
from tiny_models import make_llama, make_tiny
from whole.harness import Program

from mtplx import messages as m
from mtplx.job import Job

LOAD_S = 60.0
NO_END = {"1": -1000.0}
PROMPT = {"prompt": "the quick brown fox", "max_tokens": 20, "logit_bias": NO_END}
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4}
# Three bytes that follow each other for ever: each is the likeliest one that was not among the last two.
BYTES = {"prompt": "the", "max_tokens": 24, "repetition_penalty": 100.0, "penalty_window": 2}
JOBS: dict[str, dict[str, Any]] = {
    "greedy": PROMPT,
    "sampled": {**PROMPT, "temperature": 0.9, "top_p": 0.95, "min_p": 0.01, "top_k": 50},
    "penalties over a window": {**PROMPT, **PENALTIES, "penalty_window": 5},
    "penalties over all": {**PROMPT, **PENALTIES, "penalty_window": 0, "temperature": 0.8},
    "logprobs": {**PROMPT, "temperature": 0.7, "logprobs": 3},
    "no reuse": {**PROMPT, "cache": False},
    "drafts off": {**PROMPT, "speculation": "off"},
    "euros": BYTES,
    "euros until a stop": {**BYTES, "stop": ["€€€€€"]},
    "euros until a stop that never comes": {**BYTES, "stop": ["€€€x", "x"], "temperature": 0.5},
}


class Rig:
    """A worker process before a broker that the test speaks for."""

    def __init__(self, folder: Path, model: Path, *flags: str) -> None:
        folder.mkdir(mode=0o700)
        self.broker = BareBroker(f"ipc://{folder}/back.sock")
        self.worker = Program("worker", "--run-dir", str(folder), "--model", str(model), *flags)
        assert self.broker.socket.poll(LOAD_S * 1000), self.worker.said()
        self.ready = self.broker.welcome()
        self.lease = 0

    def answer(self, job: dict[str, Any], drawn: tuple[int, ...] = ()) -> tuple[list[m.WorkerChunk], m.Final]:
        self.lease += 1
        self.broker.run(Job.parse(job), self.lease, attempt=1 + bool(drawn), drawn=drawn, seed=1234)
        chunks, final = self.broker.answer()
        assert isinstance(final, m.Final), final
        return chunks, final

    def close(self) -> None:
        self.worker.close()
        self.broker.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def rigs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Rig, Rig]]:
    """The worker that answers, and the one that goes on."""
    folder = tmp_path_factory.mktemp("runs")
    both = Rig(folder / "a", model), Rig(folder / "b", model)
    yield both
    for rig in both:
        rig.close()


def with_euros(job: dict[str, Any], model: Path) -> dict[str, Any]:
    """*job* with the bytes of a character made likely, the first one most of all."""
    if "logit_bias" in job:
        return job
    tokenizer = load_tokenizer(model)
    ids = tokenizer.encode("€", add_special_tokens=False)
    assert len(ids) == 3, "a byte each"
    return {**job, "logit_bias": {str(token): 900.0 - 300 * place for place, token in enumerate(ids)}}


def tokens(chunks: list[m.WorkerChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.ids]


def parts(chunks: list[m.WorkerChunk]) -> list[tuple[int, tuple[int, ...], str, object]]:
    return [(chunk.first, chunk.ids, chunk.text, chunk.logprobs) for chunk in chunks]


def check_every_start(first: Rig, second: Rig, job: dict[str, Any]) -> tuple[list[int], str]:
    """Resume after each of the answer's tokens; returns ids and text of the whole."""
    chunks, whole = first.answer(job)
    ids = tokens(chunks)
    for count in range(1, len(ids) + 1):
        rest, final = second.answer(job, drawn=tuple(ids[:count]))
        assert parts(rest) == parts(chunks[count:]), f"after {count} of {len(ids)}"
        assert (final.sha256, final.finish_reason) == (whole.sha256, whole.finish_reason)
        assert final.max_tokens_used == whole.max_tokens_used
    return ids, "".join(chunk.text for chunk in chunks)


@pytest.mark.parametrize("name", JOBS)
def test_an_answer_resumed_after_any_of_its_tokens_goes_on_as_if_nothing_had_happened(
    rigs: tuple[Rig, Rig], model: Path, name: str
) -> None:
    ids, text = check_every_start(*rigs, with_euros(JOBS[name], model))
    assert len(ids) >= 15
    if name.startswith("euros"):
        assert text == {"euros until a stop": ""}.get(name, "€" * 8)


def test_a_stop_string_that_began_before_the_loss_is_completed_after_it(
    rigs: tuple[Rig, Rig], model: Path
) -> None:
    """The stop string is cut out of the middle of an answer, over several tokens."""
    plain = {**PROMPT, "max_tokens": 40}
    chunks, _ = rigs[0].answer(plain)
    text = "".join(chunk.text for chunk in chunks)
    stop = next(text[at : at + 6] for at in range(10, len(text)) if text.count(text[at : at + 6]) == 1)
    ids, cut = check_every_start(*rigs, {**plain, "stop": [stop]})
    assert cut == text[: text.index(stop)]
    assert len(ids) < 40


def test_an_answer_that_ended_with_its_end_token_ends_again_without_a_further_one(rigs: tuple[Rig, Rig]) -> None:
    """The worker was lost between its last chunk and FINAL."""
    ids, _ = check_every_start(*rigs, {**PROMPT, "logit_bias": {"1": 5.0}, "max_tokens": 300, "temperature": 1.0})
    assert ids[-1] == 1


def test_workers_of_one_model_on_one_machine_tell_the_same_hashes_and_those_of_another_model_do_not(
    rigs: tuple[Rig, Rig], tmp_path: Path
) -> None:
    one, two = (rig.ready for rig in rigs)
    assert (one.model_hash, one.build_hash, one.host) == (two.model_hash, two.build_hash, two.host)
    assert all((one.model_hash, one.build_hash, one.host, one.born))
    (tmp_path / "other").mkdir()
    other = Rig(tmp_path / "run", make_tiny("qwen3_5", tmp_path / "other"), "--reference")
    try:
        assert other.ready.model_hash != one.model_hash
        assert other.ready.build_hash != one.build_hash, "another lane"
        assert other.ready.host == one.host
    finally:
        other.close()


@pytest.mark.parametrize("flags", [("--draft", "ngram"), ("--scheduler-mode", "serial")], ids=" ".join)
def test_mode_and_drafts_do_not_show_in_a_resumed_answer(
    rigs: tuple[Rig, Rig], model: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    other = Rig(tmp_path / "run", model, *flags)
    try:
        check_every_start(rigs[0], other, {**PROMPT, "prompt": "the quick brown fox " * 4, "temperature": 0.9})
    finally:
        other.close()
