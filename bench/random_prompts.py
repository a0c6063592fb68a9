"""Prompts of random ids and copies of what stands above them: prompt lookup proposes much, right or wrong."""

from __future__ import annotations

import random
from collections.abc import Iterator

SHORTEST, LONGEST = 60, 120


def prompts(vocabulary: int, count: int, seed: int = 3) -> Iterator[list[int]]:
    """*count* prompts of `SHORTEST` to `LONGEST` ids below *vocabulary*."""
    luck = random.Random(seed)
    for _ in range(count):
        length = luck.randint(SHORTEST, LONGEST)
        ids = [luck.randrange(vocabulary) for _ in range(12)]
        while len(ids) < length:
            if luck.random() < 0.6:
                start = luck.randrange(len(ids) - 6)
                ids += ids[start : start + luck.randint(4, 24)]
            else:
                ids += [luck.randrange(vocabulary) for _ in range(luck.randint(1, 6))]
        # The end repeats what was said: the first forward has a draft.
        start = luck.randrange(length - 12)
        yield [*ids[: length - 6], *ids[start : start + 6]]
