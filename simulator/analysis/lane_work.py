"""The least time that ops of one kind need on their lane, and the ops of each kind."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from simulator.engines.reference import alone_s, demands
from simulator.machine import Machine
from simulator.quantity import Quantity
from simulator.schedule import Lane, Op, OpKind
from simulator.update.recipes import Bytes
from simulator.workload import Workload

Floats = NDArray[np.float64]


def of_optimizer(machine: Machine, workload: Workload) -> Machine:
    """With rates of updates in parameters of the workload's optimizer, not of Adam."""
    adams = Bytes.of(workload).adams
    if adams == 1.0:
        return machine

    def paced(rate: Quantity) -> Quantity:
        return Quantity.exact(rate.median / adams)

    return machine.model_copy(
        update={
            "host_adam_params_per_s": paced(machine.host_adam_params_per_s),
            "device_adam_params_per_s": paced(machine.device_adam_params_per_s),
            "host_adam_by_threads": {n: paced(r) for n, r in machine.host_adam_by_threads.items()},
        }
    )


class Work:
    """The least that k ops of one kind take, one for each of k subgroups: arrays over k.

    Attributes:
        lane_s: of their lane, shape (subgroups + 1,).
        alone_s: the same where nothing is shared, with other ranks either.
        one_s: the least seconds of a single one.
    """

    def __init__(
        self,
        make: Callable[[int], Op],
        sizes: list[int],
        machine: Machine,
        limits: dict[str, float],
    ) -> None:
        seconds, alones, self._amounts = [], [0.0], {name: [0.0] for name in limits}
        for size in sizes:
            op = make(size)
            alone = alone_s(op, machine)
            taken = demands(op, machine, alone)
            slowest = max([1.0, *(taken[name] / limits[name] for name in taken)])
            seconds.append(alone * slowest)
            alones.append(alone)
            for name in limits:
                self._amounts[name].append(taken.get(name, 0.0) * alone)
        self._limits, self._largest = limits, sizes[-1]
        self.lane_s = np.concatenate([[0.0], np.cumsum(seconds)])
        self.alone_s = np.cumsum(alones)
        self.one_s = float(seconds[0])

    def on(self, resource: str) -> Floats:
        """Seconds of a resource, were they alone on it; shape (subgroups + 1,)."""
        return np.cumsum(self._amounts[resource]) / self._limits[resource]

    def per_element(self, resource: str) -> float:
        """Seconds of a resource for one element: of the largest op, which has the least."""
        return self._amounts[resource][-1] / self._limits[resource] / self._largest


def copy_op(kind: OpKind, size_bytes: int) -> Op:
    down = kind in (OpKind.STATE_D2H, OpKind.GRADIENT_D2H)
    lane = Lane.D2H if down else Lane.H2D
    rate = "d2h_bytes_per_s" if down else "h2d_bytes_per_s"
    return Op(0, kind, lane, size_bytes, rate, dram_bytes=size_bytes)  # type: ignore[arg-type]


def device_update_op(params: int) -> Op:
    return Op(
        0, OpKind.UPDATE_DEVICE, Lane.DEVICE_UPDATE, params, "device_adam_params_per_s",
        device_share=1.0,
    )  # fmt: skip


def host_update_op(params: int, threads: float, dram_bytes: int) -> Op:
    return Op(
        0, OpKind.UPDATE_HOST, Lane.HOST, params, "host_adam_params_per_s",
        dram_bytes=dram_bytes, cores=threads,
    )  # fmt: skip


def thread_counts(machine: Machine, cores: float) -> list[float]:
    """Between these the update's rate is linear in the threads, and shared cores add one more.

    Without a measured number of threads the simulator lets one of them run at the full rate.
    """
    measured = machine.host_adam_by_threads or (1,)
    return sorted({float(machine.cpu_cores), cores, *map(float, measured)})
