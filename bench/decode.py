"""Decode on this machine's GPU, interleaved with mlx-lm's generate_step over the same weights.

Each model: milliseconds a token at several contexts, ours (greedy; with MLX's own products; sampled; with
penalties) and mlx-lm's, the bandwidth floor, what a forward of R rows costs, the first token of a prompt, whether
attempts taken up again draw the same ids, graph nodes, memory. With --start also the time until a process with
SmolLM2's shape is ready. Best measured one model in a process: the figures of one commit are gathered in
bench/results/decode.json.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import click
import mlx.core as mx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import models
import rig
import start
from report import RESULTS, Figure, commit, machine, save, write

from worker.engine.load import weight_bytes
from worker.engine.sample import Sampling
from worker.engine.self_check import prepare
from worker.engine.verify_bank import SIZES
from worker.kernels import disk_cache
from worker.kernels.dialect import target

CONTEXTS = (64, 1024, 4096, 16384)
# Contexts at which drawing is compared, rows are counted, and a prompt is read.
DRAWN, WIDE, PROMPT = (64, 1024), (1024, 16384), 1024
# Ids of a prompt whose answer is taken up again behind so many of its ids, and of one that is cancelled first: the
# longest has rows to be reused at every size of a prefill forward.
RESUMED, CANCELLED, CUTS, DRAWN_IDS = (600, 1024), (600, 1024, 1100), (7, 16, 17), 40
# Of one H200 in bytes a second: the data sheet's, and what a copy reaches.
NOMINAL, COPIED = 4.8e12, 4.3e12
GREEDY = Sampling(seed=0)
SAMPLED = Sampling(seed=1, temperature=0.8, top_p=0.95)
PENALISED = Sampling(
    seed=1,
    temperature=0.8,
    top_p=0.95,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    frequency_penalty=0.2,
)
OURS, PEER, PRODUCTS = "ours", "mlx-lm", "ours with MLX's products"


@dataclass(frozen=True)
class Goals:
    """What a model is to show. first: at context 64, then: from 1k; least_...: the same of the minima."""

    first: float | None
    then: float | None
    least_first: float | None = None
    least_then: float | None = None
    products: float | None = None
    floor: float | None = None
    eight: float | None = None


GOALS = {
    "smol-bf16": Goals(3.7, 4.0, products=2.4, eight=1.2),
    "smol-4bit": Goals(3.0, 3.4, products=1.9, eight=1.2),
    "8b-bf16": Goals(1.1, None, least_then=1.2, floor=0.8, eight=1.35),
    "8b-4bit": Goals(2.4, 2.4, least_first=2.0, least_then=2.0, eight=1.45),
}
EIGHT_FAR, DRAWING, READY_CACHED_S, READY_COLD_S = 1.8, 0.85, 20.0, 60.0


@dataclass(frozen=True)
class Effort:
    """How much is measured. calls: forwards of a count of rows in a round."""

    contexts: tuple[int, ...] = CONTEXTS
    rounds: int = 5
    tokens: int = 100
    calls: int = 20

    @property
    def wide(self) -> tuple[int, ...]:
        """Contexts at which rows are counted."""
        return tuple(context for context in WIDE if context in self.contexts)


@dataclass
class Report:
    """Figures by name, written whenever a part is done, so that a time limit takes nothing that was measured."""

    name: str
    copy: Path | None
    figures: dict[str, Figure] = field(default_factory=dict)

    def add(self, name: str, value: float, unit: str, goal: float | None = None, better: str = "lower") -> None:
        """Keep one figure."""
        self.figures[name] = Figure(name, value, unit, goal, better)

    def load(self) -> None:
        """Take up what other processes measured of the same commit on the same machine."""
        path = RESULTS / f"{self.name}.json"
        if path.exists():
            report = json.loads(path.read_text())
            if (report["commit"], report["machine"]) == (commit(), machine(device())):
                self.figures = {one["name"]: Figure(**one) for one in report["figures"]}

    def save(self) -> None:
        """Write all figures."""
        save(self.name, list(self.figures.values()), device=device())
        if self.copy is not None:
            shutil.copy(RESULTS / f"{self.name}.json", self.copy)


def device() -> str:
    """The GPU in words; nothing where there is none."""
    kind = target()
    if kind is None:
        return ""
    return f"{mx.device_info()['device_name']} (MLX {mx.__version__}, {kind.upper()})"


def bandwidth(report: Report) -> None:
    """Bytes read and written a second by one addition over 4 GiB."""
    numbers = mx.zeros((2**15, 2**16), dtype=mx.bfloat16)
    mx.eval(numbers)
    best = 1e9
    for _ in range(8):
        began = time.perf_counter()
        mx.eval(numbers + 1)
        best = min(best, time.perf_counter() - began)
    report.add(
        "bandwidth of an addition, read and written", 2 * numbers.nbytes / best / 1e12, "TB/s", None, "higher"
    )
    del numbers
    mx.clear_cache()


def decode(report: Report, name: str, one: rig.Rig, effort: Effort) -> None:
    """Milliseconds a token at every context, all lanes in turns."""
    engines = {OURS: one.engine(one.kernels), PRODUCTS: one.engine(one.products)}
    for context in effort.contexts:
        runs: dict[str, Callable[[], float]] = {
            PEER: partial(rig.decode_mlx, one.model, context, tokens=effort.tokens)
        }
        for kind, engine in engines.items():
            runs[kind] = partial(rig.decode, engine, context, GREEDY, tokens=effort.tokens)
        if context in DRAWN:
            runs["sampled"] = partial(rig.decode, engines[OURS], context, SAMPLED, tokens=effort.tokens)
            runs["penalised"] = partial(rig.decode, engines[OURS], context, PENALISED, tokens=effort.tokens)
        for run in runs.values():
            # What is compiled or planned at first use is no part of a token.
            run(tokens=max(effort.tokens // 8, 2 * rig.SKIP)) if context > CONTEXTS[0] else run()
        found = rig.interleaved(runs, effort.rounds)
        decode_figures(report, name, one, context, found)
        report.save()
        line = ", ".join(f"{kind} {times.median:.3f} [{times.least:.3f}]" for kind, times in found.items())
        click.echo(f"  context {context}: {line} ms/token", err=True)


def decode_figures(report: Report, name: str, one: rig.Rig, context: int, times: dict[str, rig.Times]) -> None:
    """The figures of one context."""
    goals, title = GOALS[name], f"{one.shape.title}, context {context}"
    first = context == CONTEXTS[0]
    for kind, found in times.items():
        report.add(f"{title}: {kind}, median", found.median, "ms/token")
        report.add(f"{title}: {kind}, minimum", found.least, "ms/token")
    ours, peer, products = times[OURS], times[PEER], times[PRODUCTS]
    medians, minima = peer.median / ours.median, peer.least / ours.least
    report.add(f"{title}: mlx-lm / ours, medians", medians, "x", goals.first if first else goals.then, "higher")
    least = goals.least_first if first else goals.least_then
    report.add(f"{title}: mlx-lm / ours, minima", minima, "x", least, "higher")
    own = peer.median / products.median
    report.add(f"{title}: mlx-lm / ours with MLX's products, medians", own, "x", goals.products, "higher")
    own = peer.least / products.least
    report.add(f"{title}: mlx-lm / ours with MLX's products, minima", own, "x", None, "higher")
    for kind in ("sampled", "penalised"):
        if kind in times:
            share = ours.median / times[kind].median
            report.add(f"{title}: speed {kind} over greedy, medians", share, "x", DRAWING, "higher")
            share = ours.least / times[kind].least
            report.add(f"{title}: speed {kind} over greedy, minima", share, "x", None, "higher")
    moved = models.weight_bytes(one.shape, one.model) + models.kv_bytes(one.shape, context)
    for words, rate in (("4.8 TB/s nominal", NOMINAL), ("4.3 TB/s of a copy", COPIED)):
        floor = moved / rate * 1e3
        goal = goals.floor if first and rate == COPIED else None
        report.add(f"{title}: floor of weights and rows at {words}", floor, "ms/token")
        report.add(f"{title}: share of the floor at {words}", floor / ours.median, "", goal, "higher")


def rows(report: Report, name: str, one: rig.Rig, effort: Effort) -> None:
    """What a forward of R rows costs, of one of a single row; and whether a row's bits depend on R."""
    goals = GOALS[name]
    # No kernel has a variant that is chosen by R, so there is no faster table that invariance would cost.
    lanes = {"rows (invariant; no tile is chosen by R)": one.kernels, "rows with MLX's products": one.products}
    for context in effort.wide:
        for words, lane in lanes.items():
            calls = effort.calls if lane is one.kernels else effort.calls // 2
            table = rig.rows_table(one, lane, context, SIZES, calls=calls, rounds=max(effort.rounds - 2, 1))
            single = table[1]
            for count, found in table.items():
                title = f"{one.shape.title}, context {context}, {words}"
                report.add(f"{title}: {count}", found.median, "ms")
                goal = None
                if count == 8 and lane is one.kernels:
                    goal = goals.eight if context == WIDE[0] else EIGHT_FAR
                if count > 1:
                    report.add(f"{title}: c({count}), medians", found.median / single.median, "x", goal)
                    report.add(f"{title}: c({count}), minima", found.least / single.least, "x")
            line = ", ".join(f"{count}: {found.median:.3f} [{found.least:.3f}]" for count, found in table.items())
            click.echo(f"  context {context}, {words}: {line} ms", err=True)
        if one.kernels.row_invariant or target() is None:
            wrong = rig.differing(one, one.kernels, context)
            report.add(f"{one.shape.title}, context {context}: logits that differ by R", wrong, "", 0.0)
            click.echo(f"  context {context}: {wrong} logits differ by R", err=True)
        report.save()


def prompts(report: Report, one: rig.Rig, effort: Effort) -> None:
    """The first token of a prompt, nothing reused."""
    prompt = tuple(place * 7919 % one.loaded.vocabulary for place in range(min(PROMPT, max(effort.contexts))))
    engine = one.engine(one.kernels, placed=False)
    runs: dict[str, Callable[[], float]] = {
        PEER: partial(rig.first_token_mlx, one.model, prompt),
        OURS: partial(rig.first_token, engine, prompt),
    }
    title = f"{one.shape.title}, prompt of {len(prompt)} in forwards of {one.kernels.prefill_rows} rows"
    for kind, found in rig.interleaved(runs, 1).items():
        report.add(f"{title}: first token, {kind}, first time in the process", found.median, "ms")
    found = rig.interleaved(runs, effort.rounds)
    for kind, times in found.items():
        report.add(f"{title}: first token, {kind}, median", times.median, "ms")
        report.add(f"{title}: first token, {kind}, minimum", times.least, "ms")
        click.echo(f"  first token, {kind}: {times.median:.2f} [{times.least:.2f}] ms", err=True)
    ratio = found[PEER].median / found[OURS].median
    report.add(f"{title}: first token, mlx-lm / ours, medians", ratio, "x", None, "higher")
    report.save()


def attempts(report: Report, one: rig.Rig) -> None:
    """Whether a job taken up again, or asked for anew behind a cancel, draws what it would have drawn."""
    engine, title = one.engine(one.kernels, placed=False, kept=True), one.shape.title
    asked = {length: [place * 7919 % one.loaded.vocabulary for place in range(length)] for length in CANCELLED}
    found = [rig.resumed(engine, asked[length], CUTS, DRAWN_IDS) for length in RESUMED]
    right, whole = (sum(part) for part in zip(*found, strict=True))
    name = "ids of resumed attempts equal to the uninterrupted ones"
    report.add(f"{title}: {name}", right, f"of {whole}", whole, "higher")
    kept = sum(rig.cancelled(engine, prompt, DRAWN_IDS) for prompt in asked.values())
    name, all_ids = "ids behind a cancelled prompt equal to those of a cold start", DRAWN_IDS * len(asked)
    report.add(f"{title}: {name}", kept, f"of {all_ids}", all_ids, "higher")
    click.echo(f"  resumed: {right} of {whole} ids equal, behind a cancel: {kept} of {all_ids}", err=True)
    report.save()


def sizes(report: Report, one: rig.Rig, effort: Effort) -> None:
    """Graph nodes of a step, and memory."""
    title, context = one.shape.title, max(effort.contexts)
    for kind, count in zip((OURS, PEER), rig.step_nodes(one), strict=True):
        report.add(f"{title}: graph nodes of a greedy step, {kind}", count, "")
    report.add(f"{title}: weights", weight_bytes(one.model) / 1e9, "GB")
    engine = one.engine(one.kernels)
    runs: dict[str, Callable[[], object]] = {
        OURS: partial(rig.decode, engine, context, GREEDY, 20),
        PEER: partial(rig.decode_mlx, one.model, context, 20),
    }
    pool = one.pool.nbytes
    for kind, run in runs.items():
        before = mx.get_active_memory()
        most = rig.peak(run)
        own = pool if kind == OURS else 0
        report.add(f"{title}, context {context}: peak memory of the process, {kind}", most / 1e9, "GB")
        report.add(f"{title}, context {context}: rows and temporaries, {kind}", (most - before + own) / 1e6, "MB")
    report.add(f"{title}: rows in the pool", pool / 1e6, "MB")
    report.save()


def measure(report: Report, name: str, shape: models.Shape, effort: Effort, kernels: Path | None) -> None:
    """All figures of one model."""
    clock = Clock(shape.title)
    model = models.make(shape)
    apart = rig.interleaved({PEER: partial(rig.decode_mlx, model, CONTEXTS[0], effort.tokens)}, 3)[PEER]
    clock.told("made, and mlx-lm alone")
    one = rig.rig_of(shape, model, max(effort.contexts) + effort.tokens)
    compiled = prepare(one.packed, one.kernels.prefill_rows, kernels)
    clock.told(f"packed, and {compiled} kernels compiled")
    joint = rig.interleaved({PEER: partial(rig.decode_mlx, model, CONTEXTS[0], effort.tokens)}, 3)[PEER]
    report.add(f"{shape.title}: mlx-lm over our packed weights / over its own", joint.least / apart.least, "x")
    for kind, lane in ((OURS, one.kernels), (PRODUCTS, one.products)):
        error = one.error(lane)
        report.add(f"{shape.title}: {kind}, error against mlx-lm's module", error, "of the largest logit", 0.1)
        click.echo(f"  {kind}: {error:.2g} of the largest logit off", err=True)
    report.save()
    clock.told("checked")
    for words, part in {
        "decode": partial(decode, report, name, one, effort),
        "rows": partial(rows, report, name, one, effort),
        "prompts": partial(prompts, report, one, effort),
        "attempts": partial(attempts, report, one),
        "sizes": partial(sizes, report, one, effort),
    }.items():
        part()
        clock.told(words)


class Clock:
    """Tells on the terminal what took how long."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._began = time.perf_counter()

    def told(self, what: str) -> None:
        """The time since the last call."""
        now = time.perf_counter()
        click.echo(f"{self._title}: {what}, {now - self._began:.1f} s", err=True)
        self._began = now


def ready(report: Report, shape: models.Shape) -> None:
    """Seconds from the start of a process until it could tell READY, with no compiled kernel and with all."""
    clock = Clock(shape.title)
    with tempfile.TemporaryDirectory() as folder:
        where, kernels = Path(folder, "model"), Path(folder, "kernels")
        start.save(shape, where)
        clock.told("written to disk")
        for words, goal in (("no kernel cached", READY_COLD_S), ("kernels cached on disk", READY_CACHED_S)):
            seconds, told = start.timed(where, kernels)
            report.add(f"{shape.title}: start to READY, {words}", seconds, "s", goal)
            report.save()
            clock.told(f"{words}, ready after {seconds:.1f} s ({told})")


@click.command()
@click.option("--models", "names", default=",".join(models.SHAPES), help="Which, by comma; none: an empty word.")
@click.option("--quick", is_flag=True, help="Two contexts, two rounds.")
@click.option("--tiny", is_flag=True, help="Tiny models of the same kind, on any device: a trial of this program.")
@click.option("--start", "starting", is_flag=True, help="Also the time from start to READY.")
@click.option("--copy", type=click.Path(path_type=Path), help="Where a copy of the results goes.")
def main(names: str, *, quick: bool, tiny: bool, starting: bool, copy: Path | None) -> None:
    """Measure decode."""
    if target() is None and not tiny:
        raise SystemExit("no GPU: the lane in place does not run here")
    effort = Effort(contexts=CONTEXTS[:2], rounds=2, tokens=30, calls=6) if quick else Effort()
    if tiny:
        effort = Effort(contexts=(64, 1024), rounds=1, tokens=10, calls=2)
    # MLX looks up where its kernels are once, before it computes anything.
    kernels = disk_cache.open_folder(Path(tempfile.gettempdir(), "mtplx-bench"))
    wanted = [one for one in names.split(",") if one]
    report = Report("decode-tiny" if tiny else "decode" if wanted else "start", copy)
    report.load()
    if target() is not None:
        bandwidth(report)
    for name in wanted:
        shape = models.SHAPES[name]
        measure(report, name, shape.tiny if tiny else shape, effort, kernels)
    if starting:
        shape = models.SHAPES["smol-bf16"]
        ready(report, shape.tiny if tiny else shape)
    write(report.name, list(report.figures.values()), device=device())


if __name__ == "__main__":
    main()
