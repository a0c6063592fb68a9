"""Prompt lookup over four kinds of text, teacher-forced, and what the planner makes of it on known devices.

    python bench/ngram.py

No model runs: the answers are those of tests/speculating/texts.py, the costs those of tests/speculating/rig.py. A
plain step draws one token; a round is a step of any kind. The last table is what drafter, planner and executor
cost the host in a step: each step's least time of many runs, over a serial engine that knows the answer.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import deque
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from speculating.rig import DEVICES, follow, price, table  # noqa: E402 - the folders come first
from speculating.texts import Text, texts  # noqa: E402

from worker.engine.engine import EngineRequest, Figures, Step, unheard  # noqa: E402
from worker.engine.sample import Sampling  # noqa: E402
from worker.engine.serial import Landed  # noqa: E402
from worker.speculation.costs import Measured  # noqa: E402
from worker.speculation.draft import Draft, accepted  # noqa: E402
from worker.speculation.executor import Parts, SpeculatingEngine  # noqa: E402
from worker.speculation.ngram import NGRAM, Ngram  # noqa: E402
from worker.speculation.planner import Planner  # noqa: E402

# Rows and waiting cost nothing: every proposal is verified in full.
FREE = table({1: 1, 16: 1}, 1, 0.0)
# Runs, of which each step's least time counts.
RUNS = 25


class Replay:
    """The serial engine over an answer that is known: one id ahead, and no time taken but by its own clock."""

    capacity = 2**20
    position, left = 0, 0
    newest: int | None = None

    def __init__(self, text: Text) -> None:
        self.text = (*text.prompt, *text.answer, 0)
        self.ends = len(self.text) - 1
        self.decided: deque[Step] = deque()
        self.now = 0.0
        self.verified = False
        self._flying, self._fresh = Draft.EMPTY, False
        self._plain = price(DEVICES["H200"], 0) / 1e3

    def clock(self) -> float:
        """Seconds of an H200."""
        return self.now

    def start(self, request: EngineRequest, _progress: object) -> None:
        """As in `Engine`."""
        self.position, self.newest = len(request.prompt), None
        self.left = self.ends - self.position - 1

    @property
    def last(self) -> int:
        """As in `SerialEngine`."""
        return self.decided[-1].token

    def step(self) -> Step:
        """As in `Engine`."""
        if not self.decided:
            self.advance()
        return self.decided.popleft()

    def advance(self) -> None:
        """As in `SerialEngine`."""
        self._decide()
        self.verified = False
        self.now += self._plain

    def _decide(self) -> None:
        self.decided.append(Step(self.text[self.position]))
        self.position, self.left, self.newest = self.position + 1, self.left - 1, None

    def launch(self, draft: Draft, _tokens: object = None) -> None:
        """As in `SerialEngine`."""
        self._flying, self._fresh = draft, self.newest is None
        if not self._fresh:
            self._decide()

    def land(self) -> Landed:
        """As in `SerialEngine`."""
        draft, at = self._flying, self.position + self._fresh
        drawn = [self.text[min(at + depth, self.ends)] for depth in (0, *draft.depths)]
        path = accepted(draft, drawn)
        ids = list(self.text[self.position : at + len(path)])
        self.decided.extend(map(Step, ids[:-1]))
        self.position, self.newest, self.verified = at + len(path) - 1, ids[-1], True
        self.left = self.ends - self.position - 1
        self.now += price(DEVICES["H200"], len(draft)) / 1e3
        return Landed(path, ids)

    def stop(self) -> Figures:
        """As in `Engine`."""
        return Figures(route="replay", row_invariant=True)


def host_us(text: Text) -> tuple[list[float], list[float]]:
    """Microseconds of the plain steps of an answer, and of those with a draft."""
    # Whether a step verified a draft; None where it handed out what was decided before.
    kinds: list[bool | None] = []
    least: list[float] = []
    for run in range(RUNS):
        serial = Replay(text)
        parts = Parts(drafter=Ngram(), measured=Measured(DEVICES["H200"]), trees=True, clock=serial.clock)
        engine = SpeculatingEngine(16, serial, parts)
        request = EngineRequest(
            prompt=tuple(text.prompt), sampling=Sampling(seed=0), max_tokens=len(text.answer), cache=False
        )
        engine.start(request, unheard)
        kinds, took = [], []
        for _ in text.answer:
            handed_out = bool(serial.decided)
            began = time.perf_counter()
            engine.step()
            took.append((time.perf_counter() - began) * 1e6)
            kinds.append(None if handed_out else serial.verified)
        engine.stop()
        least = took if run == 0 else list(map(min, least, took))
    plain, drafted = ([us for us, one in zip(least, kinds, strict=True) if one is kind] for kind in (False, True))
    return plain, drafted


def main() -> None:
    """Two tables: what the drafter offers, and the speed over plain decode on each device."""
    offers = Table(title="every proposal verified, 15 nodes at most")
    for column in ("text", "prompt", "answer", "rounds", "proposed in", "drafted", "accepted", "forks, fork wins"):
        offers.add_column(column, justify="left" if column == "text" else "right")
    speeds = Table(title="planned, speed over plain decode: chains / with forks")
    for column in ("text", *DEVICES):
        speeds.add_column(column, justify="left" if column == "text" else "right")
    for text in texts():
        spent, chain = follow(Planner(FREE, 15, False, NGRAM), text.prompt, text.answer, FREE, 0)
        _, tree = follow(Planner(FREE, 15, True, NGRAM), text.prompt, text.answer, FREE, 2)
        counts = (
            len(text.prompt),
            len(text.answer),
            round(spent.ms),
            chain["steps"],
            chain["drafted"],
            chain["accepted"],
        )
        offers.add_row(text.kind, *map(str, counts), f"{tree['fork_attempts']}, {tree['fork_wins']}")
        row = []
        for costs in DEVICES.values():
            runs = [
                follow(Planner(costs, 15, forks > 0, NGRAM), text.prompt, text.answer, costs, forks)[0].speedup
                for forks in (0, 2)
            ]
            row.append(" / ".join(f"{speedup:.2f}" for speedup in runs))
        speeds.add_row(text.kind, *row)
    console = Console(width=150)
    console.print(offers)
    console.print(speeds)
    console.print(host())


def host() -> Table:
    """What the host does beside the forwards."""
    found = Table(title="microseconds of the host in a step beside its forward, on an H200's costs")
    for column in ("text", "plain steps", "median", "mean", "with a draft", "median", "mean"):
        found.add_column(column, justify="left" if column == "text" else "right")
    for text in texts():
        cells = [text.kind]
        for us in host_us(text):
            means = (statistics.median(us), statistics.mean(us)) if us else ()
            cells += [str(len(us)), *(f"{one:.1f}" for one in means)]
        found.add_row(*cells)
    return found


if __name__ == "__main__":
    main()
