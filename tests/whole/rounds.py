"""One round: a broker, workers and producers in real processes, what a plan has befall them, and the verdict.

    python -m whole.rounds 17        # from tests/, with the checkout in PYTHONPATH: the round of seed 17

Everything happens in one loop, so that a blow falls within microseconds of the message it waits for.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import click
import zmq
from whole import power_loss
from whole.harness import Producer, Program, environment
from whole.history import Expected, History, Line, Verdict, check, write
from whole.people import LibraryProducer, RawProducer, scripted
from whole.plan import BEAT_S, DEAD_S, DRAIN_S, ORPHAN_S, STALL_S, Ask, Blow, Plan, plan_of

from mtplx import messages as m
from mtplx.job import Job
from mtplx.script import Script, answer_of

# A round takes a few seconds; one that is not over by then never will be.
LIMIT_S: Final = 60.0
# How soon a process that ended is started anew, as a service manager does it.
RESTART_S: Final = 0.1
TURN_MS: Final = 2
# How long all may take to come to rest once every producer has its answers.
AT_THE_END_S: Final = 10.0
OPEN: Final = ("waiting", "running", "cancelling")
VOCABULARY: Final = 1000
ENDED_BY_US: Final = (-signal.SIGKILL, 0)
# A program younger than this may not have come so far as to heed SIGTERM.
YOUNG_S: Final = 3.0
OF_A_WORKER: Final = ("first", "final", "fail", "drop", "overlap", "astray")

StartWorker = Callable[[Path, Path], Program]


def scripted_worker(run: Path, log: Path) -> Program:
    """A scripted worker on the broker in *run*."""
    arguments = ["--back", f"ipc://{run}/back.sock", "--log", str(log), "--vocabulary", str(VOCABULARY)]
    return Program("mtplx.testing", *arguments, "--drain-s", "0.2")


def scripted_answer(ask: Ask, max_tokens: int = 1000) -> Expected:
    """What a scripted worker answers."""
    job = Job(prompt="p", max_tokens=max_tokens)
    ids, texts = answer_of(job, Script(tokens=ask.tokens, seeded=True), VOCABULARY, ask.seed)
    return Expected(ids, texts, "".join(texts))


@dataclass(slots=True)
class Running:
    """A process of the round. asked_to_end: a blow has ended it, or will."""

    name: str
    program: Program
    log: Path | None = None
    began: float = field(default_factory=time.monotonic)
    asked_to_end: bool = False
    stopped_until: float | None = None
    replaced: bool = False

    @property
    def up(self) -> bool:
        """Whether it can do anything."""
        return self.program.process.poll() is None and self.stopped_until is None

    def too_young(self, code: int) -> bool:
        """Whether that is the exit code of a SIGTERM it could not heed yet."""
        return code == -signal.SIGTERM and time.monotonic() < self.began + YOUNG_S


@dataclass(frozen=True, slots=True)
class Report:
    """What a round has shown."""

    verdict: Verdict
    lines: list[Line]
    plan: Plan
    seconds: float
    exits: Counter[str] = field(default_factory=Counter)

    def told(self) -> str:
        """The broken promises, and how to play the round again."""
        faults = json.dumps(self.verdict.faults, indent=1)
        return f"{self.plan.told()}\n{faults}\nSEED={self.plan.seed} plays this round again."


class Round:
    """Plays one plan."""

    def __init__(
        self,
        plan: Plan,
        *,
        flags: tuple[str, ...] = (),
        start_worker: StartWorker = scripted_worker,
        fields: Callable[[Ask], dict[str, Any]] = scripted,
        answer: Callable[[Ask], Expected] = scripted_answer,
        limit_s: float = LIMIT_S,
    ) -> None:
        self.plan = plan
        self.run = Path(tempfile.mkdtemp(prefix="mxr", dir="/tmp"))
        self.lines: list[Line] = []
        self.failed: list[str] = []
        self.exits: Counter[str] = Counter()
        limits = {"beat-s": BEAT_S, "dead-s": DEAD_S, "stall-s": STALL_S, "drain-s": DRAIN_S, "orphan-s": ORPHAN_S}
        self._flags = [text for name, value in limits.items() for text in (f"--{name}", str(value))] + list(flags)
        self._start_worker, self._fields, self._answer = start_worker, fields, answer
        self._limit_s = limit_s
        # Elsewhere a power loss is a kill.
        self._shim = power_loss.compiled(self.run) if plan.power and power_loss.available() else None
        self._context: zmq.Context = zmq.Context()
        self._front = f"ipc://{self.run}/front.sock"
        self._brokers: list[Running] = []
        self._workers: list[Running] = []
        self._start_at: dict[str, float] = {"broker": 0.0, "worker": 0.0}
        self._blows: list[Blow] = list(plan.blows)
        self._heard: Counter[str] = Counter()
        self._counted = 0
        self.people: list[RawProducer | LibraryProducer] = []

    def play(self) -> Report:
        """Run the round to its end; all its processes end with it."""
        began = time.monotonic()
        try:
            self._keep_up()
            for number, person in enumerate(self.plan.people):
                if person.library:
                    self.people.append(
                        LibraryProducer(f"l{number}", person, self._front, self._note, self._fields)
                    )
                else:
                    service = (self._context, self._front)
                    self.people.append(RawProducer(f"p{number}", person, service, self._note, self._fields))
            self._until(lambda: all(one.over for one in self.people), began + self._limit_s)
            open_jobs = self._open_jobs()
            self._stop()
        finally:
            self._close()
        lines = [*self.lines, *self._of_workers()]
        verdict = check(History(lines, open_jobs, self._expected()))
        verdict.failed += self.failed
        shutil.rmtree(self.run, ignore_errors=True)
        return Report(
            verdict, sorted(lines, key=lambda line: line.at), self.plan, time.monotonic() - began, self.exits
        )

    def _note(self, line: Line) -> None:
        self.lines.append(line)

    def _until(self, holds: Callable[[], bool], ends: float) -> None:
        began = time.monotonic()
        while not holds():
            if time.monotonic() > ends:
                still = [one.name for one in self.people if not one.over]
                self.failed.append(f"the round was not over in time; {', '.join(still)} still waited")
                return
            self._wait()
            for one in self.people:
                one.turn()
                self._strike(began)
            self._keep_up()

    def _wait(self) -> None:
        poller = zmq.Poller()
        for one in self.people:
            if isinstance(one, RawProducer) and one.link is not None:
                poller.register(one.link.socket, zmq.POLLIN)
        poller.poll(TURN_MS)

    # --- blows

    def _strike(self, began: float) -> None:
        """Let the blows fall whose moment has come."""
        self._heard.update(line.what for line in self.lines[self._counted :])
        self._counted = len(self.lines)
        for blow in list(self._blows):
            reached = time.monotonic() - began if blow.moment == "at" else self._heard[blow.moment]
            if reached < blow.after:
                continue
            running = self._target(blow.whom)
            if running is not None:
                self._blows.remove(blow)
                self._hit(running, blow)

    def _target(self, whom: str) -> Running | None:
        of = self._brokers if whom == "broker" else self._workers
        return next((one for one in reversed(of) if one.up), None)

    def _hit(self, running: Running, blow: Blow) -> None:
        number = {"stop": signal.SIGSTOP, "term": signal.SIGTERM}.get(blow.how, signal.SIGKILL)
        running.program.send(number)
        self._note(Line(at=time.monotonic(), what=blow.how, by=running.name))
        if blow.how == "stop":
            running.stopped_until = time.monotonic() + blow.for_s
            running.replaced = blow.stand_in
            return
        running.asked_to_end = True
        self._start_at[blow.whom] = time.monotonic() + blow.for_s
        if blow.how == "power" and self._shim:
            running.program.ended()
            power_loss.lose(self.run / "state")

    # --- processes

    def _keep_up(self) -> None:
        """Wake what was stopped long enough, note what has ended, start what is not there."""
        now = time.monotonic()
        for one in [*self._brokers, *self._workers]:
            if one.stopped_until is not None and now >= one.stopped_until:
                one.stopped_until = None
                one.program.send(signal.SIGCONT)
                self._note(Line(at=time.monotonic(), what="continue", by=one.name))
        self._brokers = self._living("broker", self._brokers)
        self._workers = self._living("worker", self._workers)
        if not self._brokers and now >= self._start_at["broker"]:
            env = environment(**power_loss.environment(self._shim, self.run / "state")) if self._shim else None
            self._brokers.append(
                Running("broker", Program("broker", "--run-dir", str(self.run), *self._flags, env=env))
            )
        if not [one for one in self._workers if not one.replaced] and now >= self._start_at["worker"]:
            number = self._heard["worker"] = self._heard["worker"] + 1
            log = self.run / f"w{number}.jsonl"
            self._workers.append(Running(f"w{number}", self._start_worker(self.run, log), log))

    def _living(self, whom: str, all_of: list[Running]) -> list[Running]:
        living = []
        for one in all_of:
            code = one.program.process.poll()
            if code is None:
                living.append(one)
                continue
            self._note(Line(at=time.monotonic(), what="gone", by=one.name))
            self.exits[f"{whom} {code}"] += 1
            self._start_at[whom] = max(self._start_at[whom], time.monotonic() + RESTART_S)
            if whom == "broker" and not (one.asked_to_end and (one.too_young(code) or code in ENDED_BY_US)):
                self.failed.append(f"the broker ended with {code}: {one.program.said()[-2000:]}")
            one.program.close()
        return living

    def _open_jobs(self) -> list[str]:
        """What is open at the end; a job whose producer left without a word lives on for a while."""
        ends = time.monotonic() + ORPHAN_S + AT_THE_END_S
        found = None
        with Producer(self._context, self._front, RECONNECT_IVL=20) as asker:
            while found != [] and time.monotonic() < ends:
                self._keep_up()
                asker.say(m.Status(jobs=True))
                asked = time.monotonic()
                while asker.socket.poll(TURN_MS) or time.monotonic() < asked + 0.2:
                    if asker.socket.poll(0):
                        jobs = asker.expect(m.StatusReply).status["jobs"]
                        found = [job["id"] for job in jobs if job["state"] in OPEN]
                        break
                    self._keep_up()
        if found is None:
            self.failed.append("the broker does not answer at the end")
        return found or []

    def _stop(self) -> None:
        """Both programs leave when they are told to; with code 0."""
        for one in [*self._workers, *self._brokers]:
            if one.stopped_until is not None:
                one.program.send(signal.SIGCONT)
            if one.program.process.poll() is None:
                one.asked_to_end = True
                one.program.send(signal.SIGTERM)
                code = one.program.ended()
                if code != 0 and one.name == "broker" and not one.too_young(code):
                    self.failed.append(f"{one.name} left with {code}: {one.program.said()[-2000:]}")

    def _close(self) -> None:
        for one in [*self._brokers, *self._workers]:
            one.program.close()
        for person in self.people:
            person.close()
        self._context.destroy(linger=0)

    # --- what was seen

    def _of_workers(self) -> list[Line]:
        lines = []
        for path in sorted(self.run.glob("w*.jsonl")):
            for text in path.read_text().splitlines():
                try:
                    told = json.loads(text)
                except ValueError:
                    break
                if told["event"] == "run" or told["event"] in OF_A_WORKER:
                    what = "ran" if told["event"] == "run" else told["event"]
                    lines.append(Line(at=told["at"], what=what, job=told["id"], by=path.stem, lease=told["lease"]))
        return lines

    def _expected(self) -> Callable[[str], Expected | None]:
        asks = {ask.job.hex(): ask for person in self.plan.people for ask in person.asks}
        for one in self.people:
            if isinstance(one, LibraryProducer):
                asks.update(one.asks)
        answers = {job: self._answer(ask) for job, ask in asks.items()}
        return answers.get


@click.command()
@click.argument("seed", type=int)
@click.option("--lines", type=click.Path(path_type=Path), help="Where the history is written.")
@click.option("--no-power", is_flag=True)
@click.option("--no-library", is_flag=True)
def main(seed: int, lines: Path | None, no_power: bool, no_library: bool) -> None:
    """Play one round, print what it showed as JSON on one line; exit code 1 where a promise was broken."""
    report = Round(plan_of(seed, power=not no_power, library=not no_library)).play()
    if lines:
        write(lines, report.lines)
    shown = {"counts": report.verdict.counts, "faults": report.verdict.faults, "exits": report.exits}
    click.echo(json.dumps({"seed": seed, "seconds": round(report.seconds, 2), **shown}))
    if report.verdict.faults:
        click.echo(report.told(), err=True)
        sys.exit(os.EX_SOFTWARE)


if __name__ == "__main__":
    main()
