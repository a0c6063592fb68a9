"""Rounds with the real worker on a model: every stream must equal the one of a quiet service, token for token."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

from whole.harness import Program, Service, service
from whole.history import Expected
from whole.plan import Ask, Plan
from whole.rounds import Report, Round

from mtplx import messages as m
from mtplx import wire

LOAD_S: Final = 300.0
# The worker compiles while it runs its first job, and must not count as dead meanwhile.
LIMITS: Final = ("--beat-s", "0.25", "--dead-s", "8", "--stall-s", "30", "--orphan-s", "60")
PROMPTS: Final = ("the quick brown fox", "12 wise owls watch from the old oak tree", "lazy dog")


def fields(ask: Ask) -> dict[str, Any]:
    """The job of an ask."""
    prompt = PROMPTS[ask.job[0] % len(PROMPTS)]
    return {"prompt": prompt, "max_tokens": ask.tokens, "seed": ask.seed, "temperature": ask.temperature}


class RealRounds:
    """Plays rounds on *model*; *more* are flags of the worker."""

    def __init__(self, model: Path, *more: str) -> None:
        self._model, self._more = model, more
        self._quiet: dict[bytes, Expected] = {}

    def learn(self, plans: list[Plan]) -> None:
        """Let a quiet service answer all that will be asked."""
        with service() as quiet:
            worker = self._worker(quiet.run, quiet.run / "unused")
            quiet.programs.append(worker)
            _until_accepted(quiet, worker)
            with quiet.producer() as producer:
                for ask in (ask for plan in plans for person in plan.people for ask in person.asks):
                    producer.say(m.Submit(ask.job, wire.pack_body(fields(ask))))
                    word = producer.last_word(ask.job, LOAD_S)
                    assert isinstance(word, m.Done), word
                    chunks = [one for one in producer.about(ask.job) if isinstance(one, m.Chunk)]
                    ids = tuple(token for chunk in chunks for token in chunk.ids)
                    # A tokenizer may hold text back: where a piece of it comes depends on the chunks.
                    self._quiet[ask.job] = Expected(ids, None, word.text)

    def play(self, plan: Plan) -> Report:
        """One round."""
        return Round(
            plan,
            flags=LIMITS,
            start_worker=self._worker,
            fields=fields,
            answer=lambda ask: self._quiet[ask.job],
            limit_s=LOAD_S,
        ).play()

    def _worker(self, run: Path, _log: Path) -> Program:
        return Program("worker", "--run-dir", str(run), "--model", str(self._model), *self._more)


def _until_accepted(quiet: Service, worker: Program) -> None:
    with quiet.producer() as asker:
        ends = time.monotonic() + LOAD_S
        while asker.health()["worker"].get("pid") != worker.pid:
            assert worker.process.poll() is None, worker.said()
            assert time.monotonic() < ends, "the worker was not accepted"
            time.sleep(0.05)
