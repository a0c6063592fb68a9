"""Whether two models speak of the same ids, token by token: only then can one draft for the other."""

from __future__ import annotations

from typing import Any, Final

from worker.engine.load import LoadedModel

# Tokens that a refusal names; the first ones tell which tokenizer it is.
_NAMED: Final = 3


def difference(target: LoadedModel, draft: LoadedModel) -> str:
    """What differs between the ids of two models, in words; empty where nothing does.

    Compared are how many ids there are, the token of each, and which of them are special. Padded rows of the heads
    may differ, and so may the ids at which the models end their answers: the target alone decides that.
    """
    if target.vocabulary != draft.vocabulary:
        return f"it has {draft.vocabulary} ids, and the model has {target.vocabulary}"
    ours, theirs = _tokens(target.tokenizer), _tokens(draft.tokenizer)
    unlike = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    if unlike:
        named = "; ".join(f"id {one} is {theirs.get(one)!r}, not {ours.get(one)!r}" for one in unlike[:_NAMED])
        return f"{len(unlike)} of its ids stand for other tokens: {named}"
    special = set(target.tokenizer.all_special_ids) ^ set(draft.tokenizer.all_special_ids)
    if special:
        named = ", ".join(f"{one} ({ours.get(one)!r})" for one in sorted(special)[:_NAMED])
        return f"other ids are special: {named} in one of the two alone"
    return ""


def _tokens(tokenizer: Any) -> dict[int, str]:
    """The token of each id."""
    return {number: token for token, number in tokenizer.get_vocab().items()}
