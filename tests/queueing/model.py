"""What the machine's peers see, checked message by message against what they did."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from queueing.rig import Rig

from broker.moves import Phase
from mtplx import messages as m

# Answers to a request about a job that are no word of the job itself.
REPLIES = ("E_CONFLICT", "E_UNKNOWN_JOB")


@dataclass
class View:
    """One reader's place in one job's stream."""

    route: bytes
    next_seq: int = 0
    tokens: int = 0
    ended: bool = False


@dataclass
class Fact:
    """What is true of one job: what was asked, what the worker validly drew, how it ended."""

    body: bytes
    admit_seq: int | None = None
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    last_word: m.Done | m.Error | None = None
    refused: bool = False
    view: View | None = None


class CheckedRig(Rig):
    """A rig whose producers and worker check every message as it comes."""

    def __init__(self, **given) -> None:
        super().__init__(**given)
        self.facts: dict[bytes, Fact] = {}
        self.run_order: list[int] = []
        self.all_runs: list[tuple[bytes, m.Run]] = []

    # --- what was sent

    def on_sent_to_worker(self, route, message):
        super().on_sent_to_worker(route, message)
        if isinstance(message, m.Run):
            fact = self.facts[message.id]
            assert fact.last_word is None, "an ended job was run"
            assert message.job == fact.body
            assert self.back.worker is None or not self.back.worker.leaving, "a leaving worker was given a job"
            assert all(fact.admit_seq > before for before in self.run_order[-1:]), "not first in, first out"
            assert all(message.lease > run.lease for _, run in self.all_runs[-1:])
            self.run_order.append(fact.admit_seq)
            self.all_runs.append((route, message))
            open_jobs = [
                one for one in self.jobs.records.values() if one.phase in (Phase.RUNNING, Phase.CANCELLING)
            ]
            assert [one.id for one in open_jobs] == [message.id], "two in flight"

    def on_sent_to_client(self, route, message):
        job = getattr(message, "id", None)
        if job is None:
            return
        fact = self.facts[job]
        if isinstance(message, m.Error) and message.code in REPLIES:
            return
        match message:
            case m.Admitted(dup=False):
                assert fact.admit_seq == message.admit_seq
            case m.Admitted():
                assert fact.admit_seq == message.admit_seq
            case m.Started() | m.Progress():
                view = fact.view
                assert view is None or view.route != route or not view.ended, "a word after the last word"
                if isinstance(message, m.Started) and view is not None and view.route == route:
                    assert view.tokens == 0, "STARTED after a chunk"
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
        assert list(chunk.ids) == fact.ids[chunk.first : chunk.first + chunk.n]
        assert chunk.text == "".join(fact.texts[chunk.first : chunk.first + chunk.n])
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
        assert view.tokens == len(fact.ids), "a last word before the last chunk"
        if isinstance(word, m.Done):
            assert word.seq == view.next_seq
            assert word.text == "".join(fact.texts)
            word = replace(word, seq=0)
        assert fact.last_word is None or word == fact.last_word, "the last word changed"
        fact.last_word = word
        view.ended = True

    # --- what was done

    def settle(self) -> None:
        """Note what the machine decided in the last turn: ends of jobs nobody was told of yet."""
        for job, record in self.jobs.records.items():
            if record.phase is Phase.ENDED:
                word = record.last_word
                assert word is not None, "an end without a word"
                fact = self.facts[job]
                assert fact.last_word in (None, word), "the last word changed"
                fact.last_word = word

    def holds(self, route: bytes, run: m.Run) -> bool:
        """Whether what *route* says about *run* may count."""
        slot, worker = self.gate.slot, self.back.worker
        return bool(worker and worker.route == route and slot and slot.run and slot.run.lease == run.lease)
