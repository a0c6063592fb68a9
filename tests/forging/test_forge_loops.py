"""Answers that end in a loop: what comes before it is kept."""

import random

import numpy as np
import pytest

from worker.forge.text import before_loop


def ids(*parts: list[int]) -> np.ndarray:
    return np.array([one for part in parts for one in part], np.int32)


def fresh(seed: int, count: int) -> list[int]:
    luck = random.Random(seed)
    return [luck.randrange(1000) for _ in range(count)]


@pytest.mark.parametrize("period", [1, 2, 7, 30, 64])
def test_a_loop_is_kept_once(period: int) -> None:
    head, loop = fresh(1, 50), fresh(2, period)
    answer = ids(head, loop * (140 // period + 2))
    assert before_loop(answer) == 50 + period


def test_what_does_not_repeat_itself_is_kept_whole() -> None:
    for seed in range(20):
        answer = ids(fresh(seed, 300))
        assert before_loop(answer) == 300
    # A quote, or a line of code that comes again, is no loop.
    line = fresh(3, 20)
    assert (
        before_loop(ids(fresh(4, 60), line, fresh(5, 9), line, fresh(6, 50), line)) == 60 + 20 + 9 + 20 + 50 + 20
    )


def test_a_text_that_is_all_loop_is_what_this_model_writes() -> None:
    assert before_loop(ids(fresh(7, 5) * 40)) == 200
    assert before_loop(ids([])) == 0
    assert before_loop(ids([3])) == 1
