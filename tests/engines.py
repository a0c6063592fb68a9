"""The one place where tests and benches put an engine together, and how they run a request on one."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from worker.engine.engine import Cancelled, Engine, EngineRequest, Figures
from worker.engine.load import LoadedModel
from worker.engine.reference import ReferenceEngine
from worker.kv.pages import Pages
from worker.kv.prefix import PrefixIndex

Form = Literal["tail", "in place"]
# Pages of a pool that no test fills.
PLENTY = 512


@dataclass(frozen=True)
class Built:
    """An engine with its books, which are None where it has none.

    reuses: whether a request may begin with rows of an earlier one.
    """

    engine: Engine
    pages: Pages | None = None
    index: PrefixIndex | None = None
    reuses: bool = False

    def check_idle(self) -> None:
        """Prove that no request holds a page and that the books are right."""
        if self.index is None or self.pages is None:
            return
        assert not self.pages.sequences, "an ended request holds pages"
        assert self.pages.free + self.index.pages_held == self.pages.count
        self.index.check()


def reference(
    loaded: LoadedModel,
    *,
    prefill_rows: int = 512,
    form: Form = "tail",
    pages: int = PLENTY,
    stored: int | None = None,
) -> Built:
    """mlx-lm's own loop behind the engine's interface."""
    return Built(ReferenceEngine(loaded, prefill_rows))


# Arguments: rows of a prefill forward at most, form of the cache, pages of the pool, and how many of them the
# prefix index may hold (None: all).
build = reference


@dataclass(frozen=True)
class Answer:
    """What a request gave. read: ids of prompt and *drawn* that were read; cancelled: it ended before its last token."""

    ids: list[int]
    figures: Figures
    read: int
    cancelled: bool


def answer(
    engine: Engine, request: EngineRequest, *, chunks: int | None = None, tokens: int | None = None
) -> Answer:
    """Run *request*; it is cancelled at call number *chunks* of its progress, or after *tokens* tokens."""
    heard: list[tuple[int, int]] = []
    total = len(request.prompt) + len(request.drawn)

    def progress(done: int, of: int) -> None:
        heard.append((done, of))
        if len(heard) == chunks:
            raise Cancelled

    ids = []
    wanted = request.max_tokens if tokens is None else min(tokens, request.max_tokens)
    cancelled = wanted < request.max_tokens
    try:
        engine.start(request, progress)
        ids = [engine.step().token for _ in range(wanted)]
        assert heard[-1] == (total, total)
    except Cancelled:
        cancelled = True
    finally:
        figures = engine.stop()
    assert all(of == total and 0 <= done <= total for done, of in heard)
    assert all(before <= after for (before, _), (after, _) in pairwise(heard))
    return Answer(ids, figures, heard[-1][0] if heard else 0, cancelled)
