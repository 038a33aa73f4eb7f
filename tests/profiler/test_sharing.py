"""Measured contention beside what the simulator makes of the same pair."""

import pytest

from profiler.sharing import differences, simulated_share
from simulator.machine import Machine
from simulator.quantity import Quantity


def machine(**contention):
    """Host Adam moves 56 of 60 GB/s; a copy beside it asks for 20 more: both get their part."""
    rates = {"h2d": 20e9, "d2h": 20e9, "dram": 60e9, "storage_write": 2e9}
    fields = {f"{name}_bytes_per_s": Quantity.exact(rate) for name, rate in rates.items()}
    adam = {f"{name}_adam_params_per_s": Quantity.exact(2e9)
            for name in ("host", "stock_host", "device")}  # fmt: skip
    sizes = {"cpu_cores": 16, "host_memory_bytes": 2**37, "device_memory_bytes": 2**34}
    measured = {name: Quantity.exact(value, "measured") for name, value in contention.items()}
    return Machine(name="m", device_kind="cuda", contention=measured, **fields, **adam, **sizes)


def test_the_simulators_share_is_max_min_fair():
    together = simulated_share("host_adam", "h2d", machine())
    assert together == pytest.approx(60 / 76, rel=1e-3)
    assert simulated_share("h2d", "compute", machine()) == 1.0
    assert simulated_share("host_adam", "copy", machine()) is None


def test_only_what_differs_is_told():
    assert differences(machine(host_adam_while_h2d=0.75, h2d_while_compute=0.99)) == []
    told = differences(machine(host_adam_while_h2d=0.4, copy_while_host_adam=0.1))
    assert told == [
        "host_adam beside h2d reaches 40% of its speed alone, but the simulator takes 79%: "
        "predictions of plans that overlap them are off"
    ]
