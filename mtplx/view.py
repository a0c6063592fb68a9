"""What both clients' streams tell of their job."""

from __future__ import annotations

from mtplx.messages import Progress
from mtplx.stream import Result, StreamState


def result_of(state: StreamState) -> Result:
    """The result of an ended stream, or its error raised."""
    if state.error is not None:
        raise state.error
    if state.result is None:
        raise RuntimeError("The stream has not ended.")
    return state.result


class StreamView:
    """What both kinds of stream tell about their job."""

    def __init__(self, state: StreamState) -> None:
        self._state = state

    @property
    def id(self) -> bytes:
        """The job's id, 16 bytes."""
        return self._state.id

    @property
    def seed(self) -> int:
        """The seed in force: the job's own, or the one the broker drew."""
        return self._state.admitted.seed if self._state.admitted else 0

    @property
    def admit_seq(self) -> int:
        """Place in the order of all admissions; jobs run in this order."""
        return self._state.admitted.admit_seq if self._state.admitted else -1

    @property
    def position(self) -> int:
        """Jobs that were before this one at admission, the running one included."""
        return self._state.admitted.position if self._state.admitted else -1

    @property
    def progress(self) -> Progress | None:
        """The last PROGRESS, as of the last wait on this client."""
        return self._state.progress

    @property
    def text(self) -> str:
        """The answer as far as it has arrived, read or not."""
        return self._state.text

    @property
    def _orphaned(self) -> bool:
        """True for a job that goes on and whose only reader leaves."""
        return not self._state.ended and not self._state.submit.finish

    @property
    def _unreadable(self) -> bool:
        """True for a job that waits for credit, which only a reader gives, and goes on for ever without one."""
        state = self._state
        return state.submit.credit is not None and not state.ended and not state.cancel_wanted

    @property
    def ended(self) -> bool:
        """True once the last word is here."""
        return self._state.ended
