"""How long a client waits for a word of the broker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mtplx.errors import BrokerUnreachableError
from mtplx.session import Session


@dataclass(slots=True)
class Patience:
    """How long a wait may take: *limit* seconds in all, *idle()* seconds without a word of the broker.

    `missing` makes the error of a wait that took too long.
    """

    session: Session
    began: float
    limit: float | None
    idle: Callable[[], float] | None
    missing: Callable[[], Exception]
    lost: Callable[[float], BrokerUnreachableError]

    def left(self, now: float) -> float | None:
        """Seconds the caller may go on waiting; None = for ever.

        Raises:
            Exception: of `missing` or `lost`, when the time is up.
        """
        ends = []
        if self.limit is not None:
            ends.append(self.began + self.limit - now)
            if ends[-1] <= 0:
                raise self.missing()
        if self.idle is not None:
            # Silence while nobody listened proves nothing: count from the start of this wait.
            idle = self.idle()
            ends.append(max(self.session.heard, self.began) + idle - now)
            if ends[-1] <= 0:
                raise self.lost(idle)
        return min(ends, default=None)
