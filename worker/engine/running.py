"""The request that runs on the serial engine: what it has drawn, and the forwards in flight."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import mlx.core as mx

from worker.engine.draw import NOT_A_NUMBER, Drawn, Draws
from worker.engine.engine import EngineRequest, NumericError, Step, likeliest_first
from worker.kv.prefix import Opened
from worker.speculation.draft import Draft


class Flight(NamedTuple):
    """A forward over a draft that was launched.

    first: `place` of the id drawn after row 0. drawn: the draw of row 0's id, where nobody has read it. ids: that
    id, where it was read for this forward.
    """

    draft: Draft
    wide: Drawn
    first: mx.array
    drawn: Drawn | None
    ids: list[int]

    @property
    def last(self) -> mx.array:
        """Uint32 [1]: the last row that holds."""
        assert self.wide.path is not None, "a draw of rows tells the path"
        return self.wide.path[:1]


@dataclass(slots=True)
class Running:
    """The request that runs.

    ahead: the draw of the newest id, whose row nobody has computed. newest: that id, where a verify forward has
    told it. decided: what comes before it and was not handed out. flights: the forwards that draw beyond
    *decided*, in the place of *ahead*, one behind the other. widths: forwards by rows.
    """

    request: EngineRequest
    opened: Opened
    draws: Draws
    ahead: Drawn | None = None
    newest: int | None = None
    flights: deque[Flight] = field(default_factory=deque)
    decided: deque[Step] = field(default_factory=deque)
    answer: list[int] = field(default_factory=list)
    widths: Counter[int] = field(default_factory=Counter)
    failed: bool = False

    def fly(self, flight: Flight) -> None:
        """*flight* was launched."""
        mx.async_eval(flight.wide.path, *(flight.wide.top or ()))  # type: ignore[no-untyped-call]
        self.flights.append(flight)

    def take_ahead(self) -> Drawn:
        """The draw of the newest id, which its taker replaces."""
        if self.ahead is None:
            raise RuntimeError("step() without a started request, or beyond its budget")
        drawn, self.ahead = self.ahead, None
        return drawn

    def read(self, drawn: Drawn) -> Step:
        """What was drawn: waits for it, unless it is known.

        Raises:
            NumericError: the logits were not numbers.
        """
        token, self.newest = self.newest, None
        if token is None:
            token = cast("int", drawn.read.item())
            self.widths[1] += 1
        if token == NOT_A_NUMBER:
            self.failed = True
            raise NumericError("the model produced NaN or infinite logits")
        return Step(token, pairs(drawn.top))

    @property
    def total(self) -> int:
        """Ids to be read before the first draw."""
        return len(self.request.prompt) + len(self.request.drawn)


def pairs(top: tuple[mx.array, mx.array] | None, row: int | None = None) -> list[tuple[int, float]] | None:
    """The pairs of one row of *top*; row None where it has only one."""
    if top is None:
        return None
    ids, values = (cast("list[Any]", (part if row is None else part[row]).tolist()) for part in top)
    return likeliest_first(ids, values)
