"""Drafted rows in every lane: each row has the bits of a chain along its path, and what is not kept leaves no trace."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path as Folder
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inference.modules import NAN, make
from kernels.emulated import Machine
from tiny_models import VOCABULARY, bare, make_tiny

from worker.engine import dense_in_place
from worker.engine.dense_in_place import DenseInPlace
from worker.engine.dense_tail import TAIL, DenseTail
from worker.engine.forward import MAX_ROWS, Forward, Path, rows_needed
from worker.engine.load import load
from worker.engine.module_lane import ModuleForward, look_at
from worker.engine.packed import Packed, pack
from worker.engine.probe import bits, graph_nodes
from worker.engine.verify_bank import SIZES, TREE_SIZES, Switches, VerifyBank
from worker.kernels import dialect
from worker.kv.pages import PAGE, Pages, Sequence
from worker.kv.pool import Pool, Shape
from worker.kv.prefix import Opened

PAGES = 14
IDS = [place * 37 % VOCABULARY for place in range(200)]
EXACT = settings(derandomize=True, deadline=None, max_examples=25)


@dataclass
class Rig:
    """A lane over pools whose unwritten slots hold NaN, and one sequence."""

    lane: Forward
    pools: list[Pool]
    pages: Pages
    sequence: Sequence | None = None

    @classmethod
    def packed(cls, packed: Packed, form: str, pages: int = PAGES) -> Rig:
        heads = packed.heads
        pool = Pool(Shape(len(packed.layers), heads.kv_heads, heads.dim, packed.dtype), pages, fill=NAN)
        lane: Forward
        if form == "tail":
            lane = DenseTail(packed, pool)
        else:
            lane = DenseInPlace(packed, pool, prefill_rows=PAGE, switches=Switches(trees=True))
        return cls(lane, [pool], Pages(pages))

    @classmethod
    def module(cls, model: Any, pages: int = PAGES) -> Rig:
        lane = ModuleForward(model, look_at(model), pages=pages)
        for pool in lane.pools:
            pool.arrays[:] = [mx.full(array.shape, NAN, dtype=array.dtype) for array in pool.arrays]
            pool.finish()
        return cls(lane, lane.pools, Pages(pages))

    @contextmanager
    def job(self, ids: list[int], budget: int = 200) -> Iterator[Rig]:
        """The prompt *ids* is read, in scattered pages."""
        torn = [self.pages.reserve(PAGE) for _ in range(self.pages.count)]
        for one in torn[::2] + torn[1::2]:
            one.release()
        self.sequence = self.pages.reserve(rows_needed(len(ids) + budget, self.lane.prefill_rows))
        random.Random(len(ids)).shuffle(self.sequence.table)
        self.lane.begin(Opened(self.sequence, tuple(ids), b"", False, (), 0, True))
        step = max(self.lane.prefill_rows, 32)
        for start in range(0, len(ids), step):
            logits = self.lane.read(ids[start : start + step], last=start + step >= len(ids))
            mx.eval([] if logits is None else logits)
        yield self
        self.pages.check()
        self.lane.end()
        self.sequence.release()
        assert self.pages.free == self.pages.count

    def rows(self, tokens: list[int], parents: Path | None = None) -> mx.array:
        logits = self.lane.rows(mx.array(tokens, dtype=mx.uint32), parents)
        mx.eval(logits)
        assert logits.shape[0] == len(tokens)
        return logits

    def singles(self, tokens: list[int]) -> mx.array:
        return mx.concatenate([self.rows([token]) for token in tokens])

    def held(self, sequence: Sequence) -> list[mx.array]:
        """All rows of *sequence* in all layers, apart from the pools."""
        found = [
            mx.contiguous(pool.read(layer, sequence.table, sequence.length))
            for pool in self.pools
            for layer in range(len(pool.arrays))
        ]
        mx.eval(found)
        return [mx.array(np.array(one.astype(mx.float32))) for one in found]


def same(one: mx.array, other: mx.array) -> bool:
    return one.shape == other.shape and mx.array_equal(bits(one), bits(other)).item()


def lines(parents: Path | None, count: int) -> list[Path]:
    """The path of each row."""
    found: list[Path] = [(0,)]
    for row in range(1, count):
        found.append((*found[row - 1 if parents is None else parents[row - 1]], row))
    return found


@dataclass(frozen=True)
class Round:
    """One verify: its rows, whether a settle comes between it and the keep, and the row at the path's end."""

    tokens: list[int]
    parents: Path | None
    end: int
    settled: bool


def of_tree(parents: list[int], data: random.Random) -> Round:
    count = len(parents) + 1
    tokens = [data.randrange(VOCABULARY) for _ in range(count)]
    return Round(tokens, tuple(parents), data.randrange(count), data.random() < 0.2)


def rounds_of(seed: int, count: int, *, trees: bool = True) -> list[Round]:
    """Rounds of any width, chains and trees."""
    data = random.Random(seed)
    made = []
    for _ in range(count):
        size = data.choice([1, 2, 3, 4, 5, 8, 11, 16])
        if trees and data.random() < 0.7:
            made.append(of_tree([data.randrange(row) for row in range(1, size)], data))
        else:
            made.append(
                Round([data.randrange(VOCABULARY) for _ in range(size)], None, data.randrange(size), settled=False)
            )
    return made


def check_rounds(rig: Rig, other: Rig, fresh: Rig, ids: list[int], script: list[Round]) -> None:
    """Every row as *other* computes it alone, and every kept one as *fresh* does, which sees no draft at all."""
    kept: list[int] = []
    got: list[mx.array] = []
    with rig.job(ids), other.job(ids):
        for one in script:
            start = rig.sequence.length
            logits = rig.rows(one.tokens, one.parents)
            paths = lines(one.parents, len(one.tokens))
            for row in {path[-1] for path in paths} - {above for path in paths for above in path[:-1]}:
                alone = other.singles([one.tokens[each] for each in paths[row]])
                assert same(mx.take(logits, mx.array(paths[row]), axis=0), alone), (one, row)
                other.sequence.truncate(start)
                other.lane.settle()
            if one.settled:
                rig.lane.settle()
            path = paths[one.end]
            rig.lane.keep(path)
            assert rig.sequence.length == start + len(path)
            other.singles([one.tokens[row] for row in path])
            kept += [one.tokens[row] for row in path]
            got += [logits[row : row + 1] for row in path]
            rig.pages.check()
        with fresh.job(ids):
            want = fresh.singles(kept)
            assert same(mx.concatenate(got), want)
            rig.lane.settle()
            fresh.lane.settle()
            for held, wanted in zip(rig.held(rig.sequence), fresh.held(fresh.sequence), strict=True):
                assert same(held, wanted), "the stored rows are those of a run without drafts"


# --- packed, official operations


@EXACT
@given(
    st.sampled_from(["llama", "qwen3", "smollm3"]),
    st.sampled_from([1, 30, 31, 32, 33, 50, 64]),
    st.integers(0, 10**6),
)
def test_in_the_tail_form_drafts_change_no_bit(kind: str, length: int, seed: int) -> None:
    packed = pack(bare(kind))
    rigs = [Rig.packed(packed, "tail") for _ in range(3)]
    check_rounds(*rigs, IDS[:length], rounds_of(seed, 9))
