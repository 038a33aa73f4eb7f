"""Tests of the lower bound under limits on GPU memory, host memory and storage: no random plan within the
limits is faster.
"""

import numpy as np
import pytest
from ebbtide.simulator import Quantity
from ebbtide.simulator.analysis.bound import bound, fluid_bound
from ebbtide.simulator.update.footprint import Holding, tally

from tests.simulator.test_bounds import PLACEMENTS, random_machine, random_plans, random_workload, steady_s


def its_own_memory(work, codes, slots):
    """Return the bytes that a plan takes of GPU memory, host memory and storage."""
    placements = [PLACEMENTS[code] for code in codes]
    held = Holding.of_workload(work).bytes(tally(work.subgroups, placements), slots)
    activations = sum(layer.activation_bytes for layer in work.layers)
    return work.device_base_bytes + held["device"] + activations, held["host"], held["storage"]


def storing(rng, on):
    """Return the machine with drives slow enough to limit plans. Reads and writes share the drives' bandwidth."""
    rates = {
        name: Quantity.exact(float(10 ** rng.uniform(8.5, 10.5)))
        for name in ("storage_write_bytes_per_s", "storage_read_bytes_per_s")
    }
    both = Quantity.exact(float(rng.uniform(0.3, 1.0)))
    return on.model_copy(update={**rates, "storage_duplex_factor": both})


@pytest.mark.parametrize("most", [3, 5])
def test_no_plan_beats_the_bound_of_its_own_three_memories(most):
    rng, stored = np.random.default_rng(most), 0
    for _ in range(2):
        work, on = random_workload(rng, most), storing(rng, random_machine(rng))
        for plan in random_plans(rng, len(work.subgroups), 3):
            device, host, storage = its_own_memory(work, *plan[:2])
            stored += storage > 0
            floor_s = bound(work, on, device, (), host, storage).iteration_s
            assert fluid_bound(work, on, device, (), host, storage).iteration_s <= floor_s
            seconds = steady_s(work, on, floor_s, *plan)
            assert floor_s <= seconds * (1 + 1e-6), (floor_s, plan)
    assert stored


def test_storage_that_may_not_be_taken_makes_the_bound_no_looser():
    rng = np.random.default_rng(1)
    work, on = random_workload(rng, 9), storing(rng, random_machine(rng))
    host = sum(work.subgroups) * 9
    free, none = (fluid_bound(work, on, 1e15, (), host, room).iteration_s for room in (None, 0))
    assert free <= none
