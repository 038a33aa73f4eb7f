"""Tests that no flag of `tune plan` can build a plan whose predicted peak memory exceeds the plan's own limits."""

import ebbtide.tuner
import pytest
from ebbtide.simulator import Layer, Plan, Workload
from ebbtide.simulator.limits import GIB, Limits
from ebbtide.simulator.plan import Prediction
from ebbtide.simulator.rules import RuleError
from ebbtide.tuner.answer.rows import alternatives, compare
from ebbtide.tuner.placements.division import ImpossibleError
from ebbtide.tuner.placements.planning import quick_plan
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.machines import node

HOST_GIB = 40
# Without shrinking, which would take a search per attempt, and minutes in total.
NO_SHRINK = (Phase.explicit, Phase.reuse, Phase.generate)


def workload(subgroups=4, micro_batches=1):
    size = 2 * 10**8
    layer = Layer(params=size, forward_s=0.02, backward_s=0.04, activation_bytes=10**8)
    return Workload(
        name="w",
        layers=(layer,) * subgroups,
        subgroups=(size,) * subgroups,
        device_base_bytes=2 * GIB,
        subgroup_size=size,
        parameters=((size,) * subgroups,),
        gradient_accumulation_steps=micro_batches,
    )


def prediction(**changes):
    fields = {
        "iteration_s": 1.0,
        "iteration_low_s": 1.0,
        "iteration_high_s": 1.0,
        "forward_s": 0.3,
        "backward_s": 0.3,
        "step_s": 0.4,
        "update_s": 0.4,
        "device_peak_bytes": 10,
        "host_peak_bytes": 10,
        "limits": {"device": 10, "host": 10},
    }
    return Prediction(**(fields | changes))


@settings(max_examples=20, deadline=None, phases=NO_SHRINK)
@given(
    device_gib=st.floats(4, 40),
    host_gib=st.floats(8, HOST_GIB),
    subgroups=st.integers(1, 9),
    micro_batches=st.sampled_from([1, 3]),
    robust=st.booleans(),
    margin=st.sampled_from([None, 0.0, 0.3]),
    offload_parameters=st.booleans(),
    sizes=st.sampled_from([None, (10**8,)]),
    mtbf_s=st.sampled_from([None, 3600.0]),
    storage_gb=st.sampled_from([None, 1, 100]),
)
@example(4.0, 40.0, 2, 1, True, None, False, None, None, None)  # here, the fastest of few candidates do not fit
def test_no_flag_makes_a_plan_that_does_not_fit(
    device_gib, host_gib, subgroups, micro_batches, robust, margin, offload_parameters, sizes, mtbf_s, storage_gb
):
    work = workload(subgroups, micro_batches)
    have = node(device_memory_bytes=40 * GIB, host_memory_bytes=HOST_GIB * GIB)
    memory = {"device_memory_bytes": int(device_gib * GIB), "host_memory_bytes": int(host_gib * GIB)}
    try:
        made = ebbtide.tuner.plan(
            work,
            have,
            **memory,
            robust=robust,
            memory_margin=margin,
            offload_parameters=offload_parameters,
            subgroup_sizes=sizes,
            mtbf_s=mtbf_s,
            storage=storage_gb and {"/drive": storage_gb * 10**9},
        )
    except ImpossibleError:
        return
    bare = Limits.of(work, have, **memory, margin=margin)
    assert made.prediction.device_peak_bytes <= bare.device_bytes
    assert made.prediction.host_peak_bytes <= bare.host_bytes
    assert made.prediction.fits
    for other in made.alternatives:
        within = other.device_peak_bytes <= bare.device_bytes and other.host_peak_bytes <= bare.host_bytes
        assert other.fits == within or other.storage_bytes, other.strategy
        assert other.fits == (not other.note), other.strategy


@settings(max_examples=10, deadline=None, phases=NO_SHRINK)
@given(device_gib=st.floats(4, 40), host_gib=st.floats(8, HOST_GIB), subgroups=st.integers(1, 9))
def test_nor_does_the_quick_plan(device_gib, host_gib, subgroups):
    work, have = workload(subgroups), node(device_memory_bytes=40 * GIB, host_memory_bytes=HOST_GIB * GIB)
    limits = Limits.of(work, have, int(device_gib * GIB), int(host_gib * GIB))
    try:
        made = quick_plan(work, have, limits)
    except ImpossibleError:
        return
    assert made.prediction.device_peak_bytes <= limits.device_bytes
    assert made.prediction.host_peak_bytes <= limits.host_bytes
    for other in alternatives(compare(work, have, limits, made)):
        assert other.fits == (not limits.missing(other.device_peak_bytes, other.host_peak_bytes))


@pytest.mark.parametrize("peak", ["device_peak_bytes", "host_peak_bytes"])
def test_a_plan_beyond_its_limits_is_refused_however_it_is_built(peak):
    plan = Plan(subgroup_size=1, placement=Plan.runs(["host"]), prediction=prediction())
    beyond = prediction(**{peak: 11})
    assert not beyond.fits
    for build in (
        lambda: Plan(subgroup_size=1, placement=Plan.runs(["host"]), prediction=beyond),
        lambda: plan.model_copy(update={"prediction": beyond}),
        lambda: Plan.model_validate({**plan.model_dump(), "prediction": beyond.model_dump()}),
    ):
        with pytest.raises((ValidationError, RuleError), match="does not fit"):
            build()


def test_device_and_host_memory_that_are_one_must_hold_both_peaks():
    assert prediction(limits={"host": 20}).fits
    assert not prediction(limits={"host": 19}).fits
    assert not prediction(limits={"host": 99, "storage": 5}, storage_bytes=6).fits


def test_a_prediction_of_an_older_plan_file_fits_unless_its_note_says_what_it_lacks():
    assert prediction(limits={}).fits
    assert not prediction(limits={}, note="needs 1.0 GiB more GPU memory").fits
