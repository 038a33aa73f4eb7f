"""Many plans of one workload on one machine: ebbtide's schedule is built as arrays and run there.

`PlanSweep` gives what ``simulate_fast(build_schedule(workload, plan), machine)`` gives, without an
`Op` object in between. It is what the tuner's search calls.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulator.engines import kernel, recipe_arrays
from simulator.engines.compiled import capacity_vector, machine_vector
from simulator.engines.kernel import Floats, Ints
from simulator.engines.recipe_arrays import (
    HOME_CODES,
    HOST_UPDATE,
    L_FETCH,
    PARAMETERS_ON_HOST,
    PLACEMENT_CODES,
    RATES,
    SLOTS,
    RecipeArrays,
    build,
    totals,
)
from simulator.machine import Machine
from simulator.plan import Plan, PlanError
from simulator.schedules.loop import reduce_parts
from simulator.update.footprint import Holding, moved_out
from simulator.update.recipes import Bytes, Slot, recipe_of, ways
from simulator.workload import Workload

COLUMNS = (
    "iteration_s", "forward_s", "backward_s", "step_s", "update_s", "makespan_s",
    "device_peak_bytes", "host_peak_bytes", "loop_s",
)  # fmt: skip


class PlanSweep:
    """Predicts many plans of one workload on one machine.

    Holds buffers that every call reuses: one instance per thread.
    """

    def __init__(self, workload: Workload, machine: Machine, iterations: int = 3) -> None:
        """Raises ValueError where the machine lacks a rate that the workload needs."""
        self.workload, self.machine, self.iterations = workload, machine, iterations
        micro = workload.gradient_accumulation_steps
        self.layers = np.array(
            [
                (
                    layer.forward_s / micro, layer.backward_s / micro, layer.activation_bytes,
                    layer.network_gather_bytes, *reduce_parts(workload, number), 0.0,
                )
                for number, layer in enumerate(workload.layers)
            ],
            dtype=np.float64,
        )  # fmt: skip
        shares = workload.shares()
        self.share_first = np.cumsum([0, *(len(held) for held in shares)]).astype(np.int64)
        flat = [pair for held in shares for pair in held]
        self.share_subgroup = np.array([s for s, _ in flat], dtype=np.int64)
        self._share_elements = np.array([n for _, n in flat], dtype=np.float64)
        self._share_layer = np.repeat(np.arange(len(shares)), [len(held) for held in shares])
        counts = [len(held) for held in workload.layers_of_subgroups()]
        self.layer_count = np.array(counts, dtype=np.int64)
        self.sizes = np.array(workload.subgroups, dtype=np.float64)
        self.capacity = capacity_vector(machine, workload.ranks_per_node)
        self.machine_facts = machine_vector(machine)
        self.recipes = RecipeArrays.of(Bytes.of(workload))
        self.rates = self._rates()
        self._by_threads: dict[int, Floats] = {}
        self.ways = len(ways())
        self.held = Holding.of_workload(workload)
        self._forward_order = np.arange(len(self.sizes))
        self.extra = np.array(
            [workload.pipeline_idle_s, workload.step_gather_s, workload.network_step_gather_bytes]
        )
        self._allocate(len(flat))

    def _rates(self) -> Floats:
        networked = (
            self.layers[:, recipe_arrays.L_GATHER : L_FETCH].any()
            or self.workload.network_step_gather_bytes
        )
        return np.array(
            [
                1.0 if name == "network_bytes_per_s" and not networked else self.machine.rate(name)
                for name in RATES
            ]
        )

    def _allocate(self, shares: int) -> None:
        layers, subgroups = len(self.workload.layers), len(self.sizes)
        micro = self.workload.gradient_accumulation_steps
        longest = max(len(recipe_of(*way).steps) for way in ways())
        per_iteration = micro * (8 * layers + 2 * subgroups) + longest * subgroups + 5
        count = per_iteration * self.iterations
        self.ops = np.zeros((count, kernel.OP_COLUMNS))
        self.after_first = np.zeros(count + 1, dtype=np.int64)
        # A step's end waits for two ops of each subgroup, and so do its gathers.
        waits = 4 * count + self.iterations * (shares + layers + 6 * subgroups)
        self.after = np.zeros(waits, dtype=np.int64)
        self.start_s, self.end_s = np.zeros(count), np.zeros(count)

    def evaluate(
        self,
        placement: NDArray[np.int8],
        staging_slots: int = 2,
        prefetch: int = 0,
        threads: int = 0,
        overlap_forward: bool = True,
        issue: Ints | None = None,
    ) -> Floats:
        """One row with `COLUMNS` for one plan.

        Args:
            placement: shape (subgroups,), values of PLACEMENT_CODES, with those of HOME_CODES
                added; the rest as in `Plan`.
            issue: `Plan.issue_order`; None: forward order.

        Raises:
            PlanError: another number of placements than subgroups, or prefetch without slots.
        """
        self._check(placement, staging_slots, prefetch)
        if overlap_forward and self.workload.zero_stage < 3:
            raise PlanError(
                "overlap_forward must be false where steps wait for their updates, but got true "
                f"for ZeRO-{self.workload.zero_stage}"
            )
        amounts = totals(placement, self.sizes, self.ways).tolist()
        slots = self.held.slots(amounts[0], staging_slots)
        self._note_fetched(placement)
        micro = self.workload.gradient_accumulation_steps
        plan = np.array(
            [prefetch, overlap_forward, micro, self.iterations, self.workload.zero_stage,
             *(slots[s] for s in SLOTS)],
            dtype=np.int64,
        )  # fmt: skip
        arrays = self.recipes
        count = build(
            self.layers, self.share_first, self.share_subgroup, self.layer_count,
            self.extra, self.sizes, placement,
            self._forward_order if issue is None else issue, plan,
            arrays.with_threads(threads), arrays.first, arrays.last, arrays.gradient_home,
            self.ops, self.after_first, self.after,
        )  # fmt: skip
        row = self._run(count, self._rates_with(threads))
        held = self.held.bytes(amounts, staging_slots)  # on top of the activations' peak
        row[kernel.DEVICE_PEAK] += self._device_base() + held["device"]
        row[kernel.HOST_PEAK] += held["host"]
        return row

    def evaluate_plan(self, plan: Plan) -> Floats:
        """One row with `COLUMNS` for a plan."""
        ways = zip(plan.placements, plan.parameter_homes, strict=True)
        codes = np.array([PLACEMENT_CODES[p] + HOME_CODES[home] for p, home in ways], np.int8)
        return self.evaluate(
            codes, plan.staging_slots, plan.prefetch, plan.threads, plan.overlap_forward,
            np.array(plan.issue_order, dtype=np.int64),
        )  # fmt: skip

    def _note_fetched(self, placement: NDArray[np.int8]) -> None:
        """Bytes of each layer that come in from the host for a pass."""
        away = placement >= PARAMETERS_ON_HOST
        self._on_host = bool(away.any())
        self.layers[:, L_FETCH] = 0.0
        if self._on_host:
            elements = self._share_elements * away[self.share_subgroup]
            fetched = np.bincount(self._share_layer, elements, len(self.layers))
            self.layers[:, L_FETCH] = fetched * self.workload.wire_bytes

    def _check(self, placement: NDArray[np.int8], staging_slots: int, prefetch: int) -> None:
        if placement.shape != self.sizes.shape:
            raise PlanError(
                "a placement is needed for each subgroup of the workload, but got "
                f"{placement.size} for {self.sizes.size} subgroups"
            )
        visits = staging_slots < 1 and self._visits(placement)
        if not 0 <= prefetch <= staging_slots or visits:
            raise PlanError(
                "0 <= prefetch <= staging_slots must hold, with at least one slot for visiting "
                f"subgroups, but got prefetch={prefetch}, staging_slots={staging_slots}"
            )

    def _visits(self, placement: NDArray[np.int8]) -> bool:
        counts = totals(placement, self.sizes, self.ways).tolist()[0]
        return any(counts[user] for user in self.held.users[Slot.STAGING])

    def _device_base(self) -> float:
        """Without the parameters that live on the host."""
        base = self.workload.device_base_bytes
        if not self._on_host:
            return base
        return max(0.0, base - moved_out(self.layers[:, L_FETCH].tolist()))

    def _rates_with(self, threads: int) -> Floats:
        if not 0 < threads < self.machine.cpu_cores:
            return self.rates
        if threads not in self._by_threads:
            self._by_threads[threads] = self.rates.copy()
            self._by_threads[threads][HOST_UPDATE] = self.machine.host_adam_rate(threads)
        return self._by_threads[threads]

    def _run(self, count: int, rates: Floats) -> Floats:
        ops, start_s, end_s = self.ops[:count], self.start_s[:count], self.end_s[:count]
        row = np.zeros(kernel.SUMMARY_COLUMNS)
        peaks = kernel.run(
            ops, self.after_first[: count + 1], self.after, rates, self.capacity,
            self.machine_facts, start_s, end_s,
        )  # fmt: skip
        kernel.summarise(ops, start_s, end_s, self.iterations, row)
        row[kernel.DEVICE_PEAK], row[kernel.HOST_PEAK] = peaks
        return row
