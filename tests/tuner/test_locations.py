"""Tests of the parameter locations (GPU or host memory) that the plan search chooses for the 16-bit parameters."""

import ebbtide.tuner
import numpy as np
import pytest
from ebbtide.simulator import build_schedule, preset, simulate, workload_from_model
from ebbtide.simulator.analysis.bounds import Bounds, lower_bound
from ebbtide.simulator.analysis.many_plans import PlanSweep
from ebbtide.simulator.engines import summary
from ebbtide.simulator.limits import GIB, Limits
from ebbtide.simulator.update.holding import GRADIENTS_UNDER_WAY_BYTES
from ebbtide.simulator.update.recipes import RECIPES
from ebbtide.tuner.placements import planning
from ebbtide.tuner.placements.candidate import Candidate, seconds_of
from ebbtide.tuner.placements.decision import LARGE, PlanQuestion
from ebbtide.tuner.placements.shares import spaced

from studies.optimality.pairs import random_pair
from tests.machines import node as machine
from tests.tuner.test_search import workload


def test_those_that_leave_are_evenly_spaced():
    assert spaced(4, 0) == ()
    assert spaced(6, 2) == ("device", "device", "host") * 2
    assert spaced(5, 5) == ("host",) * 5
    assert all(spaced(97, n).count("host") == n for n in range(1, 98))


def whole(subgroups=40):
    """Return a workload for the plan search in which the 16-bit parameters are the only memory that the GPU uses
    throughout an iteration (`device_base_bytes`).
    """
    work = workload(subgroups)
    return work.model_copy(update={"device_base_bytes": work.params * work.wire_bytes})


def test_what_would_not_fit_otherwise_is_planned_with_parameters_in_host_memory():
    work, have = whole(), machine()
    activations = sum(layer.activation_bytes for layer in work.layers)
    room = work.device_base_bytes // 2 + activations + GRADIENTS_UNDER_WAY_BYTES
    found = ebbtide.tuner.plan(work, have, device_memory_bytes=room, memory_margin=0.0)
    assert found.parameter_locations.count("host") > 0
    timeline = simulate(build_schedule(work, found), have)
    assert timeline.device_peak_bytes <= room
    assert found.prediction.iteration_s == pytest.approx(timeline.iteration_s, rel=1e-9)
    assert found.prediction.lower_bound_s <= found.prediction.iteration_s
    assert any("With all of them on the GPU nothing fits" in why for why in found.reasons)
    assert found.alternatives[0].strategy.endswith("offload_param cpu"), "stock has to offload parameters too"


def test_with_room_for_them_parameters_stay_unless_they_may_leave():
    work, have = whole(), machine()
    room = work.device_base_bytes + 5 * GIB
    stay = ebbtide.tuner.plan(work, have, device_memory_bytes=room, offload_parameters=False)
    free = ebbtide.tuner.plan(work, have, device_memory_bytes=room, offload_parameters=True)
    assert "host" not in stay.parameter_locations
    assert free.prediction.iteration_s <= stay.prediction.iteration_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(2))
def test_no_plan_is_faster_than_the_bound_of_its_locations(seed):
    rng = np.random.default_rng(seed)
    for _ in range(2):
        work, have = random_pair(rng, counts=(6, 24))
        work = work.model_copy(update={"clip_rate": 1.0})  # with this clip rate, no update begins early
        sweep, count = PlanSweep(work, have, iterations=9), len(work.subgroups)
        for number in range(6):
            locations = spaced(count, int(rng.integers(1, count + 1)))
            c = Candidate.of(rng.choice(list(RECIPES), count), 2, 1, locations)
            seconds = seconds_of(sweep, c)
            row = sweep.evaluate_plan(c.plan(work))
            device, host, stored = (int(row[i]) for i in (summary.DEVICE_PEAK, summary.HOST_PEAK, summary.STORED))
            limits = Limits(device, host, storage_bytes=stored or None)
            away = sum(n for n, there in zip(work.subgroups, locations, strict=True) if there == "host")
            here = lower_bound(work, have, limits, away=away).iteration_s
            assert here <= seconds * (1 + 1e-6)
            if not number:  # the first plan of a pair
                assert lower_bound(work, have, limits).iteration_s <= here * (1 + 1e-4)


def test_the_advice_on_the_subgroup_size_moves_no_parameters_that_must_stay():
    have = preset("rtx4090")
    work = workload_from_model("Llama 3 8B", have, sequence=1024)
    asked = {"offload_parameters": False, "effort": 0.1}
    reasons = ebbtide.tuner.plan(work, have, subgroup_sizes=(), **asked).reasons
    advice = next(reason for reason in reasons if "smaller subgroups" in reason)
    finer = ebbtide.tuner.plan(work, have, **asked).prediction.iteration_s
    assert advice.endswith(f"an iteration takes {finer * 1e3:.0f} ms")


def test_no_smaller_subgroups_are_searched_for_where_the_search_varied_their_size(monkeypatch):
    have = preset("rtx4090")
    question = PlanQuestion.of(workload_from_model("Llama 3 8B", have, sequence=1024), have, effort=0.05)
    whole = question.search(question.cuts[0], Bounds())
    assert whole.workload.subgroup_size > LARGE
    monkeypatch.setattr(planning, "decide", None)
    assert planning.about_subgroups(whole, question) == []
