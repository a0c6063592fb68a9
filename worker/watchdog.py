"""When a worker must end itself: an attempt that gets nothing done, or that goes on without its lease."""

from __future__ import annotations

from typing import Final

from mtplx.errors import Exit

# Beyond the stall limit, so that a broker that is there says first what happened.
STALL_GRACE_S: Final = 5.0
# A step or a prefill chunk, between which the main thread sees that its lease is lost, takes no longer.
LEASE_GRACE_S: Final = 30.0
LOOK_S: Final = 1.0


class Watchdog:
    """Judges by the progress that the main thread notes; time is an argument, in monotonic seconds.

    Only time that passes between looks close together counts: a process that was stopped, or a machine that slept,
    has done nothing wrong.
    """

    def __init__(self, stall_s: float) -> None:
        self.every_s = min(LOOK_S, stall_s / 4)
        self._stall_s = stall_s + STALL_GRACE_S
        self._lease_s = min(stall_s, LEASE_GRACE_S)
        self._seen: tuple[int | None, int, bool] = (None, 0, False)
        self._since = self._looked = float("-inf")

    def look(self, lease: int | None, progress: int, now: float, *, disowned: bool) -> Exit | None:
        """The code to end with, or None. To be called every `every_s` seconds while there is a *lease*.

        disowned: the broker said that it does not know this worker: the lease is lost. A broker that says nothing
        for a while has taken nothing away.
        """
        away = now - self._looked > 3 * self.every_s + LOOK_S
        self._looked = now
        seen = (lease, progress, disowned)
        if away or lease is None or seen != self._seen:
            self._seen, self._since = seen, now
            return None
        if now - self._since <= (self._lease_s if disowned else self._stall_s):
            return None
        return Exit.LEASE_LOST if disowned else Exit.STALLED
