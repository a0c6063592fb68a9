"""The keyed rule against golden vectors, mlx-lm's filters, and what a law of chance must show."""

from __future__ import annotations

import math

import keyed_numpy
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from mtplx.trajectory import trajectory_sha256
from worker.engine.sample import (
    KeyedSampler,
    RawLogits,
    Sampling,
    gumbel,
    gumbel_of,
    key,
    penalties,
    splitmix64,
    words,
)


def log_softmax(logits):
    logits = mx.array([logits], dtype=mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def draws(logprobs, sampling, count, start=0):
    sampler = KeyedSampler(sampling, start)
    return [sampler(logprobs).item() for _ in range(count)]


def test_the_golden_vectors_are_what_the_numpy_rule_says(vectors):
    assert vectors == keyed_numpy.json.loads(keyed_numpy.json.dumps(keyed_numpy.vectors()))


def test_splitmix64_gives_its_published_first_outputs():
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    assert splitmix64(1234567) == 6457827717110365317


def test_keys_match_the_golden_vectors(vectors):
    for entry in vectors["key"]:
        assert key(int(entry["seed"]), entry["t"]).tolist() == entry["key"]


def test_bits_and_noise_match_the_golden_vectors_at_even_and_odd_widths(vectors):
    for entry in vectors["noise"]:
        noise_key = key(int(entry["seed"]), entry["t"])
        bits = words(noise_key, entry["width"]).tolist()
        assert (bits[:8], bits[-1]) == (entry["bits"], entry["last"])
        np.testing.assert_allclose(
            np.array(gumbel(noise_key, entry["width"]))[:8], entry["gumbel"], rtol=2e-5, atol=2e-6
        )


def test_trajectory_sha256es_match_the_golden_vectors(vectors):
    for entry in vectors["trajectory"]:
        assert trajectory_sha256(entry["ids"]) == entry["sha256"]


def test_noise_is_finite_at_both_ends_of_the_unit_interval():
    low, high = gumbel_of(mx.array([0, 2**32 - 1], dtype=mx.uint32)).tolist()
    assert -math.inf < low < high < math.inf


def test_temperature_zero_takes_the_likeliest_and_the_lower_id_of_a_tie():
    assert draws(log_softmax([0.0, 2.0, 1.0, 2.0]), Sampling(seed=1), 3) == [1, 1, 1]


@pytest.mark.parametrize("top_p", [5e-324, 1e-300, 1e-45, 1e-39, 1e-30])
def test_a_top_p_too_small_for_float32_keeps_the_likeliest(top_p):
    wide = log_softmax([0.0] * 40 + [0.5] + [0.0] * 40)
    assert draws(wide, Sampling(seed=1, temperature=100.0, top_p=top_p), 5) == [40] * 5


def test_a_draw_depends_on_seed_and_position_alone():
    logprobs = log_softmax([0.1 * i for i in range(50)])
    sampling = Sampling(seed=9, temperature=1.0)
    whole = draws(logprobs, sampling, 20)
    assert draws(logprobs, sampling, 12, start=8) == whole[8:]
    assert draws(logprobs, Sampling(seed=10, temperature=1.0), 20) != whole
    mx.random.seed(3)
    assert draws(logprobs, sampling, 20) == whole


def test_draws_follow_the_distribution():
    probabilities = [0.5, 0.25, 0.15, 0.1]
    logprobs = mx.log(mx.array([probabilities]))
    sampler, n = KeyedSampler(Sampling(seed=4, temperature=1.0), 0), 4000
    counts = np.bincount(mx.concatenate([sampler(logprobs) for _ in range(n)]).tolist(), minlength=4)
    chi2 = sum((counts - n * np.array(probabilities)) ** 2 / (n * np.array(probabilities)))
    assert chi2 < 16.3  # 0.1 % of chance at 3 degrees of freedom; the seed is fixed


@pytest.mark.parametrize(
    ("fields", "library"),
    [
        ({"top_p": 0.7}, lambda x: apply_top_p(x, 0.7)),
        ({"min_p": 0.05}, lambda x: apply_min_p(x, 0.05)),
        ({"top_k": 9}, lambda x: apply_top_k(x, 9)),
        (
            {"top_p": 0.9, "min_p": 0.02, "top_k": 5},
            lambda x: apply_top_k(apply_min_p(apply_top_p(x, 0.9), 0.02), 5),
        ),
    ],
)
def test_filters_are_those_of_mlx_lm_in_the_order_of_the_law(fields, library):
    logprobs = log_softmax((np.random.default_rng(0).normal(size=300) * 2).tolist())
    sampling = Sampling(seed=3, temperature=0.7, **fields)
    noise = [gumbel(key(3, t), 300) for t in range(25)]
    kept = library(logprobs)
    assert draws(logprobs, sampling, 25) == [mx.argmax(kept / 0.7 + g, axis=-1).item() for g in noise]


@pytest.mark.parametrize("top_k", [300, 5000, 2**31 - 1])
def test_top_k_at_or_above_the_vocabulary_filters_nothing_and_spoils_nothing(top_k):
    logprobs = log_softmax([0.01 * i for i in range(300)])
    plain = draws(logprobs, Sampling(seed=1, temperature=1.0), 10)
    assert draws(logprobs, Sampling(seed=1, temperature=1.0, top_k=top_k), 10) == plain
    assert draws(logprobs, Sampling(seed=1, temperature=1.0), 10) == plain


def test_top_k_among_equals_keeps_the_lower_ids():
    drawn = draws(log_softmax([0.0] * 64), Sampling(seed=2, temperature=1.0, top_k=5), 60)
    assert set(drawn) == {0, 1, 2, 3, 4}


def test_padded_rows_are_never_drawn_however_likely():
    logits = mx.array([[0.0] * 10 + [50.0] * 6])
    masked = RawLogits(vocabulary=10, width=16, top=3)(mx.array([0]), logits)
    logprobs = masked - mx.logsumexp(masked, axis=-1, keepdims=True)
    assert max(draws(logprobs, Sampling(seed=1, temperature=100.0), 200)) < 10
    assert draws(logprobs, Sampling(seed=1), 1) == [0]


def test_raw_log_probabilities_come_before_penalties_and_name_no_padded_row():
    raw = RawLogits(vocabulary=4, width=6, top=20)
    raw(mx.array([0]), mx.array([[1.0, 3.0, 2.0, 0.0, 9.0, 9.0]]))
    ids, values = raw.top
    assert sorted(ids[0].tolist()) == [0, 1, 2, 3]
    assert math.isclose(sum(math.exp(value) for value in values[0].tolist()), 1, rel_tol=1e-5)


@pytest.mark.parametrize(("window", "reached"), [(0, [0, 1, 2, 3]), (2, [2, 3]), (20, [0, 1, 2, 3])])
def test_penalties_reach_back_as_far_as_the_window_and_zero_means_all(window, reached):
    (presence,) = penalties(Sampling(seed=0, presence_penalty=1.0, penalty_window=window))
    logits = presence(mx.array([0, 1, 2, 3]), mx.zeros((1, 6)))
    assert [i for i, value in enumerate(logits[0].tolist()) if value == -1] == reached
