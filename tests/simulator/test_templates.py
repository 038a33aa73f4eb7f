"""Tests of the simulator's schedule templates: a template with new times written into it equals, bit for
bit, the schedule that is built for these times.
"""

from dataclasses import replace

import numpy as np
import pytest
from ebbtide.simulator import Layer, Plan, Workload, build_strategy, preset
from ebbtide.simulator.analysis.templates import RETIMED_LAYER, RETIMED_WORKLOAD, Template, Templates
from ebbtide.simulator.engines.compiled import compile_schedule, simulate_fast
from ebbtide.simulator.schedule import OpKind
from ebbtide.simulator.schedules.strategies import STRATEGIES
from ebbtide.simulator.workload import UNDER_PLANS

ON = preset("h100-node")
PLAN = Plan(
    subgroup_size=300,
    placement=Plan.runs(["host", "device", "resident", "host", "device"]),
    staging_slots=2,
    prefetch=1,
)
OPTIONS = {"deep_optimizer_states": {"stride": 2}, "twin_flow": {"ratio": 0.4}}


def workload(seed=0, zero_stage=3, **changes):
    """Return a workload of five subgroups over four layers, with random times that depend on the seed."""
    rng = np.random.default_rng(seed)
    layers = tuple(
        Layer(
            name=f"layer {i} of {seed}",
            params=params,
            forward_s=rng.uniform(1e-3, 2e-3),
            backward_s=rng.uniform(2e-3, 3e-3),
            activation_bytes=int(rng.integers(10**6)),
            network_gather_bytes=1000 * i * (zero_stage == 3),
            network_reduce_bytes=2000 * i,
        )
        for i, params in enumerate((400, 350, 0, 650))
    )
    fields = {
        "name": f"of {seed}",
        "zero_stage": zero_stage,
        "layers": layers,
        "subgroups": (300, 300, 300, 300, 200),
        "gradient_accumulation_steps": 2,
        "pipeline_idle_s": rng.uniform(1e-3, 2e-3),
        "device_base_bytes": int(rng.integers(10**9)),
        "tokens_per_iteration": 100 + seed,
        "samples_per_iteration": 1 + seed,
        "nodes": 1 + seed,
        "subgroup_size": 100 + seed,
        "model_checkpoint_bytes": seed,
        "provenance": str(seed),
    }
    return Workload(**{**fields, **changes})


def assert_as_built(templates, name, options, of):
    made = templates.compiled(name, of, options)
    built = compile_schedule(build_strategy(name, of, **options))
    for field in ("ops", "after_first", "after"):
        np.testing.assert_array_equal(getattr(made, field), getattr(built, field))
    assert made.rate_keys == built.rate_keys
    assert simulate_fast(made, ON) == simulate_fast(built, ON)


def counting():
    built = []

    def build(name, of, **options):
        built.append(name)
        return build_strategy(name, of, **options)

    return Templates(build), built


def options_of(name):
    return {"plan": PLAN} if name == "ebbtide" else OPTIONS.get(name, {})


def stage_of(name):
    return 2 if name == "zero_offload" else 3


@pytest.mark.parametrize("name", STRATEGIES)
def test_other_times_are_those_that_would_be_built(name):
    templates, _ = counting()
    for seed in range(4):
        assert_as_built(templates, name, options_of(name), workload(seed, stage_of(name)))


RETIMED = (
    "zero3_offload",
    "zero3_offload_async",
    "twin_flow",
    "deep_optimizer_states",
    "superoffload",
    "no_offload",
    "ebbtide",
)


@pytest.mark.parametrize("name", RETIMED)
def test_other_times_need_no_further_build(name):
    templates, built = counting()
    for seed in range(5):
        assert_as_built(templates, name, options_of(name), workload(seed))
    assert len(built) == 2, "one build makes the template and one checks it"


def test_times_where_no_template_looks_are_always_built():
    # The strategy in this test adds this forward time to the work of its CPU updates too. A template would not replace
    # it there.
    built = []

    def build(name, of, **options):
        built.append(of.name)
        made = build_strategy(name, of, **options)
        ops = [
            op._replace(work=op.work + of.layers[0].forward_s) if op.kind == OpKind.UPDATE_HOST else op
            for op in made.ops
        ]
        return replace(made, ops=tuple(ops))

    templates = Templates(build)
    for seed in range(4):
        of = workload(seed)
        made = templates.compiled("zero3_offload", of, {})
        np.testing.assert_array_equal(made.ops, compile_schedule(build("zero3_offload", of)).ops)
    assert len(built) == 8
    other = workload(3, pipeline_idle_s=workload(0).pipeline_idle_s + 1)
    templates.compiled("zero3_offload", other, {})
    assert len(built) == 9


CHANGES = {
    "wire_dtype": "fp32",
    "grad_bytes_per_param": 4,
    "optimizer": "lion",
    "clip": False,
    "gradient_accumulation_steps": 3,
    "ranks_per_node": 2,
    "pipeline_idle_s": 0.0,
    "stock_backward_extra_s": 0.5,
    "stock_threads": 2,
    "live_params": 600,
    "module_issue_s": 1.0,
    "step_issue_s": 1.0,
    "planned_step_issue_s": 0.5,
    "fetched_step_issue_s": 0.7,
    "state_stays": True,
    "subgroups": (500, 300, 200, 200, 200),
    "reduced_beside": 0.3,
    "reduce_bucket_params": 500,
    "planned_bucket_params": 400,
    "parameters": ((700, 700),),
    "layers": (*workload().layers[:3], workload().layers[3].model_copy(update={"network_gather_bytes": 7})),
}
BELOW = {"zero_stage": 1, "step_gather_s": 0.25, "network_step_gather_bytes": 3000}


@pytest.mark.parametrize(
    ("name", "change"),
    [*((name, change) for name in RETIMED for change in CHANGES), *(("zero_offload", change) for change in BELOW)],
)
def test_another_structure_is_another_template(name, change):
    templates, built = counting()
    stage = stage_of(name)
    assert_as_built(templates, name, options_of(name), workload(0, stage))
    changes = {"zero_stage": stage, change: {**CHANGES, **BELOW}[change]}
    assert_as_built(templates, name, options_of(name), workload(1, **changes))
    assert len(built) == len(templates._held) == 2


@pytest.mark.parametrize("kind", UNDER_PLANS)
@pytest.mark.parametrize("name", ["zero3_offload", "ebbtide"])
def test_times_under_a_plan_are_those_of_a_plan(name, kind):
    templates, planned = Templates(build_strategy), workload(1)
    own = {kind + "forward_s": 1e-4, kind + "backward_s": 2e-4}
    layers = tuple(layer.model_copy(update=own) for layer in planned.layers)
    # All other times have been found replaceable when the first ones under a plan come.
    for of in (workload(0), workload(1), planned.model_copy(update={"layers": layers}), workload(2)):
        assert_as_built(templates, name, options_of(name), of)


def test_every_field_is_either_written_anew_or_told_apart():
    assert {*CHANGES, *BELOW, *RETIMED_WORKLOAD} == set(Workload.model_fields)
    told_apart = {"params", "params_of_others", "unhidden_s", "persistent_params", "regathered_params"}
    told_apart |= {"network_gather_bytes", "network_reduce_bytes"}
    assert {*told_apart, *RETIMED_LAYER} == set(Layer.model_fields)


def test_the_oldest_go_and_a_large_one_is_not_kept():
    size = Template.of(build_strategy("twin_flow", workload()), workload()).size_bytes
    built = []

    def build(name, of, **options):
        built.append(options["ratio"])
        return build_strategy(name, of, **options)

    templates = Templates(build, most_bytes=5 * size)
    ratios = [0.1, 0.2, 0.3, 0.4, 0.1, 0.6, 0.7, 0.1, 0.2]
    for ratio in ratios:
        assert_as_built(templates, "twin_flow", {"ratio": ratio}, workload())
    assert built == [0.1, 0.2, 0.3, 0.4, 0.6, 0.7, 0.2], "0.1 was used lately, 0.2 was not"
    built.clear()
    small = Templates(build, most_bytes=3 * size)
    for _ in range(2):
        assert_as_built(small, "twin_flow", {"ratio": 0.5}, workload())
    assert built == [0.5, 0.5]


def test_plans_that_are_shown_alike_have_schedules_of_their_own():
    templates, early = Templates(build_strategy), PLAN.with_bits(early=True)
    assert repr(early) == repr(PLAN)
    for plan in (PLAN, early):
        expected = compile_schedule(build_strategy("ebbtide", workload(), plan=plan))
        assert np.array_equal(templates.compiled("ebbtide", workload(), {"plan": plan}).ops, expected.ops)
