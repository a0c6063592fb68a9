"""Models of the tests of forging: tiny ones made on the spot, each once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from tiny_models import make_tiny

from worker.engine.load import LoadedModel, load


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LoadedModel]:
    return cache(lambda name: load(make_tiny(name, tmp_path_factory.mktemp(name))))
