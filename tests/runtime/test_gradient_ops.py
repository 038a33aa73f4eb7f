"""A test of the copies of gradients to host memory and back."""

import threading

import torch
from ebbtide.runtime.devices.choice import EmulatedDevice
from ebbtide.runtime.execution.gradients import GradientOps
from ebbtide.simulator.schedule import Lane


class Gated(EmulatedDevice):
    """An emulated device whose copies of gradients wait until the test allows them."""

    def __init__(self):
        super().__init__()
        self.gate = threading.Event()

    def copy(self, to, source, lane, stream):
        assert lane is not Lane.D2H_GRADIENTS or self.gate.wait(30), "the copy did not run in the background"
        super().copy(to, source, lane, stream)


def test_gradients_cross_in_the_background_in_order():
    device = Gated()
    locations = [torch.zeros(2000) for _ in range(3)]
    sources = [torch.full((2000,), float(i)) for i in range(3)]
    ops = GradientOps(device, device.lanes())
    for subgroup in range(3):
        ops.send(subgroup, 0, locations[subgroup], sources[subgroup], summed=False)
    (latest,) = ops.arrived(2)
    for source in sources:
        source.fill_(-1.0)  # backward continues and reuses its buffers
    assert not latest.ended
    device.gate.set()
    latest.wait_host()
    assert [float(h[-1]) for h in locations] == [0.0, 1.0, 2.0]
    total = ops.fetch_sum(2, 0, locations[2], torch.ones(2000))
    assert total.data_ptr() != locations[2].data_ptr()
    assert float(total[-1]) == 3.0
