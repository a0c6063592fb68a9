"""What the tests of both clients and of the command line share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from whole.fake_broker import FakeBroker

from mtplx import Client


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/front.sock"


@pytest.fixture
def broker(endpoint: str) -> Iterator[FakeBroker]:
    with FakeBroker(endpoint) as broker:
        yield broker


@pytest.fixture
def client(broker: FakeBroker) -> Iterator[Client]:
    with Client(broker.endpoint, timeout=10) as client:
        yield client
