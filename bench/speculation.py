"""Speculation on this machine's GPU: SmolLM2-135M's real weights, batch 1, beside mlx-lm's two decode loops.

Four kinds of text (bench/conversations.py) at temperatures 0 and 0.7, in bfloat16 and at 4 bits: our plain decode;
ours with prompt lookup as a worker runs it, with trees and with chains alone; every fixed choice of bench/ways.py;
mlx-lm's generate_step and its speculative_generate_step, whose drafts are made by the model's first six layers
and, of the bfloat16 form, by its 4-bit form. All in turns; medians of ids a second. Every answer of ours must
be the plain one. Part "equal" does this over many short prompts; part "published" replays the answers on published
costs of other devices.

A machine that takes 64 MiB at a time gets the weights in two parts, of which the second leaves room for MLX's CUDA
build and the kernels of bench/precompile.py; the second call comes right after the first:

    python bench/pack_model.py split ~/.cache/mtplx/models/smollm2-135m .gpu/model --first 56
    1st call, carrying .gpu/model/model-1: mkdir -p /tmp/model; cp .gpu/model/model-1 /tmp/model
    2nd call, carrying .gpu/model/model-2, MLX and the kernels: cp .gpu/model/model-2 /tmp/model
        python bench/pack_model.py join /tmp/model /tmp/smol
        python bench/pack_model.py expand /tmp/smol/pulled /tmp/smol
        python bench/speculation.py --folder /tmp/smol --copy RESULT.json
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path

import click
import mlx.core as mx

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import forms  # noqa: E402 - the folders come first
import random_prompts  # noqa: E402
from conversations import CODE, SUMMARY, conversations  # noqa: E402
from decode import Clock, Report, device  # noqa: E402
from forms import Form  # noqa: E402
from ways import CHAINS, TREES, Answer, Prompt, Way, plain  # noqa: E402

from worker.kernels import disk_cache  # noqa: E402
from worker.kernels.dialect import target  # noqa: E402

TEMPERATURES = (0.0, 0.7)
PARTS = ("equal", "texts", "published")
# Of our plain decode, by kind; of mlx-lm's, of the best fixed choice, of the best chain on so many kinds.
GOALS, LEAST = {CODE: 2.0, SUMMARY: 1.4}, 0.97
OVER_PEER, OF_FIXED, OVER_CHAIN, KINDS_WON = 8.0, 0.95, 1.05, 2
PLAIN, TREE, CHAIN, PEER = forms.PLAIN, forms.TREE, forms.CHAIN, forms.PEER


@dataclass(frozen=True)
class Effort:
    """How much is measured. peer_tokens: of mlx-lm's answers. seconds: of a kind at a temperature, after 2 rounds.

    prompts: random ones, at each of `warmths`. kinds: how many.
    """

    tokens: int = 128
    peer_tokens: int = 64
    seconds: float = 12.0
    rounds: int = 7
    prompts: int = 200
    warmths: tuple[float, ...] = (0.0, 0.7, 1.0)
    kinds: int = 4


TRIAL = Effort(tokens=20, peer_tokens=10, seconds=0.0, rounds=1, prompts=4, warmths=(0.7,), kinds=1)


@dataclass
class Tally:
    """What one way came to: ids a second of each round, and the answers of the latest."""

    rates: list[float] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    right: int = 0
    all: int = 0

    @property
    def median(self) -> float:
        """Ids a second."""
        return statistics.median(self.rates)

    def total(self, name: str) -> int:
        """The sum over the answers of the latest round."""
        return sum(getattr(one, name) for one in self.answers)

    @property
    def forwards_per_token(self) -> float:
        """Forwards of the target for each id."""
        return self.total("forwards") / sum(len(one.ids) for one in self.answers)

    @property
    def depths(self) -> list[int]:
        """Drafts that were kept down to each depth."""
        return [sum(counts) for counts in zip_longest(*(one.depths for one in self.answers), fillvalue=0)]

    @property
    def widths(self) -> dict[int, int]:
        """Forwards by rows."""
        found: dict[int, int] = {}
        for one in self.answers:
            for rows, count in one.widths.items():
                found[rows] = found.get(rows, 0) + count
        return dict(sorted(found.items()))


def equal(report: Report, form: Form, effort: Effort) -> None:
    """Short answers behind random text and copies: with speculation as without."""
    ways = list(form.ours().values())[1:]
    for temperature in effort.warmths:
        right = drafted = kept = 0
        made = random_prompts.prompts(form.loaded.vocabulary, effort.prompts)
        for place, ids in enumerate(made):
            prompt = Prompt(tuple(ids), 32, temperature, seed=place)
            want, got = plain(form.serial)(prompt), ways[place % len(ways)](prompt)
            right += want.ids == got.ids
            drafted, kept = drafted + got.drafted, kept + got.accepted
        title = f"{form.title}, random prompts, temperature {temperature:g}"
        report.add(
            f"{title}: answers equal to plain ones", right, f"of {effort.prompts}", effort.prompts, "higher"
        )
        report.add(f"{title}: ids drafted", drafted, "", None, "higher")
        report.add(f"{title}: ids kept", kept, "", None, "higher")
        click.echo(f"  {title}: {right} of {effort.prompts} equal, {kept} of {drafted} drafted ids kept", err=True)
        report.save()


def answered(form: Form, temperature: float, kind: str, effort: Effort) -> list[tuple[Prompt, list[int]]]:
    """The prompts of a kind, each for as many ids as the answer has, and the plain answer."""
    found = []
    for one in conversations():
        if one.kind != kind:
            continue
        prompt = Prompt(tuple(form.ids(one)), effort.tokens, temperature)
        ids = plain(form.serial)(prompt).ids
        ends = next((place for place, token in enumerate(ids) if token in form.loaded.eos_ids), len(ids))
        found.append((replace(prompt, tokens=max(ends, 8)), ids[: max(ends, 8)]))
    return found


def run(way: Way, asked: list[tuple[Prompt, list[int]]], tally: Tally) -> None:
    """One round of one way over all prompts of a kind."""
    tally.answers = [way(prompt) for prompt, _ in asked]
    tally.rates.append(sum(one.counted for one in tally.answers) / sum(one.seconds for one in tally.answers))
    tally.right += sum(one.ids == ids for one, (_, ids) in zip(tally.answers, asked, strict=True))
    tally.all += len(asked)


def rounds(form: Form, asked: list[tuple[Prompt, list[int]]], effort: Effort) -> dict[str, Tally]:
    """All ways in turns; mlx-lm's in every second round, over the beginning of the answers."""
    ways, peers = form.ours(), form.peers()
    short = [(replace(prompt, tokens=min(prompt.tokens, effort.peer_tokens)), ids) for prompt, ids in asked]
    tallies = {name: Tally() for name in (*ways, *peers)}
    began = time.perf_counter()
    for turn in range(effort.rounds):
        if turn > 1 and time.perf_counter() - began > effort.seconds * (turn / (turn + 1)):
            break
        for name, way in ways.items():
            run(way, asked, tallies[name])
        for name, way in peers.items() if turn % 2 == 0 else ():
            run(way, short, tallies[name])
    return tallies


def texts(report: Report, form: Form, effort: Effort) -> None:
    """All kinds at both temperatures."""
    form.warm(Prompt(tuple(form.ids(conversations()[0])), 24, TEMPERATURES[-1]))
    for temperature in TEMPERATURES:
        won = 0
        for kind in list(dict.fromkeys(one.kind for one in conversations()))[: effort.kinds]:
            asked = answered(form, temperature, kind, effort)
            if temperature == 0:
                form.answers[kind] = [(list(prompt.ids), ids) for prompt, ids in asked]
            tallies = rounds(form, asked, effort)
            title = f"{form.title}, {kind}, temperature {temperature:g}"
            details(report, title, tallies)
            won += compared(report, title, kind, tallies) >= OVER_CHAIN
            report.save()
        title = f"{form.title}, temperature {temperature:g}"
        report.add(
            f"{title}: kinds on which trees are {OVER_CHAIN} x the best chain", won, "of 4", KINDS_WON, "higher"
        )
        report.save()


def details(report: Report, title: str, tallies: dict[str, Tally]) -> None:
    """What each way came to."""
    for name, tally in tallies.items():
        report.add(f"{title}: {name}", tally.median, "ids/s", None, "higher")
        report.add(f"{title}: {name}, forwards per id", tally.forwards_per_token, "", None)
        drafted, depths = tally.total("drafted"), tally.depths
        if not drafted:
            continue
        report.add(
            f"{title}: {name}, drafted ids kept", tally.total("accepted") / drafted, "share", None, "higher"
        )
        for depth, count in enumerate(depths, start=1):
            above = depths[depth - 2] if depth > 1 else sum(tally.widths.values()) - tally.widths.get(1, 0)
            if name in (TREE, CHAIN) or name.startswith(PEER):
                share = count / above if above else 0.0
                report.add(
                    f"{title}: {name}, kept at depth {depth} of those kept above", share, "", None, "higher"
                )
        if name == TREE:
            for rows, count in tally.widths.items():
                report.add(f"{title}: {name}, forwards of {rows} rows", count, "", None)
            report.add(f"{title}: {name}, forks tried", tally.total("forks"), "", None)
            report.add(f"{title}: {name}, forks won", tally.total("fork_wins"), "", None)
            report.add(f"{title}: {name}, steps that left a draft alone", tally.total("off_steps"), "", None)


def compared(report: Report, title: str, kind: str, tallies: dict[str, Tally]) -> float:
    """The figures with goals; how many times as fast as the best chain the best trees are."""
    ours = [name for name in tallies if not name.startswith(PEER)]
    right, whole = (sum(getattr(tallies[name], part) for name in ours) for part in ("right", "all"))
    report.add(f"{title}: answers equal to plain ones, all ways", right, f"of {whole}", whole, "higher")
    speed = {name: tally.median for name, tally in tallies.items()}
    chain = max((one.title for one in CHAINS), key=speed.__getitem__)
    tree = max((TREE, *(one.title for one in TREES)), key=speed.__getitem__)
    fixed = max((one.title for one in (*CHAINS, *TREES)), key=speed.__getitem__)
    over_plain, over_peer = speed[TREE] / speed[PLAIN], speed[TREE] / speed[PEER]
    of_fixed, over_chain = speed[TREE] / speed[fixed], speed[tree] / speed[chain]
    report.add(f"{title}: planned / our plain", over_plain, "x", GOALS.get(kind, LEAST), "higher")
    goal = OVER_PEER if kind == CODE else None
    report.add(f"{title}: planned / mlx-lm plain", over_peer, "x", goal, "higher")
    report.add(f"{title}: planned / best fixed choice ({fixed})", of_fixed, "x", OF_FIXED, "higher")
    report.add(f"{title}: best trees ({tree}) / best chain ({chain})", over_chain, "x", None, "higher")
    # What forks bring is ids a forward; what they cost is time a forward.
    per = {name: 1 / tallies[name].forwards_per_token for name in (chain, tree)}
    cost = (per[tree] / speed[tree]) / (per[chain] / speed[chain])
    report.add(f"{title}: best trees / best chain, ids a forward", per[tree] / per[chain], "x", None, "higher")
    report.add(f"{title}: best trees / best chain, time a forward", cost, "x", None)
    peers = [
        f"{name.removeprefix(PEER).lstrip(', ') or 'plain'} {speed[name]:.0f}"
        for name in tallies
        if name.startswith(PEER)
    ]
    click.echo(
        f"  {title}: plain {speed[PLAIN]:.0f}, planned {speed[TREE]:.0f} ({over_plain:.2f} x plain,"
        f" {over_peer:.2f} x mlx-lm, {of_fixed:.3f} x fixed), chains planned {speed[CHAIN]:.0f};"
        f" best chain {chain} {speed[chain]:.0f}, best tree {tree} {speed[tree]:.0f} ({over_chain:.3f} x;"
        f" ids a forward {per[tree]:.2f} / {per[chain]:.2f}, time {cost:.3f} x); {right} of {whole} equal;"
        f" mlx-lm: {', '.join(peers)};"
        f" widths {tallies[TREE].widths}, depths {tallies[TREE].depths}",
        err=True,
    )
    return over_chain


def account(report: Report, form: Form) -> None:
    """What rows cost here."""
    for line in form.geometry.table():
        click.echo(f"  {line}", err=True)
    for context, times in zip(form.geometry.contexts, form.geometry.ms, strict=True):
        for rows, ms in zip(form.geometry.rows, times, strict=True):
            report.add(f"{form.title}, probe, context {context}: c({rows})", ms / times[0], "x")
        report.add(f"{form.title}, probe, context {context}: a step of one row", times[0], "ms")
    share = form.geometry.overhead_ms / form.geometry.ms[0][0]
    report.add(f"{form.title}, probe: the wait for a result, of a step", share, "")
    report.save()


@click.command()
@click.option("--folder", type=click.Path(path_type=Path), help="Both forms, as pack_model.py writes them.")
@click.option("--forms", "names", default="bf16,4bit", show_default=True, help="Which, by comma.")
@click.option("--parts", default=",".join(PARTS), show_default=True, help="Which, by comma.")
@click.option("--seconds", default=12.0, show_default=True, help="Of one kind at one temperature, about.")
@click.option(
    "--tiny", is_flag=True, help="Tiny models of random weights, on any device: a trial of this program."
)
@click.option("--copy", type=click.Path(path_type=Path), help="Where a copy of the results goes.")
def main(folder: Path | None, names: str, parts: str, seconds: float, copy: Path | None, *, tiny: bool) -> None:
    """Measure speculation."""
    if target() is None and not tiny:
        raise SystemExit("no GPU: rows are not cheap here, and the planner leaves drafts alone; see --tiny")
    effort = TRIAL if tiny else Effort(seconds=seconds)
    kernels = disk_cache.open_folder(Path(tempfile.gettempdir(), "mtplx-bench"))
    if target() is None:
        mx.set_default_device(mx.cpu)
    report = Report("speculation-tiny" if tiny else "speculation", copy)
    report.load()
    for name in names.split(","):
        clock = Clock(name)
        form = forms.tiny(name) if tiny else forms.real(name, folder, kernels)
        clock.told("loaded, and rows measured")
        account(report, form)
        for words, part in {
            "equal": partial(equal, report, form, effort),
            "texts": partial(texts, report, form, effort),
            "published": partial(forms.published, report, form),
        }.items():
            if words in parts.split(","):
                part()
                clock.told(words)
        report.save()
        del form
        mx.clear_cache()
    missed = [one for one in report.figures.values() if one.met == "no"]
    met = sum(one.met == "yes" for one in report.figures.values())
    click.echo(f"{device()}: {met} goals met, {len(missed)} missed")
    for one in missed:
        click.echo(f"  missed: {one.name}: {one.value:.4g} {one.unit}, goal {one.goal:g}")


if __name__ == "__main__":
    main()
