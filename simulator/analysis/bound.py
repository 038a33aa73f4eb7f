"""How fast any plan could be: a linear program, and whole numbers of subgroups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from simulator.analysis.counted_bound import MOST_SUBGROUPS, CountBounds, count_bounds
from simulator.analysis.lane_work import of_optimizer
from simulator.engines.reference import capacities
from simulator.machine import Machine
from simulator.update.footprint import fetched_elements, fetches_of_a_step, moved_out
from simulator.update.recipes import Bytes, Placement
from simulator.update.tiers import Memory
from simulator.workload import Workload


@dataclass(frozen=True, slots=True)
class Bound:
    """A lower bound and the split that would reach it if parameters were a fluid.

    Attributes:
        iteration_s: no plan's steady iteration can be shorter.
        update_s: from the norm barrier until the next (first micro-batch's) forward has ended.
        params: the split of this rank's parameters.
        binding: the resources that are full at the optimum; ``(update)``: from the end of backward
            to the end of the next forward, else over the whole iteration.
    """

    iteration_s: float
    update_s: float
    params: Mapping[Placement, float]
    binding: tuple[str, ...]


def bound(workload: Workload, machine: Machine, device_bytes: float | None = None) -> Bound:
    """The bound for every plan that stays within so much device memory.

    Between the norm barrier and the end of the next forward (of its first micro-batch), all
    parameters are updated and that forward's compute is done; each resource must fit its share of
    that work into the time ``T``: host compute, device compute (which forward uses too), the link
    each way and both together, DRAM, and cores. Visits may come in during backward as far as slots
    hold them, and may be written back until the next barrier. Residents and slots share the device
    with activations and with gradients that stay there.
    ``iteration_s = min T + the other passes``; overlap of the update with forward is allowed, so
    the bound holds for plans without it too. Up to MOST_SUBGROUPS subgroups, it is also the
    lowest of what whole numbers of them allow (`simulator.analysis.counted_bound`).

    It is one of the steady state: a simulation of three iterations can be shorter where the link
    falls behind from iteration to iteration.

    Args:
        device_bytes: the limit on device memory; None: the machine's.

    Raises:
        ValueError: not even the workload alone fits into the device's memory.
    """
    counts = whole_counts(workload, machine, device_bytes)
    return raised(fluid_bound(workload, machine, device_bytes), counts)


def raised(fluid: Bound, counts: CountBounds | None) -> Bound:
    """`bound`, where its two parts are known."""
    if counts is None or not len(counts.iteration_s):
        return fluid
    rest_s = fluid.iteration_s - fluid.update_s
    update_s = max(fluid.update_s, float(counts.iteration_s[0]) - rest_s)
    return replace(fluid, iteration_s=rest_s + update_s, update_s=update_s)


def fluid_bound(
    workload: Workload,
    machine: Machine,
    device_bytes: float | None = None,
    homes: Sequence[Memory] = (),
    *,
    anywhere: bool = False,
) -> Bound:
    """`bound` without the numbers of whole subgroups: no tighter, and there in milliseconds.

    Args:
        homes: of the subgroups' parameters; empty: all on the device. Where some live on the host,
            they may be just those whose update would send them to the device.
        anywhere: whatever the homes: parameters take no device memory and no fetch.

    Raises:
        ValueError: not even the workload alone fits into the device's memory.
    """
    from scipy.optimize import linprog

    workload, machine = workload.serial, of_optimizer(machine, workload)
    if anywhere:
        away: Memory = "host"
        homes = [away] * len(workload.subgroups)
    problem = _Problem(
        workload, machine, device_bytes or machine.device_memory_bytes,
        fetched_elements(workload, homes), free=anywhere,
    )  # fmt: skip
    solved = linprog(
        c=[0.0, 0.0, 0.0, 0.0, 1.0],
        A_ub=np.array(problem.rows),
        b_ub=np.array(problem.limits),
        A_eq=np.array([[1.0, 1.0, 1.0, 0.0, 0.0]]),
        b_eq=np.array([1.0]),
        bounds=[(0, 1), (0, 1), (0, 1), (0, 1), (0, None)],
        method="highs",
    )
    if not solved.success:
        raise ValueError(
            "the workload alone must fit into device memory, but nothing does within "
            f"{device_bytes or machine.device_memory_bytes:.0f} bytes: {solved.message}"
        )
    split = np.asarray(solved.x, dtype=np.float64)
    host, device, resident, _, update_s = (float(x) for x in split)
    slack = problem.limits - np.array(problem.rows) @ split
    binding = tuple(
        name
        for name, left in zip(problem.names, slack, strict=True)
        if left <= 1e-9 * max(1.0, update_s)
    )
    return Bound(
        iteration_s=problem.rest_s + update_s,
        update_s=update_s,
        params={
            "host": host * workload.params,
            "device": device * workload.params,
            "resident": resident * workload.params,
        },
        binding=binding,
    )


def whole_counts(
    workload: Workload, machine: Machine, device_bytes: float | None
) -> CountBounds | None:
    """Bounds of whole numbers of subgroups; None where they are not counted out."""
    if machine.unified_memory or len(workload.subgroups) > MOST_SUBGROUPS:
        return None
    return count_bounds(workload, machine, device_bytes or machine.device_memory_bytes)


class _Problem:
    """Rows ``a . (host, device, resident, slots, T) <= limit``: shares of all parameters, and s."""

    def __init__(
        self, workload: Workload, machine: Machine, device_bytes: float, fetched: list[int],
        *, free: bool,
    ) -> None:  # fmt: skip
        self.fetched, self.free = fetched, free
        self.names: list[str] = []
        self.rows: list[list[float]] = []
        self.limits: list[float] = []
        self._times(workload, machine)
        if not machine.unified_memory:
            self._memory(workload, device_bytes)

    def _times(self, w: Workload, machine: Machine) -> None:
        n, micro = float(w.params), w.gradient_accumulation_steps
        rates = capacities(machine, w.ranks_per_node)
        away = sum(self.fetched)
        # Parameters that live on the host come in for each pass, not after their update.
        wire = 0.0 if machine.unified_memory or away else float(w.wire_bytes)
        often = zip(self.fetched, fetches_of_a_step(w), strict=True)
        fetch_bytes = 0.0 if self.free else sum(n * f for n, f in often) * w.wire_bytes
        home = 0.0 if machine.unified_memory else float(w.grad_bytes_per_param)
        state = float(Bytes.of(w).visit)
        host_s, host_cores_s = _host_update(machine, n)
        device_s = n / machine.rate("device_adam_params_per_s")
        forward_s = w.forward_s / micro
        rest_s = self.rest_s = w.backward_s + w.forward_s - forward_s
        # Updates go on in a pipeline's bubble, the training loop does not.
        self._add("training loop", [0, 0, 0, 0], -forward_s - w.pipeline_idle_s)
        self._add("host compute", [host_s, 0, 0, 0], 0.0)
        self._add("device compute", [0, device_s, device_s, 0], -forward_s)
        up = n / rates["h2d"]
        self._add("H2D link (update)", [wire * up, state * up, 0, -state * up], 0.0)
        # Write-backs and gradients may use the whole iteration.
        down, both, dram = n / rates["d2h"], n / rates["link"], n / rates["dram"]
        # From the second micro-batch on, the sum so far is fetched before it goes home again.
        fetched = (micro - 1) * home
        self._add("D2H link", [micro * home * down, state * down, 0, 0], rest_s)
        rest_in_s = rest_s - fetch_bytes / rates["h2d"]
        self._add("H2D link", [(wire + fetched) * up, state * up, 0, 0], rest_in_s)
        crossing = wire + micro * home + fetched
        rest_both_s = rest_s - fetch_bytes / rates["link"]
        self._add("both ways of the link", [crossing * both, 2 * state * both, 0, 0], rest_both_s)
        # Alone, no op asks DRAM for more than the triad rate, as in `simulate.demands`.
        triad = machine.dram_bytes_per_s.median
        wire_dram = min(wire, triad * wire / machine.rate("h2d_bytes_per_s"))
        home_dram = min(home, triad * home / machine.rate("d2h_bytes_per_s"))
        in_dram = min(state, triad * state / machine.rate("h2d_bytes_per_s"))
        out_dram = min(state, triad * state / machine.rate("d2h_bytes_per_s"))
        fetch_dram = min(home, triad * home / machine.rate("h2d_bytes_per_s"))
        visit = in_dram + out_dram
        kernel = min(Bytes.of(w).host_traffic, triad * host_s / n)
        # What is not written back when forward ends still occupies slots, as visits that came in
        # early do: within T at least the rest crosses. Host updates lie in T altogether.
        self._add("D2H link (update)", [0, state * down, 0, -state * down], 0.0)
        self._add(
            "both ways of the link (update)",
            [wire * both, 2 * state * both, 0, -2 * state * both],
            0.0,
        )
        inside = kernel + wire_dram
        self._add("DRAM (update)", [inside * dram, visit * dram, 0, -visit * dram], 0.0)
        inside += micro * home_dram + (micro - 1) * fetch_dram
        self._add("DRAM", [inside * dram, visit * dram, 0, 0], rest_s)
        if machine.device_shares_host_cores:
            self._add("CPU cores", [host_cores_s, device_s, device_s, 0], -forward_s)

    def _memory(self, w: Workload, device_bytes: float) -> None:
        """In shares of all state, so that the rows are as large as the others.

        State, slots and gradients that stay are held throughout; activations come on top of them.
        """
        state = float(w.optimizer_state.state_bytes)
        scale = w.params * state
        base = max(0, w.device_base_bytes - moved_out(w, self.fetched) * w.wire_bytes)
        spare = (device_bytes - base) / scale
        activations = sum(layer.activation_bytes for layer in w.layers) / scale
        stays = w.grad_bytes_per_param / state
        self._append("device memory", [0, stays, 1 + stays, 1, 0], spare - activations)
        self._append("staging slots", [0, -1, 0, 1, 0], 0.0)

    def _add(self, name: str, seconds: list[float], spare_s: float) -> None:
        """The work of a resource must fit into T plus what it has outside of T."""
        self._append(name, [*seconds, -1.0], spare_s)

    def _append(self, name: str, row: list[float], limit: float) -> None:
        self.names.append(name)
        self.rows.append(row)
        self.limits.append(limit)


def _host_update(machine: Machine, params: float) -> tuple[float, float]:
    """The least time, and the least use of all cores in seconds, for any number of threads."""
    counts = {1, *machine.host_adam_by_threads, machine.cpu_cores}
    rates = {threads: machine.host_adam_rate(threads) for threads in counts}
    least_s = params / max(rates.values())
    return least_s, min(params / rate * n / machine.cpu_cores for n, rate in rates.items())
