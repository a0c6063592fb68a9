"""What is checked at start on a GPU, and what follows: which kernels are used, and which form of the cache.

Each kernel runs on dummy rows in the model's own shapes and type, for every row count, and must give what plain
operations give; then rows written in place must be seen by every later reader; then the whole step is timed. What
fails or loses is switched off, for every row count, with a line in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import mlx.core as mx

from worker.engine import step_time
from worker.engine.check_cases import Case, Move, Tree, cases, left_out, tree_cases
from worker.engine.packed import Packed
from worker.engine.verify_bank import SIZES, TREE_SIZES, Switches, unserved
from worker.engine.visibility import BOUNDS, LAYERS, STEPS, Trial, apart, number_of, pools_apart
from worker.kernels import disk_cache
from worker.kernels.dialect import chosen, recorded, target

_log = logging.getLogger(__name__)

ON: Final = "on"
IN_PLACE: Final = "in place"
# Off with its switch; without any other kernel the pool is not written in place.
_SWITCHED: Final = step_time.GROUPS
# Without one of them drafts are chains.
_TREES: Final = (Tree.kernel, Move.kernel)


@dataclass(frozen=True, slots=True)
class Checked:
    """How a kernel did. error: the largest, of the largest value in its row, in the case *worst*.

    refused: what MLX said where it could not run the kernel at all.
    """

    ok: bool
    error: float
    bound: float
    worst: str
    refused: str = ""

    def __str__(self) -> str:
        if self.ok:
            return ON
        if self.refused:
            return f"does not run ({self.worst}): {self.refused}"
        return f"wrong: off by {self.error:.2g} at {self.worst}, bound {self.bound:.2g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is checked: row counts, contexts of the attention, steps and layers of the trial; trees, too."""

    rows: Sequence[int] = SIZES
    contexts: Sequence[int] = (0, 31, 700, 2100)
    steps: int = STEPS
    layers: int = LAYERS
    trees: bool = False

    def cases(self, packed: Packed, prefill_rows: int, contexts: Sequence[int]) -> Iterator[Case]:
        """All that is checked of *packed*, the attention behind every one of *contexts*."""
        trees = [size for size in self.rows if size in TREE_SIZES] if self.trees else []
        more = tree_cases(packed, trees, contexts) if trees else ()
        return chain(cases(packed, prefill_rows, self.rows, contexts), more)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What follows from the check.

    why: what keeps the model off the in-place form, in words; empty if nothing does.
    in_place: whether kernels may write the pool; without it the tail form is used, and no kernel.
    kernels: for READY: each kernel's name, and "on", perhaps with what it does not serve, or why it is off.
    report: for `mtplx probe`: every figure.
    """

    switches: Switches
    in_place: bool
    why: str = ""
    kernels: dict[str, str] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)


def choose(
    packed: Packed,
    *,
    prefill_rows: int,
    kernel_folder: Path | None = None,
    sizes: Sizes = Sizes(),
    clock: Callable[[], float] = perf_counter,
) -> Choice:
    """Check, try and time; on the CPU there is nothing to check.

    Args:
        packed: the model.
        prefill_rows: rows of a prefill forward.
        kernel_folder: of `disk_cache.open_folder`; what is missing there is compiled first.
        sizes: how much is checked.
        clock: seconds.
    """
    reason = "MLX runs on the CPU here" if chosen(Switches().kernels) is None else unserved(packed)
    if reason:
        return Choice(switches=Switches(), in_place=False, why=reason, report={"why": reason})
    seconds: dict[str, float] = {}
    with timed(seconds, "compile", clock):
        compiled = prepare(packed, prefill_rows, kernel_folder, sizes)
    with timed(seconds, "check", clock):
        checked = check(sizes.cases(packed, prefill_rows, sizes.contexts))
    kernels = {name: str(one) for name, one in checked.items()}
    report: dict[str, Any] = {"checks": {name: asdict(one) for name, one in checked.items()}, "compiled": compiled}
    if all(one.ok for name, one in checked.items() if name not in (*_SWITCHED, *_TREES)):
        with timed(seconds, "trial", clock):
            kernels[IN_PLACE] = _tried(packed, sizes, report)
    in_place = kernels.get(IN_PLACE) == ON
    right = [name for name, one in checked.items() if one.ok]
    trees = all(name in right for name in _TREES)
    switches = replace(Switches(trees=trees), **{name: name in right for name in _SWITCHED})
    if in_place:
        with timed(seconds, "time", clock):
            switches = _faster(packed, switches, kernels, report, clock)
    for name, what in left_out(packed).items():
        if kernels.get(name, ON) == ON:
            kernels[name] = f"{ON}; " * (name in kernels) + f"does not serve {what}"
    for name, state in kernels.items():
        if not is_on(state):
            _log.warning("%s is switched off: %s", name, state)
    report["seconds"] = seconds
    # Pools and rows of the check are of no more use, and the pool is sized by what is free.
    mx.clear_cache()
    why = "" if in_place else "a kernel that it needs is switched off"
    return Choice(switches=switches, in_place=in_place, why=why, kernels=kernels, report=report)


def is_on(state: str) -> bool:
    """Whether a state of `Choice.kernels` is that of a kernel that runs."""
    return state.partition(";")[0] == ON


def prepare(packed: Packed, prefill_rows: int, folder: Path | None, sizes: Sizes = Sizes()) -> int:
    """Compile what the model's forwards need and *folder* lacks; how many kernels that was."""
    if folder is None:
        return 0
    with recorded() as launches:
        # A kernel's text does not depend on how far the sequence is.
        for case in sizes.cases(packed, prefill_rows, (0,)):
            case.got()
    return disk_cache.fill(launches, folder)


def check(some: Iterable[Case]) -> dict[str, Checked]:
    """Every kernel's outcome over its cases."""
    found: dict[str, Checked] = {}
    for case in some:
        before = found.get(case.kernel)
        if before is not None and before.refused:
            continue
        one = check_one(case)
        if before is None or not one.error <= before.error or one.refused:
            found[case.kernel] = one
    return found


def check_one(case: Case) -> Checked:
    """The outcome of one case."""
    try:
        got, pool = case.got()
        # The pool is no result of the graph: it is read when the kernel is done.
        mx.eval(got)
        want, want_pool = case.want()
        bound = BOUNDS[want.dtype]
        error = number_of(apart(got, want))
        if pool is not None and want_pool is not None:
            error = max(error, number_of(pools_apart(pool, want_pool)))
    except (RuntimeError, ValueError) as refusal:
        return Checked(ok=False, error=float("inf"), bound=0.0, worst=case.what, refused=said(refusal))
    return Checked(ok=error <= bound, error=error, bound=bound, worst=case.what)


def said(refusal: Exception) -> str:
    """The first line of what MLX said where it could not run something; never empty."""
    lines = str(refusal).strip().splitlines() or [type(refusal).__name__]
    return lines[0][:200]


def _tried(packed: Packed, sizes: Sizes, report: dict[str, Any]) -> str:
    """Whether rows written in place are seen: "on", or why not."""
    layer = packed.layers[0]
    assert layer.table is not None, "a model whose rope is no table of constants is not served"
    try:
        seen = Trial(layer.heads, layer.table, packed.dtype, layers=sizes.layers).run(sizes.steps)
    except RuntimeError as refusal:
        return f"the trial does not run: {refusal}"
    report["trial"] = asdict(seen)
    return ON if seen.ok else str(seen)


def _faster(
    packed: Packed,
    switches: Switches,
    kernels: dict[str, str],
    report: dict[str, Any],
    clock: Callable[[], float],
) -> Switches:
    """*switches* without the groups that make the step slower."""
    report["step_ms"] = {}
    for group in _SWITCHED:
        if not getattr(switches, group):
            continue
        times = step_time.compare(packed, switches, group, clock)
        report["step_ms"][group] = {name: asdict(one) for name, one in times.items()}
        if reason := step_time.verdict(times):
            kernels[group] = reason
            switches = replace(switches, **{group: False})
    return switches


@contextmanager
def uncompiled() -> Iterator[None]:
    """Nothing is compiled within: what runs once is not worth the seconds that CUDA's compiler takes for it."""
    if target() != "cuda":
        yield
        return
    mx.disable_compile()
    try:
        yield
    finally:
        mx.enable_compile()


@contextmanager
def timed(seconds: dict[str, float], name: str, clock: Callable[[], float]) -> Iterator[None]:
    """Note under *name* how long this took."""
    began = clock()
    yield
    seconds[name] = clock() - began
