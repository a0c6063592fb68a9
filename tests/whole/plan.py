"""What happens in one round of disturbances, drawn from a seed: who asks for what, and what befalls whom.

A plan is the same for a seed on every machine; only the moments in which processes get to run differ.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

# A producer that was away this long and comes back still finds its jobs.
ORPHAN_S: Final = 3.0
BEAT_S: Final = 0.1
DEAD_S: Final = 1.0
STALL_S: Final = 3.0
DRAIN_S: Final = 1.0
# In which moments a blow may fall: at a time, or when so many admissions, chunks or last words were heard.
MOMENTS: Final = ("at", "took", "came", "word")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One job: after_s since the begin; cancel_after chunks heard, 0 with its admission, None never.

    twice: its SUBMIT is sent twice.  finish: it goes on without its producer.  credit: given on as chunks come.
    """

    job: bytes
    after_s: float
    tokens: int
    token_s: float
    seed: int
    temperature: float = 1.0
    cancel_after: int | None = None
    twice: bool = False
    finish: bool = False
    credit: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """One producer: its jobs, and after how many chunks it is away for how many seconds.

    leaves_after: chunks until it is gone for good, its jobs with it, and says so where it has manners.
    library: it uses `mtplx.Client`, and neither goes away nor cancels.
    """

    asks: tuple[Ask, ...]
    away: tuple[tuple[int, float], ...] = ()
    leaves_after: int | None = None
    manners: bool = True
    library: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Blow:
    """When, upon whom (`broker` or `worker`), how (`kill`, `stop`, `term`, `power`), and for how many seconds.

    stand_in: another worker is started while this one is stopped.
    """

    moment: str
    after: float
    whom: str
    how: str
    for_s: float
    stand_in: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One round. power: the power may be lost, so that only what was flushed is left."""

    seed: int
    power: bool
    people: tuple[Person, ...]
    blows: tuple[Blow, ...]

    def told(self) -> str:
        """The plan as lines to read."""
        people = [f"  {person}" for person in self.people]
        return "\n".join([f"seed {self.seed}, power {self.power}", *people, *(f"  {blow}" for blow in self.blows)])


def plan_of(seed: int, *, power: bool = True, library: bool = True) -> Plan:
    """The plan of a seed. power, library: whether power losses and clients of the library may be in it."""
    draw = random.Random(seed)
    lost = draw.random() < 0.4 and power
    people = [_person(draw) for _ in range(draw.randint(2, 4))]
    if library:
        people.append(Person(asks=_asks(draw, plain=True), library=True))
    asks = [ask for person in people for ask in person.asks]
    most = {"took": len(asks), "came": max(1, sum(ask.tokens for ask in asks) // 2), "word": max(1, len(asks) - 1)}
    blows = [_blow(draw, most, power=lost) for _ in range(draw.randint(1, 4))]
    return Plan(seed=seed, power=lost, people=tuple(people), blows=tuple(blows))


def real_plan_of(seed: int) -> Plan:
    """A plan for the real worker, which takes seconds to start: fewer jobs and blows, greedy and sampled."""
    draw = random.Random(seed)
    asks = tuple(
        Ask(
            job=draw.randbytes(16),
            after_s=0.0,
            tokens=draw.randint(80, 240),
            token_s=0.0,
            seed=draw.getrandbits(64),
            temperature=draw.choice((0.0, 1.0)),
        )
        for _ in range(3)
    )
    away = ((draw.randint(1, 40), draw.uniform(0.05, 0.5)),) if draw.random() < 0.5 else ()
    people = (Person(asks=asks[:2], away=away), Person(asks=asks[2:]))
    hows = ("kill", "kill", "kill", "stop", "term")
    blows = tuple(
        Blow(
            moment="came",
            after=draw.randint(1, 120),
            whom=draw.choice(("worker", "worker", "broker")),
            how=draw.choice(hows),
            for_s=draw.uniform(0.0, 0.5),
        )
        for _ in range(draw.randint(2, 3))
    )
    return Plan(seed=seed, power=False, people=people, blows=blows)


def _person(draw: random.Random) -> Person:
    asks = _asks(draw, plain=False)
    away = tuple((draw.randint(0, 40), draw.uniform(0.0, 0.8)) for _ in range(draw.choice((0, 0, 1, 2))))
    leaves = draw.randint(0, 30) if draw.random() < 0.15 else None
    return Person(asks=asks, away=away, leaves_after=leaves, manners=draw.random() < 0.7)


def _asks(draw: random.Random, *, plain: bool) -> tuple[Ask, ...]:
    return tuple(
        Ask(
            job=draw.randbytes(16),
            after_s=draw.choice((0.0, draw.uniform(0.0, 2.0))),
            tokens=draw.choice((1, draw.randint(2, 20), draw.randint(20, 80))),
            token_s=draw.choice((0.0, 0.002, 0.01)),
            seed=draw.getrandbits(64),
            cancel_after=None if plain or draw.random() < 0.8 else draw.randint(0, 10),
            twice=not plain and draw.random() < 0.2,
            finish=not plain and draw.random() < 0.3,
            credit=None if plain or draw.random() < 0.8 else draw.randint(1, 8),
        )
        for _ in range(draw.randint(1, 4))
    )


def _blow(draw: random.Random, most: dict[str, int], *, power: bool) -> Blow:
    """A blow in a moment that is likely to come: *most* admissions, chunks and last words."""
    whom = draw.choice(("broker", "worker"))
    hows = ["kill", "kill", "stop", "term"]
    if power and whom == "broker":
        hows += ["power"] * 4
    moment = draw.choice(MOMENTS)
    after = draw.uniform(0.0, 2.0) if moment == "at" else draw.randint(1, most[moment])
    how = draw.choice(hows)
    # A stop is shorter or longer than what makes a worker count as dead.
    stopped_s = draw.choice((draw.uniform(0.05, 0.5), draw.uniform(1.2, 2.0)))
    return Blow(
        moment=moment,
        after=after,
        whom=whom,
        how=how,
        for_s=stopped_s if how == "stop" else draw.uniform(0.0, 0.6),
        stand_in=how == "stop" and whom == "worker" and draw.random() < 0.5,
    )
