"""Models of the tests of speculation: tiny ones made on the spot, each once, and the real one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from real_model import real_model
from tiny_models import make_tiny

from worker.engine.load import LoadedModel, load


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LoadedModel]:
    return cache(lambda name: load(make_tiny(name, tmp_path_factory.mktemp(name))))


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    return real_model()
