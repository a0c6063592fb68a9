"""A head by mlx-lm's own layers, beside any lane: its block keeps a cache of its own."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ids

import mlx.core as mx

from worker.engine.host_tables import further_place
from worker.engine.trunk import Trunk
from worker.kv.prefix import Opened
from worker.speculation.mtp.following import Ask
from worker.speculation.mtp.head import Head, Reading

_ROW_0 = mx.array([0], dtype=mx.uint32)


class ModuleHead:
    """The `HeadRun` over it. Rows that an earlier job computed are not known to it: it begins behind them."""

    goes_behind = False

    def __init__(self, head: Head, trunk: Trunk) -> None:
        self._trunk, self._takes_normed = trunk, head.takes_normed
        self._open: Callable[[bool], Reading] = lambda whole: Reading(head, trunk, from_start=whole)
        self._reading = self._open(True)

    def begin(self, opened: Opened) -> None:
        """As in `HeadRun`: of positions that an earlier job computed it knows nothing."""
        self._reading = self._open(opened.cached == 0)

    def prime(self, ids: Ids[int], states: mx.array, start: int) -> None:
        """As in `HeadRun`."""
        self.read(ids, states[: len(ids)], start)

    def read(self, ids: Ids[int], states: mx.array, start: int) -> None:  # noqa: ARG002 - its cache counts
        """As in `HeadRun`."""
        hidden = self._trunk.normed(states) if self._takes_normed else states
        self._reading.read(mx.array(list(ids), dtype=mx.uint32), hidden)
        mx.async_eval(self._reading.arrays)  # type: ignore[no-untyped-call]

    def draft(self, ask: Ask) -> mx.array:
        """As in `HeadRun`."""
        position = ask.position

        def choose(logits: mx.array) -> mx.array:
            nonlocal position
            token, position = ask.draws(logits, position).token, further_place(position, _ROW_0)
            return token

        return mx.concatenate(self._reading.draft(ask.count, choose))

    def draft_behind(
        self, tokens: mx.array, states: mx.array, last: mx.array, ask: Ask, start: int | None
    ) -> mx.array:
        """As in `HeadRun`: never asked, for its cache is the host's."""
        raise NotImplementedError
