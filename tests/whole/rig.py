"""Real processes for tests: a broker, a scripted worker, and a producer's socket to speak to them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import zmq

from mtplx import wire
from mtplx.messages import TO_CLIENT, Message, Status, StatusReply

ROOT = Path(__file__).parents[2]
WAIT_MS = 20_000


class Rig:
    """A broker process with a run folder of its own, and whatever workers a test starts beside it."""

    def __init__(self, folder: Path, *flags: str) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self.folder = folder
        self.front, self.back = f"ipc://{folder}/front.sock", f"ipc://{folder}/back.sock"
        self.context = zmq.Context()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.broker = self.start("broker", "--run-dir", str(folder), *flags)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.destroy(linger=0)
        for process in reversed(self.processes):
            process.terminate()
        for process in reversed(self.processes):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()

    def start(self, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start `python -m module`, as the programs start: without the current folder on the path."""
        clean = {key: value for key, value in os.environ.items() if not key.startswith("MTPLX_")}
        environment = {**clean, "PYTHONPATH": str(ROOT), "MTPLX_CONFIG": os.devnull}
        process = subprocess.Popen([sys.executable, "-P", "-m", module, *arguments], env=environment)
        self.processes.append(process)
        return process

    def worker(self, *flags: str) -> Path:
        """Start a scripted worker and wait until it serves; returns its log."""
        log = self.folder / f"worker-{len(self.processes)}.jsonl"
        self.start("mtplx.testing", "--back", self.back, "--log", str(log), *flags)
        with self.producer() as producer:
            give_up = time.monotonic() + WAIT_MS / 1000
            while producer.ask(Status(), StatusReply).status["worker"]["state"] == "absent":
                if time.monotonic() > give_up:
                    raise TimeoutError("the scripted worker is not ready")
                # The broker tells nobody that a worker came: ask again.
                time.sleep(0.01)
        return log

    def producer(self) -> Producer:
        """A new connection to the front endpoint."""
        return Producer(self.context, self.front)


def read_log(log: Path) -> list[dict[str, object]]:
    """The events a scripted worker wrote."""
    return [json.loads(line) for line in log.read_text().splitlines()]


class Producer:
    """One DEALER that speaks frames, right ones and wrong ones."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(endpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def say(self, message: Message) -> None:
        """Send *message*."""
        self.socket.send_multipart(wire.encode(message))

    def hear(self, timeout_ms: int = WAIT_MS) -> Message:
        """The next message; raises TimeoutError where none comes."""
        if not self.socket.poll(timeout_ms):
            raise TimeoutError("the broker said nothing")
        return wire.decode(self.socket.recv_multipart(), TO_CLIENT)

    def ask(self, message: Message, kind: type[Message]) -> Message:
        """Send *message* and return the first answer of that kind."""
        self.say(message)
        while not isinstance(answer := self.hear(), kind):
            pass
        return answer
