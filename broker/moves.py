"""Every legal move of a job. A pair that is missing from the table is a bug, and raises."""

from __future__ import annotations

from enum import StrEnum, auto


class Phase(StrEnum):
    """Where a job stands."""

    WAITING = "waiting"
    RUNNING = "running"
    CANCELLING = "cancelling"
    ENDED = "ended"
    # Ended, and kept whole for a person to look at.
    BURIED = "buried"


class Move(StrEnum):
    """What can happen to a job."""

    DISPATCH = auto()
    CHUNK = auto()
    CANCEL = auto()
    REQUEUE = auto()
    END = auto()
    BURY = auto()
    KICK = auto()


MOVES: dict[Phase, dict[Move, Phase]] = {
    # A job may be found to be poison when the broker starts: no attempt of it ended while there was one.
    Phase.WAITING: {Move.DISPATCH: Phase.RUNNING, Move.END: Phase.ENDED, Move.BURY: Phase.BURIED},
    Phase.RUNNING: {
        Move.CHUNK: Phase.RUNNING,
        Move.CANCEL: Phase.CANCELLING,
        Move.REQUEUE: Phase.WAITING,
        Move.END: Phase.ENDED,
        Move.BURY: Phase.BURIED,
    },
    # The worker may still draw tokens before it reads the cancel; they count and are delivered.
    Phase.CANCELLING: {
        Move.CHUNK: Phase.CANCELLING,
        Move.CANCEL: Phase.CANCELLING,
        Move.REQUEUE: Phase.WAITING,
        Move.END: Phase.ENDED,
    },
    Phase.ENDED: {},
    Phase.BURIED: {Move.KICK: Phase.WAITING},
}


class IllegalMoveError(AssertionError):
    """The broker's own books are wrong; never caused by a peer's bytes."""


def advance(phase: Phase, move: Move) -> Phase:
    """The phase after *move*; raises IllegalMoveError and changes nothing where it is not in the table."""
    try:
        return MOVES[phase][move]
    except KeyError:
        raise IllegalMoveError(f"{move.name} while {phase.name}") from None
