"""Tests that compare the contention between two concurrent ops, as the profiler measures it, with the
simulator's assumption.
"""

import pytest
from ebbtide.profiler.rates.sharing import differences, simulated_share, with_writer_cost
from ebbtide.simulator.quantity import Quantity

from tests.machines import node


def machine(**contention):
    """Return a simulated machine with 60 GB/s of DRAM bandwidth, and the given measurements of contention
    between concurrent ops.

    Adam on the CPU uses 56 GB/s alone. A simultaneous copy needs 20 GB/s more, so both reach 60/76 of their speed.
    """
    measured = {name: Quantity.exact(value, "measured") for name, value in contention.items()}
    return node(
        h2d_bytes_per_s=20e9,
        d2h_bytes_per_s=20e9,
        dram_bytes_per_s=60e9,
        host_adam_params_per_s=2e9,
        stock_host_adam_params_per_s=2e9,
        device_adam_params_per_s=2e9,
        device_memory_bytes=2**34,
        contention=measured,
    )


def test_the_simulators_share_is_max_min_fair():
    together = simulated_share("host_adam", "h2d", machine())
    assert together == pytest.approx(60 / 76, rel=1e-3)
    assert simulated_share("h2d", "compute", machine()) == 1.0
    assert simulated_share("host_adam", "copy", machine()) is None


def test_only_what_differs_is_told():
    assert differences(machine(host_adam_while_h2d=0.75, h2d_while_compute=0.99)) == []
    told = differences(machine(host_adam_while_h2d=0.4, copy_while_host_adam=0.1))
    assert told == [
        "host_adam reaches 40% of its speed alone while h2d runs, but the simulator assumes 79%: "
        "predictions of plans that overlap the two are off"
    ]


def writing(share, thread_s=1e-10):
    told = {"host_adam_while_storage_write": share, "storage_write_while_host_adam": share}
    return machine(**told).model_copy(update={"writer_s_per_byte": Quantity.exact(thread_s, "measured", "CPU time")})


def test_a_writers_cost_is_what_host_adam_loses_beside_it():
    # A measurement tells how much Adam on the CPU and the writer slow each other down. The function must choose the CPU
    # time with which the simulator predicts this slowdown.
    for share in (0.9, 0.92):
        found = with_writer_cost(writing(share))
        assert simulated_share("host_adam", "storage_write", found) == pytest.approx(share, 1e-6)
        assert found.writer_s_per_byte.median > 1e-10
        assert "raised until it and host Adam have 9" in found.writer_s_per_byte.detail


def test_noise_that_makes_one_of_them_faster_hides_nothing_of_the_other():
    told = {"host_adam_while_storage_write": 1.1, "storage_write_while_host_adam": 0.8}
    noisy = machine(**told).model_copy(update={"writer_s_per_byte": Quantity.exact(1e-10, "measured", "CPU time")})
    found = with_writer_cost(noisy)
    assert simulated_share("host_adam", "storage_write", found) == pytest.approx(0.9, 1e-6)
    assert "it and host Adam have 90%" in found.writer_s_per_byte.detail


def test_a_writers_cost_is_never_less_than_its_thread_takes():
    found = with_writer_cost(writing(1.0))
    assert found.writer_s_per_byte.median == 1e-10
    assert found.writer_s_per_byte.detail == "CPU time"
    assert with_writer_cost(machine()).writer_s_per_byte is None


def test_where_passes_run_on_the_cores_their_loss_is_the_cost():
    # The CPU time must be derived from the slowdown of forward and backward during writes, not from the slowdown of
    # Adam on the CPU. The machine has 16 cores and writes 1 GB/s during forward and backward. If writes slow forward
    # and backward by 3%, the CPU time must be 16 * 3% = 0.48 s per GB. The CPU time must not exceed what two writer
    # threads can use.
    found = with_writer_cost(
        machine(
            passes_while_storage_write=0.75,
            storage_write_while_passes=0.5,
            host_adam_while_storage_write=0.9,
            storage_write_while_host_adam=0.9,
        ).model_copy(update={"writer_s_per_byte": Quantity.exact(1e-10, "measured", "CPU time")})
    )
    most = 2 / 2e9  # both writers, all of the time
    assert found.writer_s_per_byte.median == most
    less = with_writer_cost(
        found.model_copy(
            update={
                "writer_s_per_byte": Quantity.exact(1e-10, "measured", "CPU time"),
                "contention": found.contention | {"passes_while_storage_write": Quantity.exact(0.97)},
            }
        )
    )
    assert less.writer_s_per_byte.median == pytest.approx(16 * 0.03 / 1e9)
    assert "forward and backward have 97%" in less.writer_s_per_byte.detail
