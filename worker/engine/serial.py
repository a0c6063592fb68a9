"""The serial B1 path: one job at a time over a lane's forward, one token ahead of what was asked for."""

from __future__ import annotations

from typing import Final, NamedTuple, cast

import mlx.core as mx

from worker.engine.draw import NOT_A_NUMBER, Drawn, Draws, place, warm
from worker.engine.engine import (
    ROUTE,
    EngineRequest,
    Figures,
    PrefillProgress,
    Step,
    unheard,
)
from worker.engine.forward import MAX_ROWS, Forward, rows_needed
from worker.engine.host_tables import further_place
from worker.engine.load import LoadedModel
from worker.engine.running import Flight, Running, pairs
from worker.engine.sample import Sampling
from worker.kv.prefix import PrefixIndex
from worker.speculation.draft import Draft

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
        self._run: Running | None = None

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
        run = self._run = Running(request, opened, draws)
        self.forward.begin(opened)
        logits = self._read_prompt(run, progress)
        if request.drawn:
            logits = self._force(run, progress)
        run.ahead = self._draw(run, logits)

    def step(self) -> Step:
        """As in `Engine`."""
        run = self._running()
        if not run.decided:
            self.advance()
        step = run.decided.popleft()
        run.answer.append(step.token)
        return step

    def advance(self) -> None:
        """Decide the newest id, and run the forward over it if another id may follow.

        Raises:
            NumericError: as in `step`.
        """
        run = self._running()
        drawn = run.take_ahead()
        more = len(run.answer) + len(run.decided) + 1 < run.request.max_tokens
        if more and self.forward.one_ahead:
            run.ahead = self._next(run, drawn)
        run.decided.append(run.read(drawn))
        if more and run.ahead is None:
            run.ahead = self._next(run, drawn)

    def launch(self, draft: Draft, tokens: mx.array | None = None) -> None:
        """Start one forward over the newest id and *draft*, in place of the next plain one; `land` ends it.

        Where the newest id is known it is decided, and may be handed out while the forward runs. Where a forward
        runs that did not land, this one goes on behind it, as `may_go_behind` allows.

        tokens: uint32 [n], the draft's ids where only the device knows them, a chain; those it says are no matter.
        """
        run = self._running()
        if run.flights:
            assert tokens is not None, "what comes behind a forward in flight is known to the device"
            self._launch_behind(run, run.flights[-1], draft, tokens)
            return
        newest, drawn = run.newest, run.take_ahead()
        step = None if newest is None and self.forward.one_ahead else run.read(drawn)
        # Padded here, so that forward and draw run the few sizes that were made ready, and nothing is cut off.
        padding = (0,) * (self.forward.size(draft.width) - draft.width)
        if step is not None:
            run.decided.append(step)
        if tokens is not None:
            row = drawn.token if step is None else mx.array([step.token], dtype=mx.uint32)
            tokens = mx.concatenate([row, tokens, mx.array(padding, dtype=mx.uint32)])
        elif step is None:
            tokens = mx.concatenate([drawn.token, mx.array((*draft.tokens, *padding), dtype=mx.uint32)])
        else:
            # Of ids that the host knows: the device has nothing to cut out and to join before it may begin.
            tokens = mx.array((step.token, *draft.tokens, *padding), dtype=mx.uint32)
        first = place(run.opened.sequence.length + 1)
        wide = run.draws.rows(self.forward.rows(tokens, draft.parents), tokens, first, draft.parents)
        read = [] if step is None or newest is not None else [step.token]
        run.fly(Flight(draft, wide, first, drawn if step is None else None, read))

    def may_go_behind(self, nodes: int) -> bool:
        """Whether a forward over *nodes* more may be launched behind the one that runs, which keeps any part."""
        run = self._running()
        flight = run.flights[-1]
        room = run.request.max_tokens - len(run.answer) - len(run.decided) - flight.draft.width
        return (
            self.forward.pipelines
            and len(run.flights) == 1
            and flight.draft.is_chain
            # The id that is drawn last is not known to be decided.
            and flight.drawn is None
            and not run.draws.has_history
            and nodes < room
        )

    def _launch_behind(self, run: Running, flight: Flight, draft: Draft, tokens: mx.array) -> None:
        """Start a forward behind whatever row of *flight* is the last that holds."""
        assert self.may_go_behind(len(draft)), "ids are left, and nobody has to read what runs"
        last = flight.last
        padding = (0,) * (self.forward.size(draft.width) - draft.width)
        tokens = mx.concatenate([flight.wide.token[last], tokens, mx.array(padding, dtype=mx.uint32)])
        first = further_place(flight.first, last)
        wide = run.draws.rows(self.forward.rows(tokens, draft.parents, last), tokens, first, draft.parents)
        run.fly(Flight(draft, wide, first, None, []))

    def land(self) -> Landed:
        """Wait for the forward that was launched, and keep what holds of its draft.

        What it decides is handed out by the next steps, as plain ones would have drawn it.
        """
        run = self._running()
        assert run.flights, "launch comes first"
        draft, wide, _, drawn, ids = run.flights.popleft()
        assert wide.path is not None, "a draw of rows tells the path"
        last, *read = cast("list[int]", wide.path.tolist())
        if drawn is not None:
            # Drawn before: the wait was for both.
            run.decided.append(run.read(drawn))
            ids.append(run.decided[-1].token)
        path = draft.path(last)
        self.forward.keep(path)
        run.draws.accept(path)
        for row in path[1:]:
            # A node that is kept is the id that was drawn after its parent.
            ids.append(read[draft.parents[row - 1]])
            run.decided.append(Step(ids[-1], pairs(wide.top, draft.parents[row - 1])))
        run.widths[draft.width] += 1
        run.ahead, run.newest = wide.only(last), read[last]
        if run.newest != NOT_A_NUMBER:
            ids.append(run.newest)
        if run.flights and run.newest == NOT_A_NUMBER:
            self._drop_flight(run)
        elif run.flights:
            run.decided.append(run.read(run.take_ahead()))
        return Landed(path, ids)

    def _drop_flight(self, run: Running) -> None:
        """Wait for a forward whose ids nobody wants: its row 0 was fed what is no id."""
        flight = run.flights.pop()
        mx.eval(flight.wide.path)
        self.forward.keep((0,))
        run.draws.drop()
        run.opened.sequence.truncate(run.opened.sequence.length - 1)

    def resolve(self) -> int:
        """The newest id, `NOT_A_NUMBER` where it is none: waits for it, unless it is known."""
        run = self._running()
        if run.newest is None:
            assert run.ahead is not None, "an id that may be stepped to"
            run.newest = cast("int", run.ahead.read.item())
            run.widths[1] += 1
        return run.newest

    @property
    def flight(self) -> Flight | None:
        """The latest forward over a draft that was launched and did not land."""
        run = self._running()
        return run.flights[-1] if run.flights else None

    @property
    def decided(self) -> int:
        """Ids that are decided, and that `step` has not handed out."""
        return len(self._running().decided)

    @property
    def last(self) -> int:
        """The latest id that is decided, and was not handed out."""
        return self._running().decided[-1].token

    @property
    def newest(self) -> int | None:
        """The id that the next forward is fed, where the host knows it; `NOT_A_NUMBER` where it is none."""
        return self._running().newest

    @property
    def left(self) -> int:
        """Ids that may still be drawn after the newest one."""
        run = self._running()
        return run.request.max_tokens - len(run.answer) - len(run.decided) - 1

    @property
    def position(self) -> int:
        """Rows written: prompt and answer without the newest id."""
        return self._running().opened.sequence.length

    def stop(self) -> Figures:
        """As in `Engine`. What was computed of the prompt and of the answer is kept for later prompts."""
        run, self._run = self._run, None
        if run is None:
            return Figures(route=ROUTE, row_invariant=self.forward.row_invariant)
        while run.flights:
            # Nobody waits for what it decides: none of its rows is kept, and row 0 goes below.
            mx.eval(run.flights.popleft().wide.path)
            self.forward.keep((0,))
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
            verify_forwards=run.widths.total(),
            widths=dict(run.widths),
        )

    def _running(self) -> Running:
        if self._run is None:
            raise RuntimeError("step() without a started request")
        return self._run

    def counts(self) -> dict[str, int] | None:
        """As in `Engine`."""
        return self.index.counts() if self.forward.prefix_reuse else None

    def _read_prompt(self, run: Running, progress: PrefillProgress) -> mx.array:
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

    def _force(self, run: Running, progress: PrefillProgress) -> mx.array:
        """Rows of ids that an earlier attempt drew; the logits [1, V] of the last."""
        drawn = run.request.drawn
        for start in range(0, len(drawn), MAX_ROWS):
            tokens = mx.array(drawn[start : start + MAX_ROWS], dtype=mx.uint32)
            logits = self.forward.rows(tokens)[-1:]
            # Nothing in the graph orders this forward before the next one: its tokens are known already.
            mx.eval(logits)
            # All are rows of the text, of which a follower may hear at once.
            self.forward.keep(tuple(range(tokens.size)))
            progress(run.opened.sequence.length, run.total)
        return logits

    def _draw(self, run: Running, logits: mx.array) -> Drawn:
        drawn = run.draws(logits, place(run.opened.sequence.length))
        mx.async_eval(drawn.token, drawn.read, *(drawn.top or ()))  # type: ignore[no-untyped-call]
        return drawn

    def _next(self, run: Running, drawn: Drawn) -> Drawn:
        return self._draw(run, self.forward.rows(drawn.token))


class Landed(NamedTuple):
    """What came of a forward over a draft.

    path: the rows that were kept, 0 for the id that was the newest. ids: those known since, in order; the last is
    the newest id now, unless that is none.
    """

    path: tuple[int, ...]
    ids: list[int]
