"""NATS JetStream as a queue to be measured: a work-queue stream in a file, driven by nats-py."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from pathlib import Path

import nats
from nats.js import JetStreamContext
from nats.js.api import RetentionPolicy, StorageType, StreamConfig
from queues import Acks, Load, check_held

ACK_S = 60.0
# `port: -1` takes a free one and tells it in a file.
CONFIG = """
listen: "127.0.0.1:-1"
ports_file_dir: "{folder}"
jetstream {{
    store_dir: "{folder}"
    {sync}
}}
"""


class Nats:
    """nats-server on loopback with one work-queue stream, flushed before each PubAck, or every two minutes."""

    def __init__(self, program: str, *, flushed: bool = True) -> None:
        self.name = "NATS sync always" if flushed else "NATS sync every 2 min"
        self._program = program
        self._flushed = flushed

    def command(self, folder: Path) -> list[str]:
        """As in `Queue`."""
        sync = "sync_interval: always" if self._flushed else ""
        (folder / "nats.conf").write_text(CONFIG.format(folder=folder, sync=sync))
        return [self._program, "-c", str(folder / "nats.conf")]

    def environment(self, folder: Path) -> None:
        """As in `Queue`."""

    def drive(self, folder: Path, load: Load) -> Acks:
        """As in `Queue`."""
        return asyncio.run(self._drive(_address(folder), load))

    async def _drive(self, address: str, load: Load) -> Acks:
        connections = [await nats.connect(address) for _ in range(load.producers)]
        streams = [one.jetstream(publish_async_max_pending=load.open + 1) for one in connections]
        config = StreamConfig(
            name="line", subjects=["line"], retention=RetentionPolicy.WORK_QUEUE, storage=StorageType.FILE
        )
        await streams[0].add_stream(config)
        before = (await streams[0].stream_info("line")).state.messages
        acks, body = Acks(load), load.body()
        await asyncio.gather(*(_publish(one, body, acks) for one in streams for _ in range(load.open)))
        held = (await streams[0].stream_info("line")).state.messages
        check_held(self.name, held - before, acks.total)
        for one in connections:
            await one.close()
        return acks


async def _publish(stream: JetStreamContext, body: bytes, acks: Acks) -> None:
    """One open submission after the other."""
    follow = True
    while follow:
        sent = time.monotonic()
        await asyncio.wait_for(await stream.publish_async("line", body), ACK_S)
        follow = acks.note(sent)


def _address(folder: Path) -> str:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        time.sleep(0.01)
        for ports in folder.glob("*.ports"):
            # It may not be written to its end yet.
            with suppress(ValueError):
                return str(json.loads(ports.read_text())["nats"][0])
    raise SystemExit(f"The NATS server did not say where it listens in 20 s; {folder / 'log'} says why.")
