"""How a product on matrix units is cut up: measured on an NVIDIA H200, 132 multiprocessors.

What a row's arithmetic depends on, unit, step and split, comes from the weight alone: its shape, its packing, glu.
The number of rows changes only how much is made at a time and how much is held in registers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import mlx.core as mx

from worker.kernels.operands import Affine

MULTIPROCESSORS: Final = 132
ALL: Final = 1 << 30
# The words of x that a thread may keep, of its share of 65536 registers for 512 threads.
KEPT: Final = 50
KEPT_BEYOND_EIGHT: Final = 80


@dataclass(frozen=True, slots=True)
class Tile:
    """The parts of a product.

    Tiles of 16 lines that a threadgroup makes at a time; simdgroups that share K; units of K in a step, a power of
    two, at most 4 of a quantised weight; steps of the weight that a simdgroup has room for; units of x that are
    asked for before their use, at most a step, or 0 for all of them at the start; and the most threadgroups, each
    of which makes one tile after another.
    """

    tiles: int
    split: int
    step: int
    slots: int
    ahead: int = 1
    groups: int = ALL


def unit_of(weight: mx.array | Affine) -> int:
    """Numbers of a line in a unit of K."""
    return 64 if isinstance(weight, Affine) and weight.group >= 64 else 32


def kept(tile: Tile, width: int, weight: mx.array | Affine) -> int:
    """Words a thread needs to keep its part of eight rows of x, with the sums of a quantised weight's units."""
    unit = unit_of(weight)
    return width // unit // tile.split * (unit // 8 + (2 if isinstance(weight, Affine) else 0))


def _even(units: int, most: int) -> Iterator[tuple[int, int]]:
    """Splits and steps that cut *units* without a rest, long steps and many simdgroups first."""
    for step in (4, 2, 1):
        for split in range(16, 7, -1):
            if step <= most and units % (split * step) == 0:
                yield split, step


def tile_of(outputs: int, width: int, weight: mx.array | Affine, *, glu: bool) -> Tile:
    """The tile for a weight with that many outputs and inputs."""
    affine, units = isinstance(weight, Affine), width // unit_of(weight)
    sixteens = -(-outputs * (2 if glu else 1) // 16)
    short = width < 2048
    # A dense weight that all multiprocessors hold at once has no second tile to keep x for.
    if not affine and not short and sixteens <= 3 * MULTIPROCESSORS:
        return Tile(1, 16, 2, 2, 2) if sixteens <= 2 * MULTIPROCESSORS else Tile(1, 8, 2, 3, 2)
    many = sixteens >= (192 if short else 1024)
    bytes_ = isinstance(weight, Affine) and weight.bits == 8
    tiles = 2 if many and (short or (affine and not bytes_)) else 1
    most = 2 if short or bytes_ else 4
    for split, step in _even(units, most):
        groups = MULTIPROCESSORS * (2 if split < 12 else 1)
        tile = Tile(tiles, split, step, 2 if affine or short else 3, 0, groups)
        if kept(tile, width, weight) <= KEPT:
            return tile
    step = min(most if affine else 2, 1 << units.bit_length() - 1)
    split = min(8 if affine else 16, -(-units // step))
    return Tile(1, split, step, 2, step)


def for_rows(tile: Tile, rows: int, width: int, weight: mx.array | Affine) -> Tile:
    """The same cut for that many rows: what is held of x has to fit."""
    if rows > 8:
        keeps = tile.ahead == 0 and 2 * kept(tile, width, weight) <= KEPT_BEYOND_EIGHT
        ahead = 1 if isinstance(weight, Affine) else max(1, tile.ahead)
        tile = replace(tile, tiles=1, ahead=0 if keeps else ahead)
    even = width // unit_of(weight) % tile.step == 0
    return tile if even else replace(tile, ahead=1)
