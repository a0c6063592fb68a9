"""What the bench of acceptance computes is what draws with one noise, and with two, do."""

from __future__ import annotations

import numpy as np
import pytest

from bench.rules import kept, shared


def pairs(size: int, zeros: bool) -> tuple[np.ndarray, np.ndarray]:
    """Two laws over *size* tokens, with tokens that only one of them gives where *zeros*."""
    luck = np.random.default_rng((size, zeros))
    p, q = luck.dirichlet(np.full(size, 0.5), 2)
    if zeros:
        p[0] = q[1] = 0.0
    return p / p.sum(), q / q.sum()


@pytest.mark.parametrize("size", [2, 3, 8, 40])
@pytest.mark.parametrize("zeros", [False, True])
def test_the_chance_of_shared_noise_is_the_sum_of_its_source(size: int, zeros: bool) -> None:
    p, q = pairs(size, zeros)
    terms = [1 / np.maximum(p / p[x], q / q[x]).sum() for x in range(size) if p[x] > 0 and q[x] > 0]
    assert shared(p, q) == pytest.approx(sum(terms), rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("zeros", [False, True])
def test_draws_keep_as_often_as_the_chances_say(zeros: bool) -> None:
    p, q = pairs(8, zeros)
    ratio, together, apart, likeliest = kept(p, q)
    luck, draws = np.random.default_rng(5), 100_000
    noise, other = luck.gumbel(size=(2, draws, 8))
    with np.errstate(divide="ignore"):
        target, draft = np.log(p), np.log(q)
    drawn = (target + noise).argmax(1)
    assert together == pytest.approx((drawn == (draft + noise).argmax(1)).mean(), abs=0.006)
    assert apart == pytest.approx((drawn == (draft + other).argmax(1)).mean(), abs=0.006)
    assert likeliest == pytest.approx((drawn == q.argmax()).mean(), abs=0.006)
    assert together <= ratio + 1e-12, "no rule keeps more than 1 - TV"
    assert together >= ratio / (2 - ratio) - 1e-12, "nor this one less than (1 - TV) / (1 + TV)"


def test_equal_laws_are_always_kept_and_laws_apart_never() -> None:
    p, _ = pairs(8, False)
    assert kept(p, p)[:2] == pytest.approx((1.0, 1.0))
    assert shared(np.array([1.0, 0.0]), np.array([0.0, 1.0])) == 0.0


def test_forty_thousand_tokens_with_far_tails_lose_no_digit() -> None:
    luck = np.random.default_rng(1)
    logits = luck.normal(size=(2, 40_000)) * 8
    p, q = np.exp(logits - logits.max(1, keepdims=True))
    p, q = p / p.sum(), q / q.sum()
    likely = np.argsort(-np.minimum(p, q))[:300]
    terms = sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in likely)
    assert terms <= shared(p, q) * (1 + 1e-9)
    assert shared(p, q) - terms <= np.minimum(p, q).sum() - np.minimum(p, q)[likely].sum() + 1e-9
