"""The drafter over a head: it follows the trunk's hidden states, and drafts what only the device knows.

Drafts are drawn as the target draws, with the noise of (seed, position): a draft is what the target will draw
unless the two laws differ enough to change the best score. Each feeds the next, and the host reads none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import mlx.core as mx

from worker.engine.draw import Draws, place
from worker.engine.forward import Forward
from worker.engine.host_tables import further_place
from worker.engine.running import Flight
from worker.speculation.draft import MAX_NODES, Draft, Proposal, Terms, Traits
from worker.speculation.mtp.following import Ask, Following, HeadRun

MTP: Final = Traits(edges=(), kept=(0.7,), free=False)
# Pairs that may wait before they are read together, and how many are then.
_WAITING: Final = 16


@dataclass(slots=True)
class _Text:
    """The job. ids: prompt and answer. seen: how many of them the draws know."""

    ids: list[int]
    draws: Draws
    seen: int


class Mtp:
    """The `Drafter` over a head.

    Args:
        head: over the lane's states.
        lane: of the trunk.
        width: rows of the trunk's LM head. vocabulary: ids are below it.
    """

    name = "mtp"
    traits = MTP

    def __init__(self, head: HeadRun, lane: Forward, width: int, vocabulary: int) -> None:
        self._head, self._lane = head, lane
        self._following = Following(head)
        self._width, self._vocabulary = width, vocabulary
        self._text: _Text | None = None

    def follow(self) -> None:
        """From the next job on, until `end`, the lane tells its states."""
        self._lane.follower = self._following

    def begin(self, ids: Sequence[int], sampling: Any, terms: Terms) -> None:
        """As in `Drafter`; the lane has read the prompt, and `follow` came before that."""
        draws = Draws(
            replace(sampling, logprobs=0),
            ids,
            width=self._width,
            vocabulary=self._vocabulary,
            reach=len(ids) + terms.budget,
        )
        self._text = _Text(list(ids), draws, len(ids))

    def extend(self, ids: Sequence[int]) -> None:
        """As in `Drafter`. Of many plain steps the states are read now and then: they take memory."""
        text = self._text
        if text is None:
            return
        text.ids += ids
        if self._following.waiting > _WAITING:
            self.catch_up()

    def catch_up(self) -> None:
        """As in `Drafter`."""
        if self._text is not None:
            following = self._following
            start = following.length - following.waiting + 1
            following.catch_up(self._text.ids[start:])

    def draft(self, count: int) -> mx.array:
        """Uint32 [count]: ids behind the text, of which the trunk has computed all but the newest id's row."""
        text = self._text
        assert text is not None, "begin() comes first"
        self.catch_up()
        text.draws.extend(text.ids[text.seen :])
        text.seen = len(text.ids)
        return self._head.draft(Ask(count, text.draws.fork(), place(len(text.ids))))

    def may_draft_behind(self) -> bool:
        """Whether drafts behind rows in flight can be had: no draw of the job depends on the ids before it."""
        return self._head.goes_behind and self._text is not None and not self._text.draws.has_history

    def draft_behind(self, flight: Flight, count: int) -> mx.array:
        """Uint32 [count]: ids behind whatever will hold of the forward in flight, the only one."""
        assert self._text is not None, "begin() comes first"
        position = further_place(flight.first, flight.last)
        ask = Ask(count, self._text.draws.fork(), position)
        return self._following.show(flight.wide.token, flight.last, ask)

    def propose(self, limit: int, forks: int) -> Proposal:  # noqa: ARG002 - a head drafts chains
        """As in `Drafter`, for who wants to look at drafts: waits for them."""
        if self._text is None or limit < 1:
            return Proposal()
        tokens = cast("list[int]", self.draft(min(limit, MAX_NODES)).tolist())
        return Proposal(Draft.chain(tokens), (1.0,) * len(tokens))

    def end(self) -> None:
        """As in `Drafter`: what waits is read, for later prompts may begin with it."""
        if self._text is not None:
            self.catch_up()
        self._text = None
        self._lane.follower = None
