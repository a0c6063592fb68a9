"""Draft trees: which are refused, what their rows are, and which path is kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.speculation.draft import MAX_NODES, Draft, accepted, left_trunk

TOKENS = 4


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    """Any tree that a drafter may give: each node hangs on the path of the row before it."""
    tokens, parents, path, children = [], [], [0], {0: set()}
    for row in range(1, draw(st.integers(0, MAX_NODES)) + 1):
        free = [one for one in path if len(children[one]) < TOKENS]
        parent = draw(st.sampled_from(free))
        token = draw(st.sampled_from(sorted(set(range(TOKENS)) - children[parent])))
        children[parent].add(token)
        children[row] = set()
        path = [*path[: path.index(parent) + 1], row]
        tokens.append(token)
        parents.append(parent)
    return Draft(tuple(tokens), tuple(parents))


@given(drafts())
def test_paths_go_from_row_0_by_the_parents(draft):
    paths = draft.paths()
    assert len(paths) == draft.width == 1 + len(draft)
    assert paths[0] == (0,)
    for row in range(1, draft.width):
        parent = draft.parents[row - 1]
        assert paths[row] == (*paths[parent], row)
        assert draft.depths[row - 1] == len(paths[row]) - 1
        assert parent in paths[row - 1], "depth first"


@given(drafts(), st.data())
def test_the_kept_path_is_the_walk_of_the_tree_by_the_drawn_tokens(draft, data):
    drawn = data.draw(st.lists(st.integers(0, TOKENS - 1), min_size=draft.width, max_size=16))
    children = {}
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        children[parent, token] = node + 1
    row, walk = 0, [0]
    while (row, drawn[row]) in children:
        row = children[row, drawn[row]]
        walk.append(row)
    assert accepted(draft, drawn) == tuple(walk)


@given(drafts(), st.data())
def test_a_path_leaves_the_trunk_where_it_takes_another_child_than_the_first(draft, data):
    path = data.draw(st.sampled_from(draft.paths()))
    trunk = draft.paths()[draft.trunk]
    leaves = [depth for depth in range(len(path)) if depth >= len(trunk) or path[depth] != trunk[depth]]
    assert left_trunk(draft, path) == (leaves[0] if leaves else 0)


@given(st.lists(st.integers(0, TOKENS - 1), max_size=MAX_NODES))
def test_a_chain_is_a_tree_of_one_path(tokens):
    draft = Draft.chain(tokens)
    assert draft == Draft(tuple(tokens), tuple(range(len(tokens))))
    assert draft.is_chain
    assert draft.trunk == len(draft)
    assert draft.paths()[-1] == tuple(range(draft.width))
    assert accepted(draft, [*tokens, 9]) == tuple(range(draft.width))


@pytest.mark.parametrize(
    ("tokens", "parents", "words"),
    [
        ((1, 1), (0, 0), "same token"),
        ((1, 2, 3, 3), (0, 1, 0, 0), "same token"),
        ((1,), (1,), "not on the path"),
        ((1,), (-1,), "not on the path"),
        ((1, 2, 3), (0, 0, 1), "not on the path"),
        ((1, 2), (0,), "2 tokens and 1 parents"),
        (tuple(range(16)), tuple(range(16)), "at most 15"),
    ],
)
def test_a_wrong_tree_is_refused(tokens, parents, words):
    with pytest.raises(ValueError, match=words):
        Draft(tokens, parents)


@given(drafts())
def test_every_tree_with_its_rows_in_another_order_than_depth_first_is_refused(draft):
    """Breadth first, say: two children of a row, then a child of the first."""
    if not len(draft) or len(draft) > MAX_NODES - 2:
        return
    rows = len(draft)
    Draft((*draft.tokens, 9, 9), (*draft.parents, rows, 0))
    with pytest.raises(ValueError, match="not on the path"):
        Draft((*draft.tokens, 9, 9), (*draft.parents, 0, rows))


def test_no_draft_keeps_row_0_and_what_is_too_short_is_refused():
    assert accepted(Draft.EMPTY, [5]) == (0,)
    with pytest.raises(ValueError, match="1 tokens drawn after 2 rows"):
        accepted(Draft.chain([5]), [5])
