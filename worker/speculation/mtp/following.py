"""What a head has read of the text that its trunk computes: states wait until the ids behind them are known."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from worker.engine.draw import Draws
from worker.engine.forward import MAX_ROWS, Path
from worker.kv.prefix import Opened


@dataclass(frozen=True, slots=True)
class Ask:
    """What is to be drafted. position: `place` of the first id. draws: of the text so far; they are used up."""

    count: int
    draws: Draws
    position: mx.array


class HeadRun(Protocol):
    """A head over one text after the other. It reads pairs in order; by that what it drafted is dropped.

    A pair is the trunk's state of a position, before the final norm, and the id behind it.
    """

    goes_behind: bool
    """Whether it drafts behind rows of which no path was kept."""

    def begin(self, opened: Opened) -> None:
        """A text begins, as in `Follower.begin`."""

    def prime(self, ids: Ids[int], states: mx.array, start: int) -> None:
        """Read the pairs of the prompt from position *start* on, as many as ids.

        states: T [n, K], as many as ids or more.
        """

    def read(self, ids: Ids[int], states: mx.array, start: int) -> None:
        """Read up to 16 pairs: ids, and as many states T [R, K]."""

    def draft(self, ask: Ask) -> mx.array:
        """Uint32 [count]: ids behind the latest pair, which the host does not know."""

    def draft_behind(
        self, tokens: mx.array, states: mx.array, last: mx.array, ask: Ask, start: int | None
    ) -> mx.array:
        """As `read` and `draft`, of pairs that the device alone knows.

        tokens: uint32 [R]. states: T [R, K]. last: uint32 [1], the last pair that holds. start: position of the
        first pair; None, behind the latest pair that held.
        """


@dataclass(slots=True)
class _Flying:
    """Rows of which no path is known. start: position of the first; None behind others. read: by the head."""

    states: mx.array
    count: int
    start: int | None
    read: bool = False


class Following:
    """The `Follower` for a head."""

    def __init__(self, head: HeadRun) -> None:
        self._head = head
        self._flying: deque[_Flying] = deque()
        self._waiting: list[mx.array] = []
        self._length = self._read = 0

    @property
    def length(self) -> int:
        """Positions whose states are known, and hold."""
        return self._length

    @property
    def waiting(self) -> int:
        """States that hold and that the head has not read."""
        return self._length - self._read

    def begin(self, opened: Opened) -> None:
        """As in `Follower`: of positions that an earlier job computed there are no states."""
        self._flying.clear()
        self._waiting.clear()
        self._length = self._read = opened.cached
        self._head.begin(opened)

    def read(self, ids: Ids[int], states: mx.array) -> None:
        """As in `Follower`: the last pair has to wait for its id."""
        self.catch_up([ids[0]])
        start, count = self._length, len(ids)
        if count > 1:
            self._head.prime(ids[1:], states, start)
        self._length, self._read = start + count, start + count - 1
        self._waiting = [states[count - 1 : count]]

    def rows(self, states: mx.array, count: int, *, behind: bool) -> None:
        """As in `Follower`."""
        if not behind:
            # Nobody kept a path of them: all are rows of the text.
            while self._flying:
                self.keep(tuple(range(self._flying[0].count)))
        start = None if behind else self._length
        if count == 1 and not behind:
            self._hold(states)
            return
        self._flying.append(_Flying(states, count, start))

    def keep(self, path: Path) -> None:
        """As in `Follower`."""
        if not self._flying:
            return
        rows = self._flying.popleft()
        if rows.read:
            self._length += len(path)
            self._read = self._length
        else:
            chain = path == tuple(range(len(path)))
            kept = rows.states[: len(path)] if chain else rows.states[mx.array(path, dtype=mx.uint32)]
            self._hold(kept)
        if self._flying:
            self._flying[0].start = self._length

    def catch_up(self, ids: Sequence[int]) -> None:
        """Let the head read what waits. ids: behind the positions that wait, in order, one for each or fewer."""
        states = self._waiting[0] if len(self._waiting) == 1 else None
        if self._waiting and states is None:
            states = mx.concatenate(self._waiting)
        done = 0
        while states is not None and done < min(len(ids), states.shape[0]):
            end = min(done + MAX_ROWS, len(ids), states.shape[0])
            self._head.read(ids[done:end], states[done:end], self._read)
            self._read += end - done
            done = end
        left = [] if states is None or done == states.shape[0] else [states[done:]]
        self._waiting = left

    def show(self, tokens: mx.array, last: mx.array, ask: Ask) -> mx.array:
        """Draft behind the rows in flight, those up to *last* of which hold; *tokens* uint32 [R] were drawn."""
        rows = self._flying[-1]
        rows.read = True
        # Where nothing waits the head is where these rows begin, and the device knows where that is.
        start = rows.start if self.waiting else None
        return self._head.draft_behind(tokens, rows.states, last, ask, start)

    def _hold(self, states: mx.array) -> None:
        self._waiting.append(states)
        self._length += states.shape[0]
