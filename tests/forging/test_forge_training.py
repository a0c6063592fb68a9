"""The training of a head: what a step does, and that it goes on as if it had never stopped."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mtplx.errors import ModelFilesError
from worker.engine.load import LoadedModel
from worker.forge import target as target_module
from worker.forge import text
from worker.forge.columns import Columns, Share, columns_of
from worker.forge.loss import Lesson, taught
from worker.forge.states import source
from worker.forge.target import Target
from worker.forge.text import Shape, Text, Writing
from worker.forge.train import Recipe, Trainer, config_of, fresh_head

RECIPE = Recipe(depths=3, deep=0.0, rate=1e-3)


def texts(vocabulary: int) -> list[Text]:
    luck = np.random.default_rng(4)
    return [Text(luck.integers(2, vocabulary, length).astype(np.int32), 5) for length in (20, 30, 25, 9)]


def trainer(loaded: LoadedModel, recipe: Recipe = RECIPE) -> Trainer:
    config = config_of(loaded, "none")
    return Trainer(Target(loaded), config, fresh_head(config, loaded), recipe)


def weights(one: Trainer) -> dict[str, np.ndarray]:
    return {name: np.array(weight) for name, weight in tree_flatten(one.head.parameters())}


def batches(loaded: LoadedModel) -> list[text.Batch]:
    return list(text.batches(texts(loaded.vocabulary), Shape(positions=128, length=64, depths=3), None))


def test_the_gradient_of_the_lesson_is_that_of_its_loss() -> None:
    """Against MLX's own derivative of the written-out cross-entropy, in chunks that do not come out even."""
    mx.random.seed(2)
    head, truth = mx.random.normal((6, 40)), mx.random.normal((10, 6))
    states = [mx.random.normal((10, 6)) for _ in range(3)]
    shares = mx.abs(mx.random.normal((3, 10)))

    def plain(states: list[mx.array]) -> mx.array:
        logits = truth @ head
        law = mx.softmax(logits, axis=-1)
        wanted = 0.6 * law + 0.4 * (mx.arange(40) == logits.argmax(axis=-1, keepdims=True))
        found = mx.array(0.0)
        for depth, state in enumerate(states):
            own = state @ head
            losses = mx.logsumexp(own, axis=-1) - (wanted * own).sum(-1)
            found = found + (shares[depth] * losses).sum()
        return found

    lesson = Lesson(hard=0.4, chunk=4)
    got = mx.grad(lambda states: taught(states, truth, shares, Columns(head), lesson)[0])(states)
    for mine, right in zip(got, mx.grad(plain)(states), strict=True):
        np.testing.assert_allclose(np.array(mine), np.array(right), rtol=1e-4, atol=1e-5)
    total = taught(states, truth, shares, Columns(head), lesson)[1].sum()
    assert float(total) == pytest.approx(float(plain(states)), rel=1e-5)


def law_of_loss(columns: Columns) -> tuple[np.ndarray, float]:
    """(gradient, loss) of one depth over 40 ids, of which *columns* has all or some."""
    mx.random.seed(2)
    head, truth, state = (mx.random.normal(shape) * 0.6 for shape in ((6, 40), (10, 6), (10, 6)))
    head = columns.head if columns.shift is not None else head
    call = mx.value_and_grad(
        lambda states: taught(states, truth, mx.ones((1, 10)), Columns(head, columns.shift), Lesson(hard=0.0))
    )
    (_, losses), gradients = call([state])
    return np.array(gradients[0]), float(losses[0])


def test_common_ids_and_a_lot_of_the_others_teach_on_average_what_all_teach() -> None:
    mx.random.seed(2)
    head = mx.random.normal((6, 40)) * 0.6
    some = [Text(np.array([3] * 9 + [7] * 5 + [1, 30], np.int32), 2)]
    want, loss = law_of_loss(Columns(head))
    # Of 40 ids 4 + 16 are less than half of all, and no lot is drawn of fewer.
    assert columns_of(head, some, Share(10, 11))(0).shift is None
    of = columns_of(head, some, Share(4, 16, seed=1))
    first = of(0).head
    assert np.array_equal(np.array(first[:, :2]), np.array(head[:, mx.array([3, 7])]))
    assert np.array_equal(np.array(of(0).head), np.array(first))
    assert not np.array_equal(np.array(of(1).head), np.array(first))
    found = [law_of_loss(of(step)) for step in range(400)]
    mean = np.mean([gradient for gradient, _ in found], axis=0)
    # The estimate of a logarithm is off a little; without the shift it is off by far.
    assert np.abs(mean - want).max() < 0.15 * np.abs(want).max()
    assert np.mean([one for _, one in found]) == pytest.approx(loss, rel=0.06)
    flat = [law_of_loss(Columns(of(step).head, mx.zeros(20))) for step in range(100)]
    assert np.mean([one for _, one in flat]) < 0.85 * loss


@pytest.mark.parametrize("name", ["llama", "llama-4bit-32"])
def test_states_that_are_kept_are_those_that_are_computed(
    tiny_model: Callable[[str], LoadedModel], name: str
) -> None:
    loaded = tiny_model(name)
    target, shape = Target(loaded), Shape(positions=64, length=64, depths=2)
    # The last one teaches nothing, and is in no batch.
    known = [*texts(loaded.vocabulary), Text(np.arange(5, dtype=np.int32), 5), *texts(loaded.vocabulary)]
    kept, bytes_ = source(target, known, shape, 10**9)
    anew, none = source(target, known, shape, bytes_)
    assert (bytes_, none) == (2 * (20 + 30 + 25 + 9) * target.width * 4, 0)
    seen = 0
    for batch in text.batches(known, shape, np.random.default_rng(3).permutation):
        live = batch.rows >= 0
        seen += live.sum()
        for mine, right in zip(kept(batch), anew(batch), strict=True):
            np.testing.assert_allclose(np.array(mine)[live], np.array(right)[live], rtol=1e-4, atol=1e-4)
    assert seen == 2 * (20 + 30 + 25 + 9)


def test_deeper_guesses_are_trained_in_the_last_part_alone(tiny_model: Callable[[str], LoadedModel]) -> None:
    loaded = tiny_model("llama")
    one, (batch, *_) = trainer(loaded, Recipe(depths=3, deep=0.5)), batches(loaded)
    assert np.isfinite(np.array(one.step(batch, 0.49))).tolist() == [True, False, False]
    assert np.isfinite(np.array(one.step(batch, 0.5))).all()


def test_the_loss_falls(tiny_model: Callable[[str], LoadedModel]) -> None:
    loaded = tiny_model("llama")
    one, (batch, *_) = trainer(loaded), batches(loaded)
    losses = [np.array(one.step(batch, 0.2)) for _ in range(15)]
    assert (losses[-1] < losses[0] - 0.5).all()


def test_a_resumed_run_ends_with_the_same_weights(tiny_model: Callable[[str], LoadedModel], tmp_path) -> None:
    loaded = tiny_model("llama")
    (batch, *_) = batches(loaded)
    whole = trainer(loaded)
    for step in range(4):
        whole.step(batch, step / 4)
    half = trainer(loaded)
    half.step(batch, 0.0)
    half.step(batch, 0.25)
    half.save(tmp_path, {"data": 1})
    again = trainer(loaded)
    again.load(tmp_path, {"data": 1})
    assert again.steps == 2
    again.step(batch, 0.5)
    again.step(batch, 0.75)
    want, got = weights(whole), weights(again)
    assert all(np.array_equal(want[name], got[name]) for name in want)
    with pytest.raises(ModelFilesError, match="other options \\(data\\)"):
        trainer(loaded).load(tmp_path, {"data": 2})
    with pytest.raises(ModelFilesError, match="other options \\(recipe\\)"):
        trainer(loaded, Recipe(depths=2)).load(tmp_path, {"data": 1})


@pytest.mark.prove
def test_what_a_gpu_compiles_writes_the_same(
    tiny_model: Callable[[str], LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiled form of a writing step, by the CPU's own compiler."""
    loaded = tiny_model("llama-4bit-32")
    prompts = [one.ids.tolist() for one in texts(loaded.vocabulary)]
    writing = Writing(length=80, batch=4, eos_ids=frozenset())
    found = []
    for kind in ("cpu", "compiled"):
        monkeypatch.setattr(target_module, "device_name", lambda kind=kind: kind)
        answers = text.write(Target(loaded), prompts, [0.0, 0.7] * 2, writing, 0)
        found.append([answer.ids.tolist() for answer in answers])
    assert found[0] == found[1]
