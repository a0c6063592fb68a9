"""The ways in which the bench of speculation answers a prompt: ours, ours with a forced choice, mlx-lm's two.

Every way tells the seconds behind the first step that hands out a token, and how many ids were decided in them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models import llama
from mlx_lm.sample_utils import make_sampler

from worker.engine.engine import Engine, EngineRequest, unheard
from worker.engine.sample import Sampling
from worker.engine.serial import SerialEngine
from worker.speculation.costs import Costs, Measured
from worker.speculation.draft import MAX_NODES
from worker.speculation.executor import Parts, SpeculatingEngine
from worker.speculation.ngram import Ngram
from worker.speculation.planner import Plan, Planner
from worker.width import Meta, WidthExecutor

SEED = 7
DRAFT_LAYERS = 6


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is answered: *ids*, by at most *tokens* ids at a temperature."""

    ids: tuple[int, ...]
    tokens: int
    temperature: float
    seed: int = SEED

    @property
    def request(self) -> EngineRequest:
        """As our engine takes it; nothing is reused."""
        sampling = Sampling(seed=self.seed, temperature=self.temperature)
        return EngineRequest(prompt=self.ids, sampling=sampling, max_tokens=self.tokens, cache=False)


@dataclass(slots=True)
class Answer:
    """One answer. counted: ids decided in *seconds*.

    forwards: of the target, all of them. drafted, accepted: nodes. depths: how many drafts were kept so deep.
    forks, fork_wins: of the drafts. widths: forwards by rows.
    """

    ids: list[int]
    seconds: float
    counted: int
    forwards: int = 0
    drafted: int = 0
    accepted: int = 0
    depths: tuple[int, ...] = ()
    forks: int = 0
    fork_wins: int = 0
    off_steps: int = 0
    widths: dict[int, int] = field(default_factory=dict)


Way = Callable[[Prompt], Answer]


@dataclass(frozen=True, slots=True)
class Choice:
    """A choice that is the same at every step: so many nodes, forks taken from them where there are any."""

    nodes: int
    forks: int = 0

    @property
    def title(self) -> str:
        """In figures."""
        return f"{self.nodes} nodes" + (f", {self.forks} fork{'s' * (self.forks > 1)}" if self.forks else "")


# The most nodes of each compiled row count; forks where three nodes of a branch leave a trunk.
CHAINS = tuple(Choice(nodes) for nodes in (1, 3, 7, 15))
TREES = (Choice(7, 1), Choice(15, 1), Choice(15, 2), Choice(15, 3))


class Fixed(Planner):
    """Verifies whatever is proposed, by one choice."""

    def __init__(self, measured: Measured, limit: int, choice: Choice) -> None:
        super().__init__(measured, limit, choice.forks > 0, Ngram.traits)
        self._choice = choice

    def plan(self, context: int, margins: Sequence[float] | None, turns: Sequence[int] = ()) -> Plan:
        """As in `Planner`."""
        if not margins:
            return Plan(context, why="nothing to verify")
        limit, branch = min(self._choice.nodes, self._limit), self._traits.branch
        forks = min(self._choice.forks, len(turns), (limit - 1) // branch)
        depth = min(len(margins), limit - forks * branch)
        kinds = tuple(map(self._kept.kind, margins[:depth]))
        return Plan(context, depth + forks * branch, forks, depth, kinds, tuple(turns[:forks]))


class Forced(SpeculatingEngine):
    """Speculation by a `Fixed` planner."""

    def __init__(self, serial: SerialEngine, costs: Costs, choice: Choice) -> None:
        measured, width = Measured(costs), min(serial.forward.width, MAX_NODES + 1)
        parts = Parts(drafter=Ngram(), measured=measured, trees=choice.forks > 0, clock=time.perf_counter)
        super().__init__(width, serial, parts)
        self._planner = Fixed(measured, width - 1, choice)


def ours(serial: SerialEngine, engine_of: Callable[[Prompt], Engine], prompt: Prompt) -> Answer:
    """By the engine that *engine_of* makes for the prompt, over *serial*."""
    engine = engine_of(prompt)
    engine.start(prompt.request, unheard)
    ids = [engine.step().token]
    known, began = 1 + serial.decided, time.perf_counter()
    ids += [engine.step().token for _ in range(prompt.tokens - 1)]
    took = time.perf_counter() - began
    told = engine.stop()
    drafting = told.drafting
    return Answer(
        ids,
        took,
        len(ids) - known,
        forwards=told.verify_forwards,
        drafted=told.drafted,
        accepted=drafting.get("rows_committed", 0),
        depths=tuple(told.accepted_by_depth),
        forks=drafting.get("fork_attempts", 0),
        fork_wins=drafting.get("fork_wins", 0),
        off_steps=drafting.get("off_steps", 0),
        widths=dict(told.widths),
    )


def plain(serial: SerialEngine) -> Way:
    """Our decode loop alone."""
    return partial(ours, serial, lambda _: serial)


def planned(serial: SerialEngine, executor: WidthExecutor | None) -> Way:
    """As a worker runs a job; without an executor at width 1."""

    def engine_of(prompt: Prompt) -> Engine:
        if executor is None:
            return serial
        plan = executor.plan(Meta(speculation="auto", prompt=len(prompt.ids), budget=prompt.tokens))
        return executor.run(plan, serial) if plan.width > 1 else serial

    return partial(ours, serial, engine_of)


def forced(serial: SerialEngine, costs: Costs, choice: Choice) -> Way:
    """Every proposal verified by one choice."""
    return partial(ours, serial, lambda _: Forced(serial, costs, choice))


def peer(model: Any, prompt: Prompt) -> Answer:
    """mlx-lm's generate_step."""
    mx.random.seed(prompt.seed)
    steps = generate_step(
        mx.array(prompt.ids), model, max_tokens=prompt.tokens, sampler=make_sampler(temp=prompt.temperature)
    )
    ids = [next(steps)[0]]
    began = time.perf_counter()
    ids += [token for token, _ in steps]
    took = time.perf_counter() - began
    return Answer(ids, took, len(ids) - 1, forwards=len(ids))


def peer_speculation(model: Any, draft: Any, count: int, prompt: Prompt) -> Answer:
    """mlx-lm's speculative_generate_step with *count* drafted ids a round."""
    mx.random.seed(prompt.seed)
    steps = speculative_generate_step(
        mx.array(prompt.ids),
        model,
        draft,
        num_draft_tokens=count,
        max_tokens=prompt.tokens,
        sampler=make_sampler(temp=prompt.temperature),
    )
    rounds = list(_rounds(steps, 1))
    began = time.perf_counter()
    rounds += _rounds(steps, None)
    took = time.perf_counter() - began
    kept = Counter(depth for one in rounds for depth in range(len(one) - 1))
    ids = [token for one in rounds for token in one]
    return Answer(
        ids,
        took,
        len(ids) - len(rounds[0]),
        forwards=len(rounds),
        drafted=count * len(rounds),
        accepted=sum(kept.values()),
        depths=tuple(kept[depth] for depth in range(count)),
        widths={count + 1: len(rounds)},
    )


def _rounds(steps: Iterable[tuple[int, mx.array, bool]], most: int | None) -> Iterator[list[int]]:
    """The ids of each round, of at most so many rounds: drafted ones, and the one behind them."""
    ids: list[int] = []
    done = 0
    for token, _, drafted in steps:
        ids.append(token)
        if not drafted:
            yield ids
            ids, done = [], done + 1
            if done == most:
                return
    if ids:
        yield ids


def first_layers(model: Any, count: int) -> Any:
    """A llama of the first *count* layers of *model*, with its embedding, norm and head; no weight is copied."""
    short = llama.Model(replace(model.args, num_hidden_layers=count, layer_types=None))
    short.model.embed_tokens, short.model.norm = model.model.embed_tokens, model.model.norm
    short.model.layers = model.model.layers[:count]
    if not model.args.tie_word_embeddings:
        short.lm_head = model.lm_head
    return short
