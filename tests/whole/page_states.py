"""A broker with its page in the states that a person sees: idle, running with 20 waiting, the worker dead."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from whole.harness import Service, service

SPECULATION = {
    "drafted": 300,
    "verify_forwards": 160,
    "accepted_by_depth": [118, 81, 52, 31, 14],
    "widths": {"1": 40, "2": 24, "4": 71, "8": 25},
}
SHORT = {"tokens": 40, "token_s": 0.008, "speculation": SPECULATION}
LONG = {"tokens": 4000, "token_s": 0.012, "prefill_steps": 3}
WAITING = 20


@contextmanager
def page_service() -> Iterator[tuple[Service, str]]:
    """A broker with a free HTTP port and a worker; its page's address."""
    with service("--http", "127.0.0.1:0", "--beat-s", "0.5", "--dead-s", "60") as running:
        running.worker("--model", "SmolLM2-135M-Instruct", "--stage", "h2")
        with running.producer() as producer:
            url = producer.health()["broker"]["http"]
        yield running, url


def idle(running: Service) -> str:
    """Three jobs have ended; returns the headline."""
    with running.producer() as producer:
        jobs = [producer.submit(script=SHORT) for _ in range(3)]
        for job in jobs:
            producer.last_word(job)
    return "Idle"


def busy(running: Service) -> str:
    """One job runs and twenty wait."""
    producer = running.producer()
    jobs = [producer.submit(script=LONG, finish=True, max_tokens=4000) for _ in range(WAITING + 1)]
    producer.submit(script={"tokens": 1}, max_tokens=1, queue_ttl_ms=1)
    producer.until(lambda message: getattr(message, "n", 0) and message.first > 150)
    producer.socket.close()
    assert len(jobs) == WAITING + 1
    return "Running job"


def worker_dead(running: Service) -> str:
    """The worker was killed with twenty waiting, and its job goes on later."""
    worker = next(one for one in running.programs if one is not running.broker)
    worker.send(signal.SIGKILL)
    worker.ended()
    return "No worker"


STATES: dict[str, Callable[[Any], str]] = {"idle": idle, "running": busy, "worker-dead": worker_dead}
