"""The module of a head: what a position's hidden state and the next token say of the token behind that.

    e = norm_e(embed(x[t+1])); h = norm_h(H[t]); g = block(W [e; h]); logits of x[t+2] = head(norm(g))

H[t] is the trunk's hidden state of position t. For a guess one deeper the head is run again: H is then what the
run before it made, and x the token that was guessed. Keys and values of the block are kept for each pair
(H[t], x[t+1]) (DeepSeek-V3 report, section 2.2; names as there). A head of several modules has one for each depth:
that of depth k reads the pairs (g of depth k-1 at t, x[t+k]).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
from mlx import nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import CacheList, KVCache

from worker.engine.trunk import Trunk


class Out(NamedTuple):
    """Of R pairs. states: T [R, K], what a deeper run takes for H. normed: T [R, K], what the LM head takes."""

    states: mx.array
    normed: mx.array


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """How a module is put together.

    embedding_first: whether the projection takes [e; h], else [h; e].
    takes_normed: whether H is the trunk's state behind its final norm, else before it.
    passes_normed: whether a deeper run takes the state behind *norm*, else before it.
    ends_normed: whether there is a *norm*; else the LM head takes the block's output.
    zeroes_first: whether the embedding of the pair at the text's first position is zero.
    window: positions that a row of the block sees, itself included; None: all.
    array_mask: whether the block wants its mask as an array.
    make_cache: of the block. Windows are masks over a whole cache: what was drafted can always be forgotten.
    """

    embedding_first: bool = True
    takes_normed: bool = True
    passes_normed: bool = True
    ends_normed: bool = True
    zeroes_first: bool = False
    window: int | None = None
    array_mask: bool = False
    make_cache: Callable[[], Any] = KVCache


class Head(nn.Module):  # type: ignore[misc]  # MLX ships no types
    """One step module: two norms, the joint projection, a block, a norm.

    Args:
        width: K.
        eps: of the two norms before the projection, and of the last one.
        block: mlx-lm's decoder layer: x [1, R, K], mask, cache -> [1, R, K].
        wiring: of them.

    May have, set from outside: `embedding` and `head`, where they are not the trunk's, and `further`, the modules
    of deeper steps.
    """

    def __init__(self, width: int, eps: float, block: Any, wiring: Wiring = Wiring()) -> None:
        super().__init__()
        self.enorm = nn.RMSNorm(width, eps)
        self.hnorm = nn.RMSNorm(width, eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.block = block
        if wiring.ends_normed:
            self.norm = nn.RMSNorm(width, eps)
        self.wiring = wiring

    @property
    def takes_normed(self) -> bool:
        """As in `Wiring`."""
        return self.wiring.takes_normed

    @property
    def passes_normed(self) -> bool:
        """As in `Wiring`."""
        return self.wiring.passes_normed

    @property
    def embedding_first(self) -> bool:
        """As in `Wiring`."""
        return self.wiring.embedding_first

    @property
    def steps(self) -> list[Head]:
        """The module of each depth; the last one serves all deeper ones."""
        return [self, *self.get("further", ())]

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing but one module over the trunk's embedding and LM head, seeing all positions."""
        own = {"embedding", "head", "further"} & self.keys()
        return not own and self.wiring.ends_normed and not self.wiring.zeroes_first and self.wiring.window is None

    def embed(self, trunk: Trunk, ids: mx.array) -> mx.array:
        """Of ids uint32 [R]: T [R, K]."""
        own = self.get("embedding")
        rows: mx.array = trunk.embed(ids) if own is None else own(ids)
        return rows

    def logits(self, trunk: Trunk, normed: mx.array) -> mx.array:
        """Of normed states T [R, K]: T [R, V]."""
        own = self.get("head")
        rows: mx.array = trunk.logits(normed) if own is None else own(normed)
        return rows

    def __call__(self, embedded: mx.array, hidden: mx.array, cache: Any) -> Out:
        """Run R pairs that follow those in *cache*.

        embedded: T [R, K], of the tokens. hidden: T [R, K]. cache: of mlx-lm's, or None: no pairs before these.
        """
        wiring = self.wiring
        e, h = self.enorm(embedded), self.hnorm(hidden)
        joined = mx.concatenate([e, h] if wiring.embedding_first else [h, e], axis=-1)
        x = self.eh_proj(joined)[None]
        counted = cache[0] if isinstance(cache, CacheList) else cache
        mask = create_attention_mask(x, counted, window_size=wiring.window, return_array=wiring.array_mask)
        g = self.block(x, mask, cache)[0]
        normed = self.norm(g) if wiring.ends_normed else g
        return Out(normed if wiring.passes_normed else g, normed)


class Reading:
    """A head over one text: it reads true pairs, drafts behind them, and forgets what it drafted.

    Args:
        head: the module.
        trunk: below it.
        from_start: whether the first pair read is that of the text's first position.
    """

    def __init__(self, head: Head, trunk: Trunk, *, from_start: bool = True) -> None:
        self._steps, self._trunk, self._from_start = head.steps, trunk, from_start
        self._caches = [step.wiring.make_cache() for step in self._steps]
        self._drafted = [0] * len(self._steps)
        # For each deeper step the latest state above it: no true token is known for that one.
        self._waiting: list[mx.array | None] = [None] * len(self._steps)
        self._latest: Out | None = None

    def read(self, ids: mx.array, hidden: mx.array) -> None:
        """True pairs that follow those read before: tokens uint32 [R] and the states T [R, K] before them.

        The states are as `head.takes_normed` says. What was drafted is dropped.
        """
        self._forget()
        out = self._run(0, ids, hidden)
        self._latest = Out(out.states[-1:], out.normed[-1:])
        for depth in range(1, len(self._steps)):
            states = self._behind_waiting(depth, out.states)
            self._waiting[depth] = states[-1:]
            count = states.shape[0] - 1
            if count == 0:
                break
            out = self._run(depth, ids[-count:], states[:-1])

    def draft(self, count: int, choose: Callable[[mx.array], mx.array]) -> list[mx.array]:
        """*count* tokens uint32 [1] behind the latest pair; *choose* draws one from logits T [1, V], in order.

        Nothing is read by the host: each token feeds the next.
        """
        assert self._latest is not None, "a pair comes first"
        self._forget()
        out, tokens = self._latest, []
        last = len(self._steps) - 1
        for place in range(count):
            step = self._steps[min(place, last)]
            tokens.append(choose(step.logits(self._trunk, out.normed[-1:])))
            if place + 1 == count:
                break
            depth = place + 1
            if depth > last:
                out = self._run(last, tokens[-1], out.states[-1:])
            else:
                # The state above that waits is the first of them already where the step above is the first.
                states = out.states if depth == 1 else self._behind_waiting(depth, out.states)
                out = self._run(depth, mx.concatenate(tokens[-states.shape[0] :]), states)
            self._drafted[min(depth, last)] += out.states.shape[0]
        return tokens

    @property
    def arrays(self) -> list[mx.array]:
        """What the next call needs: to be evaluated now and then."""
        caches = [part for one in self._caches for part in (one.caches if isinstance(one, CacheList) else (one,))]
        state = [one for cache in caches for one in (cache.keys, cache.values) if one is not None]
        waiting = [one for one in self._waiting if one is not None]
        return [*state, *waiting, *(() if self._latest is None else self._latest)]

    def _run(self, depth: int, ids: mx.array, states: mx.array) -> Out:
        step, cache = self._steps[depth], self._caches[depth]
        embedded = step.embed(self._trunk, ids)
        if step.wiring.zeroes_first and self._from_start and self._latest is None:
            embedded = mx.concatenate([mx.zeros_like(embedded[:1]), embedded[1:]])
        return step(embedded, states, cache)

    def _behind_waiting(self, depth: int, states: mx.array) -> mx.array:
        waiting = self._waiting[depth]
        return states if waiting is None else mx.concatenate([waiting, states])

    def _forget(self) -> None:
        for cache, count in zip(self._caches, self._drafted, strict=True):
            if count:
                cache.trim(count)
        self._drafted = [0] * len(self._steps)
