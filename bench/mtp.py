"""A multi-token prediction head at work: SmolLM2-135M with the head that we ship, or another, on this GPU.

Four kinds of text (bench/conversations.py), answered at temperature 0 and 0.7 by our plain decode, by the head
alone, by prompt lookup alone, by both as a worker runs them, and by mlx-lm's generate_step; ratios are medians of
ratios of neighbouring runs. Acceptance is conditional: of drafts whose ids above were all kept, the share whose id
was kept, with four ids drafted at every step. Part "wrong" repeats this with a head that was not primed, that
takes the state before the final norm, or that passes it on: what a wrong wiring costs. Every answer of ours must
be the plain one.

    python bench/mtp.py --folder FOLDER [--mtp HEAD] [--copy RESULT.json]

FOLDER has both forms as bench/pack_model.py writes them; see bench/speculation.py for a machine that takes 64 MiB.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import mlx.core as mx

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import forms  # noqa: E402 - the folders come first
from conversations import CODE, conversations  # noqa: E402
from decode import Clock, Report, device  # noqa: E402
from forms import PEER, PLAIN, Form  # noqa: E402
from rounds import Asked, Rounds  # noqa: E402
from speculation import NEAR, answered, details, shortened  # noqa: E402
from speculation import Effort as Answers  # noqa: E402
from ways import Answer, Prompt, Way, ours, planned  # noqa: E402

from mtplx.settings import SchedulerMode, Settings  # noqa: E402
from worker.engine.trunk import Trunk  # noqa: E402
from worker.forge.train import config_of, fresh_head  # noqa: E402
from worker.kernels import disk_cache  # noqa: E402
from worker.kernels.dialect import target  # noqa: E402
from worker.speculation.build import Width, width  # noqa: E402
from worker.speculation.costs import Measured  # noqa: E402
from worker.speculation.executor import Parts  # noqa: E402
from worker.speculation.mtp import forged  # noqa: E402
from worker.speculation.mtp.build import shipped_for  # noqa: E402
from worker.speculation.mtp.drafter import MTP, Mtp  # noqa: E402
from worker.speculation.mtp.following import HeadRun  # noqa: E402
from worker.speculation.mtp.module import ModuleHead  # noqa: E402
from worker.speculation.mtp.on_device import DeviceDrafts  # noqa: E402
from worker.speculation.planner import Plan, Planner  # noqa: E402

HEAD, NGRAM, BOTH = "head", "prompt lookup", "head and prompt lookup"
DEPTHS = 4
KEPT = (75.0, 60.0, 45.0)
OVER_PLAIN, OVER_PEER, OVER_BETTER = 1.8, 7.0, 1.2
TEMPERATURES = (0.0, 0.7)


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    tokens: of an answer. long: of one whose drafts are counted; wrong: of one by a head that is wired wrong.
    rounds, seconds: of the ways that are compared, at least and about.
    """

    tokens: int = 128
    long: int = 256
    wrong: int = 96
    peer_tokens: int = 48
    rounds: int = 3
    seconds: float = 5.0
    kinds: int = 4


TRIAL = Effort(tokens=20, long=24, wrong=16, peer_tokens=6, rounds=1, seconds=0.0, kinds=2)


class FixedDepth(Planner):
    """Always so many ids."""

    def __init__(self, measured: Measured, limit: int, depth: int) -> None:
        super().__init__(measured, limit, False, MTP)
        self._depth = min(depth, limit)

    def plan(self, context: int, *_: Any) -> Plan:
        """As in `Planner`."""
        kinds = tuple(map(self._kept.kind, (None,) * self._depth))
        return Plan(context, self._depth, 0, self._depth, kinds)


@dataclass
class Heads:
    """A form with a head. wide: by way. seconds: until the head was ready, kernels included."""

    form: Form
    folder: Path
    drafter: Mtp
    wide: dict[str, Width]
    seconds: float

    def ways(self) -> dict[str, Way]:
        """The plain one first."""
        form = self.form
        ways = {PLAIN: form.ours()[PLAIN]}
        return ways | {name: planned(form.serial, wide.executor) for name, wide in self.wide.items()}

    def fixed(self, depth: int, run: HeadRun | None = None) -> Way:
        """So many ids drafted at every step, by this head or as *run* runs it."""
        form = self.form
        lane = form.serial.forward
        drafter = self.drafter if run is None else Mtp(run, lane, form.loaded.width, form.loaded.vocabulary)
        parts = Parts(
            drafter=drafter,
            measured=Measured(form.costs),
            trees=False,
            clock=time.perf_counter,
            engine=DeviceDrafts,
        )

        def engine_of(_prompt: Prompt) -> DeviceDrafts:
            engine = DeviceDrafts(min(16, lane.width), form.serial, parts)
            engine._planner = FixedDepth(parts.measured, 15, depth)  # noqa: SLF001 - in place of its own
            return engine

        return partial(ours, form.serial, engine_of)


def with_head(form: Form, folder: Path, kernels: Path | None) -> Heads:
    """The executors as a worker makes them."""
    wide: dict[str, Width] = {}
    with tempfile.TemporaryDirectory() as cache:
        asked: dict[str, Any] = {"scheduler_mode": SchedulerMode.HYPER, "cache_dir": Path(cache)}
        wide[NGRAM] = width(Settings(**asked, draft="ngram"), form.loaded, form.serial, time.perf_counter)
        began = time.perf_counter()
        wide[HEAD] = width(
            Settings(**asked, draft="mtp", mtp=str(folder)), form.loaded, form.serial, time.perf_counter, kernels
        )
        seconds = time.perf_counter() - began
        wide[BOTH] = width(
            Settings(**asked, draft="auto", mtp=str(folder)), form.loaded, form.serial, time.perf_counter, kernels
        )
    executor = wide[HEAD].executor
    assert executor is not None
    drafter = executor._parts.drafter  # noqa: SLF001 - made there
    assert isinstance(drafter, Mtp)
    return Heads(form, folder, drafter, wide, seconds)


def random_one(form: Form) -> Path:
    """A head of random weights."""
    folder = Path(tempfile.mkdtemp(prefix="mtplx-"))
    config = config_of(form.loaded, Trunk.of(form.loaded).fingerprint())
    forged.save(folder, config, fresh_head(config, form.loaded))
    return folder


def kept_of(answers: Sequence[Answer]) -> list[float]:
    """Of drafts kept above, the share kept at each depth, in percent."""
    drafts = sum(count for one in answers for rows, count in one.widths.items() if rows > 1)
    depths = [
        sum(one.depths[place] if place < len(one.depths) else 0 for one in answers) for place in range(DEPTHS)
    ]
    above = [drafts, *depths]
    return [100 * kept / before if before else 0.0 for kept, before in zip(depths, above, strict=False)]


def acceptance(report: Report, heads: Heads, effort: Effort) -> None:
    """By depth, over each kind and over all of them, at both temperatures."""
    form = heads.form
    way = heads.fixed(DEPTHS)
    for temperature in TEMPERATURES:
        everything: list[Answer] = []
        for kind in kinds(effort):
            asked = answered(form, temperature, kind, replace(Answers(), tokens=effort.long))
            got = [way(prompt) for prompt, _ in asked]
            right = sum(one.ids == ids for one, (_, ids) in zip(got, asked, strict=True))
            title = f"{form.title}, {kind}, temperature {temperature:g}: {DEPTHS} drafted"
            report.add(f"{title}, answers equal to plain ones", right, f"of {len(got)}", len(got), "higher")
            tell(report, title, got, goals=())
            everything += got
        title = f"{form.title}, all kinds, temperature {temperature:g}: {DEPTHS} drafted"
        tell(report, title, everything, goals=KEPT if temperature == 0 else ())
    report.save()


def tell(report: Report, title: str, answers: Sequence[Answer], goals: Sequence[float]) -> None:
    """Acceptance by depth, and ids of a forward."""
    shares = kept_of(answers)
    for depth, share in enumerate(shares, start=1):
        goal = goals[depth - 1] if depth <= len(goals) else None
        report.add(f"{title}, kept at depth {depth} of those kept above", share, "%", goal, "higher")
    per = sum(len(one.ids) for one in answers) / sum(one.forwards for one in answers)
    report.add(f"{title}, ids a forward", per, "", None, "higher")
    click.echo(f"  {title}: {' / '.join(f'{share:.1f}' for share in shares)} %, {per:.2f} ids a forward", err=True)


class Unprimed(ModuleHead):
    """A head that did not read the prompt."""

    def prime(self, ids: Sequence[int], states: mx.array, start: int) -> None:
        """Nothing is read."""


def wrong(report: Report, heads: Heads, effort: Effort) -> None:
    """What is lost where a head is wired wrong."""
    form = heads.form
    trunk = Trunk.of(form.loaded)

    def made(**changes: bool) -> ModuleHead:
        head = forged.load(heads.folder, form.loaded, trunk)
        head.wiring = replace(head.wiring, **changes)
        return ModuleHead(head, trunk)

    runs: dict[str, Callable[[], HeadRun]] = {
        "as it was trained": made,
        "prompt not read": lambda: Unprimed(forged.load(heads.folder, form.loaded, trunk), trunk),
        "state before the final norm": lambda: made(takes_normed=False),
        "own state passed on before its norm": lambda: made(passes_normed=False),
        "halves exchanged": lambda: made(embedding_first=False),
    }
    asked = [
        one for kind in kinds(effort) for one in answered(form, 0.0, kind, replace(Answers(), tokens=effort.wrong))
    ]
    for words, run in runs.items():
        way = heads.fixed(DEPTHS, run())
        got = [way(prompt) for prompt, _ in asked]
        right = sum(one.ids == ids for one, (_, ids) in zip(got, asked, strict=True))
        title = f"{form.title}, head {words}, temperature 0"
        report.add(f"{title}: answers equal to plain ones", right, f"of {len(got)}", len(got), "higher")
        tell(report, title, got, goals=())
    report.save()


def kinds(effort: Effort) -> list[str]:
    """Of text."""
    return list(dict.fromkeys(one.kind for one in conversations()))[: effort.kinds]


def speed(report: Report, heads: Heads, effort: Effort) -> None:
    """The ways over each kind, and over all kinds together."""
    form = heads.form
    ways, peer = heads.ways(), form.peers()[PEER]
    for temperature in TEMPERATURES:
        all_over: dict[str, list[float]] = {}
        for kind in kinds(effort):
            asked = answered(form, temperature, kind, replace(Answers(), tokens=effort.tokens))
            title = f"{form.title}, {kind}, temperature {temperature:g}"
            for name, ratio in compared(report, title, asked, (ways, peer), effort).items():
                all_over.setdefault(name, []).append(ratio)
            report.save()
        title = f"{form.title}, mean of all kinds, temperature {temperature:g}"
        goals = {f"{HEAD} / our plain": OVER_PLAIN, f"{HEAD} / mlx-lm plain": OVER_PEER} if not temperature else {}
        for name, ratios in all_over.items():
            mean = sum(ratios) / len(ratios)
            report.add(f"{title}: {name}", mean, "x", goals.get(name), "higher")
            click.echo(f"  {title}: {name} {mean:.3f} x", err=True)
        report.save()
    if target() is not None:
        swept(report, heads, effort)


def compared(
    report: Report, title: str, asked: Asked, ways: tuple[dict[str, Way], Way], effort: Effort
) -> dict[str, float]:
    """Ratios of one kind by name."""
    ran, beside = Rounds(asked), Rounds(asked)
    ran.run(ways[0], effort.rounds, effort.seconds)
    peer = partial(shortened, effort.peer_tokens, ways[1])
    beside.run({name: ways[0][name] for name in (HEAD, BOTH)} | {PEER: peer}, 2)
    right = sum(one.right for one in ran.tallies.values())
    whole = sum(one.all for one in ran.tallies.values())
    report.add(f"{title}: answers equal to plain ones", right, f"of {whole}", whole, "higher")
    for name, tally in ran.tallies.items():
        details(report, f"{title}: {name}", tally, ran.tallies.get(PLAIN))
    found = {f"{name} / our plain": ran.over(name, PLAIN) for name in (HEAD, NGRAM, BOTH)}
    found |= {f"{name} / mlx-lm plain": beside.over(name, PEER) for name in (HEAD, BOTH)}
    better = ran.fastest((HEAD, NGRAM))
    found[f"{BOTH} / better of the two"] = ran.over(BOTH, better)
    for name, ratio in found.items():
        copy_goal = OVER_BETTER if CODE in title and name.endswith("of the two") and title.endswith(" 0") else None
        report.add(f"{title}: {name}, {NEAR}", ratio, "x", copy_goal, "higher")
    words = ", ".join(f"{name} {ratio:.2f}" for name, ratio in found.items())
    click.echo(f"  {title}: {right} of {whole} equal; {words}", err=True)
    return found


def swept(report: Report, heads: Heads, effort: Effort) -> None:
    """Every fixed depth beside the planner's choice, at temperature 0 over all kinds."""
    form = heads.form
    asked = [
        one
        for kind in kinds(effort)
        for one in answered(form, 0.0, kind, replace(Answers(), tokens=effort.tokens))
    ]
    rounds = Rounds(asked)
    ways = {f"{depth} drafted": heads.fixed(depth) for depth in (1, 2, 3, 4, 7)}
    rounds.run({PLAIN: heads.ways()[PLAIN], HEAD: heads.ways()[HEAD], **ways}, 2)
    for name in (HEAD, *ways):
        ratio = rounds.over(name, PLAIN)
        report.add(
            f"{form.title}, all kinds, temperature 0: {name} / our plain, {NEAR}", ratio, "x", None, "higher"
        )
        click.echo(
            f"  all kinds: {name} {ratio:.3f} x plain, {rounds.tallies[name].ms:.3f} ms a forward", err=True
        )
    report.save()


def cost(report: Report, heads: Heads) -> None:
    """What the head takes."""
    told = heads.wide[HEAD].info["mtp"]
    title = f"{heads.form.title}: the head"
    for name in ("bytes", "pool_bytes"):
        report.add(f"{title}, {name.replace('_', ' ')}", told.get(name, 0) / 1e6, "MB")
    report.add(
        f"{title}, on the disk", sum(file.stat().st_size for file in heads.folder.iterdir()) / 1e6, "MB", 6.0
    )
    report.add(f"{title}, until it is ready", heads.seconds, "s")
    report.add(f"{title}, an id drafted", told["draft_ms"], "ms")
    click.echo(f"  {told}, ready after {heads.seconds:.1f} s", err=True)
    report.save()


@click.command()
@click.option("--folder", type=click.Path(path_type=Path), help="Both forms, as pack_model.py writes them.")
@click.option("--forms", "names", default="bf16,4bit", show_default=True, help="Which, by comma.")
@click.option("--mtp", type=click.Path(path_type=Path), help="The head; without it the shipped one.")
@click.option("--parts", default="acceptance,speed,wrong", show_default=True, help="Which, by comma.")
@click.option("--seconds", default=5.0, show_default=True, help="Of what is compared on a kind at a temperature.")
@click.option(
    "--trial",
    is_flag=True,
    help="Tiny models and heads of random weights: a trial of this program, on any device.",
)
@click.option("--copy", type=click.Path(path_type=Path), help="Where a copy of the results goes.")
def main(  # noqa: PLR0917 - options
    folder: Path | None,
    names: str,
    mtp: Path | None,
    parts: str,
    seconds: float,
    copy: Path | None,
    *,
    trial: bool,
) -> None:
    """Measure a head."""
    effort = TRIAL if trial else Effort(seconds=seconds)
    kernels = disk_cache.open_folder(Path(tempfile.gettempdir(), "mtplx-bench"))
    report = Report("mtp-trial" if trial else "mtp", copy)
    report.load()
    for name in names.split(","):
        clock = Clock(name)
        form = forms.tiny(name) if trial else forms.real(name, folder, kernels)
        form.warm(Prompt(tuple(form.ids(conversations()[0])), 24, TEMPERATURES[-1])) if not trial else None
        clock.told("loaded, and rows measured")
        chosen = random_one(form) if trial else mtp or shipped_for(Trunk.of(form.loaded))
        if chosen is None:
            raise SystemExit("no head is shipped for this model; name one with --mtp")
        heads = with_head(form, chosen, kernels)
        cost(report, heads)
        clock.told("head")
        for words, part in {"acceptance": acceptance, "speed": speed, "wrong": wrong}.items():
            if words in parts.split(","):
                part(report, heads, effort)
                clock.told(words)
        report.save()
        del form, heads
        mx.clear_cache()
    missed = [one for one in report.figures.values() if one.met == "no"]
    click.echo(
        f"{device()}: {sum(one.met == 'yes' for one in report.figures.values())} goals met, {len(missed)} missed"
    )
    for one in missed:
        click.echo(f"  missed: {one.name}: {one.value:.4g} {one.unit}, goal {one.goal:g}")


if __name__ == "__main__":
    main()
