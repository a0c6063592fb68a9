"""Rounds of disturbances, some at each run: nothing is lost, run twice or out of order, and each text is right.

`SEED=17 python -m pytest tests/whole/test_faults.py` plays the round of one seed; bench/faults.py plays hundreds.
"""

import dataclasses
import os

import pytest
from tiny_models import make_llama
from whole.plan import plan_of, real_plan_of
from whole.real_rounds import RealRounds
from whole.rounds import Round

# Kills, stops and orderly ends of both programs; the first loses power in the moment of an ADMITTED.
SEEDS = [int(os.environ["SEED"])] if "SEED" in os.environ else [60, 6, 29]


def test_a_seed_is_a_plan():
    assert plan_of(5) == plan_of(5)
    assert plan_of(5) != plan_of(6)


def test_a_round_without_a_blow_keeps_every_promise():
    report = Round(dataclasses.replace(plan_of(3, power=False), blows=())).play()
    assert report.verdict.faults == {}, report.told()
    assert report.verdict.counts["runs"] == report.verdict.counts["jobs"] > 5


@pytest.mark.parametrize("seed", SEEDS)
def test_a_round_of_blows_keeps_every_promise(seed: int):
    report = Round(plan_of(seed)).play()
    assert report.verdict.faults == {}, report.told()


@pytest.mark.parametrize("seed", SEEDS[:1])
def test_streams_of_the_real_worker_are_those_of_a_quiet_one(seed: int, tmp_path):
    rounds, plan = RealRounds(make_llama(tmp_path)), real_plan_of(seed)
    rounds.learn([plan])
    report = rounds.play(plan)
    assert report.verdict.faults == {}, report.told()
