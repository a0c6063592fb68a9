"""Many jobs with drafts one after the other, cut short in every way: nothing leaks, and none changes the next."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import mlx.core as mx
import pytest
from speculating.cover import SAMPLERS, check_counts, ids_of, prompt_of
from speculating.oracle import EAGER, FREE, Oracle, Priced, Watched, executor
from tiny_models import Room

from mtplx.job import Job
from mtplx.trajectory import trajectory_sha256
from worker.attempt import Attempt
from worker.engine import draw_tree
from worker.engine.load import LoadedModel
from worker.job import run_job
from worker.speculation.executor import ROUTE
from worker.speculation.ngram import Ngram

TOKENS = 28
# Pages that these jobs fill: beginnings are evicted all the time.
PAGES = 12
ANSWERS = 9
SAMPLINGS = list(SAMPLERS.values())
# Of three ids: much of its answer stands in its text before, and much does not.
PROBE = {
    "token_ids": [20, 21, 22] * 6,
    "temperature": 1.0,
    "logit_bias": {"20": 60.0, "21": 60.0, "22": 60.0},
}


@dataclass(frozen=True)
class Known:
    """A job and its whole answer by plain decode."""

    body: dict[str, Any]
    seed: int
    ids: tuple[int, ...]

    @property
    def text(self) -> tuple[int, ...]:
        return (*self.body["token_ids"], *self.ids)


class Life:
    """One worker's engine, with an executor for each drafter and for each table of costs."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.room = Room(loaded, prefill_chunk=32, pages=PAGES)
        self.oracle = Oracle((), loaded.vocabulary, 0.2)
        self.wide = [
            self._executor(drafter, costs) for drafter in (Ngram(), self.oracle) for costs in (FREE, EAGER)
        ]
        luck = random.Random(1)
        bodies = [
            {"token_ids": prompt_of(luck, loaded.vocabulary), **luck.choice(SAMPLINGS)} for _ in range(ANSWERS)
        ]
        self.known = [self._known(body, seed) for seed, body in enumerate((PROBE, *bodies))]
        self.opened = self.room.engine.index.counts()["opened"]

    def _executor(self, drafter: Any, costs: Any) -> Watched:
        return executor(self.room.engine, drafter, costs, clock=Priced(self.room.engine, costs))

    def _known(self, body: dict[str, Any], seed: int) -> Known:
        body = {**body, "max_tokens": TOKENS}
        return Known(body, seed, tuple(self.room.ids(body, seed=seed)))

    def run(self, known: Known, wide: Watched, body: dict[str, Any], stop: Callable[[int], str]) -> None:
        """stop: what happens at each look for a cancel, by its number: "cancel", "leave" or nothing."""
        self.oracle.text = known.text
        self.room.gate.executor = wide
        looks, ids, final = count(), [], None
        job = run_job(
            Attempt(job=Job.parse(body), seed=known.seed),
            self.room.gate,
            self.room.loaded,
            clock=self.room.tick,
            cancelled=lambda: stop(next(looks)) == "cancel",
            progress=lambda *_: None,
        )
        for part in job:
            if hasattr(part, "ids"):
                ids += part.ids
                if stop(len(ids)) == "leave":
                    job.close()
                    break
            else:
                final = part
        assert tuple(ids) == known.ids[: len(ids)]
        if final is not None:
            assert final.sha256 == trajectory_sha256(ids)
            if final.route == ROUTE:
                check_counts(final, len(ids) + wide.left, 16)
        self.check_idle(body)

    def check_idle(self, body: dict[str, Any]) -> None:
        built, engine = self.room.built, self.room.engine
        built.check_idle()
        engine.index.pages.check()
        assert not self.oracle.held
        self.opened += engine.forward.prefix_reuse and body.get("cache") is not False
        figures = engine.index.counts()
        assert figures["opened"] == self.opened
        assert figures["held_pages"] == engine.index.pages_held <= PAGES

    def probe(self) -> list[dict[str, Any]]:
        """What one job's last word says of each kind of drafts."""
        known, told = self.known[0], []
        body = {**known.body, "cache": False}
        for wide in self.wide:
            self.oracle.text = known.text
            self.room.gate.executor = wide
            chunks, final = self.room.run(body, seed=known.seed)
            assert tuple(ids_of(chunks)) == known.ids
            assert final.route == ROUTE
            told.append(final.speculation)
            self.check_idle(body)
        return told


def asked(luck: random.Random, known: Known) -> tuple[dict[str, Any], Callable[[int], str]]:
    """Limits, wishes, and an end that comes too early, or does not."""
    body = {
        **known.body,
        "max_tokens": luck.randint(1, TOKENS),
        "cache": luck.choice((True, True, "answers", False)),
        "speculation": luck.choice(("auto", "auto", "auto", "off")),
    }
    if luck.random() < 0.2:
        body["stop"] = [chr(luck.randrange(97, 123))]
    place, how = luck.randrange(TOKENS), luck.choice(("cancel", "leave", "", ""))
    return body, lambda look: how if look >= place else ""


def held() -> int:
    # Shapes of trees are kept, so many and no more: not yet so many here.
    draw_tree._operand.cache_clear()
    gc.collect()
    mx.synchronize()
    return mx.get_active_memory()


def live_through(loaded: LoadedModel, jobs: int) -> None:
    life, luck = Life(loaded), random.Random(7)
    for known in life.known:
        # Each kind of draw is compiled, and the pool is full.
        for wide in life.wide:
            life.run(known, wide, known.body, lambda _: "")
    first, bytes_held = life.probe(), held()
    assert all(told["rows_committed"] > 0 for told in first), "there is something to compare"
    objects = 0
    for number in range(jobs):
        known = luck.choice(life.known)
        life.run(known, luck.choice(life.wide), *asked(luck, known))
        if number == jobs // 2:
            objects = len(gc.get_objects())
    assert life.probe() == first, "what is accepted does not drift, and no count of other jobs is in it"
    assert held() <= bytes_held + 1024
    assert len(gc.get_objects()) <= objects * 1.01
    reuses = life.room.engine.forward.prefix_reuse
    assert (life.room.engine.index.counts()["evicted_pages"] > 0) is reuses


def test_sixty_jobs_that_end_anyhow_leave_nothing_behind(tiny_model) -> None:
    live_through(tiny_model("llama"), 60)


@pytest.mark.prove
@pytest.mark.parametrize(("name", "jobs"), [("llama", 1000), ("qwen3_5", 200)])
def test_a_thousand_jobs_that_end_anyhow_leave_nothing_behind(tiny_model, name: str, jobs: int) -> None:
    live_through(tiny_model(name), jobs)
