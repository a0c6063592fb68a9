"""The planner on devices of given costs and texts of given luck."""

from __future__ import annotations

from itertools import pairwise

import pytest
from speculating.rig import (
    DEVICES,
    Costs,
    Measured,
    Plan,
    Planner,
    Round,
    Text,
    Traits,
    best_fixed,
    bursty,
    follow,
    planned,
    price,
    steady,
    table,
    then,
)
from speculating.texts import texts

from worker.speculation.ngram import NGRAM

TOKENS = 2400
MODEL = Traits((), (0.7,), branch=2)

# By the acceptance of each depth; of a drafter that is not watched.
STEADY: dict[str, Text] = {
    "good": steady((0.89, 0.78, 0.69, 0.61, 0.5), 1),
    "middling": steady((0.78, 0.6, 0.45, 0.35), 2),
    "weak": steady((0.6, 0.45, 0.35, 0.3), 3),
    "poor": steady((0.15, 0.1), 4),
    "often a fork": steady((0.5, 0.5), 5, 0.6),
    "surer with depth": steady((0.5, 0.9, 0.95), 6),
}
# Of an n-gram drafter, watched.
BURSTY: dict[str, Text] = {
    "copies": bursty(60, 10, 0.1, 1),
    "copies and new text": bursty(15, 15, 0.2, 2),
    "hardly a copy": bursty(3, 30, 0.25, 3),
    "false alarms": bursty(0, 1, 0.5, 4),
    "code, then a story": then(bursty(60, 5, 0.1, 5), bursty(0, 1, 0.4, 6), TOKENS // 2),
    "a story, then code": then(bursty(0, 1, 0.4, 7), bursty(60, 5, 0.1, 8), TOKENS // 2),
}


GAPS = Traits(edges=(1.0,), kept=(0.4, 0.95), gained=0.6, free=False)


def planned_before_drafting(costs: Costs) -> tuple[Planner, Plan]:
    planner = Planner(costs, 15, True, GAPS)
    plan = planner.plan(64, None)
    assert plan.nodes == plan.depth >= 3
    return planner, plan


def test_a_plan_that_was_made_before_the_draft_is_cut_where_the_draft_is_unsure():
    costs = table({1: 1, 8: 2.4, 16: 5}, 30, 1.0, 0.5)
    planner, plan = planned_before_drafting(costs)
    sure = planner.refined(plan, (3.0,) * plan.depth, ())
    assert sure.depth == plan.depth
    assert sure.beside_ms == 0
    cut = planner.refined(plan, (3.0, *(0.1,) * (plan.depth - 1)), ())
    assert 1 <= cut.depth < plan.depth
    assert cut.beside_ms == (plan.depth - cut.depth) * 0.5
    assert planner.figures()["off_steps"] == 0


def test_what_was_drafted_is_verified_however_unsure_it_is():
    planner, plan = planned_before_drafting(table({1: 1, 8: 2.4, 16: 5}, 30, 1.0, 0.5))
    assert planner.refined(plan, (0.0,) * plan.depth, ()).nodes >= 1


def test_a_fork_is_taken_where_rows_are_cheap_and_costs_no_draft():
    planner, plan = planned_before_drafting(table({1: 1, 16: 1.3}, 30, 1.0, 3.0))
    forked = planner.refined(plan, (0.1, *(3.0,) * (plan.depth - 1)), (1,))
    assert (forked.forks, forked.turns) == (1, (1,))
    assert forked.nodes == forked.depth + 1
    assert forked.beside_ms == (plan.depth - forked.nodes) * 3.0


def test_time_spent_on_drafts_that_are_not_verified_is_not_held_against_the_rows():
    costs = table({1: 1, 8: 2.4, 16: 5}, 30, 1.0, 0.5)
    planner, plan = planned_before_drafting(costs)
    cut = planner.refined(plan, (3.0, *(0.1,) * (plan.depth - 1)), ())
    before = planner.measured.steps(64)[cut.nodes]
    planner.told(cut, 1, before + cut.beside_ms)
    assert planner.measured.steps(64)[cut.nodes] == pytest.approx(before)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [*STEADY, *BURSTY])
def test_it_is_within_5_percent_of_the_best_fixed_depth_and_forks(device, kind):
    costs, traits = DEVICES[device], MODEL if kind in STEADY else NGRAM
    text = (STEADY | BURSTY)[kind]
    spent = planned(Planner(costs, 15, True, traits), costs, text, TOKENS, watch=kind in BURSTY, jitter=1)
    best, _ = best_fixed(costs, text, TOKENS, traits, trees=True)
    assert spent.ms <= 1.05 * best
    assert spent.speedup >= 0.985, "and it never loses what anyone would miss"


@pytest.mark.parametrize("watch", [True, False])
def test_on_a_linear_curve_it_ends_at_width_1_within_16_steps_and_loses_less_than_1_percent(watch):
    for costs in (DEVICES["CPU"], table({1: 1, 16: 16}, 40, 0.0)):
        for text in (*STEADY.values(), BURSTY["false alarms"], BURSTY["hardly a copy"]):
            planner = Planner(costs, 15, True, MODEL)
            spent = planned(planner, costs, text, 300, watch=watch)
            assert spent.speedup > 0.99
            assert all(at < 16 for at in spent.drafted)


@pytest.mark.parametrize("kept", [(0.0,), (0.1, 0.0)])
def test_speculation_that_loses_is_off_within_16_steps_with_pauses_that_grow(kept):
    costs = DEVICES["H200"]
    planner = Planner(costs, 15, True, MODEL)
    spent = planned(planner, costs, steady(kept, 9), TOKENS, watch=False)
    first = [at for at in spent.drafted if at < 16]
    assert 0 < len(first) <= 16
    later = [at for at in spent.drafted if at >= 16]
    starts = [at for at, before in zip(later, [0, *later], strict=False) if at - before > 8]
    pauses = [end - start for start, end in pairwise(starts)]
    assert all(second >= 2 * one for one, second in pairwise(pauses) if second < 400)
    assert len(starts) <= 9
    assert spent.speedup > 0.99
    assert planner.figures()["offs"] >= 3


def test_a_table_that_promises_too_much_is_found_out_by_the_gate():
    """The probe said that rows are free; in truth each costs a step."""
    told, true = DEVICES["H200"], table({1: 1, 16: 16}, 1.3, 0.45)
    planner = Planner(told, 15, False, MODEL)
    at, drafted, ms, text = 0, [], 0.0, STEADY["middling"]
    while at < 600:
        now = text(at)
        plan = planner.plan(at, now.margins)
        kept = min(now.kept, plan.depth)
        took = price(true, plan.nodes)
        planner.told(plan, kept, took)
        drafted += [at] if plan.nodes else []
        ms += took
        at += 1 + kept
    assert planner.figures()["offs"] > 0
    assert len([one for one in drafted if one > 100]) < 30
    assert ms < 600 * 1.3 * 1.15


@pytest.mark.parametrize("watch", [True, False])
def test_it_is_on_again_where_it_would_win(watch):
    costs = DEVICES["H200"]
    text = then(steady((0.02,), 11), steady((0.9,), 12), 400)
    planner = Planner(costs, 15, False, MODEL)
    spent = planned(planner, costs, text, 4000, watch=watch)
    late = [at for at in spent.drafted if at >= 400]
    # Watched drafts say it after a few rounds; a trial has to wait for its turn.
    assert late[0] < 400 + (80 if watch else 512)
    assert planned(Planner(costs, 15, False, MODEL), costs, steady((0.9,), 12), 4000, watch=False).speedup > 3
    assert len([at for at in late if at > late[0] + 40]) > 200, "and stays on"


def test_a_false_alarm_is_left_alone_while_long_matches_are_verified():
    """Rows are nearly free here; the wait is not."""
    costs = DEVICES["H200"]
    planner = Planner(costs, 15, False, NGRAM)
    planned(planner, costs, bursty(40, 20, 0.5, 13), 2000, watch=True)
    assert planner.plan(2000, (2.0, 3.0, 4.0)).nodes == 0
    assert planner.plan(2000, tuple(map(float, range(20, 35)))).nodes == 15


def test_nothing_of_a_job_but_the_times_reaches_the_next():
    costs = DEVICES["H200"]
    fresh, used = Planner(Measured(costs), 15, True, NGRAM), Planner(Measured(costs), 15, True, NGRAM)
    planned(used, costs, BURSTY["false alarms"], 500, watch=True)
    planned(used, costs, steady((0.9, 0.1), 3, 0.5), 500, watch=False)
    assert used.figures() != fresh.figures()
    used.begin()
    assert used.figures() == fresh.figures() == Planner(costs, 15, True, NGRAM).figures()
    for text in (BURSTY["copies and new text"], STEADY["often a fork"]):
        one, other = (planned(planner, costs, text, 800, watch=True, jitter=5) for planner in (fresh, used))
        assert one == other
        assert fresh.figures() == used.figures()
        fresh.begin()
        used.begin()


def test_what_a_job_measured_of_the_costs_outlives_it():
    costs = DEVICES["H200"]
    planner = Planner(costs, 15, False, MODEL)
    for _ in range(200):
        plan = planner.plan(0, (1.0,) * 15)
        planner.told(plan, plan.depth, 3 * price(costs, plan.nodes) if plan.nodes else price(costs, 0))
    slow = planner.measured.steps(0)[15]
    assert slow > 2 * costs.forward(0, 16)
    planner.begin()
    assert planner.measured.steps(0)[15] == slow
    assert Planner(planner.measured, 15, False, MODEL).measured.steps(0)[15] == slow
    assert planner.measured.steps(0)[0] == costs.forward(0, 1), "the plain step has its own times"


@pytest.mark.parametrize(("times", "steps"), [(200, 1), (1000, 4), (3, 40)])
@pytest.mark.parametrize("traits", [NGRAM, GAPS], ids=["watched", "asked"])
@pytest.mark.parametrize("device", ["H200", "M5 Max 70B", "M4 Pro matmul", "M1 Ultra 27B"])
def test_a_machine_that_was_busy_for_a_while_costs_no_later_job_its_drafts(device, traits, times, steps):
    """A stalled reader, a process that was stopped, another program on the device: then all is as it was."""
    costs, text = DEVICES[device], steady((0.95,), 12)

    def speedup(planner: Planner) -> float:
        planner.begin()
        return planned(planner, costs, text, 3000, watch=traits.free).speedup

    planner = Planner(costs, 15, False, traits)
    planned(planner, costs, text, 300, watch=traits.free)
    for at in range(steps):
        plan = planner.plan(at, (1.0,) * 15)
        planner.told(plan, plan.depth, times * price(costs, plan.nodes))
    speedup(planner)
    assert speedup(planner) >= 0.9 * speedup(Planner(costs, 15, False, traits))


def test_the_figures_count_what_was_told():
    planner = Planner(DEVICES["H200"], 15, True, MODEL)
    plans = [planner.plan(0, (1.0,) * 4), planner.plan(5, (1.0,) * 4)]
    assert [(plan.nodes, plan.depth) for plan in plans] == [(4, 4), (4, 4)]
    planner.told(plans[0], 4, 2.0)
    planner.told(plans[1], 1, 2.0)
    planner.told(planner.plan(9, ()), 0, 1.3)
    figures = planner.figures()
    assert figures | {"why": ""} == {
        "steps": 2, "drafted": 8, "accepted": 5, "drafted_by_depth": [2, 2, 2, 2], "accepted_by_depth": [2, 1, 1, 1],
        "fork_attempts": 0, "fork_wins": 0, "off_steps": 0, "offs": 0, "why": "",
    }  # fmt: skip


def test_forks_are_learnt_where_the_trunk_missed_at_their_depth():
    planner = Planner(DEVICES["H200"], 15, True, MODEL)
    text = steady((0.3, 0.3), 21, 0.9)
    planned(planner, DEVICES["H200"], text, 400, watch=False)
    figures = planner.figures()
    assert figures["fork_wins"] > 20
    assert planner.plan(400, (1.0,) * 15, (1,)).forks == 1
    plan = planner.plan(400, (1.0,) * 15, (1,))
    assert plan.nodes == plan.depth + MODEL.branch
    assert planner.plan(400, (1.0,) * 15, ()).forks == 0
    chains = Planner(DEVICES["H200"], 15, False, MODEL)
    planned(chains, DEVICES["H200"], text, 400, watch=False)
    assert chains.figures()["fork_attempts"] == 0


def test_a_limit_of_0_and_an_empty_proposal_are_plain_steps():
    assert Planner(DEVICES["H200"], 0, True, MODEL).plan(0, (9.0,)).nodes == 0
    planner = Planner(DEVICES["H200"], 15, True, MODEL)
    assert planner.plan(0, ()).nodes == 0
    assert 0 < planner.plan(0, None).nodes <= 15, "a drafter that has yet to draft is asked for so many"
    assert Planner(DEVICES["H200"], 3, True, MODEL).plan(0, None).nodes == 3


def test_costs_are_read_between_contexts_rows_and_compiled_sizes():
    costs = Costs((1, 2, 4, 8), (0, 1000), ((1, 2, 4, 8), (3, 4, 6, 10)), 0.5, 0.1, (1, 2, 4, 8, 16))
    assert costs.forward(0, 3) == 4
    assert costs.forward(500, 5) == 9
    assert costs.forward(9000, 1) == 3
    assert costs.forward(0, 16) == 16
    assert Costs((1, 4), (0,), ((1, 4),), 0.0).forward(7, 3) == 3
    steps = Measured(costs).steps(10)
    assert steps[0] == pytest.approx(costs.forward(128, 1))
    assert steps[2] == pytest.approx(costs.forward(128, 3) + 0.5 + 0.2)


@pytest.mark.parametrize("device", ["H200", "M5 Max 70B", "M4 Pro matmul", "M1 Ultra 27B", "CPU"])
def test_over_real_texts_it_gains_where_they_copy_and_loses_nothing_elsewhere(device):
    costs = DEVICES[device]
    for text in texts():
        planner = Planner(costs, 15, True, NGRAM)
        spent, figures = follow(planner, text.prompt, text.answer, costs, 2 if device == "H200" else 0)
        assert spent.speedup >= 0.985, text.kind
        if text.kind == "code edit" and device == "H200":
            assert spent.speedup > 2.5
        assert figures["accepted"] == sum(figures["accepted_by_depth"])


def test_a_round_of_the_rig_is_what_a_drafter_would_say():
    assert steady((1.0,), 1)(0) == Round((1.0,) * 15, 15)
