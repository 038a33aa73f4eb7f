"""The footprint is what the runtime allocates, to the byte, and what it refuses a plan for."""

import pytest

from runtime.execution.fit import needed_bytes
from runtime.zero.attach import host_bytes
from simulator.update.footprint import footprint, plan_bytes
from simulator.update.optimizer import ADAM
from simulator.workload import Layer, Workload
from tests.runtime.contract.training import DEVICES, SUBGROUP, attached, start

pytestmark = pytest.mark.usefixtures("only_rank")
DEVICE = list(DEVICES)[-1]
PATTERNS = {
    "hosted": ["host"],
    "one of each": ["host", "device", "resident"],
    "visits": ["device", "device", "resident"],
}
GRADIENTS = {
    2: {},
    4: {"accumulation": 2, "extra": {"data_types": {"grad_accum_dtype": "fp32"}}},
}


def allocated_device_bytes(executor):
    resident = [s for s in executor.states if s.placement == "resident"]
    on_device = [s.gradient for s in executor.states if s.placement != "host"]
    held = [t for s in resident for t in s.state] + on_device + [s.parts for s in executor.slots]
    return sum(t.nbytes for t in held)


@pytest.mark.parametrize("stage", [3, 2])
@pytest.mark.parametrize("gradient_bytes", list(GRADIENTS))
@pytest.mark.parametrize("pattern", list(PATTERNS))
def test_the_footprint_is_what_is_allocated(pattern, gradient_bytes, stage):
    engine = attached(start(stage=stage, **GRADIENTS[gradient_bytes]), PATTERNS[pattern], DEVICE)
    own = engine.optimizer._ebbtide
    sizes = tuple(s.elements for s in own.executor.states)
    kept = own.executor.states[0].gradient.element_size()
    if stage == 3:
        assert kept == gradient_bytes
    told = plan_bytes(
        sizes, own.plan.placements, own.plan.staging_slots, ADAM, kept, 2, stage=stage
    )
    assert told.host_bytes == host_bytes(engine.optimizer)
    assert told.device_bytes == allocated_device_bytes(own.executor)
    named = own.plan.model_copy(update={"subgroups": sizes})
    assert needed_bytes(named, kept, stage=stage) == told.host_bytes
    layers = tuple(Layer(params=n, forward_s=1.0, backward_s=1.0) for n in sizes)
    work = Workload(
        name="w", layers=layers, subgroups=sizes, subgroup_size=SUBGROUP, device_base_bytes=7,
        grad_bytes_per_param=kept, zero_stage=stage,
    )  # fmt: skip
    whole = footprint(work, own.plan)
    assert (whole.host_bytes, whole.device_bytes - 7) == (told.host_bytes, told.device_bytes)
    engine.destroy()


def test_eight_billion_parameters_on_the_host_with_gradients_in_fp32():
    """96 GB of state, 32 of gradients, and two slots of 2: 128, 136 and 132 were told before."""
    held = plan_bytes((10**9,) * 8, ("host",) * 8, 0, ADAM, 4, 2)
    assert held.host_bytes == 132 * 10**9
