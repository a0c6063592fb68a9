"""What a device can do, in figures: for `mtplx probe`, and for a first run where nobody has run it yet."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final

import mlx.core as mx

import mtplx
from worker.engine import step_time
from worker.engine.build import IN_PLACE, TAIL_FORM, Options
from worker.engine.check_cases import Case, cases
from worker.engine.dense_in_place import DenseInPlace
from worker.engine.dense_tail import DenseTail
from worker.engine.forward import Forward, rows_needed
from worker.engine.load import LoadedModel, device_name, load, resolve_model, weight_bytes
from worker.engine.memory import room
from worker.engine.packed import NotDenseError, Packed, pack
from worker.engine.self_check import Choice, Sizes, check_one, choose, is_on, said, timed
from worker.engine.step_time import Stepper
from worker.engine.verify_bank import Switches
from worker.engine.visibility import Trial, number_of
from worker.kernels import disk_cache
from worker.kernels.dialect import MAX_ROWS
from worker.kv import pages as books
from worker.kv.pages import PAGE, Pages
from worker.kv.pool import Pool, Shape
from worker.kv.prefix import Opened

NO_COMMITS: Final = "MLX does not tell how many command buffers it commits; nodes of the graph are counted instead"


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much is measured: forwards of so many *rows* behind so many positions, each so often.

    prefill_rows: None, as a worker would have it.
    """

    rows: Sequence[int] = (1, 2, 3, 4, 6, 8, 12, 16)
    contexts: Sequence[int] = (64, 1024, 4096)
    repeats: int = 5
    prefill_rows: int | None = None
    sizes: Sizes = field(default_factory=Sizes)


# A minute's worth of what takes a GPU no time.
ON_THE_CPU: Final = Extent(rows=(1, 4, 16), contexts=(64,), repeats=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is asked for.

    model: loads the model. cache_dir: as in the settings. full: more than the table of kernels. extent: None, what
    suits the device.
    """

    model: Callable[[], LoadedModel]
    cache_dir: Path
    full: bool
    extent: Extent | None = None


def named(model: str, cache_dir: Path) -> Callable[[], LoadedModel]:
    """What loads the *model* of the settings."""
    return lambda: load(resolve_model(model, cache_dir))


def probe(wish: Wish, say: Callable[[str], None], clock: Callable[[], float] = perf_counter) -> dict[str, Any]:
    """The report, ready for JSON.

    Raises:
        ModelFilesError: the model is missing or incomplete.
    """
    folder = disk_cache.open_folder(wish.cache_dir)
    start: dict[str, float] = {}
    say("loading the model")
    with timed(start, "load", clock):
        loaded = wish.model()
    report: dict[str, Any] = {"system": system(), "device": device(), "model": described(loaded), "start_s": start}
    try:
        with timed(start, "pack", clock):
            packed = pack(loaded.model)
    except NotDenseError as error:
        return report | {"kernels": {}, "why": f"kernels serve the dense family alone, and {error}"}
    say("checking the kernels")
    extent = wish.extent or (ON_THE_CPU if device_name() == "cpu" else Extent())
    rows = Options(prefill_rows=extent.prefill_rows).rows(loaded)
    choice = choose(packed, prefill_rows=max(rows, PAGE), kernel_folder=folder, sizes=extent.sizes, clock=clock)
    start |= choice.report.get("seconds", {})
    report |= {"form": IN_PLACE if choice.in_place else TAIL_FORM, "why": choice.report.get("why", "")}
    report["kernels"] = table(packed, choice, max(rows, PAGE), extent, clock)
    if wish.full:
        report |= Measured(packed, choice, rows, extent, clock).all(say)
        report["memory"] = memory(loaded)
    return report


def system() -> dict[str, Any]:
    """Versions and the machine."""
    return {
        "platform": platform.platform(),
        "machine": platform.machine(),
        "macos": platform.mac_ver()[0],
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "mtplx": mtplx.__version__,
        "mlx": version("mlx"),
        "mlx_lm": version("mlx-lm"),
    }


def device() -> dict[str, Any]:
    """What MLX tells of its device."""
    return {"kind": device_name(), **{str(name): value for name, value in mx.device_info().items()}}


def described(loaded: LoadedModel) -> dict[str, Any]:
    """The model in figures."""
    return {
        "name": loaded.name,
        "dtype": loaded.dtype,
        "vocabulary": loaded.vocabulary,
        "width": loaded.width,
        "context": loaded.context,
        "weight_bytes": weight_bytes(loaded.model),
    }


def memory(loaded: LoadedModel) -> dict[str, Any]:
    """Bytes: of the weights, and what MLX has used and may use."""
    found = room()
    return {
        "active_bytes": mx.get_active_memory(),
        "peak_bytes": mx.get_peak_memory(),
        "cache_bytes": mx.get_cache_memory(),
        "may_fill_bytes": found.total,
        "weight_bytes": weight_bytes(loaded.model),
    }


def table(
    packed: Packed, choice: Choice, prefill_rows: int, extent: Extent, clock: Callable[[], float]
) -> dict[str, dict[str, Any]]:
    """For each kernel: state, error, bound, microseconds alone and of the plain path, milliseconds of a step."""
    checks = choice.report.get("checks", {})
    found: dict[str, dict[str, Any]] = {}
    for name, state in choice.kernels.items():
        found[name] = {"state": state, **checks.get(name, {})}
        if name in choice.report.get("step_ms", {}):
            times = choice.report["step_ms"][name]
            found[name]["step_ms"] = {way: taken["median"] for way, taken in times.items()}
    if choice.kernels:
        for case in cases(packed, prefill_rows, (1,), (extent.contexts[-1],)):
            row = found[case.kernel]
            if not row.get("refused") and "alone_us" not in row:
                # The check at start does not go as far.
                refused = check_one(case).refused
                times = {"refused": refused} if refused else alone(case, extent.repeats, clock)
                row["alone_us"] = {"what": case.what, **times}
    return found


def alone(case: Case, repeats: int, clock: Callable[[], float]) -> dict[str, float]:
    """Microseconds of the kernel and of the plain path; several at once, so that not the host alone is timed."""
    together = 8
    makers: dict[str, Callable[[], mx.array]] = {"kernel": lambda: case.got()[0], "plain": case.plain}
    taken: dict[str, list[float]] = {"kernel": [], "plain": []}
    for _ in range(repeats + 1):
        for name, make in makers.items():
            made = [make() for _ in range(together)]
            began = clock()
            mx.eval(made)
            taken[name].append((clock() - began) * 1e6 / together)
    return {name: median(times[1:]) for name, times in taken.items()}


class Measured:
    """What is measured on the form of the cache that works here."""

    def __init__(
        self, packed: Packed, choice: Choice, rows: int, extent: Extent, clock: Callable[[], float]
    ) -> None:
        self._packed = packed
        self._choice = choice
        self._rows = rows
        self._extent = extent
        self._clock = clock

    def all(self, say: Callable[[str], None]) -> dict[str, Any]:
        """Every part of the report that needs the packed model."""
        found: dict[str, Any] = {}
        if "trial" in self._choice.report:
            say("trying writes in place")
            found["in_place"] = self.in_place()
        else:
            reasons = [state for state in self._choice.kernels.values() if not is_on(state)]
            found["in_place"] = {"does_not_apply": "; ".join(reasons) or self._choice.report["why"]}
        say("measuring what rows cost")
        found["cost_ms"] = self.cost()
        say("comparing rows of wide and narrow forwards")
        found["row_invariance"] = self.row_invariance()
        found["step"] = {"nodes": self.nodes(), "commits": None, "why": NO_COMMITS}
        found["heads"] = asdict(self._packed.heads) | {"layers": len(self._packed.layers)}
        found["page_bytes"] = self._shape.page_bytes
        return found

    @property
    def _shape(self) -> Shape:
        heads = self._packed.heads
        return Shape(len(self._packed.layers), heads.kv_heads, heads.dim, self._packed.dtype)

    def in_place(self) -> dict[str, Any]:
        """The trial as the check does it, waiting after every step, and with a single layer."""
        layer, sizes = self._packed.layers[0], self._extent.sizes
        assert layer.table is not None, "what was tried has constants"
        found = {}
        for name, layers, ahead in (
            ("one ahead", sizes.layers, True),
            ("waiting", sizes.layers, False),
            ("one layer", 1, True),
        ):
            trial = Trial(layer.heads, layer.table, self._packed.dtype, layers=layers, ahead=ahead)
            found[name] = asdict(trial.run(sizes.steps))
        return found

    def cost(self) -> dict[str, Any]:
        """Milliseconds of a forward by rows and context: one ahead with and without our products, or waiting.

        A context at which MLX could not run them has what it said under `refused` instead.
        """
        if not self._choice.in_place:
            return {"waiting": self._costs(self._waiting)}
        ways = {"our products": Switches(), "MLX's products": Switches(matvec=False)}
        if not self._choice.report["checks"].get("matvec", {"ok": False})["ok"]:
            del ways["our products"]
        return {name: self._costs(partial(self._ahead, switches=switches)) for name, switches in ways.items()}

    def _costs(self, measured: Callable[[int], dict[str, float]]) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for context in self._extent.contexts:
            try:
                found[str(context)] = measured(context)
            except (RuntimeError, ValueError) as refusal:
                found[str(context)] = {"refused": said(refusal)}
        return found

    def _ahead(self, context: int, switches: Switches) -> dict[str, float]:
        lent = step_time.pools(self._packed, context + max(self._extent.rows))
        runs = {
            str(rows): Stepper(self._packed, switches, lent, rows=rows, context=context).run
            for rows in self._extent.rows
        }
        taken = step_time.in_turns(runs, self._clock, repeats=self._extent.repeats)
        return {name: one.median for name, one in taken.items()}

    def _waiting(self, context: int) -> dict[str, float]:
        taken: dict[int, list[float]] = {rows: [] for rows in self._extent.rows}
        with self._lane(context) as (forward, sequence):
            for _ in range(self._extent.repeats + 1):
                for rows, times in taken.items():
                    began = self._clock()
                    mx.eval(forward.rows(mx.arange(rows, dtype=mx.uint32)))
                    times.append((self._clock() - began) * 1000)
                    sequence.truncate(context)
        return {str(rows): median(times[1:]) for rows, times in taken.items()}

    @contextmanager
    def _lane(self, context: int) -> Iterator[tuple[Forward, books.Sequence]]:
        """The lane that works here, with a sequence of *context* rows of zeros."""
        needed = rows_needed(context + MAX_ROWS, max(self._rows, PAGE))
        pages = Pages(-(-needed // PAGE))
        pool = Pool(self._shape, pages.count)
        forward: Forward
        if self._choice.in_place:
            forward = DenseInPlace(
                self._packed, pool, prefill_rows=max(self._rows, PAGE), switches=self._choice.switches
            )
        else:
            forward = DenseTail(self._packed, pool, prefill_rows=self._rows)
        sequence = pages.reserve(needed)
        sequence.append(context, prompt=True)
        forward.begin(Opened(sequence, (), b"", False, (), context, True))
        yield forward, sequence
        forward.end()
        sequence.release()

    def row_invariance(self) -> dict[str, Any]:
        """How many logits of a row differ in their bits between a forward of this row and one of R rows."""
        context = self._extent.contexts[0]
        tokens = mx.arange(MAX_ROWS, dtype=mx.uint32)
        with self._lane(context) as (forward, sequence):
            alone = []
            for row in range(MAX_ROWS):
                alone.append(forward.rows(tokens[row : row + 1]))
                mx.eval(alone[-1])
            one = mx.concatenate(alone)
            differing = {}
            for rows in self._extent.rows[1:]:
                sequence.truncate(context)
                wide = forward.rows(tokens[:rows])
                mx.eval(wide)
                differing[str(rows)] = int(number_of(mx.sum(bits(wide) != bits(one[:rows]))))
        return {"promised": forward.row_invariant, "values_a_row": one.shape[1], "differing": differing}

    def nodes(self) -> int:
        """Nodes of the graph of one step of one row."""
        with self._lane(self._extent.contexts[0]) as (forward, _):
            forward.rows(mx.zeros((1,), dtype=mx.uint32))
            forward.settle()
            logits = forward.rows(mx.zeros((1,), dtype=mx.uint32))
            count = graph_nodes(logits)
            mx.eval(logits)
        return count


def graph_nodes(*outputs: mx.array) -> int:
    """Primitives of the graph of *outputs* that are not computed yet."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "graph.dot")
        mx.export_to_dot(str(path), *outputs)
        return path.read_text().count("shape=rectangle")


def bits(array: mx.array) -> mx.array:
    """The values as unsigned numbers of the same size."""
    return array.view({2: mx.uint16, 4: mx.uint32}[array.dtype.size])
