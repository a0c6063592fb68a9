"""The draws of the graph against the law as it stands in `sample.py`, read eagerly, one token at a time."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import keyed_numpy
import mlx.core as mx
import numpy as np
import pytest
from eager_rule import by_the_law
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.engine import draw as draw_module
from worker.engine import law as law_module
from worker.engine.draw import COMMON, NOT_A_NUMBER, Draws, place, warm
from worker.engine.draw_tree import tree_operand
from worker.engine.law import Kind, law, operands, state
from worker.engine.sample import RawLogits, Sampling, gumbel, key, penalties

WIDTH, VOCABULARY = 323, 319
EVERYTHING = Sampling(
    seed=2**63 + 5,
    temperature=0.8,
    top_p=0.9,
    min_p=0.01,
    top_k=40,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    logit_bias={3: 2.5, 318: -1.0},
    logprobs=4,
)
FREE = {"width": WIDTH, "vocabulary": VOCABULARY}


def answer_by_the_law(rows, history, sampling):
    ids = list(history)
    for row in rows:
        ids.append(by_the_law(row[None], ids, sampling, VOCABULARY))
    return ids[len(history) :]


def answer(draws, rows, start):
    """All tokens that *draws* gives for logits [n, V], with nothing evaluated between them."""
    drawn = [draws(row[None], place(start + i)) for i, row in enumerate(rows)]
    read = mx.concatenate([one.read for one in drawn]).tolist()
    assert read == mx.concatenate([one.token for one in drawn]).tolist()
    return read


def logits_of(count, seed, width=WIDTH, scale=2.0, dtype=mx.float32):
    """Rows with a few ids far ahead, so that histories repeat and penalties have something to do."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(count, width)) * scale
    rows[:, rng.integers(0, width, 6)] += 3 * scale
    return mx.array(rows.astype(np.float32)).astype(dtype)


samplings = st.builds(
    Sampling,
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.0, 5.0]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    top_k=st.sampled_from([0, 1, 7, 318, 322, 323, 2**31 - 1]),
    min_p=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.7, 1.3, 100.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.6, -3.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.37, -0.11]),
    penalty_window=st.sampled_from([0, 1, 2, 3, 20, 64]),
    logit_bias=st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-1000, 1000, width=32), max_size=3),
    logprobs=st.sampled_from([0, 0, 1, 20]),
)
histories = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(samplings, histories, st.integers(0, 10**6))
def test_an_answer_drawn_in_the_graph_is_the_answer_of_the_law(sampling, history, seed):
    rows = logits_of(4, seed)
    drawn = answer(Draws(sampling, history, **FREE, compiled=False), rows, len(history))
    assert drawn == answer_by_the_law(rows, history, sampling)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(samplings, histories, st.integers(2, 16), st.data())
def test_rows_of_a_chain_are_drawn_as_alone_and_any_number_of_them_may_be_accepted(sampling, history, count, data):
    start, rows = len(history), logits_of(count + 4, data.draw(st.integers(0, 10**6)))
    # Most ids of the chain are what would be drawn, as in a draft that holds; the end is not.
    fed = [history[-1], *answer_by_the_law(rows[: count - 1], history, sampling)]
    fed = [*fed[:-1], data.draw(st.integers(0, VOCABULARY - 1))] if count > 2 else fed
    draws = Draws(sampling, history, **FREE, compiled=False)
    drawn = draws.rows(rows[:count], mx.array(fed, dtype=mx.uint32), place(start))
    alone = [by_the_law(rows[i : i + 1], [*history, *fed[1 : i + 1]], sampling, VOCABULARY) for i in range(count)]
    assert drawn.read.tolist() == alone
    for i in range(count):
        single = Draws(sampling, [*history, *fed[1 : i + 1]], **FREE, compiled=False)(
            rows[i : i + 1], place(start + i)
        )
        assert single.token.item() == alone[i]
        if sampling.logprobs:
            assert all(mx.array_equal(a[i], b) for a, b in zip(drawn.top, single.top, strict=True))
    kept = data.draw(st.integers(1, count))
    draws.accept(range(kept))
    ids = [*history, *fed[1:kept], alone[kept - 1]]
    after = rows[count:]
    assert answer(draws, after, len(ids)) == answer_by_the_law(after, ids, sampling)


def test_chains_follow_chains_as_single_draws_follow_each_other():
    history, rows = [5, 6, 5], logits_of(12, 3)
    whole = answer_by_the_law(rows, history, EVERYTHING)
    draws, ids, done = Draws(EVERYTHING, history, **FREE, compiled=False), [5, *whole], 0
    for count in (3, 1, 4, 2):
        fed = mx.array(ids[done : done + count], dtype=mx.uint32)
        drawn = draws.rows(rows[done : done + count], fed, place(len(history) + done))
        assert drawn.read.tolist() == whole[done : done + count]
        draws.accept(range(count))
        done += count
    assert answer(draws, rows[done:], len(history) + done) == whole[done:]


def test_rows_alone_are_not_yet_history():
    history, rows = [5, 6], logits_of(3, 4)
    draws = Draws(EVERYTHING, history, **FREE, compiled=False)
    draws.rows(rows, mx.array([6, 9, 9], dtype=mx.uint32), place(2))
    assert answer(draws, rows, 2) == answer_by_the_law(rows, history, EVERYTHING)
    with pytest.raises(RuntimeError, match="without rows"):
        Draws(EVERYTHING, history, **FREE).accept([0])


@pytest.mark.parametrize("width", [1, 2, 7, 320])
def test_draws_at_a_temperature_match_the_numpy_rule_at_even_and_odd_widths(width):
    logits = logits_of(20, width, width)
    scores = np.array(logits, dtype=np.float64) / 0.7
    for seed in (0, 2**32, 2**64 - 1):
        draws = Draws(
            Sampling(seed=seed, temperature=0.7), [0] * 41, width=width, vocabulary=width, compiled=False
        )
        noise = [keyed_numpy.gumbel(keyed_numpy.key(seed, 41 + i), width) for i in range(20)]
        assert answer(draws, logits, 41) == np.argmax(scores + noise, axis=-1).tolist()


def test_the_noise_of_the_graph_matches_the_golden_vectors(vectors):
    """Where one id lies ahead of the rest by a known lead, the lead at which it loses tells the noise."""
    for entry in vectors["noise"]:
        noise = np.array(entry["gumbel"][:2])
        if entry["width"] < 2 or entry["t"] == 0:
            continue
        for lead, winner in ((noise[0] - noise[1] - 1e-3, 0), (noise[0] - noise[1] + 1e-3, 1)):
            logits = mx.array([[0.0, lead] + [-1e4] * (entry["width"] - 2)])
            sampling = Sampling(seed=int(entry["seed"]), temperature=1.0)
            draws = Draws(sampling, [0], width=entry["width"], vocabulary=entry["width"], compiled=False)
            assert draws(logits, place(entry["t"])).read.item() == winner


def test_temperature_zero_takes_the_likeliest_and_the_lower_id_of_a_tie_in_every_type():
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        rows = mx.array([[0.0, 2.0, 1.0, 2.0, 9.0], [3.0, 3.0, -1.0, 3.0, 9.0]]).astype(dtype)
        draws = Draws(Sampling(seed=1), [0], width=5, vocabulary=4, compiled=False)
        assert answer(draws, rows, 1) == [1, 0]
        assert draws.rows(rows, mx.array([0, 1], dtype=mx.uint32), place(3)).read.tolist() == [1, 0]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("sampling", COMMON)
def test_sixteen_bit_logits_give_what_they_give_in_float32(sampling, dtype):
    rows = logits_of(60, 8, dtype=dtype)
    drawn = answer(Draws(sampling, [1, 2], **FREE, compiled=False), rows, 2)
    assert drawn == answer_by_the_law(rows, [1, 2], sampling)


@pytest.mark.parametrize("sampling", [*COMMON, EVERYTHING])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_logits_that_are_not_numbers_are_told_and_still_give_an_id_to_go_on_with(sampling, dtype):
    sane = logits_of(1, 5)[0].tolist()
    for spoil in (
        {0: math.nan},
        {200: math.nan},
        {318: math.inf},
        {0: math.inf, 9: math.nan},
        dict.fromkeys(range(319), math.nan),
    ):
        row = [spoil.get(i, value) for i, value in enumerate(sane)]
        rows = mx.array([sane, row]).astype(dtype)
        draws = Draws(sampling, [1], **FREE, compiled=False)
        one = draws(rows[1:], place(1))
        chain = Draws(sampling, [1], **FREE, compiled=False).rows(
            rows, mx.array([1, 2], dtype=mx.uint32), place(1)
        )
        assert one.read.item() == chain.read.tolist()[1] == NOT_A_NUMBER
        assert chain.read.tolist()[0] == chain.token.tolist()[0] < VOCABULARY
        assert max(one.token.item(), *chain.token.tolist()) < VOCABULARY


def test_nothing_but_minus_infinity_is_no_number_and_some_of_it_is_fine():
    for sampling in (Sampling(seed=1), Sampling(seed=1, temperature=1.0)):
        draws = Draws(sampling, [0], width=4, vocabulary=4, compiled=False)
        assert draws(mx.full((1, 4), -math.inf), place(1)).read.item() == NOT_A_NUMBER
        assert draws(mx.array([[-math.inf, 0.0, -math.inf, -math.inf]]), place(2)).read.item() == 1


@pytest.mark.parametrize("filling", [math.nan, math.inf, 1e30])
def test_padded_rows_may_hold_anything_and_are_never_drawn(filling):
    rows = mx.concatenate([logits_of(30, 6)[:, :VOCABULARY], mx.full((30, 4), filling)], axis=1)
    clean = logits_of(30, 6)
    for sampling in (Sampling(seed=1), Sampling(seed=1, temperature=100.0), EVERYTHING):
        drawn = answer(Draws(sampling, [1], **FREE, compiled=False), rows, 1)
        assert drawn == answer_by_the_law(clean, [1], sampling)
        assert max(drawn) < VOCABULARY


def test_raw_log_probabilities_come_before_bias_and_penalties_and_name_no_padded_row():
    sampling = Sampling(seed=0, repetition_penalty=2.0, logit_bias={1: 50.0}, logprobs=20)
    rows = logits_of(3, 7)
    draws = Draws(sampling, [1, 1], **FREE, compiled=False)
    for i in range(3):
        top = draws(rows[i : i + 1], place(2 + i)).top
        raw = RawLogits(VOCABULARY, WIDTH, 20)
        raw(mx.array([0]), rows[i : i + 1])
        assert [a.tolist() for a in top] == [b[0].tolist() for b in raw.top]
    few = Draws(sampling, [1], width=6, vocabulary=4, compiled=False)(mx.zeros((1, 6)), place(1))
    assert sorted(few.top[0].tolist()) == [0, 1, 2, 3]
    assert Draws(Sampling(seed=0), [1], **FREE)(rows[:1], place(1)).top is None


def test_repetition_and_presence_penalties_are_mlx_lms_bit_by_bit_and_frequency_within_its_roundings():
    rows, rng = logits_of(1, 9)[:, :VOCABULARY], np.random.default_rng(2)
    for _ in range(50):
        history = rng.integers(0, 30, int(rng.integers(1, 60))).tolist()
        exact = Sampling(
            seed=0, repetition_penalty=float(rng.uniform(0.5, 2)), presence_penalty=float(rng.normal())
        )
        for sampling in (exact, replace(exact, frequency_penalty=float(rng.normal()))):
            kind = Kind.of(sampling, VOCABULARY, VOCABULARY, None)
            newest = mx.array(history[-1:], dtype=mx.uint32)
            counts, _ = law_module._counts(kind, state(kind, history), newest, None)
            ours = law_module._penalised(rows[0], counts, operands(sampling, kind))
            theirs = rows + 0  # mlx-lm's processors write into what they are given
            for processor in penalties(sampling):
                theirs = processor(mx.array(history), theirs)
            if sampling is exact:
                assert mx.array_equal(ours, theirs[0])
            np.testing.assert_allclose(np.array(ours), np.array(theirs[0]), rtol=0, atol=2e-5)


def test_a_window_that_reaches_over_the_whole_answer_is_kept_as_counts():
    history, rows = [4, 5, 4], logits_of(6, 10)
    sampling = replace(EVERYTHING, penalty_window=2**31 - 1)
    draws = Draws(sampling, history, **FREE, reach=9, compiled=False)
    assert answer(draws, rows, 3) == answer_by_the_law(rows, history, sampling)
    assert Kind.of(sampling, WIDTH, VOCABULARY, 9).window == 0
    assert Kind.of(replace(sampling, penalty_window=8), WIDTH, VOCABULARY, 9).window == 8


COMPILED = [
    (Sampling(seed=2**64 - 1), mx.bfloat16),
    (Sampling(seed=3, temperature=0.8, top_p=0.95), mx.bfloat16),
    (EVERYTHING, mx.float32),
    (replace(EVERYTHING, penalty_window=0, logprobs=0, logit_bias={}), mx.bfloat16),
]


@pytest.mark.parametrize(("sampling", "dtype"), COMPILED)
def test_compiled_draws_are_the_eager_ones_bit_by_bit(sampling, dtype):
    history, rows = [9, 8, 7, 8], logits_of(12, 11, dtype=dtype)
    fed = mx.array([8, 1, 2, 8, 3], dtype=mx.uint32)
    seen = []
    for compiled in (False, True):
        draws = Draws(sampling, history, **FREE, compiled=compiled)
        seen.append([draws.rows(rows[:5], fed, place(4))])
        draws.accept([0, 1, 2])
        seen[-1] += [draws(rows[i : i + 1], place(i + 2)) for i in range(5, 12)]
    for eager, graph in zip(*seen, strict=True):
        assert mx.array_equal(eager.token, graph.token)
        assert mx.array_equal(eager.read, graph.read)
        for one, other in zip(eager.top or (), graph.top or (), strict=True):
            assert mx.array_equal(one, other)


def test_new_values_of_a_kind_make_no_new_graph(monkeypatch):
    traced = []

    def counted(kind):
        draw = law(kind)

        def trace(*arrays):
            traced.append(kind)
            return draw(*arrays)

        return trace

    monkeypatch.setattr(draw_module, "law", counted)
    draw_module._law.cache_clear()
    rows = logits_of(3, 12)
    for i in range(5):
        sampling = replace(
            EVERYTHING, seed=i, temperature=0.5 + i, top_p=0.5 + i / 10, min_p=0.01 * (i + 1),
            repetition_penalty=1.5 + i, presence_penalty=0.1 * i, frequency_penalty=-0.1 * i, logit_bias={i: 1.0},
        )  # fmt: skip
        draws = Draws(sampling, [1] * (i + 1), **FREE, compiled=True)
        for j in range(3):
            draws(rows[j : j + 1], place(i + 1 + j))
    draw_module._law.cache_clear()
    assert len(traced) == 1


@pytest.mark.parametrize("top_p", [5e-324, 1e-300, 1e-45, 1e-39, 1e-30])
def test_a_top_p_too_small_for_float32_keeps_the_likeliest(top_p):
    rows = logits_of(4, 3)
    draws = Draws(Sampling(seed=1, temperature=100.0, top_p=top_p), [1], **FREE)
    assert answer(draws, rows, 1) == mx.argmax(rows[:, :VOCABULARY], axis=-1).tolist()


def test_only_so_many_kinds_are_kept():
    for top_k in range(1, 100):
        Draws(Sampling(seed=0, temperature=1.0, top_k=top_k), [0], **FREE, compiled=True)
    assert draw_module._law.cache_info().currsize <= 64


def test_each_seed_and_position_has_its_own_noise():
    kind = Kind.of(Sampling(seed=0, temperature=1.0), WIDTH, WIDTH, None)
    logits = mx.zeros((3, WIDTH))
    drawn = law(kind)(
        logits,
        place(50),
        mx.zeros(3, dtype=mx.uint32),
        state(kind, [0]),
        *operands(Sampling(seed=6, temperature=1.0), kind),
        tree_operand(None, 3, (0, 1)),
    )
    assert drawn[0].tolist() == [mx.argmax(gumbel(key(6, 50 + j), WIDTH)).item() for j in range(3)]


# Nodes of a draw of one row, those that only look at memory in another shape included.
NODES = {
    "greedy": (Sampling(seed=0), 4),
    "temperature": (Sampling(seed=0, temperature=0.8), 9),
    "top_p": (Sampling(seed=0, temperature=0.8, top_p=0.95), 18),
    "greedy, penalties": (Sampling(seed=0, repetition_penalty=1.1), 12),
    "top_p, penalties": (Sampling(seed=0, temperature=0.8, top_p=0.95, repetition_penalty=1.1), 24),
    "top_p, endless penalties": (
        Sampling(seed=0, temperature=0.8, top_p=0.95, frequency_penalty=0.1, penalty_window=0),
        21,
    ),
}


@pytest.mark.parametrize("name", NODES)
def test_a_draw_has_few_nodes(name, tmp_path):
    sampling, most = NODES[name]
    draws = Draws(sampling, [0, 1], width=320, vocabulary=320, compiled=True)
    logits = mx.zeros((1, 320), dtype=mx.bfloat16)
    mx.eval(logits)
    drawn = draws(logits, place(2))
    mx.export_to_dot(str(tmp_path / "graph.dot"), drawn.token, drawn.read, draws._state)
    nodes = re.findall(r"shape=rectangle", (tmp_path / "graph.dot").read_text())
    assert len(nodes) <= most


def test_the_common_kinds_are_warmed_for_every_number_of_rows(monkeypatch):
    drawn = set()

    def noted(kind):
        draw = law(kind)

        def run(logits, *rest):
            drawn.add((kind, *logits.shape))
            return draw(logits, *rest)

        return run

    monkeypatch.setattr(draw_module, "law", noted)
    draw_module._law.cache_clear()
    warm(WIDTH, VOCABULARY, mx.float32, rows=(1, 2))
    draw_module._law.cache_clear()
    kinds = {Kind.of(sampling, WIDTH, VOCABULARY, None) for sampling in COMMON}
    assert len(kinds) == len(COMMON)
    assert drawn == {(kind, rows, WIDTH) for kind in kinds for rows in (1, 2)}
