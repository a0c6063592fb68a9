"""SmolLM2 with its real weights, pulled once into the user's cache."""

from __future__ import annotations

from functools import cache

from mtplx.settings import Settings
from worker.engine.load import LoadedModel, load
from worker.pull import pull


@cache
def real_model() -> LoadedModel:
    """One for all tests of a process; the first on a machine downloads it."""
    return load(pull("smollm2-135m", Settings.load().cache_dir, lambda _line: None))
