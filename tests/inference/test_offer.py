"""What READY tells of a worker: above all how long a job can be here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mtplx.job import MAX_INT
from mtplx.settings import Settings
from worker.engine.load import LoadedModel
from worker.runtime import offer


@pytest.mark.parametrize(
    ("model", "capacity", "told", "why"),
    [
        (512, 512, 512, "the model's context"),
        (512, 1000, 512, "the model's context"),
        (512, 100, 100, "the worker has memory for no more of the model's 512; --kv-memory sets it"),
        (
            MAX_INT,
            4000,
            4000,
            "the model names no context; the worker has memory for no more; --kv-memory sets it",
        ),
        (MAX_INT, MAX_INT, MAX_INT, "the model names no context"),
    ],
)
def test_ready_tells_what_a_job_can_have_and_why(
    tiny: LoadedModel, model: int, capacity: int, told: int, why: str
) -> None:
    ready = offer(Settings(), replace(tiny, context=model), capacity, {"lane": "packed", "pool": {}}, "h0")
    assert ready.context == told
    assert ready.info["context_why"] == why
    assert ready.info["lane"] == "packed"


def test_without_a_pool_no_setting_of_memory_is_named(tiny: LoadedModel) -> None:
    ready = offer(Settings(), replace(tiny, context=MAX_INT), 2**24, {"lane": "module"}, "h0")
    assert ready.info["context_why"] == "the model names no context; the worker takes no more"
    ready = offer(Settings(), replace(tiny, context=2**25), 2**24, {"lane": "module"}, "h0")
    assert ready.info["context_why"] == "the worker takes no more of the model's 33554432"
