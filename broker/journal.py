"""What of the jobs outlives the broker: the entries of a journal, and a journal that keeps nothing.

Entries gather until `commit`, which the loop calls once a turn, after the machine has decided and before anything
is sent. `broker/journal_file.py` keeps them in a file.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from broker.record import Piece, Record
from mtplx.messages import Done, Error


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One job as the journal has it. Times are wall time in nanoseconds since 1970; None where there is none.

    owner: who submitted it. body: empty of a job that ended, unless it is buried. attempts: begun. barren: those
    of them, the latest ones, that brought no new token. model, model_hash, build_hash: of the worker that drew the
    tokens; empty where there are none. exact: whether all attempts ran on one build. tokens: of the answer.
    answer_bytes: as `Answer.nbytes` counts. last_word: of a job that ended; a buried one's is E_POISON.
    """

    admit_seq: int
    id: bytes
    owner: str
    digest: bytes
    body: bytes
    headers: dict[str, str] | None
    seed: int
    finish: bool
    admitted_ns: int
    ttl_ns: int | None
    deadline_ns: int | None
    attempts: int
    barren: int
    model: str
    model_hash: str
    build_hash: str
    exact: bool
    tokens: int
    answer_bytes: int
    last_word: Done | Error | None
    ended_ns: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What the journal knows beside jobs: vocabulary and context of the last READY, the next `admit_seq`."""

    limits: tuple[int, int] | None = None
    admit_seq: int = 0


class Journal(Protocol):
    """Entries about records, in the order in which things happened.

    keeps: whether anything outlives the process. A record is found by its owner and id, which never change.
    """

    keeps: bool

    @property
    def path(self) -> str:
        """The file, for health and messages; empty where there is none."""

    @property
    def nbytes(self) -> int:
        """Bytes of the file and its log."""

    def admitted(self, record: Record) -> None:
        """*record* is in the line. ADMITTED may be sent once this is committed."""

    def attempt(self, record: Record) -> None:
        """An attempt begins, with the counts and hashes of *record*. RUN may be sent once this is committed."""

    def piece(self, record: Record, piece: Piece) -> None:
        """The answer of *record* goes on by *piece*."""

    def ended(self, record: Record) -> None:
        """*record* has its last word. Its body is dropped, unless it is buried."""

    def kicked(self, record: Record) -> None:
        """A buried *record* is in the line again: it has a new number, no last word, attempts or time limits.

        Its rows under the former number go, and its answer so far comes with it: no `forgotten` is needed.
        """

    def forgotten(self, record: Record) -> None:
        """Nothing of *record* need be kept."""

    def limits(self, vocabulary: int, context: int) -> None:
        """What the latest READY told."""

    def withdraw(self, record: Record) -> None:
        """Drop all entries of *record* that are not committed: it was never taken."""

    def commit(self) -> None:
        """Write all entries, and flush them where one of them has to be and the durability asks for it.

        Raises:
            JournalError: nothing was written; the entries are still there, for the next commit.
        """

    @property
    def pending(self) -> bool:
        """Whether there are entries to be committed."""

    @property
    def pending_bytes(self) -> int:
        """About how much memory the entries take."""

    def known(self) -> Known:
        """What outlived the last process, beside jobs."""

    def jobs(self) -> Iterable[Stored]:
        """The jobs that outlived it, by `admit_seq`."""

    def pieces(self, record: Record, first: int, most: int) -> list[Piece]:
        """Committed pieces from the one that begins at token *first* on, until they have *most* tokens.

        Empty where none begins there.

        Raises:
            JournalError: they cannot be read.
        """

    def last_word(self, record: Record) -> Done | Error:
        """The committed last word.

        Raises:
            JournalError: it cannot be read.
        """

    def close(self) -> None:
        """Let the file go; what was not committed is lost."""


class NoJournal:
    """A `Journal` that keeps nothing: `--durability none`."""

    keeps = False
    path = ""
    nbytes = 0
    pending = False
    pending_bytes = 0

    def admitted(self, record: Record) -> None:
        """As in `Journal`."""

    def attempt(self, record: Record) -> None:
        """As in `Journal`."""

    def piece(self, record: Record, piece: Piece) -> None:
        """As in `Journal`."""

    def ended(self, record: Record) -> None:
        """As in `Journal`."""

    def kicked(self, record: Record) -> None:
        """As in `Journal`."""

    def forgotten(self, record: Record) -> None:
        """As in `Journal`."""

    def limits(self, vocabulary: int, context: int) -> None:
        """As in `Journal`."""

    def withdraw(self, record: Record) -> None:
        """As in `Journal`."""

    def commit(self) -> None:
        """As in `Journal`."""

    def known(self) -> Known:
        """As in `Journal`."""
        return Known()

    def jobs(self) -> Iterable[Stored]:
        """As in `Journal`."""
        return ()

    def pieces(self, record: Record, first: int, most: int) -> list[Piece]:  # noqa: ARG002 - keeps none
        """As in `Journal`."""
        raise AssertionError("nothing was kept")

    def last_word(self, record: Record) -> Done | Error:  # noqa: ARG002 - keeps none
        """As in `Journal`."""
        raise AssertionError("nothing was kept")

    def close(self) -> None:
        """As in `Journal`."""
