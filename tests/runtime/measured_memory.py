"""Measured host and device memory of an engine with 50 M parameters, in a forked process for each case.

    python -m tests.runtime.measured_memory RESULTS

The emulated device's memory is host memory too, so it is subtracted from the process's resident set.
"""

import ctypes
import gc
import json
import sys
import time
from functools import partial
from pathlib import Path

import ebbtide.runtime
import psutil
import torch
from ebbtide.runtime import session_of
from ebbtide.runtime.devices.choice import EmulatedDevice
from ebbtide.runtime.replan.observed import observed_workload
from ebbtide.simulator.schedules.footprint import footprint
from ebbtide.simulator.update.holding import GRADIENTS_UNDER_WAY_BYTES
from torch.multiprocessing.reductions import StorageWeakRef

from studies.bench.forked import Child
from studies.bench.many_engines import answer_once, freeze_heap
from studies.checkpoints.run import warm_up
from tests.runtime.contract.training import plan_for, start

WIDTH, LAYERS = 2048, 12  # 50 M parameters
SUBGROUP = 2 * WIDTH**2
BUCKET = WIDTH**2  # elements of the reduction bucket
M_MMAP_THRESHOLD = -3  # constant from malloc.h
OFFLOAD = {"device": "cpu", "pin_memory": False}
CASES = {
    "host": (
        ["host"],
        ["host"],
        {
            "offload_param": {"device": "cpu", "pin_memory": True, "buffer_count": 9, "max_in_cpu": 10**6},
            "stage3_prefetch_bucket_size": 3 * WIDTH**2,
        },
    ),
    "mixed": (
        ["host", "device", "resident"],
        ["host", "device"],
        {"offload_param": OFFLOAD, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 1},
    ),
    "device": (["device", "resident"], ["device"], {"stage3_prefetch_bucket_size": 1}),
}


class Layers(torch.nn.Module):
    def __init__(self, width=WIDTH, layers=LAYERS):
        super().__init__()
        made = (torch.nn.Linear(width, width, bias=False) for _ in range(layers))
        self.layers = torch.nn.ModuleList(made)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().square().mean()


class Counting(EmulatedDevice):
    """An emulated device that records the largest number of bytes in use at one time."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak_bytes = [], 0

    def device_empty(self, elements, dtype):
        made = super().device_empty(elements, dtype)
        self.alive.append((StorageWeakRef(made.untyped_storage()), made.nbytes))
        self.peak_bytes = max(self.peak_bytes, self.bytes())
        return made

    def bytes(self):
        self.alive = [(ref, size) for ref, size in self.alive if not ref.expired()]
        return sum(size for _, size in self.alive)


def resident_bytes():
    """Read the resident set size of this process five times, and return the smallest value in bytes.

    Other threads free memory late, so that a single value could be too large.
    """
    found = []
    for _ in range(5):
        time.sleep(0.1)
        gc.collect()
        found.append(psutil.Process().memory_info().rss)
    return min(found)


def measured(model, width, subgroup, case):
    """Train under a plan, and return the predicted and the measured peak bytes of host memory and of GPU memory."""
    placements, locations, config = CASES[case]
    before = resident_bytes()
    engine = start(model=model(), subgroup_size=subgroup, reduce_bucket_size=BUCKET, **config)
    device = Counting()
    ebbtide.runtime.attach(engine, plan_for(engine, placements, subgroup, locations=locations), device=device)
    own = session_of(engine)
    device.peak_bytes = device.bytes()  # the peak of training only
    for number in range(3):
        x = torch.randn(2, width, generator=torch.Generator().manual_seed(number)).bfloat16()
        engine.backward(engine(x))
        engine.step()
    engine.optimizer.wait()
    work = observed_workload(own.engine, own.recorder.passes())
    told = footprint(work, own.plan)
    on_host = sum(s.gradient.nbytes for s in own.executor.states if s.placement == "host")
    # DeepSpeed's own device memory is host memory here: its bucket, and parameters that stay on the device.
    stay = 0 if "host" in locations else sum(s.wire.nbytes for s in own.executor.states)
    beside = device.bytes() + stay + 2 * BUCKET
    under_way = min(GRADIENTS_UNDER_WAY_BYTES, on_host)  # counted, although `device_empty` does not allocate it
    found = {
        "host": [told["host"], resident_bytes() - before - beside],
        "device": [told["device"] - under_way, device.peak_bytes + stay],
    }
    engine.destroy()
    return found


def measure(case, page):
    # Freed tensors return to the system. Otherwise, the heaps of glibc's threads would keep up to 38 MB each.
    ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, 2**20)
    measured(lambda: Layers(64, 2), 64, 64**2, case)  # loads everything that a process loads once
    freeze_heap()
    page.write_text(json.dumps(measured(Layers, WIDTH, SUBGROUP, case)))


def main():
    folder = Path(sys.argv[1])
    warm_up()
    answer_once()  # otherwise each of many garbage collections would scan all imported modules
    for case in CASES:
        Child(partial(measure, case, folder / f"{case}.json"), folder / f"{case}.log").wait()


if __name__ == "__main__":
    main()
