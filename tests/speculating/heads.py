"""Heads for tests: random ones over a tiny model, ones that know the text, and ones that note what they drafted."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from engines import Form, build
from mlx.utils import tree_map

from worker.engine.dense_in_place import DenseInPlace
from worker.engine.engine import EngineRequest
from worker.engine.load import LoadedModel
from worker.engine.sample import Sampling
from worker.engine.serial import SerialEngine
from worker.engine.trunk import Trunk
from worker.kv.prefix import Opened
from worker.speculation.costs import Costs, Measured
from worker.speculation.executor import Parts
from worker.speculation.mtp.drafter import Mtp
from worker.speculation.mtp.following import Ask, HeadRun
from worker.speculation.mtp.forged import ForgedConfig
from worker.speculation.mtp.head import Head
from worker.speculation.mtp.on_device import DeviceDrafts
from worker.speculation.ngram import Ngram


def random_head(loaded: LoadedModel, seed: int = 3, **quantization: int) -> Head:
    """A forged head of random weights that fits *loaded*, a dense model."""
    args = loaded.model.args
    config = ForgedConfig(
        hidden_size=args.hidden_size,
        intermediate_size=2 * args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_key_value_heads=args.num_key_value_heads,
        head_dim=getattr(args, "head_dim", None) or args.hidden_size // args.num_attention_heads,
        rms_norm_eps=args.rms_norm_eps,
        vocab_size=loaded.width,
        trunk=Trunk.of(loaded).fingerprint(),
        quantization=quantization,
    )
    head = config.module()
    keys = iter(mx.random.split(mx.random.key(seed), 100))
    if not quantization:
        head.update(
            tree_map(
                lambda x: (
                    mx.random.normal(x.shape, key=next(keys)) * (2 / x.shape[-1] ** 0.5) if x.ndim > 1 else x
                ),
                head.parameters(),
            )
        )
    mx.eval(head.parameters())
    return head


class Knowing:
    """Drafts the *text*, with a *share* of its ids wrong, whatever it reads; *goes_behind* as told.

    It checks that it is shown the pairs of the text in order, each once while it holds.
    """

    def __init__(self, text: Sequence[int], vocabulary: int, share: float, *, goes_behind: bool) -> None:
        luck = random.Random(7)
        self.text = list(text)
        wrong = [(token + 1) % vocabulary if luck.random() < share else token for token in text]
        # Behind the end of the text anything may be drafted.
        self.drafts = mx.array([*wrong, *[0] * 40], dtype=mx.uint32)
        self.goes_behind = goes_behind
        self.read_to = 0

    def begin(self, opened: Opened) -> None:
        self.read_to = opened.cached

    def prime(self, ids: Sequence[int], states: mx.array, start: int) -> None:
        assert states.shape[0] >= len(ids)
        self._check(ids, start)

    def read(self, ids: Sequence[int], states: mx.array, start: int) -> None:
        assert states.shape[0] == len(ids) <= 16
        self._check(ids, start)

    def draft(self, ask: Ask) -> mx.array:
        at = ask.position[1:].astype(mx.int32)
        return self.drafts[at + mx.arange(ask.count)]

    def draft_behind(
        self, tokens: mx.array, states: mx.array, last: mx.array, ask: Ask, start: int | None
    ) -> mx.array:
        assert self.goes_behind
        assert states.shape[0] == tokens.shape[0]
        assert start is None or start >= self.read_to
        # How many of them hold is not known here: what is read next says it.
        self.read_to = -1
        return self.draft(ask)

    def _check(self, ids: Sequence[int], start: int) -> None:
        assert self.read_to in (-1, start), "pairs come in order, none twice"
        assert list(ids) == self.text[start + 1 : start + 1 + len(ids)]
        self.read_to = start + len(ids)


class Noting:
    """A head that reads and drafts; what it drafts is noted, and what *other* drafts is what is verified."""

    def __init__(self, head: HeadRun, other: Knowing) -> None:
        self.head, self.other = head, other
        self.goes_behind = other.goes_behind
        self.noted: list[tuple[mx.array, mx.array]] = []

    def begin(self, opened: Opened) -> None:
        self.head.begin(opened)
        self.other.begin(opened)

    def prime(self, ids: Sequence[int], states: mx.array, start: int) -> None:
        self.head.prime(ids, states, start)
        self.other.prime(ids, states, start)

    def read(self, ids: Sequence[int], states: mx.array, start: int) -> None:
        self.head.read(ids, states, start)
        self.other.read(ids, states, start)

    def draft(self, ask: Ask) -> mx.array:
        self.noted.append((ask.position, self.head.draft(ask)))
        return self.other.draft(ask)

    def draft_behind(
        self, tokens: mx.array, states: mx.array, last: mx.array, ask: Ask, start: int | None
    ) -> mx.array:
        self.noted.append((ask.position, self.head.draft_behind(tokens, states, last, ask, start)))
        return self.other.draft_behind(tokens, states, last, ask, start)


class Bench:
    """One model on one lane; a request is run plainly, or with a head."""

    def __init__(self, loaded: LoadedModel, form: Form, pages: int = 40) -> None:
        self.loaded = loaded
        self.built = build(loaded, prefill_rows=32, form=form, pages=pages)
        assert isinstance(self.built.engine, SerialEngine)
        self.engine = self.built.engine

    @property
    def pipelines(self) -> bool:
        return self.engine.forward.pipelines

    def plain(self, request: EngineRequest, count: int | None = None) -> list[int]:
        self.engine.start(request, lambda *_: None)
        ids = [self.engine.step().token for _ in range(count or request.max_tokens)]
        self.engine.stop()
        return ids

    def drafting(
        self, head: HeadRun, costs: Costs, width: int, clock: Callable[[], float], *, copies: bool = False
    ) -> DeviceDrafts:
        """The engine of jobs that *head* drafts for; *copies*: prompt lookup is asked, too."""
        drafter = Mtp(head, self.engine.forward, self.loaded.width, self.loaded.vocabulary)
        beside = None
        if copies:
            beside = Parts(drafter=Ngram(), measured=Measured(costs), trees=False, clock=clock)
        parts = Parts(
            drafter=drafter,
            measured=Measured(costs),
            trees=False,
            clock=clock,
            engine=DeviceDrafts,
            beside=beside,
        )
        return DeviceDrafts(width, self.engine, parts)

    def drafted(
        self, engine: DeviceDrafts, request: EngineRequest, count: int | None = None
    ) -> tuple[list[int], Any]:
        engine.start(request, lambda *_: None)
        ids = [engine.step().token for _ in range(count or request.max_tokens)]
        figures = engine.stop()
        self.built.check_idle()
        assert self.engine.forward.follower is None, "nobody listens once the job is over"
        return ids, figures


def request_of(prompt: Sequence[int], count: int, **sampling: Any) -> EngineRequest:
    return EngineRequest(prompt=tuple(prompt), sampling=Sampling(**{"seed": 9} | sampling), max_tokens=count)


def pool_of(engine: SerialEngine) -> int:
    """Pages of the lane's pool."""
    lane = engine.forward
    assert isinstance(lane, DenseInPlace)
    return lane.pages
