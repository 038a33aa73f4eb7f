"""How fast any plan could be: a linear program over the node's resources."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simulator.machine import Machine
from simulator.simulate import capacities
from simulator.workload import STATE_BYTES_PER_PARAM, Workload


@dataclass(frozen=True, slots=True)
class Bound:
    """A lower bound and the split that would reach it if parameters were a fluid.

    Attributes:
        iteration_s: no plan's steady iteration can be shorter.
        update_s: from the norm barrier until the next forward has ended, at the least.
        host_params, device_params, resident_params: the split of this rank's parameters.
        binding: the resources that are full at the optimum.
    """

    iteration_s: float
    update_s: float
    host_params: float
    device_params: float
    resident_params: float
    binding: tuple[str, ...]


def bound(
    workload: Workload,
    machine: Machine,
    resident_params: float = 0.0,
    prefetched_params: float = 0.0,
) -> Bound:
    """The bound for plans with at most so many resident and prefetched parameters.

    Between the norm barrier and the end of the next forward, all parameters are updated and all
    forward compute is done; each resource must fit its share of that work into the time ``T``:
    host compute, device compute (which forward uses too), the link each way and both together,
    DRAM, and cores. What visits may come in during backward (prefetch) and may be written back
    until the next barrier. ``iteration_s = backward + min T``; overlap of the update with forward
    is allowed, so the bound holds for plans without it too.

    Raises:
        ValueError: the program has no solution (cannot happen for rates > 0).
    """
    from scipy.optimize import linprog

    problem = _Problem(workload, machine, prefetched_params)
    solved = linprog(
        c=[0.0, 0.0, 0.0, 1.0],
        A_ub=np.array(problem.rows),
        b_ub=np.array(problem.limits),
        A_eq=np.array([[1.0, 1.0, 1.0, 0.0]]),
        b_eq=np.array([1.0]),
        bounds=[(0, 1), (0, 1), (0, min(1.0, resident_params / workload.params)), (0, None)],
        method="highs",
    )
    if not solved.success:
        raise ValueError(f"the bound's linear program must be solvable, but: {solved.message}")
    split = np.asarray(solved.x, dtype=np.float64)
    host, device, resident, update_s = (float(x) for x in split)
    slack = problem.limits - np.array(problem.rows) @ split
    binding = tuple(
        name
        for name, left in zip(problem.names, slack, strict=True)
        if left <= 1e-9 * max(1.0, update_s)
    )
    return Bound(
        iteration_s=workload.backward_s + workload.pipeline_idle_s + update_s,
        update_s=update_s,
        host_params=host * workload.params,
        device_params=device * workload.params,
        resident_params=resident * workload.params,
        binding=binding,
    )


class _Problem:
    """Rows ``a . (host, device, resident, T) <= limit``; shares of all parameters, T in seconds."""

    def __init__(self, workload: Workload, machine: Machine, prefetched_params: float) -> None:
        self.names: list[str] = []
        self.rows: list[list[float]] = []
        self.limits: list[float] = []
        w, n = workload, float(workload.params)
        have = capacities(machine, w.ranks_per_node)
        wire = 0.0 if machine.unified_memory else float(w.wire_bytes)
        home = 0.0 if machine.unified_memory else float(w.grad_bytes_per_param)
        state = float(STATE_BYTES_PER_PARAM)
        host_s, host_cores_s = _host_update(machine, n)
        device_s = n / machine.rate("device_adam_params_per_s")
        early = min(prefetched_params, n) * state  # came in before the barrier
        rest_s = w.backward_s + w.pipeline_idle_s
        self._add("host compute", [host_s, 0, 0], 0.0)
        self._add("device compute", [0, device_s, device_s], -w.forward_s)
        self._add(
            "H2D link", [wire * n / have["h2d"], state * n / have["h2d"], 0], early / have["h2d"]
        )
        # Write-backs and gradients may use the whole iteration.
        self._add("D2H link", [home * n / have["d2h"], state * n / have["d2h"], 0], rest_s)
        both = have["link"]
        self._add("link", [(wire + home) * n / both, 2 * state * n / both, 0], rest_s)
        update_dram = 2 * state + w.grad_bytes_per_param + w.wire_bytes + wire + home
        self._add("DRAM", [update_dram * n / have["dram"], 2 * state * n / have["dram"], 0], rest_s)
        if machine.device_shares_host_cores:
            self._add("cores", [host_cores_s, device_s, device_s], -w.forward_s)

    def _add(self, name: str, seconds: list[float], spare_s: float) -> None:
        """The work of a resource must fit into T plus what it has outside of T."""
        self.names.append(name)
        self.rows.append([*seconds, -1.0])
        self.limits.append(spare_s)


def _host_update(machine: Machine, params: float) -> tuple[float, float]:
    """The least time, and the least use of all cores in seconds, for any number of threads."""
    counts = {*machine.host_adam_by_threads, machine.cpu_cores}
    rates = {threads: machine.host_adam_rate(threads) for threads in counts}
    least_s = params / max(rates.values())
    return least_s, min(params / rate * n / machine.cpu_cores for n, rate in rates.items())
