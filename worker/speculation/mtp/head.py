"""The module of a head: what a position's hidden state and the next token say of the token behind that.

    e = norm_e(embed(x[t+1])); h = norm_h(H[t]); g = block(W [e; h]); logits of x[t+2] = head(norm(g))

H[t] is the trunk's hidden state of position t. For a guess one deeper the head is run again: H is then what the
run before it made, and x the token that was guessed. Keys and values of the block are kept for each pair
(H[t], x[t+1]) (DeepSeek-V3 report, section 2.2; names as there).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
from mlx import nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from worker.engine.trunk import Trunk


class Out(NamedTuple):
    """Of R pairs. states: T [R, K], what a deeper run takes for H. normed: T [R, K], what the LM head takes."""

    states: mx.array
    normed: mx.array


class Head(nn.Module):  # type: ignore[misc]  # MLX ships no types
    """One step module: two norms, the joint projection, a block, a norm.

    Args:
        width: K.
        eps: of the two norms before the projection, and of the last one.
        block: mlx-lm's decoder layer: x [1, R, K], mask, cache -> [1, R, K].
        embedding_first: whether the projection takes [e; h], else [h; e].
        takes_normed: whether H is the trunk's state behind its final norm, else before it.
        passes_normed: whether a deeper run takes the state behind *norm*, else before it.
    """

    def __init__(
        self,
        width: int,
        eps: float,
        block: Any,
        *,
        embedding_first: bool = True,
        takes_normed: bool = True,
        passes_normed: bool = True,
    ) -> None:
        super().__init__()
        self.enorm = nn.RMSNorm(width, eps)
        self.hnorm = nn.RMSNorm(width, eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.block = block
        self.norm = nn.RMSNorm(width, eps)
        self.embedding_first = embedding_first
        self.takes_normed = takes_normed
        self.passes_normed = passes_normed

    def __call__(self, embedded: mx.array, hidden: mx.array, cache: Any) -> Out:
        """Run R pairs that follow those in *cache*.

        embedded: T [R, K], of the tokens. hidden: T [R, K]. cache: of mlx-lm's, or None: no pairs before these.
        """
        e, h = self.enorm(embedded), self.hnorm(hidden)
        joined = mx.concatenate([e, h] if self.embedding_first else [h, e], axis=-1)
        x = self.eh_proj(joined)[None]
        g = self.block(x, create_attention_mask(x, cache), cache)[0]
        normed = self.norm(g)
        return Out(normed if self.passes_normed else g, normed)


class Reading:
    """A head over one text: it reads true pairs, drafts behind them, and forgets what it drafted.

    Args:
        head: the module.
        trunk: below it.
        make_cache: the cache of its block.
    """

    def __init__(self, head: Head, trunk: Trunk, make_cache: Callable[[], Any] = KVCache) -> None:
        self._head, self._trunk = head, trunk
        self._cache = make_cache()
        self._drafted = 0
        self._latest: Out | None = None

    def read(self, ids: mx.array, hidden: mx.array) -> None:
        """True pairs that follow those read before: tokens uint32 [R] and the states T [R, K] before them.

        The states are as `head.takes_normed` says. What was drafted is dropped.
        """
        self._cache.trim(self._drafted)
        self._drafted = 0
        out = self._head(self._trunk.embed(ids), hidden, self._cache)
        self._latest = Out(out.states[-1:], out.normed[-1:])

    def draft(self, count: int, choose: Callable[[mx.array], mx.array]) -> list[mx.array]:
        """*count* tokens uint32 [1] behind the latest pair; *choose* draws one from logits T [1, V], in order.

        Nothing is read by the host: each token feeds the next.
        """
        assert self._latest is not None, "a pair comes first"
        self._cache.trim(self._drafted)
        self._drafted = 0
        out, tokens = self._latest, []
        for place in range(count):
            token = choose(self._trunk.logits(out.normed))
            tokens.append(token)
            if place + 1 < count:
                out = self._head(self._trunk.embed(token), out.states, self._cache)
                self._drafted += 1
        return tokens

    @property
    def arrays(self) -> list[mx.array]:
        """What the next call needs: to be evaluated now and then."""
        state = [one for one in (self._cache.keys, self._cache.values) if one is not None]
        return [*state, *(() if self._latest is None else self._latest)]
