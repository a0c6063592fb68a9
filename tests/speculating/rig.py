"""A device of given costs and a text of given luck: what planned and fixed drafts take, in milliseconds."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from worker.speculation.costs import Costs, Measured
from worker.speculation.draft import Proposal, Traits, accepted, left_trunk
from worker.speculation.ngram import Ngram
from worker.speculation.planner import Plan, Planner
from worker.speculation.shadow import Shadow

ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
SIZES = (1, 2, 4, 8, 16)


def table(curve: dict[int, float], unit: float, overhead: float, draft: float = 0.0, sizes=()) -> Costs:
    """Costs of a curve c(R) in plain steps of *unit* ms; overhead and draft in ms."""
    rows = tuple(sorted(curve))
    return Costs(rows, (0,), (tuple(unit * curve[row] for row in rows),), overhead, draft, sizes)


# A flat curve with compiled sizes, as an H200 has it under a small model; waiting costs a third of a step. The
# published curves of Apple's chips. A CPU, where a row costs what a row costs.
DEVICES = {
    "H200": table({1: 1, 2: 1.02, 4: 1.04, 8: 1.08, 16: 1.16}, 1.3, 0.45, sizes=SIZES),
    "M5 Max 70B": table({1: 1, 3: 1.12, 5: 1.42, 8: 2.2, 12: 3.9, 16: 3.9}, 76, 1.0),
    "M4 Pro matmul": table({1: 1, 2: 1.03, 3: 1.22, 4: 1.47, 6: 2.07, 8: 2.69, 16: 5.4}, 30, 1.0),
    "M1 Ultra 27B": table({1: 1, 2: 1.74, 3: 2.44, 4: 3.11, 8: 5.6, 16: 11}, 43.6, 1.0),
    "CPU": table({1: 1, 2: 1.95, 4: 3.8, 8: 7.6, 16: 15.2}, 40, 0.2),
}


@dataclass(frozen=True)
class Round:
    """What a drafter would propose at a place of the text, and what of it is right.

    kept: ids of the trunk that are right, of any depth. gained: tokens of a fork, if the trunk misses at its depth.
    """

    margins: tuple[float, ...] = ()
    kept: int = 0
    turns: tuple[int, ...] = ()
    gained: int = 0


Text = Callable[[int], Round]


def steady(keeps: tuple[float, ...], seed: int, hit: float = 0.0) -> Text:
    """Each depth is right with its own chance; a fork at depth 1 is right with chance *hit* and yields two."""

    @cache
    def at(place: int) -> Round:
        luck = random.Random(seed * 1_000_003 + place)
        kept = 0
        while kept < 15 and luck.random() < keeps[min(kept, len(keeps) - 1)]:
            kept += 1
        turns = (1,) if hit else ()
        return Round((1.0,) * 15, kept, turns, 2 if hit and luck.random() < hit else 0)

    return at


def bursty(copied: int, novel: int, alarms: float, seed: int, until: int = 20_000) -> Text:
    """Copies of about *copied* ids between *novel* new ones, where a share of *alarms* proposes a short false match."""
    luck = random.Random(seed)
    rounds: list[Round] = []
    while len(rounds) < until:
        for _ in range(max(1, round(luck.expovariate(1 / novel))) if novel else 0):
            false = luck.random() < alarms
            kept = int(luck.random() < 0.15) if false else 0
            rounds.append(Round(lengths(2), kept) if false else Round())
        run = max(1, round(luck.expovariate(1 / copied))) if copied else 0
        rounds += [Round(lengths(done), run - done) for done in range(2, run)]
    return lambda place: rounds[place]


def lengths(match: int) -> tuple[float, ...]:
    """The margins of a match, as the n-gram drafter gives them."""
    return tuple(float(match + depth) for depth in range(min(2 * match + 1, 15)))


def then(first: Text, second: Text, place: int) -> Text:
    """The text changes its kind."""
    return lambda at: first(at) if at < place else second(at)


@dataclass
class Spent:
    """What a run took: time, places where drafts were verified, time over plain decode there."""

    ms: float
    drafted: list[int]
    plain_ms: float

    @property
    def speedup(self) -> float:
        return self.plain_ms / self.ms


def price(costs: Costs, nodes: int) -> float:
    return costs.forward(0, nodes + 1) + (costs.overhead_ms + nodes * costs.draft_ms if nodes else 0)


def outcome(now: Round, depth: int, forks: int) -> tuple[int, int]:
    """How deep the kept path goes, and where it leaves the trunk."""
    if now.kept >= depth:
        return depth, 0
    if now.kept + 1 in now.turns[:forks] and now.gained:
        return now.kept + now.gained, now.kept + 1
    return now.kept, 0


def planned(
    planner: Planner, costs: Costs, text: Text, tokens: int, *, watch: bool, jitter: int | None = None
) -> Spent:
    """The planner at work; *watch*: unverified drafts are compared with the text."""
    luck = random.Random(jitter)
    at, seen, spent = 0, 0, Spent(0.0, [], tokens * price(costs, 0))
    while at < tokens:
        now = text(at)
        plan = planner.plan(at, now.margins, now.turns)
        took = price(costs, plan.nodes) * (luck.uniform(0.9, 1.1) if jitter is not None else 1)
        depth, turned = outcome(now, plan.depth, plan.forks) if plan.nodes else (0, 0)
        planner.told(plan, depth, took, turned)
        spent.ms += took
        if plan.nodes:
            spent.drafted.append(at)
            seen = at + depth + 1
        elif watch and now.margins and at >= seen:
            kept = min(now.kept, len(now.margins))
            planner.watched(at, now.margins, kept)
            seen = at + kept + 1
        at += 1 + depth
    return spent


def fixed(costs: Costs, text: Text, tokens: int, depth: int, forks: int, traits: Traits) -> float:
    """Milliseconds where every proposal is verified to the same depth; 0: never."""
    at, ms = 0, 0.0
    while at < tokens:
        now = text(at)
        reach = min(depth, len(now.margins))
        taken = min(forks, len(now.turns)) if reach else 0
        got = outcome(now, reach, taken)[0] if reach else 0
        ms += price(costs, reach + taken * traits.branch)
        at += 1 + got
    return ms


def best_fixed(
    costs: Costs, text: Text, tokens: int, traits: Traits, *, trees: bool
) -> tuple[float, tuple[int, int]]:
    """The least milliseconds of any (depth, forks), and which."""
    pairs = [
        (depth, forks)
        for depth in range(16)
        for forks in ((0, 1) if trees else (0,))
        if depth + forks * traits.branch <= 15
    ]
    return min((fixed(costs, text, tokens, *pair, traits), pair) for pair in pairs)


def follow(
    planner: Planner, prompt: list[int], answer: list[int], costs: Costs, most_forks: int
) -> tuple[Spent, dict]:
    """The n-gram drafter and the planner over an answer that is known."""
    drafter, shadow, at = Ngram(), Shadow(), 0
    drafter.begin(prompt)
    spent = Spent(0.0, [], len(answer) * price(costs, 0))
    while at < len(answer):
        room = len(answer) - at - 1
        proposal = drafter.propose(min(15, room), most_forks)
        plan = planner.plan(len(prompt) + at, proposal.margins, proposal.turns)
        depth, turned = 0, 0
        if plan.nodes:
            shadow.drop()
            path, draft = verified(drafter.propose(plan.nodes, plan.forks), answer[at:])
            depth, turned = len(path) - 1, left_trunk(draft, path)
            spent.drafted.append(at)
        else:
            shadow.take(proposal)
        took = price(costs, plan.nodes)
        spent.ms += took
        planner.told(plan, depth, took, turned)
        ids = answer[at : at + depth + 1]
        seen = shadow.extend(ids)
        if seen:
            planner.watched(at, *seen)
        drafter.extend(ids)
        at += len(ids)
    return spent, planner.figures()


def verified(proposal: Proposal, answer: list[int]):
    """The path that a target keeps which draws *answer*."""
    draft = proposal.draft
    drawn = [answer[depth] if depth < len(answer) else -1 for depth in (0, *draft.depths)]
    return accepted(draft, drawn), draft


__all__ = ["DEVICES", "Costs", "Measured", "Plan", "Planner", "Round", "Spent", "Text", "Traits"]
