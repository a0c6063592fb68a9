"""A smaller model that drafts for a larger one with the same ids, from its own logits with the job's own noise.

It draws as the target does: the same sampling, over its own law, with the noise of (seed, position). So a draft is
what the target will draw unless the two laws differ enough to change the best perturbed score; how far the second
best is behind says how much they may.

It has its own lane and its own pool. Rows stay as long as their ids are the text's, and those that a job leaves
serve the next one. Between drafted tokens the host reads nothing: each feeds the next, and all come back at once.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final, cast

import mlx.core as mx

from worker.engine.draw import COMMON, NOT_A_NUMBER, Drawn, Draws, place
from worker.engine.forward import MAX_ROWS, rows_needed
from worker.engine.load import LoadedModel
from worker.engine.sample import Sampling
from worker.engine.serial import SerialEngine
from worker.kv.prefix import Opened
from worker.speculation.draft import MAX_NODES, Draft, Proposal, Terms, Traits

# A margin is the gap between the two best perturbed scores, in nats. Where it is small the runner-up is often what
# the target draws, if the draft is not.
MODEL: Final = Traits(
    edges=(0.25, 0.5, 1.0, 2.0, 4.0),
    kept=(0.35, 0.5, 0.6, 0.75, 0.9, 0.97),
    branch=1,
    gained=0.55,
    free=False,
)
# Gaps beyond which a fork is not worth a row.
_FORK_BELOW: Final = 2.0
# Ids that are fed together with the newest one: after a full accept there are two.
_IN_STEP: Final = 2
# Prompt ids between two looks for a cancel, where the rows of a forward are not fixed.
_CHUNK: Final = 512


@dataclass(frozen=True, slots=True)
class _Drafted:
    """Behind a text: the tokens, the runner-up of each and how far it is behind."""

    tokens: tuple[int, ...] = ()
    others: tuple[int, ...] = ()
    gaps: tuple[float, ...] = ()


@dataclass(slots=True)
class _Run:
    """The job. text: prompt and answer. reach: ids it may have here. seen: ids that the draws know.

    base, fed: behind the first *base* ids of the text, rows of these ids were written. drafted: behind the text as
    it is; None where that has grown.
    """

    opened: Opened
    draws: Draws
    text: list[int]
    reach: int
    seen: int
    base: int = 0
    fed: tuple[int, ...] = ()
    drafted: _Drafted | None = None


class DraftModel:
    """The `Drafter` over a second model.

    Args:
        loaded: the model, with the ids of the target.
        engine: what `build` made of it; only its lane and its books are used.
        width: rows of the target's head: noise depends on it, so the logits are brought to it.
    """

    name = "model"
    traits = MODEL

    def __init__(self, loaded: LoadedModel, engine: SerialEngine, width: int) -> None:
        self.loaded = loaded
        self.forward, self.index = engine.forward, engine.index
        self._width = width
        self._capacity = min(loaded.context, engine.capacity)
        self._run: _Run | None = None

    def begin(self, ids: Sequence[int], sampling: Any, terms: Terms) -> None:
        """As in `Drafter`: reads the prompt. A text that this model has no room for gets no drafts."""
        self.end()
        reach = min(len(ids) + terms.budget, self._capacity)
        if reach <= len(ids):
            return
        draws = Draws(
            replace(sampling, logprobs=0),
            ids,
            width=self._width,
            vocabulary=self.loaded.vocabulary,
            reach=len(ids) + terms.budget,
            ranked=True,
        )
        opened = self.index.open(
            tuple(ids),
            rows_needed(reach, self.forward.prefill_rows),
            owner=terms.owner,
            # Drafts need not be those of a cold start: rows that were drawn serve as well.
            cache="answers" if terms.keep and self.forward.prefix_reuse else False,
        )
        self._run = _Run(opened, draws, list(ids), reach, len(ids))
        self.forward.begin(opened)
        chunk = self.forward.prefill_rows if self.forward.prefill_rows > 1 else _CHUNK
        for start in range(opened.cached, len(ids), chunk):
            terms.look()
            end = min(start + chunk, len(ids))
            logits = self.forward.read(ids[start:end], last=end == len(ids))
            mx.eval([] if logits is None else [logits])

    def extend(self, ids: Sequence[int]) -> None:
        """As in `Drafter`."""
        if self._run is not None:
            self._run.text += ids
            self._run.drafted = None

    def catch_up(self) -> None:
        """As in `Drafter`: writes the rows that are missing, but for the last ones, which a draft begins with."""
        run = self._run
        if run is None or len(run.text) >= run.reach:
            return
        self._take_back(run)
        while True:
            length = run.opened.sequence.length
            missing = run.text[length : length + MAX_ROWS]
            if len(missing) <= _IN_STEP:
                return
            # Nothing in the graph orders this forward before the next one: its tokens are known already.
            mx.eval(self.forward.rows(mx.array(missing[:-1], dtype=mx.uint32)))

    def propose(self, limit: int, forks: int) -> Proposal:
        """As in `Drafter`: what is drafted once stands until the text goes on."""
        run = self._run
        if run is None:
            return Proposal()
        if run.drafted is None:
            count = min(limit, MAX_NODES, run.reach - len(run.text))
            run.drafted = self._draft(run, count) if count > 0 else _Drafted()
        drafted = run.drafted
        turns = _turns(drafted.gaps)
        taken = sorted(turns[: min(forks, limit - 1)], reverse=True)
        trunk = drafted.tokens[: limit - len(taken)]
        tokens, parents = list(trunk), list(range(len(trunk)))
        # From the end of the trunk upwards: rows come depth first.
        for depth in taken:
            if depth <= len(trunk):
                tokens.append(drafted.others[depth - 1])
                parents.append(depth - 1)
        return Proposal(Draft(tuple(tokens), tuple(parents)), drafted.gaps, turns)

    def end(self) -> None:
        """As in `Drafter`: rows of the text are kept for later prompts, where the job allows it."""
        run, self._run = self._run, None
        if run is None:
            return
        self._take_back(run)
        self.forward.settle()
        self.index.store(run.opened, run.text, run.opened.sequence.length)
        self.forward.end()
        run.opened.sequence.release()

    def warm_up(self) -> None:
        """Make the graphs and kernels of the common kinds of job."""
        for sampling in COMMON:
            self.begin((0,) * MAX_ROWS, sampling, Terms(budget=MAX_ROWS))
            for more in (_IN_STEP, MAX_ROWS - 1):
                self.extend((0,) * more)
                self.catch_up()
                self.propose(2, 0)
        self.end()

    def draft_ms(self, clock: Callable[[], float], count: int, turns: int) -> float:
        """Milliseconds of one drafted token, the median of *turns* drafts of *count*. clock: seconds."""
        self.begin((0,) * MAX_ROWS, Sampling(seed=0, temperature=1.0), Terms(budget=MAX_ROWS + turns + 1 + count))
        taken = []
        for _ in range(turns + 1):
            self.extend((0,))
            self.catch_up()
            began = clock()
            self.propose(count, 0)
            taken.append((clock() - began) * 1e3 / count)
        self.end()
        return median(taken[1:])

    def _take_back(self, run: _Run) -> None:
        """Rows whose ids did not become text were never written."""
        kept, most = 0, len(run.text) - 1 - run.base
        while kept < min(len(run.fed), most) and run.fed[kept] == run.text[run.base + kept]:
            kept += 1
        if run.fed:
            copies = run.opened.sequence.truncate(run.base + kept)
            assert not copies, "nobody else holds rows of a running job"
            run.fed = ()

    def _draft(self, run: _Run, count: int) -> _Drafted:
        """*count* tokens behind the text, of which all but the last are fed."""
        self.catch_up()
        run.draws.extend(run.text[run.seen :])
        run.seen = run.base = len(run.text)
        missing = run.text[run.opened.sequence.length :]
        draws, drawn = run.draws.fork(), []
        tokens = mx.array(missing, dtype=mx.uint32)
        for depth in range(count):
            logits = self.forward.rows(tokens)[-1:]
            one = draws(self._fitted(logits), place(run.base + depth))
            drawn.append(one)
            tokens = one.token
            if self.forward.one_ahead:
                mx.async_eval(tokens)  # type: ignore[no-untyped-call]
            else:
                mx.eval(tokens)
        drafted, fed = _read(drawn)
        run.fed = fed[:-1]
        return drafted

    def _fitted(self, logits: mx.array) -> mx.array:
        """Logits [1, V] with as many rows as the target's head has; what is added stands for no id."""
        own = logits.shape[-1]
        if own < self._width:
            return mx.pad(logits, [(0, 0), (0, self._width - own)])
        return logits[:, : self._width] if own > self._width else logits


def _read(drawn: Sequence[Drawn]) -> tuple[_Drafted, tuple[int, ...]]:
    """The draft, which ends where numbers do, and the ids that were fed; waits for them."""
    parts: list[mx.array] = [one.read for one in drawn]
    pairs = [one.second for one in drawn if one.second is not None]
    parts += [other for other, _ in pairs] + [gap.view(mx.uint32) for _, gap in pairs]
    words = cast("list[int]", mx.concatenate(parts).tolist())
    count = len(drawn)
    tokens, others = tuple(words[:count]), tuple(words[count : 2 * count])
    gaps = struct.unpack(f"{count}f", struct.pack(f"{count}I", *words[2 * count :]))
    sound = tokens.index(NOT_A_NUMBER) if NOT_A_NUMBER in tokens else count
    return _Drafted(tokens[:sound], others[:sound], gaps[:sound]), tokens


def _turns(gaps: Sequence[float]) -> tuple[int, ...]:
    """Depths where the runner-up may be right, the likeliest to be both reached and missed first."""
    worth, reach = {}, 1.0
    for depth, gap in enumerate(gaps, start=1):
        kept = MODEL.kept[sum(edge <= gap for edge in MODEL.edges)]
        if gap < _FORK_BELOW:
            worth[depth] = reach * (1 - kept)
        reach *= kept
    return tuple(sorted(worth, key=lambda depth: -worth[depth]))
