"""What the machine's peers see, checked message by message against what they did."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from queueing.memory_journal import MemoryJournal
from queueing.rig import Rig

from broker.jobs import FORMER_READERS
from broker.moves import Phase
from broker.record import Now
from mtplx import messages as m

# Answers to a request about a job that are no word of the job itself.
REPLIES = ("E_CONFLICT", "E_UNKNOWN_JOB")


@dataclass
class View:
    """One reader's place in one job's stream.

    lost: the broker knows that the reader is gone. before: those whose stream it took up, the latest last.
    """

    route: bytes
    next_seq: int = 0
    tokens: int = 0
    ended: bool = False
    lost: bool = False
    before: tuple[View, ...] = ()


@dataclass(frozen=True)
class Token:
    """What every worker draws at one place of one job's answer: `One seed, one text.`"""

    id: int
    text: str

    @classmethod
    def at(cls, job: bytes, place: int) -> Token:
        number = (int.from_bytes(job, "big") * 7 + place) % 1000
        return cls(number, f"{number} ")


@dataclass
class Fact:
    """What is true of one job: what was asked, what the worker validly drew, how it ended."""

    body: bytes
    admit_seq: int | None = None
    told: bool = False
    ids: list[int] = field(default_factory=list)
    last_word: m.Done | m.Error | None = None
    refused: bool = False
    view: View | None = None

    def read_by(self, view: View) -> None:
        """Another reader, or another place: who read before goes on there when this one is found gone."""
        old, self.view = self.view, view
        if old is not None:
            view.before = old.before
            if old.route != view.route and not old.lost and not old.ended:
                view.before = (*old.before, old)[-FORMER_READERS:]

    def left_by(self, route: bytes) -> None:
        """The broker finds *route* gone."""
        view = self.view
        if view is None or view.route != route or view.ended or view.lost:
            return
        if view.before:
            *others, self.view = view.before
            self.view.before = tuple(others)
        else:
            view.lost = True


class CheckedRig(Rig):
    """A rig whose producers and worker check every message as it comes."""

    def __init__(self, **given) -> None:
        super().__init__(journal=MemoryJournal(), **given)
        # Who read a job when the broker died, and who reads one that was kicked.
        self.gone |= {b"gone", b"nobody"}
        self.facts: dict[bytes, Fact] = {}
        self.power_losses = 0
        self.run_order: list[int] = []
        self.all_runs: list[tuple[bytes, m.Run]] = []
        # Of this process of the broker; leases begin anew with the next.
        self.boot_runs: list[tuple[bytes, m.Run]] = []
        self.drawn: m.Drawn | None = None

    # --- what was sent

    def on_sent_to_worker(self, route, message):
        super().on_sent_to_worker(route, message)
        if isinstance(message, m.Drawn):
            self.drawn = message
        if isinstance(message, m.Run):
            fact = self.facts[message.id]
            assert fact.last_word is None, "an ended job was run"
            behind = self.drawn.ids if self.drawn and self.drawn.lease == message.lease else ()
            assert list(behind) == fact.ids, "an attempt goes on behind other tokens than were drawn"
            record = self.jobs.find(message.id)
            assert 0 < record.barren <= 2, "more attempts than there are"
            assert record.attempts == message.attempt <= 8
            kept = self.journal.kept[record.key].stored
            assert self.failing or kept.attempts == message.attempt, "an attempt that is not written down"
            assert message.job == fact.body
            assert self.back.worker is None or not self.back.worker.leaving, "a leaving worker was given a job"
            assert all(fact.admit_seq >= before for before in self.run_order[-1:]), "not first in, first out"
            assert all(message.lease > run.lease for _, run in self.boot_runs[-1:])
            self.run_order.append(fact.admit_seq)
            self.all_runs.append((route, message))
            self.boot_runs.append((route, message))
            open_jobs = [one for one in self.jobs if one.phase in (Phase.RUNNING, Phase.CANCELLING)]
            assert [one.id for one in open_jobs] == [message.id], "two in flight"

    def on_sent_to_client(self, route, message):
        job = getattr(message, "id", None)
        if job is None or route == b"ops":
            return
        fact = self.facts[job]
        if isinstance(message, m.Error) and message.code in REPLIES:
            return
        match message:
            case m.Admitted():
                assert fact.admit_seq == message.admit_seq
                # It may be forgotten by the time at which a slow reader hears that it was taken.
                forgotten = self.jobs.find(job) is None
                assert forgotten or self.holds_flushed(job), "a promise that a power loss would break"
                fact.told = True
            case m.Started() | m.Progress():
                view = fact.view
                assert view is None or view.route != route or not view.ended, "a word after the last word"
            case m.Chunk():
                self._chunk(fact, route, message)
            case m.Done() | m.Error():
                self._last_word(fact, route, message)

    def _chunk(self, fact, route, chunk):
        view = fact.view
        assert view is not None, "a chunk for nobody"
        assert view.route == route, "a chunk for another reader"
        assert not view.ended, "a chunk after the last word"
        assert (chunk.seq, chunk.first, chunk.n) == (view.next_seq, view.tokens, len(chunk.ids))
        places = range(chunk.first, chunk.first + chunk.n)
        assert list(chunk.ids) == [Token.at(chunk.id, place).id for place in places]
        assert chunk.text == "".join(Token.at(chunk.id, place).text for place in places)
        assert chunk.first + chunk.n <= len(fact.ids), "a token that nobody drew"
        kept = self.journal.kept.get(("", chunk.id))
        written = kept.answer.tokens if kept else 0
        assert self.failing or chunk.first + chunk.n <= written, "a token that a kill would take back"
        view.next_seq += 1
        view.tokens += chunk.n

    def _last_word(self, fact, route, word):
        if fact.admit_seq is None:
            assert isinstance(word, m.Error)
            assert not fact.refused, "refused twice"
            fact.refused = True
            return
        view = fact.view
        assert view is not None, "a last word for nobody"
        assert view.route == route, "a last word for another reader"
        assert not view.ended, "two last words"
        if isinstance(word, m.Error) and word.code == "E_SLOW_READER":
            assert fact.last_word is not None, "a running job's reader is never too slow"
            view.ended = True
            return
        if isinstance(word, m.Error) and word.code == "E_ANSWER_LOST":
            assert fact.last_word is not None or view.tokens <= len(fact.ids)
            assert self.power_losses, "nothing could be lost"
            view.ended = True
            return
        lost = self.power_losses and isinstance(word, m.Error)
        assert view.tokens == len(fact.ids) or (lost and view.tokens > len(fact.ids)), (
            "a last word before the chunks"
        )
        if isinstance(word, m.Done):
            assert word.seq == view.next_seq
            assert word.text == "".join(Token.at(word.id, place).text for place in range(len(fact.ids)))
            word = replace(word, seq=0)
        assert fact.last_word is None or word == fact.last_word, "the last word changed"
        fact.last_word = word
        view.ended = True

    def _start(self, boot_id: bytes) -> None:
        super()._start(boot_id)
        found_gone = self.machine.on_client_gone

        def gone(route: bytes, now: Now) -> None:
            for fact in self.facts.values():
                fact.left_by(route)
            found_gone(route, now)

        self.machine.on_client_gone = gone

    @property
    def failing(self) -> bool:
        """Whether the journal cannot be written, as far as the broker knows."""
        return self.journal.fails or bool(self.machine.commits.error)

    def holds_flushed(self, job: bytes) -> bool:
        """Whether a power loss now would leave *job* in the journal."""
        return ("", job) in self.journal.after(power_loss=True).kept

    # --- what was done

    def settle(self) -> None:
        """Note what the machine decided in the last turn: ends of jobs nobody was told of yet."""
        for record in self.jobs:
            if record.over:
                word = record.last_word
                assert word is not None, "an end without a word"
                if record.answer is not None and record.answer.spilled:
                    word = self.journal.last_word(record)
                fact = self.facts[record.id]
                assert fact.last_word in (None, word), "the last word changed"
                fact.last_word = word

    def holds(self, route: bytes, run: m.Run) -> bool:
        """Whether what *route* says about *run* may count."""
        slot, worker = self.gate.slot, self.back.worker
        return bool(
            worker
            and worker.route == route
            and slot
            and slot.run
            and (slot.run.lease, slot.id, slot.run.attempt) == (run.lease, run.id, run.attempt)
        )

    def broker_dies(self, *, power_loss: bool) -> None:
        """The broker is killed and started again; what is true is now what its journal has."""
        self.power_losses += power_loss
        # What was written and not flushed, or not even written, is drawn and ended again.
        forgets = power_loss or self.failing
        promised = {record.id for record in self.jobs if self.facts[record.id].told and not record.over}
        self.journal.fails = False
        self.boot_runs, self.drawn, self.run_order = [], None, []
        self.restart(power_loss=power_loss)
        # Its time may have run out meanwhile, and be forgotten at once where nobody reads and much is kept.
        kinds = ("admitted", "kicked", "ended")
        latest = {entry.key[1]: entry.kind for entry in self.journal.log if entry.kind in kinds}
        for job in promised:
            assert self.jobs.find(job) is not None or latest[job] == "ended", "an admitted job is lost"
        for job, fact in self.facts.items():
            record = self.jobs.find(job)
            if record is not None:
                fact.ids = [Token.at(job, place).id for place in range(record.tokens)]
                fact.admit_seq = record.admit_seq
                assert forgets or record.over or fact.last_word is None, "an ended job runs again"
                fact.last_word = fact.last_word if record.over and not forgets else None
            elif fact.last_word is None:
                # Never told, or forgotten in the moment in which it ended.
                fact.admit_seq, fact.view = None, None
            if fact.view is not None and not fact.view.ended:
                fact.view = replace(fact.view, route=b"gone", lost=True, before=())
        self.settle()
