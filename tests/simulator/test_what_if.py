"""Tests of `what_if`, which simulates a table of what-if cases: each row equals the simulator's result,
bad input is refused before anything runs, and Ctrl-C keeps the finished rows.
"""

import math

import pytest
from ebbtide import what_if
from ebbtide.simulator import Layer, Plan, Workload, build_strategy, simulate
from ebbtide.simulator.analysis.best_setting import simulated
from ebbtide.simulator.analysis.bounds import lower_bound
from ebbtide.simulator.limits import UNKNOWN_MARGIN, Limits
from ebbtide.simulator.update.way import Way
from ebbtide.tuner import plan

from tests.machines import node

GIB = 2**30


def machine(**changes):
    copies = {"host_copy_bytes_per_s": 1e11, "pageable_h2d_bytes_per_s": 2e10}
    return node(host_memory_bytes=64 * GIB, **{**copies, **changes})


def workload(**fields):
    layer = Layer(params=10**8, forward_s=0.01, backward_s=0.02, activation_bytes=10**8)
    values = {"device_base_bytes": 4 * GIB, "tokens_per_iteration": 4096} | fields
    return Workload(name="w", layers=(layer,) * 10, subgroups=(10**8,) * 10, **values)


def test_a_row_is_what_the_simulator_says():
    table = what_if(workload(), machine(), [("twin_flow", {"ratio": 0.5}), "zero3_offload"])
    assert list(table.strategy) == ["twin_flow", "zero3_offload"]
    for _, row in table.iterrows():
        options = {"ratio": 0.5} if row.strategy == "twin_flow" else {}
        expected = simulate(build_strategy(row.strategy, workload(), **options), machine())
        assert row.iteration_s == pytest.approx(expected.iteration_s, rel=1e-9)
        assert row.device_peak_bytes == expected.device_peak_bytes
        assert row.tokens_per_s == pytest.approx(4096 / expected.iteration_s)
    assert table.setting[0] == "ratio=0.5"


@pytest.mark.parametrize(("stage", "stock"), [(1, "zero_offload"), (2, "zero_offload"), (3, "zero3_offload")])
def test_without_strategies_deepspeed_at_the_stage_of_the_workload_is_compared_with_ebbtide(stage, stock):
    table = what_if(workload(zero_stage=stage), machine(), n_jobs=1)
    assert list(table.strategy) == [stock, "ebbtide"]
    assert table.fits.all()


def test_the_grid_is_the_product_of_what_is_given():
    table = what_if(
        workload(),
        machine(),
        ["zero3_offload", "no_offload"],
        gpu_memory_bytes=[16e9, 24e9, 80e9],
        h2d_bytes_per_s=[25e9, 50e9],
    )
    assert len(table) == 12
    assert set(table.h2d_bytes_per_s) == {25e9, 50e9}
    assert len(table.drop_duplicates(["strategy", "gpu_memory_bytes", "h2d_bytes_per_s"])) == 12


def test_a_faster_link_is_never_slower_and_more_memory_neither():
    table = what_if(
        workload(), machine(), ["ebbtide"], gpu_memory_bytes=[8e9, 12e9, 30e9], h2d_bytes_per_s=[10e9, 100e9]
    )
    for _, rows in table.groupby("h2d_bytes_per_s"):
        times = rows.sort_values("gpu_memory_bytes").iteration_s.tolist()
        assert times == sorted(times, reverse=True)
        assert times[0] > times[-1], "memory must matter here"
    for _, rows in table.groupby("gpu_memory_bytes"):
        slow, fast = rows.sort_values("h2d_bytes_per_s").iteration_s
        assert fast <= slow


def test_no_row_that_fits_is_faster_than_its_bound_or_beyond_its_memory():
    table = what_if(workload(), machine(), ["ebbtide"], gpu_memory_bytes=[6e9, 10e9, 20e9])
    assert table.fits.all()
    assert (table.device_peak_bytes <= table.gpu_memory_bytes).all()
    assert (table.iteration_s >= table.lower_bound_s * (1 - 1e-9)).all()
    smaller = machine().with_rates(device_memory_bytes=10e9)
    expected = lower_bound(workload(), smaller, Limits.of(workload(), smaller)).iteration_s
    assert table.lower_bound_s[1] == pytest.approx(expected)


def test_what_does_not_fit_says_how_much_is_missing():
    table = what_if(workload(), machine(), ["no_offload"], gpu_memory_bytes=[8e9])
    assert not table.fits[0]
    missing = (table.device_peak_bytes[0] - 8e9 * (1 - UNKNOWN_MARGIN)) / GIB
    assert table.reason[0] == f"needs {missing:.1f} GiB more GPU memory"
    planned = what_if(workload(), machine(), ["ebbtide"], gpu_memory_bytes=[2e8])
    assert not planned.fits[0]
    assert planned.reason[0].endswith("GiB more GPU memory")


def test_one_memory_holds_what_device_and_host_take_together():
    there = machine(unified_memory=True)
    peaks = what_if(workload(), there, ["zero3_offload"])
    both = int(peaks.device_peak_bytes[0] + peaks.host_peak_bytes[0])
    least = math.ceil(both / (1 - UNKNOWN_MARGIN))
    for memory, fits in ((least, True), (least - 2, False)):
        less = there.model_copy(update={"host_memory_bytes": memory})
        assert what_if(workload(), less, ["zero3_offload"]).fits.tolist() == [fits]


def test_host_memory_is_shared_among_the_ranks():
    table = what_if(workload(), machine(), ["zero3_offload"], ranks_per_node=[1, 16])
    assert table.fits.tolist() == [True, False]
    assert "more host memory" in table.reason[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategies": ["magic"]}, "strategies must be among .*ebbtide.* but got 'magic'"),
        ({"gpu_memory_bytes": [-1]}, "gpu_memory_bytes must be finite and > 0, but got -1"),
        ({"gpu_memory_bytes": [float("nan")]}, "gpu_memory_bytes must be finite"),
        ({"h2d_bytes_per_s": [0]}, "h2d_bytes_per_s must be finite and greater than 0"),
        ({"h2d_bytes_per_s": [1e20]}, "h2d_bytes_per_s must lie within a factor"),
        ({"warp_speed": [9]}, "but got 'warp_speed'"),
        ({"ranks_per_node": [0]}, "ranks_per_node"),
        ({"strategies": []}, r"strategies must name at least one strategy, but got \[\]"),
        ({"gpu_memory_bytes": []}, "gpu_memory_bytes must have at least one value"),
        ({"h2d_bytes_per_s": []}, "h2d_bytes_per_s must have at least one value"),
        ({"device_memory_bytes": [1e9]}, r"device_memory_bytes must not .*\. Instead, give gpu_memory_bytes"),
        ({"device_flops_per_s": [1e14, 9e14]}, r"fixed times.*\. Instead, make a workload"),
        ({"cpu_cores": [1, 64]}, "cpu_cores must not .* stock_host_adam_params_per_s"),
        ({"micro_batch": [2]}, "workload_from_model"),
        ({"gpus_per_node": [2]}, "gpus_per_node must not .* make a workload"),
    ],
)
def test_bad_input_is_told_before_anything_runs(arguments, message):
    with pytest.raises(ValueError, match=message):
        what_if(workload(), machine(), **arguments)


def test_a_field_that_no_row_depends_on_is_told():
    with pytest.warns(UserWarning, match="storage_write_bytes_per_s has no effect on zero3"):
        what_if(workload(), machine(), ["zero3_offload"], storage_write_bytes_per_s=[1e9, 2e9])


def test_fields_that_matter_are_not_told_of(recwarn):
    rates = {"storage_write_bytes_per_s": [1e8, 2e9], "h2d_bytes_per_s": [1e9, 2e10]}
    nvme = ("zero_infinity", {"optimizer": "nvme"})
    what_if(workload(), machine(), ["zero3_offload", nvme], **rates)
    what_if(workload(), machine(device_shares_host_cores=True), ["ebbtide"], cpu_cores=[8])
    assert not [warning for warning in recwarn if "has no effect" in str(warning.message)]


def test_the_fields_that_an_error_names_can_be_changed():
    with pytest.raises(ValueError, match="a what-if can change") as refused:
        what_if(workload(), machine(), warp_speed=[9])
    listed = str(refused.value).removeprefix("a what-if can change ").split(", but got")[0]
    assert not {"device_flops_per_s", "device_memory_bytes"} & {*listed.split(", ")}
    assert "gradient_accumulation_steps" in listed


def test_a_workload_and_a_machine_in_the_wrong_order_are_told():
    with pytest.raises(ValueError, match="workload must be a Workload, but got Machine"):
        what_if(machine(), workload())


def test_device_memory_that_is_host_memory_is_told():
    with pytest.warns(UserWarning, match="gpu_memory_bytes has no effect"):
        what_if(workload(), machine(unified_memory=True), ["zero3_offload"], [1e9])


def test_ctrl_c_keeps_the_rows_that_are_finished(monkeypatch):
    import sys

    code = sys.modules["ebbtide.simulator.analysis.what_if"]
    real, calls = code.evaluate, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) > 2 * code.POINTS_PER_TASK:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(code, "evaluate", interrupted)
    monkeypatch.setattr(code, "POINTS_PER_TASK", 2)
    rates = [1e10 + i * 1e8 for i in range(3 * code.POINTS_PER_TASK)]
    with pytest.warns(UserWarning, match="4 of 6 simulations are finished"):
        table = what_if(workload(), machine(), ["zero3_offload"], h2d_bytes_per_s=rates, progress=False)
    assert len(table) == 2 * code.POINTS_PER_TASK
    assert table.attrs["interrupted"] is True
    assert not table.iteration_s.isna().any()


def test_processes_give_the_same_rows():
    arguments = {"h2d_bytes_per_s": [1e10, 4e10]}
    alone = what_if(workload(), machine(), ["ebbtide"], **arguments)
    together = what_if(workload(), machine(), ["ebbtide"], n_jobs=2, **arguments)
    assert alone.equals(together)
    assert all(math.isfinite(x) for x in alone.iteration_s)


def test_a_row_of_ebbtide_is_near_what_a_plan_brings():
    # The row's iteration time is at most 8% longer than that of a searched plan. If the workload says that no step
    # clips, the row's time is shorter than with the usual clip rate, because updates may then start before the gradient
    # norm is known.
    layers = [
        Layer(params=n, forward_s=0.01, backward_s=0.02, activation_bytes=2 * 10**8)
        for n in (3 * 10**8, *[10**8] * 10, 3 * 10**8)
    ]
    sizes = tuple(layer.params for layer in layers)
    work = Workload(name="w", layers=layers, subgroups=sizes, device_base_bytes=4 * GIB)
    on = machine(h2d_bytes_per_s=40e9, d2h_bytes_per_s=40e9)
    made = plan(work, on.with_rates(device_memory_bytes=10 * GIB), memory_margin=0)
    never = work.model_copy(update={"clip_rate": 0.0})
    [row], [updated_early] = (
        what_if(one, on, ["ebbtide"], gpu_memory_bytes=10 * GIB).itertuples() for one in (work, never)
    )
    assert row.fits
    assert updated_early.fits
    over = row.iteration_s / made.prediction.iteration_s
    assert 1 - 1e-3 <= over <= 1.08
    assert updated_early.iteration_s < 0.98 * row.iteration_s


def test_a_plan_with_a_further_option_has_clipping_steps_in_its_mean():
    work, on = workload(clip_rate=0.5), machine()
    limits = Limits.of(work, on)
    made = Plan(subgroup_size=10**8, ways=Way.each(["host"] * 10)).with_bits(early=True)
    alone = simulated("ebbtide", work, on, limits, {"plan": made}).result
    assert (
        simulated("ebbtide", work, on, limits, {"plan": made, "iterations": 3}).result.iteration_s == alone.iteration_s
    )
    never = work.model_copy(update={"clip_rate": 0.0})
    assert simulated("ebbtide", never, on, limits, {"plan": made}).result.iteration_s < alone.iteration_s


def test_a_plan_option_that_is_no_plan_is_refused_or_means_the_default_one():
    work, on = workload(), machine()
    limits = Limits.of(work, on)
    with pytest.raises(ValueError, match="plan must be a Plan"):
        simulated("ebbtide", work, on, limits, {"plan": "plan.json"})
    default = simulated("ebbtide", work, on, limits, {}).result
    assert simulated("ebbtide", work, on, limits, {"plan": None}).result.iteration_s == default.iteration_s
