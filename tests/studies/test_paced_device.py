"""Tests of the emulated GPU's timing: an op takes at least the time that follows from the emulated speeds of
copies and updates, and concurrent ops share the GPU as in the simulator.
"""

import threading
import time

import pytest
import torch
from ebbtide.simulator.schedule import Lane

from studies.trials.paced_device import EmulatedRates, FluidPacer, PacedDevice


def run_together(pacer, jobs):
    """Start jobs at the same moment on a pacer. Return two lists: the seconds until each job ends, and the seconds
    until it has begun.

    A pacer delays the end of each job, because concurrent jobs on the emulated GPU share its capacities, such as memory
    bandwidth.

    Args:
        jobs: For each job, the seconds that it takes alone, and the amount of each capacity that it uses per second.
    """
    ends, begins, gate = [0.0] * len(jobs), [0.0] * len(jobs), threading.Barrier(len(jobs) + 1)
    begun = []

    def work(number, seconds, demand):
        gate.wait()
        with pacer.work(seconds, demand):
            begins[number] = time.perf_counter()
        ends[number] = time.perf_counter()

    threads = [threading.Thread(target=work, args=(i, *job)) for i, job in enumerate(jobs)]
    for thread in threads:
        thread.start()
    begun.append(time.perf_counter())
    gate.wait()
    for thread in threads:
        thread.join(30)
    return [end - begun[0] for end in ends], [begin - begun[0] for begin in begins]


def test_work_lasts_at_least_as_long_as_alone():
    (end,), _ = run_together(FluidPacer({"device": 1.0}), [(0.05, {"device": 1.0})])
    assert end >= 0.05


def test_two_on_one_device_take_the_sum():
    ends, begins = run_together(FluidPacer({"device": 1.0}), [(0.05, {"device": 1.0}), (0.15, {"device": 1.0})])
    # Both run at half speed until the short one ends, and then the other one runs at full speed. On a busy machine, the
    # short one may run alone until the other one begins.
    assert ends[0] >= 0.1 - begins[1]
    assert ends[1] >= 0.2


def test_work_that_takes_longer_by_itself_is_not_slowed_further():
    pacer = FluidPacer({"device": 1.0})
    begun = time.perf_counter()
    with pacer.work(0.001, {"device": 1.0}):
        time.sleep(0.05)
    middle = time.perf_counter()
    with pacer.work(0.05, {"device": 1.0}):  # the first one has ended
        pass
    assert middle - begun >= 0.05
    assert pacer._active == []


def test_an_error_in_the_block_gives_its_share_back():
    pacer = FluidPacer({"device": 1.0})
    with pytest.raises(ValueError, match="boom"), pacer.work(0.01, {"device": 1.0}):
        raise ValueError("boom")
    assert pacer._active == []


def test_both_ways_share_the_link():
    device = PacedDevice(EmulatedRates(1e6, 1e6, duplex_factor=0.5))
    a, b = torch.zeros(25_000), torch.ones(25_000)  # each alone takes 0.1 s
    other = threading.Thread(target=device.copy, args=(torch.zeros(25_000), b, Lane.D2H, None))
    begun = time.perf_counter()
    other.start()
    device.copy(a, b, Lane.H2D, None)
    other.join(30)
    assert time.perf_counter() - begun >= 0.19
    assert torch.equal(a, b)
