"""Speculation on this machine's GPU: SmolLM2-135M's real weights, batch 1, beside mlx-lm's two decode loops.

Four kinds of text (bench/conversations.py) at temperatures 0 and 0.7, in bfloat16 and at 4 bits: our plain decode;
ours with prompt lookup as a worker runs it, with trees and with chains alone; every fixed choice of bench/ways.py;
mlx-lm's generate_step and its speculative_generate_step, whose drafts are made by the model's first six layers
and, of the bfloat16 form, by its 4-bit form. Fixed choices are swept first; the best chain and the best tree then
run beside ours in many rounds. Ratios are medians of ratios of runs that were neighbours in one round; speeds are
medians of ids a second. "A step with a draft" is what is left of a way's time when its other steps take as long as
plain ones. mlx-lm's loops with drafts run once, over few ids: acceptance is the figure there.

Every answer of ours must be the plain one. Part "equal" does this over many short prompts; part "near-ties" counts
the answers that differ where rows are not invariant, over MLX's own products; part "published" replays the answers
on published costs of other devices.

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

import sys
import tempfile
from dataclasses import dataclass, replace
from functools import partial
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
from rounds import Asked, Rounds, Tally  # noqa: E402
from ways import CHAINS, TREES, Answer, Prompt, Way, forced, plain  # noqa: E402

from worker.kernels import disk_cache  # noqa: E402
from worker.kernels.dialect import target  # noqa: E402

TEMPERATURES = (0.0, 0.7)
PARTS = ("equal", "near-ties", "texts", "published")
# Of our plain decode, by kind; of mlx-lm's, of the best fixed choice, of the best chain on so many kinds.
GOALS, LEAST = {CODE: 2.0, SUMMARY: 1.4}, 0.97
OVER_PEER, OF_FIXED, OVER_CHAIN, KINDS_WON = 8.0, 0.95, 1.05, 2
PLAIN, TREE, CHAIN, PEER = forms.PLAIN, forms.TREE, forms.CHAIN, forms.PEER
MAIN = (PLAIN, TREE, CHAIN)
NEAR = "median of neighbouring runs"


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    tokens, peer_tokens, drafted: of an answer of ours, of mlx-lm's plain loop, of its loop with drafts.
    sweeps: rounds of the fixed choices. rounds, seconds: of the ways that are compared, at least and about.
    prompts: random ones, at each of `warmths`, answered by `short` ids. near: those without row invariance.
    kinds: how many.
    """

    tokens: int = 128
    peer_tokens: int = 48
    drafted: int = 10
    sweeps: int = 2
    rounds: int = 3
    seconds: float = 6.5
    prompts: int = 200
    short: int = 20
    warmths: tuple[float, ...] = (0.0, 0.7, 1.0)
    near: int = 60
    kinds: int = 4


TRIAL = Effort(
    tokens=20,
    peer_tokens=10,
    drafted=6,
    sweeps=1,
    rounds=2,
    seconds=0.0,
    prompts=4,
    warmths=(0.7,),
    near=3,
    kinds=1,
)


def equal(report: Report, form: Form, effort: Effort) -> None:
    """Short answers behind random text and copies: with speculation as without."""
    ways = list(form.ours().values())[1:]
    for temperature in effort.warmths:
        right = drafted = kept = 0
        made = random_prompts.prompts(form.loaded.vocabulary, effort.prompts)
        for place, ids in enumerate(made):
            prompt = Prompt(tuple(ids), effort.short, temperature, seed=place)
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


def near_ties(report: Report, form: Form, effort: Effort) -> None:
    """MLX's own products: rows round by their number, and an answer may part from the plain one at a near-tie."""
    serial, moved = form.by_products()
    for rows, share in moved.items():
        report.add(f"{form.title}, MLX's products: first row's logits move in a forward of {rows} rows", share, "")
    ways = [forced(serial, form.costs, one) for one in (*CHAINS, *TREES)]
    for temperature in TEMPERATURES:
        other = drafted = 0
        for place, ids in enumerate(random_prompts.prompts(form.loaded.vocabulary, effort.near)):
            prompt = Prompt(tuple(ids), effort.short, temperature, seed=place)
            want, got = plain(serial)(prompt), ways[place % len(ways)](prompt)
            other, drafted = other + (want.ids != got.ids), drafted + got.drafted
        title = f"{form.title}, MLX's products, random prompts, temperature {temperature:g}"
        report.add(f"{title}: answers that differ with drafts", other, f"of {effort.near}")
        report.add(f"{title}: ids drafted", drafted, "", None, "higher")
        click.echo(f"  {title}: {other} of {effort.near} answers differ, {drafted} ids drafted", err=True)
    click.echo(
        f"  logits moved, by rows: {', '.join(f'{n}: {share:.2g}' for n, share in moved.items())}", err=True
    )
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


def texts(report: Report, form: Form, effort: Effort) -> None:
    """All kinds at both temperatures."""
    form.warm(Prompt(tuple(form.ids(conversations()[0])), 24, TEMPERATURES[-1]))
    for temperature in TEMPERATURES:
        won = 0
        for kind in list(dict.fromkeys(one.kind for one in conversations()))[: effort.kinds]:
            asked = answered(form, temperature, kind, effort)
            if temperature == 0:
                form.answers[kind] = [(list(prompt.ids), ids) for prompt, ids in asked]
            title = f"{form.title}, {kind}, temperature {temperature:g}"
            won += measured(report, form, title, asked, effort) >= OVER_CHAIN
            report.save()
        title = f"{form.title}, temperature {temperature:g}"
        report.add(
            f"{title}: kinds on which trees are {OVER_CHAIN} x the best chain", won, "of 4", KINDS_WON, "higher"
        )
        report.save()


def shortened(tokens: int, way: Way, prompt: Prompt) -> Answer:
    """The beginning of an answer."""
    return way(replace(prompt, tokens=min(prompt.tokens, tokens)))


def measured(report: Report, form: Form, title: str, asked: Asked, effort: Effort) -> float:
    """The ways over one kind of text; how many times as fast as the best chain the best trees are."""
    ours, peers = form.ours(), form.peers()
    sweep, beside, ran = Rounds(asked), Rounds(asked), Rounds(asked)
    sweep.run({name: way for name, way in ours.items() if name not in (TREE, CHAIN)}, effort.sweeps)
    chain, tree = (sweep.fastest([one.title for one in choices]) for choices in (CHAINS, TREES))
    # Not the rounds in which they were found to be the best.
    ran.run({name: ours[name] for name in (*MAIN, chain, tree)}, effort.rounds, effort.seconds)
    beside.run({TREE: ours[TREE], PEER: partial(shortened, effort.peer_tokens, peers.pop(PEER))}, effort.sweeps)
    beside.run({name: partial(shortened, effort.drafted, way) for name, way in peers.items()}, 1)
    ways = len(sweep.tallies) + len(ran.tallies)
    right, whole = (
        sum(getattr(one, part) for rounds in (sweep, ran) for one in rounds.tallies.values())
        for part in ("right", "all")
    )
    report.add(f"{title}: answers equal to plain ones, {ways} ways", right, f"of {whole}", whole, "higher")
    click.echo(f"  {title}: {right} of {whole} answers equal to plain ones", err=True)
    for rounds in (sweep, ran, beside):
        for name, tally in rounds.tallies.items():
            if rounds is ran or name not in ran.tallies:
                details(report, f"{title}: {name}", tally, rounds.tallies.get(PLAIN))
    over_peer = beside.over(TREE, PEER)
    goal = OVER_PEER if CODE in title else None
    report.add(f"{title}: planned / mlx-lm plain, {NEAR}", over_peer, "x", goal, "higher")
    return compared(report, title, ran, (chain, tree))


def details(report: Report, title: str, tally: Tally, plain_ones: Tally | None) -> None:
    """What one way came to. plain_ones: of the same rounds."""
    report.add(title, tally.median, "ids/s", None, "higher")
    report.add(f"{title}, forwards per id", tally.forwards_per_token, "")
    report.add(f"{title}, a forward", tally.ms, "ms")
    line = f"{tally.median:.0f} ids/s, {tally.ms:.3f} ms a forward"
    drafted, depths = tally.total("drafted"), tally.depths
    if drafted:
        if plain_ones is not None:
            report.add(f"{title}, a step with a draft", tally.draft_ms(plain_ones), "ms")
            line += f", {tally.draft_ms(plain_ones):.2f} ms with a draft"
        kept = tally.total("accepted") / drafted
        report.add(f"{title}, drafted ids kept", kept, "share", None, "higher")
        line += f", {kept:.2f} kept of {drafted}; widths {tally.widths}, depths {depths}"
        of_all = [sum(tally.widths.values()) - tally.widths.get(1, 0), *depths]
        for depth, count in enumerate(depths, start=1):
            share = count / of_all[depth - 1] if of_all[depth - 1] else 0.0
            report.add(f"{title}, kept at depth {depth} of those kept above", share, "", None, "higher")
        for rows, count in tally.widths.items():
            report.add(f"{title}, forwards of {rows} rows", count, "")
        for name, words in {
            "forks": "forks tried",
            "fork_wins": "forks won",
            "off_steps": "drafts left alone",
        }.items():
            report.add(f"{title}, {words}", tally.total(name), "")
    click.echo(f"    {title.rsplit(': ', maxsplit=1)[-1]}: {line}", err=True)


def compared(report: Report, title: str, ran: Rounds, best: tuple[str, str]) -> float:
    """The ratios of ours, most with goals; how many times as fast as the best chain the best trees are.

    best: the fastest fixed chain and tree of the sweep.
    """
    tallies, chain = ran.tallies, best[0]
    tree, fixed = ran.fastest((TREE, best[1])), ran.fastest(best)
    over_plain, of_fixed, over_chain = ran.over(TREE, PLAIN), ran.over(TREE, fixed), ran.over(tree, chain)
    goal = next((goal for kind, goal in GOALS.items() if kind in title), LEAST)
    report.add(f"{title}: planned / our plain, {NEAR}", over_plain, "x", goal, "higher")
    report.add(f"{title}: chains planned / our plain, {NEAR}", ran.over(CHAIN, PLAIN), "x", None, "higher")
    report.add(f"{title}: planned / best fixed choice, {NEAR}", of_fixed, "x", OF_FIXED, "higher")
    report.add(f"{title}: best trees / best chain, {NEAR}", over_chain, "x", None, "higher")
    # What forks bring is ids a forward; what they cost is time a forward.
    per = {name: 1 / tallies[name].forwards_per_token for name in (chain, tree)}
    cost = tallies[tree].ms / tallies[chain].ms
    report.add(f"{title}: best trees / best chain, ids a forward", per[tree] / per[chain], "x", None, "higher")
    report.add(f"{title}: best trees / best chain, time a forward", cost, "x")
    click.echo(
        f"    {len(tallies[PLAIN].rates)} rounds: planned {over_plain:.3f} x plain, {of_fixed:.3f} x {fixed},"
        f" chains planned {ran.over(CHAIN, PLAIN):.3f} x plain; {tree} {over_chain:.3f} x {chain}"
        f" (ids a forward {per[tree]:.2f} / {per[chain]:.2f}, time a forward {cost:.3f} x)",
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
@click.option("--seconds", default=6.5, show_default=True, help="Of what is compared on a kind at a temperature.")
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
            "near-ties": partial(near_ties, report, form, effort),
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
