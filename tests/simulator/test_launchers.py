"""Tests of the number of threads that the simulator assumes for DeepSpeed's CPU updates.

The number depends on the launcher: for several ranks, `torchrun` and `accelerate launch` set ``OMP_NUM_THREADS=1``.
"""

import pytest
from ebbtide.simulator import ModelError, Plan, build_strategy, preset, simulate
from ebbtide.simulator.engines.compiled import simulate_fast
from ebbtide.simulator.estimates.estimate import estimated
from ebbtide.simulator.estimates.job import LAUNCHERS, Job, started
from ebbtide.simulator.estimates.presets import SHEETS, STOCK_UPDATE_BYTES
from ebbtide.simulator.quantity import Quantity
from ebbtide.tuner.inputs import options_of
from ebbtide.tuner.placements.planning import plan
from ebbtide.tuner.quantities import seconds_text
from ebbtide.tuner.service.requests import Scenario, workload_of
from pydantic import ValidationError

from tests.machines import node, workload

LLAMA = {"layers": 8, "hidden": 2048, "heads": 16, "vocabulary": 32000}


def threads(ranks, **how):
    job = Job.of_deepspeed(LLAMA, data_parallel=ranks, **how)
    return estimated(job, preset("h100-node")).stock_threads


def test_torchrun_leaves_one_thread_where_a_node_has_several_ranks():
    assert threads(4, launcher="torchrun") == threads(4, launcher="accelerate") == 1
    assert threads(1, launcher="torchrun") is None
    assert threads(4, launcher="torchrun", omp_threads=12) == threads(4, omp_threads=12) == 12
    assert [threads(4, launcher=name) for name in ("deepspeed", "srun", "python")] == [None] * 3
    with pytest.raises(ModelError, match=r"launcher must be one of deepspeed, .* got 'slurm'"):
        threads(4, launcher="slurm")


def test_a_profiled_workload_is_started_otherwise():
    four = workload((8,) * 4, 1.0, 1.0, ranks_per_node=4)
    assert started(four, "torchrun").stock_threads == 1
    assert started(started(four, "torchrun"), "deepspeed").stock_threads is None


def test_threads_slow_stock_and_its_peers_and_nothing_else():
    # One thread updates a quarter as many parameters per second as all cores, so an update of 1 s takes 4 s.
    on = node(
        stock_host_adam_params_per_s=Quantity.exact(1e9),
        cpu_cores=8,
        stock_host_adam_thread_params_per_s=Quantity.exact(0.25e9),
        dram_bytes_per_s=Quantity.exact(1e13),
    )
    usual = workload((10**9,), 0.1, 0.2)
    slow = usual.model_copy(update={"stock_threads": 1})
    half = usual.model_copy(update={"stock_threads": 2})

    def iteration_s(work, name="zero3_offload", **options):
        schedule = build_strategy(name, work, **options)
        seconds = simulate(schedule, on).iteration_s
        assert simulate_fast(schedule, on).iteration_s == pytest.approx(seconds, rel=1e-9)
        return seconds

    assert iteration_s(slow) - iteration_s(usual) == pytest.approx(3.0)  # 4 s instead of 1 s
    assert iteration_s(half) - iteration_s(usual) == pytest.approx(1.0)  # 2 s instead of 1 s
    assert iteration_s(slow, "twin_flow") > iteration_s(usual, "twin_flow") + 1
    held = Plan(subgroup_size=10**9, placement=Plan.runs(["host"]), staging_slots=0)
    assert iteration_s(slow, "ebbtide", plan=held) == iteration_s(usual, "ebbtide", plan=held)
    assert iteration_s(slow, "no_offload") == iteration_s(usual, "no_offload")


def test_without_a_rate_of_one_thread_stock_loses_what_the_fused_kernel_does():
    on = node(
        stock_host_adam_params_per_s=Quantity.exact(1e9),
        cpu_cores=8,
        host_adam_params_per_s=Quantity.exact(2e9),
        host_adam_by_threads={1: Quantity.exact(0.5e9), 8: Quantity.exact(2e9)},
    )
    assert on.stock_host_adam_rate(1) == pytest.approx(0.25e9)
    assert on.op_rate("stock_host_adam_params_per_s", 8) == 1e9


@pytest.mark.parametrize("name", sorted(SHEETS))
def test_one_core_draws_less_than_all_and_more_cores_reach_them(name):
    on, sheet = preset(name), SHEETS[name]
    one = on.stock_host_adam_thread_params_per_s
    assert one.source == "assumed"
    assert one.median * STOCK_UPDATE_BYTES <= 1.001 * sheet.core[0]
    assert one.median < on.rate("stock_host_adam_params_per_s")
    assert on.stock_host_adam_rate(sheet.cores) == on.rate("stock_host_adam_params_per_s")


def test_the_comparison_says_what_one_thread_costs():
    on = preset("h100-node")
    job = Job.of_deepspeed(LLAMA, data_parallel=4, launcher="torchrun")
    found = plan(estimated(job, on), on)
    assert found.alternatives[0].strategy == "stock ZeRO-3 offload, 1 thread a rank, offload_param cpu"
    (told,) = [reason for reason in found.reasons if "OMP_NUM_THREADS" in reason]
    usual = plan(estimated(job.changed(launcher="deepspeed"), on), on)
    assert f"it takes {seconds_text(usual.alternatives[0].iteration_s)}" in told
    assert f"of its {seconds_text(found.alternatives[0].iteration_s)}." in told
    assert "OMP_NUM_THREADS=24" in told
    assert found.alternatives[0].iteration_s > 1.5 * usual.alternatives[0].iteration_s
    assert found.prediction.iteration_s == usual.prediction.iteration_s


def test_a_scenario_of_the_service_tells_its_launcher():
    asked = {"machine": "h200"}
    on = preset("h200")
    model = Scenario(**asked, gpus=4, model="Llama 3.2 1B", launcher="torchrun")
    assert workload_of(model, on).stock_threads == 1
    assert workload_of(model.model_copy(update={"omp_threads": 6}), on).stock_threads == 6
    four = workload((8,) * 4, 1.0, 1.0, ranks_per_node=4)
    profiled = Scenario(**asked, workload=four, launcher="accelerate")
    assert workload_of(profiled, on).stock_threads == 1
    with pytest.raises(ValidationError, match="launcher"):
        Scenario(**asked, model="Llama 3.2 1B", launcher="bash")


def test_the_flag_knows_every_launcher():
    (flag,) = options_of(["launcher"])
    assert tuple(flag.type.choices) == LAUNCHERS
