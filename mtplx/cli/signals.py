"""How the commands hear of SIGINT, SIGTERM and SIGHUP."""

from __future__ import annotations

import select
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Final, Self

STOPS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def install(number: signal.Signals, handler: Callable[[int, FrameType | None], Any]) -> Any:
    """Set *handler*; returns the one before it. A SIGHUP that `nohup` has switched off stays off."""
    before = signal.getsignal(number)
    if number != signal.SIGHUP or before is not signal.SIG_IGN:
        signal.signal(number, handler)
    return before


@contextmanager
def ctrl_c_by_sigterm() -> Iterator[None]:
    """Let SIGTERM and SIGHUP interrupt this block as Ctrl-C does (main thread), so that it says goodbye."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [install(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


class Signals:
    """Counts the signals to stop while it is entered (main thread); `pause` ends with the next one.

    The handler only counts: it may run in the middle of any line, where a lock could be held already.
    """

    def __init__(self, again: Callable[[], None] | None = None) -> None:
        self.count = 0
        self.last = 0
        self.again = again
        self._reader, self._writer = socket.socketpair()
        self._before: list[Any] = []
        self._wakeup_before = -1

    def pause(self, seconds: float) -> None:
        """Wait *seconds*, or until a signal comes."""
        if not self.count:
            select.select([self._reader], [], [], seconds)

    def __enter__(self) -> Self:
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._before = [install(number, self._on_signal) for number in STOPS]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in zip(STOPS, self._before, strict=True):
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._reader.close()
        self._writer.close()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.count += 1
        self.last = number
        if self.count > 1 and self.again is not None:
            self.again()
