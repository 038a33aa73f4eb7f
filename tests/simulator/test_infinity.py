"""Tests of simulated ZeRO-Infinity, with parameters, activations and optimizer state in host memory or on
NVMe: the copies, their times, and the memory in use.
"""

import pytest
from ebbtide.simulator import Lane, OpKind, build_strategy, simulate

from tests.machines import machine, workload

QUICK = {
    "stock_host_adam_params_per_s": 1e9,
    "pageable_d2h_bytes_per_s": 1e9,
    "pageable_h2d_bytes_per_s": 1e9,
    "h2d_bytes_per_s": 1e9,
    "d2h_bytes_per_s": 1e9,
    "storage_write_bytes_per_s": 1e9,
    "device_adam_params_per_s": 1e9,
}


def run(work=None, on=None, **locations):
    schedule = build_strategy("zero_infinity", work or workload(), **locations)
    return simulate(schedule, on or machine())


def spans(timeline, kind, iteration=2):
    return sorted((s for s in timeline.spans if s.kind == kind and s.iteration == iteration), key=lambda s: s.start_s)


def test_with_nothing_more_offloaded_it_is_stock_offload():
    mine = run(optimizer="cpu", parameters="device")
    stock = simulate(build_strategy("zero3_offload", workload()), machine())
    assert mine.iteration_s == stock.iteration_s
    assert (mine.device_peak_bytes, mine.host_peak_bytes) == (stock.device_peak_bytes, stock.host_peak_bytes)


def test_parameters_come_in_for_each_pass_while_the_pass_before_runs():
    timeline = run(optimizer="cpu")
    assert len(spans(timeline, OpKind.PARAMETER_FETCH)) == 8
    assert timeline.phases()["forward_s"] == 4 * 20 + 1
    assert not spans(timeline, OpKind.PARAMETER_H2D)  # the update wrote them directly to their place


def test_unpinned_parameters_come_at_their_rate_and_each_pass_waits():
    # Unpinned copies have half the rate of pinned ones here.
    slow = machine(pageable_h2d_bytes_per_s=0.5)
    timeline = run(on=slow, optimizer="cpu", pinned_parameters=False)
    assert timeline.phases()["forward_s"] == 4 * (40 + 1)
    pinned = run(on=slow, optimizer="cpu")
    assert pinned.phases()["forward_s"] == 4 * 20 + 1


def test_unpinned_gradients_are_those_of_stock_offload():
    mine = run(optimizer="cpu", parameters="device", pinned=False)
    stock = simulate(build_strategy("zero3_offload_unpinned", workload()), machine())
    assert mine.iteration_s == stock.iteration_s


def test_parameters_leave_the_device_but_for_two_layers():
    work = workload(device_base_bytes=1000)
    held = run(work, optimizer="cpu", parameters="device")
    gone = run(work, optimizer="cpu")
    assert held.device_peak_bytes - gone.device_peak_bytes == 2 * 40 - 2 * 2 * 10
    assert gone.host_peak_bytes - held.host_peak_bytes == 2 * 40


def test_activations_wait_in_host_memory():
    link = {"d2h_bytes_per_s": 1e6, "h2d_bytes_per_s": 1e6}
    kept = run(on=machine(**link), optimizer="cpu", parameters="device")
    gone = run(on=machine(**link), optimizer="cpu", parameters="device", activations="cpu")
    assert kept.device_peak_bytes == 4 * 7
    assert gone.device_peak_bytes == 2 * 7
    assert gone.host_peak_bytes - kept.host_peak_bytes == 3 * 7
    backward = {s.layer: s for s in spans(gone, OpKind.BACKWARD)}
    for copy in spans(gone, OpKind.ACTIVATION_H2D):
        assert copy.end_s <= backward[copy.layer].start_s


def test_state_is_read_updated_and_written_one_subgroup_after_the_other():
    on = machine(**{**QUICK, "storage_write_bytes_per_s": 1.0, "storage_read_bytes_per_s": quantity(2.0)})
    timeline = run(on=on, parameters="device")
    reads, writes = spans(timeline, OpKind.STATE_READ), spans(timeline, OpKind.STATE_WRITE)
    state = [s for s in writes if s.subgroup >= 0]
    assert [s.lane for s in reads] == [Lane.STORAGE_READ] * 4
    for read, write in zip(reads[1:], state, strict=False):
        assert read.start_s >= write.end_s
    # Before the updates, fp32 gradients go to storage: 4 layers of 40 bytes. Backward ends when they are written.
    assert timeline.phases()["step_s"] == pytest.approx(4 * (80 + 120), rel=1e-6)
    assert sum(s.end_s - s.start_s for s in writes if s.layer >= 0) == pytest.approx(160)


def quantity(value):
    from ebbtide.simulator import Quantity

    return Quantity.exact(value)


def test_pipelined_reads_and_writes_overlap():
    slow = {**QUICK, "storage_write_bytes_per_s": 1.0}
    plain, pipelined = (run(on=machine(**slow), parameters="device", pipelined=p) for p in (False, True))
    assert plain.phases()["step_s"] == pytest.approx(4 * (160 + 120), rel=1e-6)
    # A read of 160 beside each write of 120. Only the last write is alone.
    assert pipelined.phases()["step_s"] == pytest.approx(4 * 160 + 120, rel=1e-6)
    assert pipelined.host_peak_bytes - plain.host_peak_bytes == 10 * 16


def test_state_on_nvme_leaves_the_host_but_for_a_subgroup():
    host = run(optimizer="cpu", parameters="device").host_peak_bytes
    stored = run(parameters="device").host_peak_bytes
    assert host == 40 * 20
    assert stored == 40 * 4 + 10 * 16


def test_ranks_share_the_drive():
    on = machine(**{**QUICK, "storage_write_bytes_per_s": 1.0})
    alone, four = (run(workload(ranks_per_node=n), on).phases()["step_s"] for n in (1, 4))
    assert four == pytest.approx(4 * alone, rel=1e-6)


@pytest.mark.parametrize(
    ("locations", "said"),
    [
        ({"optimizer": "disk"}, "optimizer must be one of .*'disk'"),
        ({"parameters": "nvme"}, "parameters must be one of .*'nvme'"),
        ({"optimizer": "cpu", "pipelined": True}, "pipelined must be False .* got True"),
    ],
)
def test_locations_that_are_none_are_refused(locations, said):
    with pytest.raises(ValueError, match=said):
        run(**locations)
