"""Full decode with the heads of all families: one seed, one text, whatever the head drafts."""

from __future__ import annotations

import random
from itertools import count

import pytest
from speculating.heads import Bench, request_of
from speculating.mtp_checkpoints import FAMILIES, checkpoint
from speculating.oracle import EAGER

from worker.engine.engine import EngineRequest
from worker.engine.load import load
from worker.engine.module_lane import ModuleForward
from worker.engine.trunk import Trunk
from worker.speculation.mtp.module import ModuleHead
from worker.speculation.mtp.weights import load_head

# One with recurrent layers, and one with windows and a module for each depth; the others in the long form.
SHORT = ("qwen3_5", "mimo_v2_flash")


@pytest.mark.parametrize(
    "name", [*SHORT, *(pytest.param(name, marks=pytest.mark.prove) for name in FAMILIES if name not in SHORT)]
)
def test_answers_drafted_by_a_models_own_head_are_those_of_plain_decode(tmp_path, name: str) -> None:
    checkpoint(tmp_path, name)
    loaded = load(tmp_path)
    bench = Bench(loaded, "tail")
    trunk = Trunk.of(loaded)
    head = load_head(tmp_path, loaded, trunk, None)
    lane = bench.engine.forward
    if isinstance(lane, ModuleForward):
        if lane.width == 1:
            pytest.skip(f"the lane takes one row at a time: {lane.why_narrow}")
        lane.tap = trunk.tap()
    ticks = count()
    engine = bench.drafting(ModuleHead(head, trunk), EAGER, 4, lambda: next(ticks) / 1e3)
    luck, drafted = random.Random(5), 0
    for number, temperature in enumerate((0.0, 0.8)):
        request = request_of([luck.randrange(4, 200) for _ in range(9)], 16, seed=number, temperature=temperature)
        whole = bench.plain(request)
        # Cancelled after some tokens, resumed behind others.
        cancelled, _ = bench.drafted(engine, request, 7)
        rest = EngineRequest(
            prompt=request.prompt, drawn=tuple(whole[:5]), sampling=request.sampling, max_tokens=11
        )
        resumed, _ = bench.drafted(engine, rest)
        ids, figures = bench.drafted(engine, request)
        drafted += figures.drafted
        assert (ids, cancelled, resumed) == (whole, whole[:7], whole[5:])
    assert drafted > 10
