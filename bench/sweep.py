"""The cases of the kernel sweep: shapes x types x page edges x row counts x trees, in an order that a seed gives.

Row counts are a kernel's constants, so each is a kernel of its own. On CUDA the first pass in FMA serves float32
and heads of 256; for what matrix units serve there it has a few row counts here, all others have every one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import numpy as np
from sweep_attention import Attention, Moves, Turned
from sweep_base import EVERY, KINDS, Case, Findings, Silent
from sweep_products import Elementwise, Product

from worker.kernels.dialect import MAX_ROWS, PAGE
from worker.kernels.rope_write import Heads

# By dimension: heads, key heads.
HEADS = {64: (9, 3), 80: (4, 4), 96: (6, 2), 128: (8, 1), 256: (4, 2)}
# Around each edge of the first pages; around later ones, and where the size of a piece changes; far out.
EDGES = (0, 1, *(PAGE * page + by for page in range(1, 9) for by in (-1, 0, 1)))
LATER = (
    511,
    512,
    513,
    1023,
    1024,
    1025,
    2031,
    2040,
    2047,
    2048,
    2049,
    4090,
    4095,
    4096,
    4097,
    6143,
    8192,
    16385,
    20001,
)
LENGTHS = EDGES + LATER
# Pages of a table that nothing is in yet, in turns.
LONGER = (0, 40, 3)
FEW = (1, 3, 8, 16)
PACKINGS = (None, *product((4, 8), (32, 64, 128)))
# Width, outputs, extras: cut in each way that the table of tiles has.
PRODUCTS = (
    (640, 24, "norm residual"),
    (1536, 2051, "norm bias"),
    (1024, 33, "norm glu"),
    (4096, 1000, "residual"),
    (128, 33, ""),
    (576, 1536, "norm glu"),
    (2048, 16400, "norm"),
    (4096, 5000, "bias"),
    (384, 4096, "norm residual"),
    (8192, 520, "norm glu"),
)
WIDTHS = (64, 104, 576, 4096, 12288)


def attention() -> Iterator[Attention]:
    """Both first passes, every type and dimension they serve, at every length."""
    kinds = [(False, kind, dim) for kind, dim in product(KINDS, HEADS)]
    kinds += [(True, kind, dim) for kind, dim in product(KINDS[1:], HEADS) if dim <= 128]
    for turn, (matrix, kind, dim) in enumerate(kinds):
        heads, kv_heads = HEADS[dim]
        main = matrix or kind == KINDS[0] or dim > 128
        counts = EVERY if main else FEW
        trees = (MAX_ROWS, 2 + turn * 3 % 6, 8 + turn * 5 % 8) if main else (MAX_ROWS,)
        for place, length in enumerate(LENGTHS):
            longer = LONGER[(place + turn) % len(LONGER)]
            own = Heads(heads=heads, kv_heads=kv_heads, dim=dim, rotated=0)
            yield Attention(matrix, kind, own, length, counts, trees, longer)


def turned() -> Iterator[Turned]:
    """Rope, norms and the write, in every form."""
    for turn, (kind, dim) in enumerate(product(KINDS, HEADS)):
        heads, kv_heads = HEADS[dim]
        passes = (False, True) if kind != KINDS[0] and dim <= 128 else (False,)
        forms = (
            {"rotated": dim, "norm_eps": 1e-6},
            {"rotated": dim, "traditional": True},
            {"rotated": dim // 2, "input_scale": 1.19, "norm_eps": 1e-5 if turn % 2 else None},
        )
        for place, length in enumerate((0, 17, 31, 32, 33, 62, 255, 256, 1023, 4090)):
            own = Heads(heads=heads, kv_heads=kv_heads, dim=dim, **forms[(place + turn) % len(forms)])
            # Attention in one form by turns, at row counts of which its own sweep has the kernels too.
            with_attention = (place + turn) % len(forms) == turn % len(forms)
            yield Turned(kind, own, length, FEW[2], MAX_ROWS, passes if with_attention else ())


def products() -> Iterator[Product]:
    """Every type and packing: one shape with every row count, the others with two."""
    for turn, (kind, packing) in enumerate(product(KINDS, PACKINGS)):
        for matrix in (False, True) if kind != KINDS[0] else (False,):
            main = matrix or kind == KINDS[0]
            for place in range(3 if main else 1):
                width, outputs, extras = PRODUCTS[(turn + place * 3) % len(PRODUCTS)]
                width += -width % (1 if packing is None else packing[1])
                few = (1 + (turn + place) % 8, 9 + (turn + 3 * place) % 8)
                counts = EVERY if main and place == 0 else few
                yield Product(matrix, kind, packing, width, outputs, extras, counts)


def rest() -> Iterator[Case]:
    """Kernels without row counts."""
    for kind, width in product(KINDS, WIDTHS):
        yield Elementwise(kind, width)
    for kind, dim, count in product(KINDS, HEADS, (1, 16, 64)):
        yield Moves(kind, dim, count)


def every(seed: int) -> list[Case]:
    """All cases, their inputs and their order from *seed*."""
    cases: list[Case] = [*attention(), *turned(), *products(), *rest()]
    order = np.random.default_rng(seed).permutation(len(cases))
    return [replace(cases[place], seed=seed) for place in order]  # type: ignore[type-var]


def instances() -> list[Case]:
    """As few cases as have all kernels of the sweep, for a run that is only listened to."""
    shortest = {replace(one, length=0, longer=0): one for one in reversed([*attention()])}
    forms = {replace(one, length=0): one for one in reversed([*turned()])}
    return [*shortest.values(), *forms.values(), *products(), *rest()]


def launch_all() -> None:
    """Launch every kernel of the sweep, and look at no result."""
    for case in instances():
        case.check(Silent())


def sweep(
    findings: Findings, seed: int, seconds: float, clock: Callable[[], float] = time.perf_counter
) -> tuple[int, int]:
    """Check cases until *seconds* are over: how many that were, of how many."""
    cases, end, done = every(seed), clock() + seconds, 0
    for case in cases:
        if clock() >= end:
            break
        case.check(findings)
        findings.settle()
        done += 1
    return done, len(cases)
