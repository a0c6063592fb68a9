"""`mtplx serve`: broker and worker in the foreground; one Ctrl-C stops both, in order."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Self

import click

from mtplx.cli.options import load_settings, settings_options
from mtplx.cli.signals import Signals
from mtplx.client import Client
from mtplx.errors import EXITS, BrokerUnreachableError, Exit, WireError
from mtplx.http_place import AUTO
from mtplx.paths import expanded, is_folder
from mtplx.settings import Settings

TURN_S: Final = 0.2
# Beyond the drain limit, for last words and spans to leave the broker.
BROKER_GRACE_S: Final = 6.0
WORKER_GRACE_S: Final = 6.0
MAX_BACKOFF_S: Final = 30.0
# A worker that ends this often in a row, without a job run to its end or a while in good health, is given up. One
# job that ends every worker is buried before that.
MAX_DEATHS: Final = 10
HEALTHY_S: Final = 300.0
# A worker that ends with one of these would end so again.
FINAL_CODES: Final = tuple(code for code, ending in EXITS.items() if code is not Exit.OK and not ending.again)

# Both leave when their stdin ends: a killed `serve` leaves nobody on the endpoints or the device.
BROKER: Final = (sys.executable, "-P", "-m", "broker", "--exit-with-stdin")
WORKER: Final = (sys.executable, "-P", "-m", "worker", "--exit-with-stdin")

Child = subprocess.Popen[bytes]


class Service:
    """Starts broker and worker, looks after them in `turn`, and stops them in order.

    exit_code is set when the service cannot go on; `ready` while the worker can take jobs.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        say: Callable[[str], None],
        broker: tuple[str, ...] = BROKER,
        worker: tuple[str, ...] = WORKER,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.settings = settings
        self.exit_code: int | None = None
        self.ready = False
        self.health: dict[str, Any] = {}
        self._say = say
        self._clock = clock
        self._pause = pause
        self._commands = {"broker": broker, "worker": worker}
        self._broker = self._spawn("broker")
        self._worker: Child | None = None
        self._client: Client | None = None
        self._killed = 0
        self._deaths = 0
        self._ready_at: float | None = None
        self._completed = -1
        self._restart_at = 0.0
        self._hurry = False

    def turn(self) -> None:
        """Look at both once; waits for the broker's answer, for less than a second."""
        code = self._broker.poll()
        if code is not None:
            self.ready = False
            self.exit_code = code if code > 0 else int(Exit.INTERNAL)
            self._say(f"The broker ended by itself ({_ending(code)}); stopping.")
            return
        self._ask_health()
        # A worker must not meet another service's broker.
        if self._client is not None:
            self._watch_worker()

    def turn_until(self, holds: Callable[[], bool], limit_s: float = math.inf) -> bool:
        """Take turns until *holds*; False where the limit passes, or the service cannot go on."""
        ends = self._clock() + limit_s
        while not holds():
            if self.exit_code is not None or self._clock() >= ends:
                return False
            self.turn()
            self._pause(TURN_S)
        return True

    def stop(self) -> None:
        """Drain the broker, then end the worker; each is killed where it exceeds its limit."""
        self.ready = False
        if self._client is not None:
            self._client.close()
            self._client = None
        _end(self._broker, self.settings.drain_s + BROKER_GRACE_S, lambda: self._hurry)
        if self._worker is not None:
            _end(self._worker, WORKER_GRACE_S, lambda: self._hurry)
        for child in (self._broker, self._worker):
            if child is not None and child.stdin is not None:
                child.stdin.close()

    def hurry(self) -> None:
        """End a running `stop` early; safe in a signal handler."""
        self._hurry = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _spawn(self, name: str) -> Child:
        # Each leads its own group: the terminal's Ctrl-C is for us, who stop them in order.
        return subprocess.Popen(
            self._commands[name],
            env=self.settings.environment(),
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def _watch_worker(self) -> None:
        if self._worker is None:
            if self._clock() >= self._restart_at:
                self._worker = self._spawn("worker")
            return
        code = self._worker.poll()
        if code is None:
            return
        self.ready = False
        # The broker, too, kills a worker that hangs: it knows why.
        self._ask_health()
        if self._worker.stdin is not None:
            self._worker.stdin.close()
        self._worker = None
        if code in FINAL_CODES:
            self.exit_code = code
            self._say(f"The worker cannot run ({_ending(code)}); stopping.")
            return
        if self._did_well():
            self._deaths = 0
        self._ready_at = None
        self._deaths += 1
        if self._deaths >= MAX_DEATHS:
            self.exit_code = int(Exit.INTERNAL)
            self._say(
                f"The worker ended {self._deaths} times in a row ({_ending(code)}); its log says why. Stopping."
            )
            return
        backoff_s = min(2.0 ** (self._deaths - 1), MAX_BACKOFF_S)
        self._say(f"The worker ended ({_ending(code)}); starting it again in {backoff_s:.0f} s.")
        self._restart_at = self._clock() + backoff_s

    def _did_well(self) -> bool:
        """Whether the worker that just ended was of use: only then is its end no part of a series."""
        before, self._completed = self._completed, self._last_completed()
        healthy = self._ready_at is not None and self._clock() - self._ready_at >= HEALTHY_S
        return healthy or self._completed > before

    def _last_completed(self) -> int:
        """Place in the order of admission of the last job that ran to its end, or what was known before."""
        try:
            jobs = self._client.status(jobs=True)["jobs"] if self._client is not None else []
        except (BrokerUnreachableError, WireError):
            return self._completed
        ended = (int(job["admit_seq"]) for job in jobs if job.get("outcome") in ("stop", "length"))
        return max(self._completed, *ended, -1)

    def _ask_health(self) -> None:
        try:
            if self._client is None:
                self._client = self._connected()
            self.health = self._client.health()
        except (BrokerUnreachableError, WireError):
            return
        self._judge(self.health["worker"])

    def _connected(self) -> Client:
        client = Client(settings=self.settings, timeout=TURN_S)
        pid, page = 0, ""
        try:
            told = client.health()["broker"]
            pid, page = told["pid"], told.get("http", "")
        finally:
            if pid != self._broker.pid:
                client.close()
        if pid != self._broker.pid:
            # Ours will find the endpoint taken and end with a sentence on that.
            raise BrokerUnreachableError(f"Another broker (pid {pid}) answers.")
        client.timeout = 2 * TURN_S
        self._say(f"The broker takes jobs at {self.settings.endpoint('front')} (pid {pid}).")
        if page:
            self._say(f"Its page is at {page}")
        return client

    def _judge(self, worker: dict[str, Any]) -> None:
        child = self._worker
        if child is None:
            return
        if worker["state"] == "absent":
            self.ready = False
            hangs = worker.get("last_loss") in ("silent", "stalled") and worker.get("lost_pid") == child.pid
            if hangs and self._killed != child.pid:
                self._killed = child.pid
                self._say(f"The worker is {worker['last_loss']}; it is killed and started again.")
                child.kill()
        elif worker.get("pid") == child.pid and not self.ready and child.poll() is None:
            self.ready = True
            self._ready_at = self._clock()
            self._say(f"The worker is ready with {worker['model']} (pid {child.pid}).")


def _ending(code: int) -> str:
    if code < 0:
        return signal.Signals(-code).name
    known = code in set(Exit)
    return f"exit code {code}: {EXITS[Exit(code)].meaning}" if known else f"exit code {code}"


def _end(child: Child, limit_s: float, hurry: Callable[[], bool]) -> None:
    """Ask by SIGTERM; by a second one when *hurry* says so; kill at the limit."""
    if child.poll() is None:
        child.terminate()
    ends, asked_again = time.monotonic() + limit_s, False
    while child.poll() is None:
        # First: of two signals at once the second may be lost.
        with suppress(subprocess.TimeoutExpired):
            child.wait(TURN_S)
        if hurry() and not asked_again:
            child.terminate()
            asked_again = True
        if time.monotonic() >= ends:
            child.kill()


def absolute_model(settings: Settings) -> Settings:
    """*settings* with a local model folder named from the root, wherever the children run."""
    local = expanded(settings.model)
    return replace(settings, model=str(local.absolute())) if is_folder(local) else settings


def serve_until_told(settings: Settings, say: Callable[[str], None], **commands: Any) -> int:
    """Run both programs until a signal or a failure; the exit code."""
    with (
        Signals() as signals,
        Service(absolute_model(settings), say=say, pause=signals.pause, **commands) as service,
    ):
        signals.again = service.hurry
        service.turn_until(lambda: signals.count > 0)
        if service.exit_code is None:
            say("Stopping: the running job may end. Once more to hurry.")
    return service.exit_code or 0


@click.command()
@settings_options
@click.pass_context
def serve(context: click.Context, /, **flags: Any) -> None:
    """Run the service here, until Ctrl-C: a broker and one worker."""
    settings = load_settings(flags, context.obj)
    if not settings.http:
        settings = replace(settings, http=AUTO)
    code = serve_until_told(settings, lambda line: click.echo(line, err=True))
    context.exit(code)
