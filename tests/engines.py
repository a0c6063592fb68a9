"""The one place where tests and benches put an engine together, and how they run a request on one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import mlx.core as mx

from worker.engine import build as lanes
from worker.engine.build import Options
from worker.engine.engine import Cancelled, Engine, EngineRequest, Figures
from worker.engine.load import LoadedModel
from worker.kv.pages import PAGE, Pages
from worker.kv.prefix import PrefixIndex

Form = Literal["tail", "in place"]
# Those that work on this device without more ado.
FORMS: tuple[Form, ...] = ("tail",) if mx.default_device() == mx.cpu else ("tail", "in place")
# Pages of a pool that no single request fills.
PLENTY = 32


@dataclass(frozen=True)
class Built:
    """An engine with its books, which are None where it has none.

    reuses: whether a request may begin with rows of an earlier one. align: it does so in multiples of this.
    lane: as health names it.
    """

    engine: Engine
    pages: Pages | None = None
    index: PrefixIndex | None = None
    reuses: bool = False
    align: int = 1
    lane: str = ""

    def check_idle(self) -> None:
        """Prove that no request holds a page and that the books are right."""
        if self.index is None or self.pages is None:
            return
        assert not self.pages.sequences, "an ended request holds pages"
        assert self.pages.free + self.index.pages_held == self.pages.count
        self.index.check()


def build(
    loaded: LoadedModel,
    *,
    prefill_rows: int = 512,
    form: Form = "tail",
    pages: int = PLENTY,
    stored: int | None = None,
) -> Built:
    """The serial engine.

    prefill_rows: rows of a prefill forward at most, and exactly so many in place. pages: of the pool. stored: how many
    of them the prefix index may hold; None, all.
    """
    options = Options(
        prefill_chunk=prefill_rows,
        prefill_rows=-(-prefill_rows // PAGE) * PAGE if form == "in place" else 1,
        form=form,
    )
    _, info = lanes.build(loaded, options)
    pool = info.get("pool", {"bytes": 0, "pages": 1})
    page_bytes = pool["bytes"] // pool["pages"]
    engine, _ = lanes.build(loaded, replace(options, kv_bytes=max(page_bytes, 1) * pages))
    index = engine.index
    if stored is not None:
        index = engine.index = PrefixIndex(
            index.pages, page_bytes=1, limit_bytes=stored, align=options.prefill_rows or 1
        )
    return Built(engine, index.pages, index, info["prefix_reuse"], info["prefill_rows"], info["lane"])


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
