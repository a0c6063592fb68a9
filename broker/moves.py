"""Every legal move of a job. A pair that is missing from the table is a bug, and raises."""

from __future__ import annotations

from enum import StrEnum, auto


class Phase(StrEnum):
    """Where a job stands."""

    WAITING = "waiting"
    RUNNING = "running"
    CANCELLING = "cancelling"
    ENDED = "ended"


class Move(StrEnum):
    """What can happen to a job."""

    DISPATCH = auto()
    CHUNK = auto()
    CANCEL = auto()
    END = auto()


MOVES: dict[Phase, dict[Move, Phase]] = {
    Phase.WAITING: {Move.DISPATCH: Phase.RUNNING, Move.END: Phase.ENDED},
    Phase.RUNNING: {Move.CHUNK: Phase.RUNNING, Move.CANCEL: Phase.CANCELLING, Move.END: Phase.ENDED},
    # The worker may still draw tokens before it reads the cancel; they count and are delivered.
    Phase.CANCELLING: {Move.CHUNK: Phase.CANCELLING, Move.CANCEL: Phase.CANCELLING, Move.END: Phase.ENDED},
    Phase.ENDED: {},
}


class IllegalMoveError(AssertionError):
    """The broker's own books are wrong; never caused by a peer's bytes."""


def advance(phase: Phase, move: Move) -> Phase:
    """The phase after *move*; raises IllegalMoveError and changes nothing where it is not in the table."""
    try:
        return MOVES[phase][move]
    except KeyError:
        raise IllegalMoveError(f"{move.name} while {phase.name}") from None
