"""Models of the inference tests: tiny ones made on the spot, and the real one, pulled once into the user's cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from real_model import real_model
from tiny_models import Room, make_llama

from worker.engine.load import LoadedModel, load


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny(tiny_dir: Path) -> LoadedModel:
    return load(tiny_dir)


@pytest.fixture
def room(tiny: LoadedModel) -> Room:
    return Room(tiny)


@pytest.fixture
def vectors() -> dict[str, Any]:
    return json.loads((Path(__file__).parent / "vectors" / "keyed.json").read_text())


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    return real_model()
