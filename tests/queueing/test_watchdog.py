"""When a worker ends itself, on a clock moved by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mtplx.errors import Exit
from worker.watchdog import LEASE_GRACE_S, STALL_GRACE_S, Watchdog

STALL_S = 60.0


class Dog:
    """A watchdog that is asked once a second."""

    def __init__(self, stall_s: float = STALL_S) -> None:
        self.dog = Watchdog(stall_s)
        self.now = 1000.0

    def ends(
        self,
        seconds: int,
        *,
        lease: int | None = 1,
        progress: Callable[[int], int] = lambda _: 0,
        lost: bool = False,
    ) -> tuple[int, Exit] | None:
        """After how many of these seconds it ends the worker, and how."""
        for second in range(seconds):
            self.now += self.dog.every_s
            code = self.dog.look(lease, progress(second), self.now, disowned=lost)
            if code is not None:
                return second, code
        return None


def test_an_attempt_without_progress_is_ended_after_the_stall_limit_and_a_moment_for_the_broker_to_say_so():
    assert Dog().ends(1000) == (STALL_S + STALL_GRACE_S + 1, Exit.STALLED)


def test_progress_in_good_time_is_never_ended():
    assert Dog().ends(1000, progress=lambda second: second // int(STALL_S)) is None


def test_an_idle_worker_has_nothing_to_progress_with():
    assert Dog().ends(1000, lease=None) is None


def test_a_new_lease_has_the_whole_limit():
    dog = Dog()
    assert dog.ends(60) is None
    assert dog.ends(60, lease=2) is None
    assert dog.ends(100, lease=2) == (STALL_S + STALL_GRACE_S - 59, Exit.STALLED)


def test_a_lost_lease_that_nobody_heeds_ends_the_worker_sooner():
    dog = Dog()
    assert dog.ends(20) is None
    assert dog.ends(100, lost=True) == (LEASE_GRACE_S + 1, Exit.LEASE_LOST)


def test_a_lost_lease_leaves_no_more_time_than_a_stall_does():
    assert Dog(2.0).ends(100, lost=True) == (2.0 / 0.5 + 1, Exit.LEASE_LOST)


@pytest.mark.parametrize("lost", [False, True])
def test_time_in_which_the_process_itself_did_not_run_does_not_count(lost: bool):
    dog = Dog()
    assert dog.ends(20, lost=lost) is None
    dog.now += 10_000
    assert dog.ends(20, lost=lost) is None
