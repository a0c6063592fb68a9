"""The serial B1 path: one job at a time over a lane's forward, one token ahead of what was asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, cast

import mlx.core as mx

from worker.engine.draw import NOT_A_NUMBER, Drawn, Draws, place, warm
from worker.engine.engine import (
    ROUTE,
    EngineRequest,
    Figures,
    NumericError,
    PrefillProgress,
    Step,
    likeliest_first,
    unheard,
)
from worker.engine.forward import MAX_ROWS, Forward, rows_needed
from worker.engine.load import LoadedModel
from worker.engine.sample import Sampling
from worker.kv.prefix import Opened, PrefixIndex

# Prompt rows after which memory kept for reuse is given back: each forward's rows so far are of another size.
_FREED_EVERY: Final = 2048


class SerialEngine:
    """The `Engine` over our own decode loop at batch size 1.

    While the caller handles a token, the device already computes the next one, where the lane allows it.
    """

    def __init__(
        self, loaded: LoadedModel, forward: Forward, index: PrefixIndex, *, prefill_chunk: int = 512
    ) -> None:
        self._loaded = loaded
        self.forward = forward
        self.index = index
        # Where rows are aligned the lane says how many a forward reads; else only the wait for a cancel matters.
        self._chunk = forward.prefill_rows if forward.prefill_rows > 1 else prefill_chunk
        self.capacity = forward.capacity
        self._run: _Run | None = None

    def warm_up(self) -> None:
        """Run the common kinds of draw and every width once, so that no job waits for a kernel to be compiled."""
        request = EngineRequest(
            prompt=(0,), sampling=Sampling(seed=0), max_tokens=2, drawn=(0,) * MAX_ROWS, cache=False
        )
        self.start(request, unheard)
        self.forward.trace()
        # Not by step(): a model whose first numbers are bad must fail in a job, where it is told.
        self.stop()
        warm(self._loaded.width, self._loaded.vocabulary, getattr(mx, self._loaded.dtype))

    def start(self, request: EngineRequest, progress: PrefillProgress) -> None:
        """As in `Engine`."""
        self.stop()
        positions = len(request.prompt) + len(request.drawn) + request.max_tokens
        # Before any page is held: what cannot be drawn leaves nothing behind.
        draws = Draws(
            request.sampling,
            (*request.prompt, *request.drawn),
            width=self._loaded.width,
            vocabulary=self._loaded.vocabulary,
            reach=positions,
        )
        opened = self.index.open(
            request.prompt,
            rows_needed(positions, self.forward.prefill_rows),
            owner=request.owner,
            cache=request.cache if self.forward.prefix_reuse else False,
        )
        run = self._run = _Run(request, opened, draws)
        self.forward.begin(opened)
        logits = self._read_prompt(run, progress)
        if request.drawn:
            logits = self._force(run, progress)
        run.ahead = self._draw(run, logits)

    def step(self) -> Step:
        """As in `Engine`."""
        run = self._run
        if run is None or run.ahead is None:
            raise RuntimeError("step() without a started request, or beyond its budget")
        drawn, run.ahead = run.ahead, None
        more = run.steps + 1 < run.request.max_tokens
        if more and self.forward.one_ahead:
            run.ahead = self._next(run, drawn)
        token = cast("int", drawn.read.item())
        if token == NOT_A_NUMBER:
            run.failed = True
            raise NumericError("the model produced NaN or infinite logits")
        run.steps += 1
        run.answer.append(token)
        if more and run.ahead is None:
            run.ahead = self._next(run, drawn)
        return Step(token, _pairs(drawn))

    def stop(self) -> Figures:
        """As in `Engine`. What was computed of the prompt and of the answer is kept for later prompts."""
        run, self._run = self._run, None
        if run is None:
            return Figures(route=ROUTE, row_invariant=self.forward.row_invariant)
        if run.ahead is not None:
            # The step in flight writes its row: nobody may get that place before it has.
            mx.eval(run.ahead.read)
            run.ahead = None
        sequence = run.opened.sequence
        ids = [*run.request.prompt, *run.request.drawn, *run.answer]
        # The last id drawn has no row that counts: its forward is the one that was dropped, or never ran.
        verified = min(sequence.length, max(len(ids) - 1, len(run.request.prompt)))
        sequence.truncate(verified)
        if not run.failed:
            self.forward.settle()
            self.index.store(run.opened, ids, verified)
        self.forward.end()
        sequence.release()
        return Figures(
            route=ROUTE,
            row_invariant=self.forward.row_invariant,
            cached_tokens=run.opened.cached,
            prefix_exact=run.opened.exact,
            verify_forwards=run.steps,
            widths={1: run.steps} if run.steps else {},
        )

    def counts(self) -> dict[str, int] | None:
        """As in `Engine`."""
        return self.index.counts() if self.forward.prefix_reuse else None

    def _read_prompt(self, run: _Run, progress: PrefillProgress) -> mx.array:
        """Logits [1, V] of the prompt's last id."""
        prompt, done, total = run.request.prompt, run.opened.cached, run.total
        progress(done, total)
        while True:
            end = min(done + self._chunk, len(prompt))
            logits = self.forward.read(prompt[done:end], last=end == len(prompt))
            if logits is not None or done // _FREED_EVERY != end // _FREED_EVERY:
                mx.clear_cache()
            done = end
            progress(done, total)
            if logits is not None:
                return logits

    def _force(self, run: _Run, progress: PrefillProgress) -> mx.array:
        """Rows of ids that an earlier attempt drew; the logits [1, V] of the last."""
        drawn = run.request.drawn
        for start in range(0, len(drawn), MAX_ROWS):
            tokens = mx.array(drawn[start : start + MAX_ROWS], dtype=mx.uint32)
            logits = self.forward.rows(tokens)[-1:]
            # Nothing in the graph orders this forward before the next one: its tokens are known already.
            mx.eval(logits)
            progress(run.opened.sequence.length, run.total)
        return logits

    def _draw(self, run: _Run, logits: mx.array) -> Drawn:
        drawn = run.draws(logits, place(run.opened.sequence.length))
        mx.async_eval(drawn.token, drawn.read, *(drawn.top or ()))  # type: ignore[no-untyped-call]
        return drawn

    def _next(self, run: _Run, drawn: Drawn) -> Drawn:
        return self._draw(run, self.forward.rows(drawn.token))


@dataclass(slots=True)
class _Run:
    """The request that runs. ahead: the draw that nobody has read; steps: draws read."""

    request: EngineRequest
    opened: Opened
    draws: Draws
    ahead: Drawn | None = None
    answer: list[int] = field(default_factory=list)
    steps: int = 0
    failed: bool = False

    @property
    def total(self) -> int:
        """Ids to be read before the first draw."""
        return len(self.request.prompt) + len(self.request.drawn)


def _pairs(drawn: Drawn) -> list[tuple[int, float]] | None:
    if drawn.top is None:
        return None
    ids, values = (cast("list[Any]", part.tolist()) for part in drawn.top)
    return likeliest_first(ids, values)
