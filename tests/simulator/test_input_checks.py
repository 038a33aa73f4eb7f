"""Tests that ebbtide's Python API refuses arguments of a wrong type or value, with an error that states the rule."""

import pytest
from ebbtide.simulator import ModelError, Quantity, build_strategy, simulate, workload_from_model

from tests.machines import machine, node, workload

GPT = {"layers": 2, "hidden": 256, "heads": 8, "kv_heads": 2, "vocabulary": 500}


def estimated(**arguments):
    on = node(device_flops_per_s=Quantity.exact(1e14), gpus_per_node=16)
    return workload_from_model(GPT, on, **{"sequence": 64, **arguments})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"precision": "fp8"}, "precision must be one of bf16, fp16, fp32, but got 'fp8'"),
        ({"activation_checkpointing": True}, "must be 'full' .* or 'none', but got True"),
        ({"activation_checkpointing": "some"}, "must be 'full' .* 'selective' .* but got 'some'"),
        ({"kernels": "compiled"}, "kernels must be one of fused, eager, but got 'compiled'"),
        ({"fused_loss": "yes"}, "fused_loss must be True or False, but got 'yes'"),
        ({"recompute_share": 0}, r"recompute_share must lie in \(0, 1\], but got 0"),
        ({"flash_attention": "no"}, "flash_attention must be True or False, but got 'no'"),
        ({"flash_version": True}, "flash_version must be one of 1, 2, 3, 4, but got True"),
        ({"flash_version": 5}, "flash_version must be one of 1, 2, 3, 4, but got 5"),
        ({"sequence_parallel": 1}, "sequence_parallel must be True or False, but got 1"),
        ({"sequence_parallel": True}, "must be False without tensor parallelism"),
        ({"sequence": True}, "sequence must be a whole number >= 1, but got True"),
        ({"data_parallel": True}, "data_parallel must be a whole number >= 1, but got True"),
        ({"tensor_parallel": 16}, "tensor_parallel must divide the 8 attention heads, but got 16"),
    ],
)
def test_arguments_of_a_workload(arguments, says):
    with pytest.raises(ModelError, match=says):
        estimated(**arguments)


def test_tensor_parallelism_may_be_a_multiple_of_the_key_value_heads():
    assert estimated(tensor_parallel=4, sequence_parallel=True).params < estimated().params


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("twin_flow", {"ratio": "0.5"}, "ratio must be a number, but got '0.5'"),
        ("twin_flow", {"ratio": True}, "ratio must be a number, but got True"),
        ("twin_flow", {"pinned": 0}, "pinned must be True or False, but got 0"),
        ("twin_flow", {"pinned": False, "async_gradients": False}, "async_gradients must be True"),
        ("deep_optimizer_states", {"stride": 2.5}, "stride must be a whole number, but got 2.5"),
        ("deep_optimizer_states", {"stride": 10**9}, "stride must be at most 100, .* no subgroup"),
        ("zero3_offload", {"iterations": 0}, "iterations must be >= 1, but got 0"),
        ("zero3_offload", {"iterations": 1.0}, "iterations must be a whole number, but got 1.0"),
        ("zero_infinity", {"pipelined": "no"}, "pipelined must be True or False, but got 'no'"),
        ("superoffload", {"clip": "yes"}, "clip must be True or False, but got 'yes'"),
        ("ebbtide", {"plan": "auto"}, "plan must be a Plan .* but got 'auto'"),
        ("ebbtide", {"threads": 1}, "'ebbtide' takes the options iterations, plan, but got 'threads'"),
        ("ebbtide", {"plan": {}}, "plan must be a Plan .* but got {}"),
    ],
)
def test_options_of_a_strategy(name, options, says):
    with pytest.raises(ValueError, match=says):
        build_strategy(name, workload(), **options)


def test_none_leaves_an_option_that_has_it_at_its_default():
    assert build_strategy("superoffload", workload(), clip=None)
    assert build_strategy("ebbtide", workload(), plan=None)


@pytest.mark.parametrize("name", ["zero3_offload", "ebbtide", "no_offload", "zero_infinity"])
def test_more_micro_batches_than_memory_is_for_are_refused_before_they_are_built(name):
    work = workload(gradient_accumulation_steps=10**6)
    with pytest.raises(ValueError, match="steps must be at most 41,666 to simulate"):
        build_strategy(name, work)


def test_a_simulation_is_of_a_schedule_on_a_machine():
    schedule = build_strategy("zero3_offload", workload())
    with pytest.raises(ValueError, match=r"schedule must be of type Schedule, but got <Workload: "):
        simulate(workload(), machine())
    with pytest.raises(ValueError, match=r"machine must be of type Machine, but got None"):
        simulate(schedule, None)
