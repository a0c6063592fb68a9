"""Which head a worker takes at its start, and what it says where the one asked for cannot be had."""

from __future__ import annotations

import logging

import mlx.core as mx
import pytest
from speculating.mtp_checkpoints import checkpoint
from speculating.test_start_up import Start

from mtplx.errors import ModelFilesError, SettingsError
from worker.engine import memory
from worker.engine.load import load


def start(tmp_path, name: str, *, with_head: bool = True) -> tuple[Start, str]:
    folder = tmp_path / "model"
    folder.mkdir()
    checkpoint(folder, name, with_head=with_head)
    return Start(load(folder), tmp_path / "cache"), str(folder)


def test_a_models_own_head_drafts_without_being_named(tmp_path) -> None:
    begin, model = start(tmp_path, "mimo")
    found = begin(model=model)
    assert found.info["draft"] == "mtp+ngram"
    told = found.info["mtp"]
    assert (told["head"], told["form"]) == ("its own", "module")
    assert told["bytes"] > 10_000
    begin.room.gate.executor = found.executor
    body = {"token_ids": list(range(20, 40)), "max_tokens": 12}
    drafted = begin.room.ids(body)
    begin.room.gate.executor = None
    assert drafted == begin.room.ids(body)


def test_a_conversion_without_its_head_starts_and_where_a_head_is_asked_for_says_why_not(tmp_path, caplog) -> None:
    begin, model = start(tmp_path, "mimo", with_head=False)
    with caplog.at_level(logging.INFO):
        assert begin(model=model).info["draft"] == "ngram"
    assert "conversions drop it" in caplog.text
    with pytest.raises(ModelFilesError, match=r"declares a head .* --mtp PATH"):
        begin(model=model, draft="mtp")


def test_a_head_that_memory_does_not_hold_is_refused_before_its_weights_are_read(
    tmp_path, caplog, monkeypatch
) -> None:
    begin, model = start(tmp_path, "mimo")
    monkeypatch.setattr(memory, "room", lambda: memory.Room(total=10**6, used=10**6 - 1000))
    monkeypatch.setattr(mx, "load", lambda *_, **__: pytest.fail("it is not read"))
    with pytest.raises(SettingsError, match=r"The head in .* its weights take .* --draft ngram"):
        begin(model=model, draft="mtp")
    assert begin(model=model).info["draft"] == "ngram"
    assert "Nothing drafts in its place" in caplog.text
