"""Tests that `tune search` and re-planning during training find their plans by ebbtide's common plan search
(`ebbtide.tuner.placements.decision`), and not by a search of their own.
"""

import ebbtide
import pytest
from ebbtide.simulator.estimates.estimate import estimated
from ebbtide.simulator.estimates.presets import preset
from ebbtide.tuner.placements import decision
from ebbtide.tuner.placements.decision import QUICK, PlanQuestion, decide
from ebbtide.tuner.placements.search import Search

from studies.one_answer.__main__ import _job, replanned_s, search_s

JOBS = [
    ("Llama 3.2 3B", "rtx4090", {}),
    ("Llama 3.2 1B", "rtx4090", {"zero_stage": 2, "accumulation": 2}),
    ("Qwen3 8B", "h100-node", {"gpus": 4}),
]


@pytest.fixture
def outside(monkeypatch):
    """Yield the list of searches that begin outside of `decision._searches`, with which quick and full decisions begin
    all their searches. Fail if a test never calls this function.
    """
    deciding, began, inside, outside, calls = decision._searches, Search.__init__, [], [], []

    def counted(*args, **options):
        inside.append(1)
        calls.append(1)
        try:
            return deciding(*args, **options)
        finally:
            inside.pop()

    def noted(search, *args, **options):
        if not inside:
            outside.append(args)
        began(search, *args, **options)

    monkeypatch.setattr(decision, "_searches", counted)
    monkeypatch.setattr(Search, "__init__", noted)
    yield outside
    assert calls


@pytest.mark.parametrize(("model", "name", "about"), JOBS[1:])
def test_a_search_of_configurations_and_a_live_plan_give_the_decisions_answer(model, name, about, outside):
    machine = preset(name)
    work = estimated(_job(model, about), machine)
    quick = decide(PlanQuestion.of(work, machine, effort=QUICK))
    assert search_s(model, about, machine, None) == pytest.approx(quick.iteration_s, rel=0.005)
    made = ebbtide.plan(work, machine, effort=QUICK)
    assert replanned_s(work, machine, made) <= 1.05 * quick.iteration_s
    assert not outside


def test_more_effort_is_never_slower():
    model, name, about = JOBS[0]
    machine = preset(name)
    work = estimated(_job(model, about), machine)
    less, more = (decide(PlanQuestion.of(work, machine, effort=e, subgroup_sizes=())) for e in (QUICK, 2 * QUICK))
    assert more.iteration_s <= less.iteration_s
