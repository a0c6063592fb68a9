"""Rows of a tree are drawn as single draws would draw them, bit by bit, and going on after a path leaves no trace."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.engine import draw as draw_module
from worker.engine import law as law_module
from worker.engine.draw import NOT_A_NUMBER, Draws, place, warm
from worker.engine.draw_tree import tree_operand
from worker.engine.law import Kind, law
from worker.engine.sample import Sampling

WIDTH, VOCABULARY = 67, 61
FREE = {"width": WIDTH, "vocabulary": VOCABULARY, "compiled": False}
EVERYTHING = Sampling(
    seed=2**63 + 5,
    temperature=0.8,
    top_p=0.9,
    min_p=0.01,
    top_k=40,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    logit_bias={3: 2.5, 60: -1.0},
    logprobs=4,
)
samplings = st.builds(
    Sampling,
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.0, 5.0]),
    top_p=st.sampled_from([1.0, 0.95, 0.5]),
    top_k=st.sampled_from([0, 1, 7, WIDTH]),
    min_p=st.sampled_from([0.0, 0.02, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.6]),
    frequency_penalty=st.sampled_from([0.0, 0.37]),
    penalty_window=st.sampled_from([0, 1, 2, 3, 5, 20, 64]),
    logit_bias=st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-9, 9, width=32), max_size=3),
    logprobs=st.sampled_from([0, 0, 1, 20]),
)
# One id alone is a history without a prompt.
histories = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40)


def logits_of(count, seed, dtype=mx.float32):
    """Rows with a few ids far ahead, so that histories repeat and penalties have something to do."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(count, WIDTH)) * 2
    rows[:, rng.integers(0, WIDTH, 6)] += 6
    return mx.array(rows.astype(np.float32)).astype(dtype)


def alone(sampling, ids, row):
    """What a single draw gives after *ids* for logits [V]."""
    return Draws(sampling, ids, **FREE)(row[None], place(len(ids)))


def grown(sampling, history, logits, parents, wanted):
    """The ids of a tree over *parents*: where *wanted* says so and no sibling has it, what would be drawn there.

    Returns the ids fed to the rows, and the single draw after each.
    """
    tokens, paths = [history[-1]], [(0,)]
    singles = [alone(sampling, history, logits[0])]
    for row, parent in enumerate(parents, start=1):
        taken = {tokens[other] for other in range(1, row) if parents[other - 1] == parent}
        hoped = singles[parent].token.item()
        others = [id_ for id_ in range(VOCABULARY) if id_ not in taken and id_ != hoped]
        tokens.append(hoped if wanted[row - 1] and hoped not in taken else others[7 * row % len(others)])
        paths.append((*paths[parent], row))
        ids = [*history, *(tokens[one] for one in paths[row][1:])]
        singles.append(alone(sampling, ids, logits[row]))
    return tokens, singles


def by_hand(tokens, parents, singles):
    """The accepted path, by descending while a child is the token drawn."""
    path = [0]
    while True:
        children = [row for row, parent in enumerate(parents, start=1) if parent == path[-1]]
        kept = [row for row in children if tokens[row] == singles[path[-1]].read.item()]
        if not kept:
            return path
        path.append(*kept)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(samplings, histories, st.data())
def test_rows_of_a_tree_are_single_draws_and_the_state_after_any_path_is_theirs(sampling, history, data):
    seed = data.draw(st.integers(0, 10**6))
    count = data.draw(st.integers(1, 16))
    nodes = data.draw(st.integers(0, count - 1))
    parents = [data.draw(st.integers(max(0, row - 4), row)) for row in range(nodes)]
    logits = logits_of(count + 3, seed)
    wanted = [data.draw(st.integers(0, 3)) > 0 for _ in parents]
    tokens, singles = grown(sampling, history, logits, parents, wanted)
    padding = [data.draw(st.integers(0, VOCABULARY - 1)) for _ in range(count - 1 - nodes)]
    fed = mx.array([*tokens, *padding], dtype=mx.uint32)
    draws = Draws(sampling, history, **FREE)
    drawn = draws.rows(logits[:count], fed, place(len(history)), parents)
    for row, single in enumerate(singles):
        assert drawn.token[row].item() == drawn.read[row].item() == single.token.item()
        if sampling.logprobs:
            tops = drawn.top if count == 1 else [part[row] for part in drawn.top]
            assert all(mx.array_equal(one, other) for one, other in zip(tops, single.top, strict=True))
    path = by_hand(tokens, parents, singles)
    assert drawn.path.dtype == mx.uint32
    assert drawn.path.tolist() == [path[-1], *drawn.read.tolist()]
    draws.accept(path)
    walker = Draws(sampling, history, **FREE)
    for depth, row in enumerate(path):
        walker(logits[row : row + 1], place(len(history) + depth))
    assert mx.array_equal(draws._state, walker._state)
    assert mx.array_equal(draws._newest, walker._newest)
    for further in range(count, count + 3):
        position = place(len(history) + len(path) + further - count)
        one, other = (each(logits[further : further + 1], position) for each in (draws, walker))
        assert one.read.item() == other.read.item()


@pytest.mark.parametrize("window", [0, 1, 3, 20])
@pytest.mark.parametrize("path", [[0], [0, 1], [0, 1, 2], [0, 3], [0, 3, 5], [0, 1, 4]])
def test_the_state_goes_on_along_any_path_that_the_host_chooses(path, window):
    """Also one that ends before the deepest row that holds, as a budget or a stop word may end it."""
    parents, ids = (0, 1, 0, 1, 3), [9, 8, 7, 6, 5, 4]
    for history in ([9], [3, 1, 4, 1, 5, 9]):
        sampling = replace(EVERYTHING, penalty_window=window)
        draws = Draws(sampling, history, **FREE)
        draws.rows(logits_of(8, 1), mx.array([*ids, 0, 0], dtype=mx.uint32), place(len(history)), parents)
        draws.accept(path)
        after = [*history, *(ids[row] for row in path[1:])]
        drawn = alone(sampling, after, logits_of(8, 1)[path[-1]]).token.item()
        fresh = Draws(sampling, [*after, drawn], **FREE)
        assert mx.array_equal(draws._state, fresh._state)
        assert mx.array_equal(draws._newest, fresh._newest)


@pytest.mark.parametrize(
    "sampling", [EVERYTHING, replace(EVERYTHING, penalty_window=0), Sampling(seed=7, temperature=1.0)]
)
def test_the_numbers_that_a_row_is_chosen_by_are_the_same_bits_for_any_number_of_rows_and_any_place(
    sampling, monkeypatch
):
    scores = []

    def noted(rows, *rest, real=law_module._perturbed):
        scores.append(real(rows, *rest))
        return scores[-1]

    monkeypatch.setattr(law_module, "_perturbed", noted)
    row, history, ids = logits_of(1, 3)[0], [4, 4, 9], [9, 5, 4]
    single = alone(sampling, [*history, 5, 4], row)
    for count in range(3, 17):
        for start in (1, count - 2):
            # The path 0, start, start + 1; all other rows are children of row 0.
            parents = [0] * (count - 1)
            parents[start] = start
            fed = [ids[0], *[10 + i for i in range(count - 1)]]
            fed[start : start + 2] = ids[1:]
            logits = logits_of(count, count)
            logits[start + 1] = row
            drawn = Draws(sampling, history, **FREE).rows(
                logits, mx.array(fed, dtype=mx.uint32), place(3), parents
            )
            assert mx.array_equal(scores[-1][start + 1], scores[0])
            assert drawn.read[start + 1].item() == single.read.item()


@pytest.mark.parametrize("sampling", [Sampling(seed=1), Sampling(seed=1, temperature=1.0), EVERYTHING])
def test_rows_that_are_no_numbers_end_the_path_and_are_told_and_elsewhere_they_harm_nothing(sampling):
    history, parents, logits = [1, 2], (0, 1, 0, 3), logits_of(5, 8)
    tokens, singles = grown(sampling, history, logits, parents, [True, True, False, False])
    fed = mx.array(tokens, dtype=mx.uint32)
    sane = Draws(sampling, history, **FREE).rows(logits, fed, place(2), parents).path.tolist()
    assert sane == [2, *(single.read.item() for single in singles)]
    for spoiled in range(5):
        for filling in (math.nan, math.inf, -math.inf):
            rows = mx.array(logits)
            rows[spoiled] = filling
            path = Draws(sampling, history, **FREE).rows(rows, fed, place(2), parents).path.tolist()
            last, read = path[0], path[1:]
            assert [row for row in range(5) if read[row] != sane[1 + row]] == [spoiled]
            assert read[spoiled] == NOT_A_NUMBER
            # A spoiled row of the path is its last: its token is no number, and the host learns it.
            assert last == min(spoiled, 2)


def test_a_row_whose_parent_was_refused_is_refused_even_if_it_is_what_was_drawn_there():
    sampling, history, logits = Sampling(seed=5), [1], logits_of(4, 2)
    tokens, singles = grown(sampling, history, logits, (0, 1, 2), [False, True, True])
    assert [tokens[row] == singles[row - 1].read.item() for row in (1, 2, 3)] == [False, True, True]
    drawn = Draws(sampling, history, **FREE).rows(logits, mx.array(tokens, dtype=mx.uint32), place(1))
    assert drawn.path.tolist()[0] == 0


def test_padding_is_never_accepted_though_it_be_fed_what_is_drawn():
    sampling, logits = Sampling(seed=5), logits_of(1, 2)
    token = alone(sampling, [1], logits[0]).token.item()
    rows = mx.broadcast_to(logits, (8, WIDTH))
    for parents, last in (((), 0), ((0,), 1), ((0, 1, 2), 3), (None, 7)):
        drawn = Draws(sampling, [1], **FREE).rows(
            rows, mx.array([1, *[token] * 7], dtype=mx.uint32), place(1), parents
        )
        assert drawn.path.tolist() == [last, *[token] * 8]


def test_a_tree_or_path_that_cannot_be_is_refused():
    logits, tokens = logits_of(3, 1), mx.array([1, 2, 3], dtype=mx.uint32)
    draws = Draws(EVERYTHING, [1], **FREE)
    for parents in ((0, 1, 2), (1, 0), (0, 2), (-1, 0)):
        with pytest.raises(ValueError, match=r"parent"):
            draws.rows(logits, tokens, place(1), parents)
    with pytest.raises(ValueError, match="parents"):
        draws.rows(logits[:1], tokens[:1], place(1), (0,))
    draws.rows(logits, tokens, place(1), (0,))
    for path in ([], [1], [0, 2], [0, 0], [0, 1, 2], [0, -1], [0, 3]):
        with pytest.raises(ValueError, match=r"path|row 0"):
            draws.accept(path)
    draws.accept([0, 1])
    with pytest.raises(RuntimeError, match="without rows"):
        draws.accept([0])


COMPILED = [
    (Sampling(seed=2**64 - 1), mx.bfloat16),
    (EVERYTHING, mx.float32),
    (replace(EVERYTHING, penalty_window=0, logprobs=0, logit_bias={}), mx.bfloat16),
]


@pytest.mark.parametrize(("sampling", "dtype"), COMPILED)
def test_compiled_trees_are_the_eager_ones_bit_by_bit(sampling, dtype):
    history, rows = [9, 8, 7, 8], logits_of(11, 11, dtype=dtype)
    fed = mx.array([8, 1, 2, 8, 3, 5, 0, 0], dtype=mx.uint32)
    seen = []
    for compiled in (False, True):
        draws = Draws(sampling, history, **{**FREE, "compiled": compiled})
        seen.append([draws.rows(rows[:8], fed, place(4), (0, 1, 0, 3, 3))])
        draws.accept([0, 3, 5])
        seen[-1] += [draws(rows[i : i + 1], place(i - 1)) for i in range(8, 11)]
    for eager, graph in zip(*seen, strict=True):
        assert mx.array_equal(eager.read, graph.read)
        assert eager.path is None or mx.array_equal(eager.path, graph.path)
        for one, other in zip(eager.top or (), graph.top or (), strict=True):
            assert mx.array_equal(one, other)


def test_new_trees_and_new_numbers_make_no_new_graph(monkeypatch):
    traced = []

    def counted(kind):
        draw = law(kind)

        def trace(*arrays):
            traced.append((kind, arrays[0].shape[0]))
            return draw(*arrays)

        return trace

    monkeypatch.setattr(draw_module, "law", counted)
    draw_module._law.cache_clear()
    trees = [None, (), (0,), (0, 0, 0), (0, 1, 1), (0, 1, 0, 3), (0, 0, 1, 1, 2, 2, 3)]
    for seed, parents in enumerate(trees):
        sampling = replace(EVERYTHING, seed=seed, temperature=0.5 + seed, logit_bias={seed: 1.0})
        draws = Draws(sampling, [1] * (seed + 1), width=WIDTH, vocabulary=VOCABULARY, compiled=True)
        for count in (8, 16):
            tokens = mx.arange(count).astype(mx.uint32)
            draws.rows(logits_of(count, seed), tokens, place(seed + 1), parents)
            draws.accept([0])
            draws(logits_of(1, seed), place(seed + 2))
    draw_module._law.cache_clear()
    assert sorted(rows for _, rows in traced) == [1, 8, 16]
    assert len({kind for kind, _ in traced}) == 1


def test_a_single_draw_has_no_tree_and_no_path():
    assert alone(EVERYTHING, [1], logits_of(1, 1)[0]).path is None


# Nodes of a draw of eight rows; what accepts them is eight of these.
NODES = {
    "greedy": (Sampling(seed=0), 13),
    "temperature": (Sampling(seed=0, temperature=0.8), 19),
    "greedy, penalties": (Sampling(seed=0, repetition_penalty=1.1), 27),
}


@pytest.mark.parametrize("name", NODES)
def test_a_draw_of_rows_has_few_nodes(name, tmp_path):
    sampling, most = NODES[name]
    draws = Draws(sampling, [0, 1], width=64, vocabulary=64, compiled=True)
    logits, tokens = mx.zeros((8, 64), dtype=mx.bfloat16), mx.zeros(8, dtype=mx.uint32)
    mx.eval(logits, tokens)
    mx.export_to_dot(str(tmp_path / "graph.dot"), draws.rows(logits, tokens, place(2), (0, 0)).path)
    assert len(re.findall(r"shape=rectangle", (tmp_path / "graph.dot").read_text())) <= most


def test_the_operand_of_a_tree_stays_small_for_a_long_window_and_is_kept():
    assert tree_operand(100_000, 16, (0, 1)).shape == (16, 4 + 16 + 16)
    assert tree_operand(3, 16, [0, 1]).shape == (16, 4 + 16 + 3)
    assert tree_operand(0, 2, (0,)).shape == tree_operand(None, 2, ()).shape == (2, 7)
    assert tree_operand(3, 16, [0, 1]) is tree_operand(3, 16, (0, 1))


def test_warming_runs_a_path_that_moves_ids_for_every_number_of_rows(monkeypatch):
    drawn, moved = set(), []

    def noted(kind):
        draw = law(kind)

        def run(logits, *rest):
            drawn.add((kind, logits.shape[0]))
            return draw(logits, *rest)

        return run

    def gone(self, path, real=Draws.accept):
        moved.append(len(path) - 1 < path[-1])
        real(self, path)

    monkeypatch.setattr(draw_module, "law", noted)
    monkeypatch.setattr(Draws, "accept", gone)
    draw_module._law.cache_clear()
    warm(WIDTH, VOCABULARY, mx.float32, rows=(1, 4, 16))
    draw_module._law.cache_clear()
    kinds = {Kind.of(sampling, WIDTH, VOCABULARY, None) for sampling in draw_module.COMMON}
    assert drawn == {(kind, rows) for kind in kinds for rows in (1, 4, 16)}
    assert moved == [True] * 2 * len(kinds)
