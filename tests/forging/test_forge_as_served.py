"""What the training computes is what serving computes: the model's states, the texts it writes, and the head."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from mtplx.errors import ModelFilesError
from worker.engine.load import LoadedModel
from worker.engine.trunk import Trunk
from worker.forge import text
from worker.forge.accept import Acceptance
from worker.forge.states import pairs
from worker.forge.target import Target
from worker.forge.text import Shape, Text, Writing
from worker.forge.train import Recipe, Trainer, config_of, fresh_head, in_type
from worker.forge.unrolled import Unrolled
from worker.speculation.mtp.forged import ForgedConfig, quantized
from worker.speculation.mtp.head import Head, Reading

DENSE = ("llama", "qwen3", "smollm3", "llama-bias", "llama-llama3", "llama-4bit-32")


def drawn_head(loaded: LoadedModel) -> tuple[ForgedConfig, Head]:
    """A head of random weights, so that no part of it is neutral."""
    config = config_of(loaded, "none")
    head = fresh_head(config, loaded)
    mx.random.seed(5)
    noisy = [
        mx.random.normal(one.shape) * 0.1 for one in (head.eh_proj.weight, head.enorm.weight, head.hnorm.weight)
    ]
    head.eh_proj.weight, head.enorm.weight, head.hnorm.weight = (
        one + noise
        for one, noise in zip((head.eh_proj.weight, head.enorm.weight, head.hnorm.weight), noisy, strict=True)
    )
    return config, head


def some_ids(loaded: LoadedModel, rows: int, length: int) -> np.ndarray:
    return np.random.default_rng(3).integers(2, loaded.vocabulary, (rows, length)).astype(np.int32)


def final_states(loaded: LoadedModel, ids: mx.array) -> mx.array:
    return loaded.model.model(ids)


@pytest.mark.parametrize("name", DENSE)
def test_the_states_are_those_of_the_model(tiny_model: Callable[[str], LoadedModel], name: str) -> None:
    loaded = tiny_model(name)
    ids = mx.array(some_ids(loaded, 3, 40))
    want = final_states(loaded, ids)
    target = Target(loaded)
    assert float(mx.abs(target.states(ids) - want).max()) < 1e-4
    assert float(mx.abs(target.logits(target.states(ids)) - loaded.model(ids)).max()) < 1e-3


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_written_text_is_the_models_own(tiny_model: Callable[[str], LoadedModel], name: str) -> None:
    """Rows of different lengths, across a border of the buffers' steps, end where the model ends them."""
    loaded = tiny_model(name)
    target = Target(loaded)
    prompts = [some_ids(loaded, 1, length)[0].tolist() for length in (5, 60, 17)]
    writing = Writing(length=90, batch=3, eos_ids=loaded.eos_ids)
    for prompt, answer in zip(prompts, text.write(target, prompts, [0.0, 0.0, 0.0], writing, 1), strict=True):
        ids = list(prompt)
        while len(ids) < len(prompt) + 90 and not (len(ids) > len(prompt) and ids[-1] in loaded.eos_ids):
            ids.append(int(loaded.model(mx.array([ids]))[0, -1].argmax()))
        assert answer.ids.tolist() == ids
        assert answer.prompt == len(prompt)


def test_sampled_text_follows_the_law(tiny_model: Callable[[str], LoadedModel]) -> None:
    loaded = tiny_model("llama")
    target = Target(loaded)
    prompt = some_ids(loaded, 1, 12)[0].tolist()
    writing = Writing(length=1, batch=512, eos_ids=loaded.eos_ids)
    drawn = [one.ids[-1] for one in text.write(target, [prompt] * 512, [1.0] * 512, writing, 7)]
    law = np.array(mx.softmax(loaded.model(mx.array([prompt]))[0, -1].astype(mx.float32)))
    seen = np.bincount(drawn, minlength=law.size) / 512
    assert 0.5 * np.abs(seen - law).sum() < 0.25
    assert law.max() < 0.9, "a law without choice would show nothing"


@pytest.mark.parametrize("depths", [1, 2, 3, 4])
def test_a_depth_in_training_is_what_serving_drafts(tiny_model: Callable[[str], LoadedModel], depths: int) -> None:
    loaded = tiny_model("llama")
    config, head = drawn_head(loaded)
    trunk, target = Trunk.of(loaded), Target(loaded)
    ids = some_ids(loaded, 2, 24)
    hidden, embedded = pairs(target, mx.array(ids))
    states = Unrolled(config, head)(in_type(head, mx.float32), embedded, hidden, depths)
    deepest = np.array(target.logits(states[-1]))
    for row in range(2):
        # Read to t, draft as the text goes on: the last guess is that of depth `depths` at t + depths - 1.
        for t in (0, 1, 6, 15):
            reading = Reading(head, trunk)
            for upto in range(t + 1):
                reading.read(mx.array(ids[row, upto + 1 : upto + 2]), hidden[row, upto : upto + 1])
            told: list[mx.array] = []

            def choose(logits: mx.array, row: int = row, t: int = t, told: list[mx.array] = told) -> mx.array:
                told.append(logits)
                return mx.array(ids[row, t + 1 + len(told) : t + 2 + len(told)])

            reading.draft(depths, choose)
            got = deepest[row, t + depths - 1]
            np.testing.assert_allclose(got, np.array(told[-1])[0], rtol=1e-4, atol=1e-4 * np.abs(got).max())


def test_acceptance_is_what_serving_would_accept(tiny_model: Callable[[str], LoadedModel]) -> None:
    """Counted by drafting behind every position, greedy, until a guess is wrong."""
    loaded = tiny_model("llama")
    config, head = drawn_head(loaded)
    trunk, target = Trunk.of(loaded), Target(loaded)
    prompts = [some_ids(loaded, 1, length)[0].tolist() for length in (9, 30)]
    texts = text.write(target, prompts, [0.0, 0.0], Writing(length=40, batch=2, eos_ids=frozenset()), 1)
    shape = Shape(positions=128, length=128, depths=3)
    # It learns them by heart, nearly: some guesses are right, some wrong.
    trainer = Trainer(target, config, head, Recipe(depths=3, deep=0.0, rate=1e-2))
    for batch in [*text.batches(texts, shape, None)] * 12:
        trainer.step(batch, 0.3)
    measured = Acceptance(target, Unrolled(config, head), 3, list(text.batches(texts, shape, None)))
    right, tried = np.zeros(3), np.zeros(3)
    for one in texts:
        hidden, _ = pairs(target, mx.array(one.ids[None]))
        reading = Reading(head, trunk)
        for t in range(len(one.ids) - 2):
            reading.read(mx.array(one.ids[t + 1 : t + 2]), hidden[0, t : t + 1])
            if t + 1 < one.prompt:
                continue
            guesses = [int(token.item()) for token in reading.draft(3, lambda logits: logits.argmax(axis=-1))]
            for depth, (guess, token) in enumerate(zip(guesses, one.ids[t + 2 :], strict=False)):
                tried[depth] += 1
                if guess != token:
                    break
                right[depth] += 1
    assert 0 < right[2] < tried[2] <= right[1] < tried[1] <= right[0] < tried[0]
    assert measured.of(in_type(head, mx.float32)) == pytest.approx((right / tried).tolist())


def test_a_quantised_head_is_measured_as_it_is_served(tiny_model: Callable[[str], LoadedModel]) -> None:
    loaded = tiny_model("llama")
    config, head = drawn_head(loaded)
    _, small = quantized(config, head, 32, 4)
    target, trunk = Target(loaded), Trunk.of(loaded)
    ids = mx.array(some_ids(loaded, 1, 10))
    hidden, embedded = pairs(target, ids)
    got = Unrolled(config, head)(in_type(small, mx.float32), embedded, hidden, 1)[0][0, :9]
    want = small(trunk.embed(ids[0, 1:]), hidden[0, :9], None).normed
    dense = head(trunk.embed(ids[0, 1:]), hidden[0, :9], None).normed
    assert float(mx.abs(got - want).max()) < 1e-3
    assert float(mx.abs(dense - want).max()) > 1e-2, "four bits are not the weights themselves"


def test_a_batch_teaches_answers_alone() -> None:
    """Depth d is taught at j where the draft behind the true pair j-d+1 began at the answer's first token or later."""
    texts = [Text(np.arange(10, 30, dtype=np.int32), 5), Text(np.arange(50, 53, dtype=np.int32), 2)]
    (batch,) = text.batches(texts, Shape(positions=256, length=64, depths=2), None)
    taught = [
        sorted((int(place) // 64, int(place) % 64) for place in batch.places[batch.weights[depth] > 0])
        for depth in range(2)
    ]
    # x[j+2] is the answer's second token at the earliest, and its last token at the latest.
    assert taught[0] == [(0, j) for j in range(4, 18)]
    assert taught[1] == [(0, j) for j in range(5, 18)]


@pytest.mark.parametrize("name", ["gemma3", "qwen3_5", "granite_hybrid"])
def test_a_model_that_is_not_dense_is_refused_in_words(
    tiny_model: Callable[[str], LoadedModel], name: str
) -> None:
    with pytest.raises(ModelFilesError, match="Heads are made for dense models only"):
        Target(tiny_model(name))
