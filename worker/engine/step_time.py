"""How long a decode step takes, with and without a group of kernels: the whole compiled forward, one step ahead.

A kernel alone on a chain that the host holds up says little, so the step is what is timed. Runs of the variants
take turns, since a host has fast and slow phases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

import mlx.core as mx

from worker.engine.packed import Packed
from worker.engine.verify_bank import Switches, VerifyBank
from worker.kv.pages import PAGE, pages_for

# A kernel group that makes the step longer than this, of the step without it, loses.
TOLERATED: Final = 1.03
GROUPS: Final = ("matvec",)
"""The groups of `Switches` that can be on or off."""

CONTEXT: Final = 1000
_STEPS: Final = 16
_REPEATS: Final = 7


@dataclass(frozen=True, slots=True)
class Taken:
    """Milliseconds of a step: the median of some turns, and the least."""

    median: float
    least: float


def pools(packed: Packed, positions: int) -> list[mx.array]:
    """Pools of the model for one sequence of *positions*, all zeros."""
    shape = (2, packed.heads.kv_heads, max(7, pages_for(positions)) * PAGE, packed.heads.dim)
    made = [mx.zeros(shape, dtype=packed.dtype) for _ in packed.layers]
    mx.eval(made)
    return made


class Stepper:
    """The step of *rows* rows behind *context* positions; tokens are the likeliest ones.

    The rows written are the same ones in every step: order comes from the tokens. So the *pools* may be lent to
    several, one at a time; they have room for context and rows.
    """

    def __init__(
        self,
        packed: Packed,
        switches: Switches,
        pools: list[mx.array],
        *,
        rows: int = 1,
        context: int = CONTEXT,
    ) -> None:
        self._bank = VerifyBank(packed, switches)
        self._pools = pools
        self._meta = mx.array([context, *range(pools[0].shape[2] // PAGE)], dtype=mx.int32)
        self._tokens = mx.zeros((rows,), dtype=mx.uint32)
        mx.eval(self._meta, self._tokens)

    def run(self, steps: int) -> None:
        """Steps, each built while the one before it runs; done on return."""
        ahead = self._step()
        for _ in range(steps - 1):
            now, ahead = ahead, self._step()
            mx.eval(now)
        mx.eval(ahead)

    def _step(self) -> mx.array:
        logits, _, self._pools, _ = self._bank.run(self._tokens, self._meta, self._pools)
        self._tokens = mx.argmax(logits, axis=-1).astype(mx.uint32)
        mx.async_eval(self._tokens)  # type: ignore[no-untyped-call]
        return self._tokens


def in_turns(
    runs: Mapping[str, Callable[[int], None]],
    clock: Callable[[], float],
    *,
    steps: int = _STEPS,
    repeats: int = _REPEATS,
) -> dict[str, Taken]:
    """Milliseconds a step of each run, over *repeats* turns of *steps* steps, after one to warm up."""
    for run in runs.values():
        run(2)
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            began = clock()
            run(steps)
            taken[name].append((clock() - began) * 1000 / steps)
    return {name: Taken(median(times), min(times)) for name, times in taken.items()}


def compare(
    packed: Packed, switches: Switches, group: str, clock: Callable[[], float], *, repeats: int = _REPEATS
) -> dict[str, Taken]:
    """A step of one row with *group* "on" and "off", all else as *switches* say."""
    lent = pools(packed, CONTEXT + 1)
    steppers = {
        name: Stepper(packed, replace(switches, **{group: on}), lent)
        for name, on in (("on", True), ("off", False))
    }
    return in_turns({name: stepper.run for name, stepper in steppers.items()}, clock, repeats=repeats)


def verdict(times: Mapping[str, Taken]) -> str:
    """Why the group of `compare` loses; empty where it does not.

    A slow phase of the host can fool the median, and one lucky turn the least: both have to say so.
    """
    on, off = times["on"], times["off"]
    if on.median <= off.median * TOLERATED or on.least <= off.least * TOLERATED:
        return ""
    return f"slower: {on.median:.3g} ms a step with it, {off.median:.3g} without"
