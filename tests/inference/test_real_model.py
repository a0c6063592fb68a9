"""SmolLM2 with its real weights: sensible text, and the ids of mlx-lm's own loop."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm import stream_generate
from tiny_models import Room

from worker.engine.sample import KeyedSampler, Sampling

MESSAGES = [{"role": "user", "content": "Explain why the sky is blue in three sentences."}]


def library_ids(loaded, temperature, seed, count):
    prompt = loaded.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)
    sampler = KeyedSampler(Sampling(seed=seed, temperature=temperature), start=len(prompt))
    theirs = stream_generate(loaded.model, loaded.tokenizer, mx.array(prompt), max_tokens=count, sampler=sampler)
    return [response.token for response in theirs]


@pytest.fixture(scope="module")
def real(smollm2) -> Room:
    return Room(smollm2)


def test_it_explains_the_sky_with_rayleigh_scattering(real):
    chunks, final = real.run({"messages": MESSAGES, "max_tokens": 16})
    assert "Rayleigh scattering" in "".join(chunk.text for chunk in chunks)
    assert final.prompt_tokens == 40
    assert [token for chunk in chunks for token in chunk.ids] == library_ids(real.loaded, 0, 0, 16)


def test_at_temperature_above_zero_the_ids_are_those_of_mlx_lm_with_the_keyed_sampler(real):
    body = {"messages": MESSAGES, "max_tokens": 12, "temperature": 0.8, "cache": False}
    assert real.ids(body, seed=2**63 + 7) == library_ids(real.loaded, 0.8, 2**63 + 7, 12)


@pytest.mark.parametrize(
    "text", ["In 2024, it's 3.14 “ok”\n\n  x", "def f(x):\n    return x  # 漢字 🦊", "<|im_start|>a"]
)
def test_its_tokenizer_gives_every_text_back(smollm2, text):
    assert smollm2.tokenizer.decode(smollm2.tokenizer.encode(text)) == text
