"""Many plans of one workload on one machine: ebbtide's schedule is built as arrays and run there.

`PlanSweep` gives what ``simulate_fast(build_schedule(workload, plan), machine)`` gives, without an
`Op` object in between. It is what the tuner's search calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulator.engines import kernel
from simulator.engines.compiled import capacity_vector, machine_vector
from simulator.engines.jit import compiled, inlined
from simulator.engines.kernel import Floats, Ints
from simulator.machine import Machine, RateName
from simulator.plan import Placement, Plan, PlanError
from simulator.schedule import Lane, OpKind
from simulator.schedules.ebbtide import SPLIT_STATE_BYTES_PER_PARAM
from simulator.workload import STATE_BYTES_PER_PARAM, Workload

HOST, DEVICE, RESIDENT = range(3)
PLACEMENT_CODES: dict[Placement, int] = {"host": HOST, "device": DEVICE, "resident": RESIDENT}
COLUMNS = (
    "iteration_s", "forward_s", "backward_s", "step_s", "update_s", "makespan_s",
    "device_peak_bytes", "host_peak_bytes",
)  # fmt: skip

_RATES: tuple[RateName, ...] = (
    "wall_s", "h2d_bytes_per_s", "d2h_bytes_per_s", "host_adam_params_per_s",
    "device_adam_params_per_s", "network_bytes_per_s",
)  # fmt: skip
_WALL, _R_H2D, _R_D2H, _R_HOST_ADAM, _R_DEVICE_ADAM, _R_NETWORK = range(6)
_L = {lane: number for number, lane in enumerate(Lane)}
_K = {kind: number for number, kind in enumerate(OpKind)}
_COMPUTE, _UPDATE, _H2D, _PARAMETERS = (
    _L[Lane.COMPUTE], _L[Lane.DEVICE_UPDATE], _L[Lane.H2D], _L[Lane.H2D_PARAMETERS],
)  # fmt: skip
_D2H, _HOST, _NETWORK = _L[Lane.D2H], _L[Lane.HOST], _L[Lane.NETWORK]
_FORWARD, _BACKWARD, _IDLE = _K[OpKind.FORWARD], _K[OpKind.BACKWARD], _K[OpKind.IDLE]
_GATHER, _REDUCE = _K[OpKind.PARAMETER_GATHER], _K[OpKind.GRADIENT_REDUCE]
_GRADIENT_D2H, _GRADIENT_H2D = _K[OpKind.GRADIENT_D2H], _K[OpKind.GRADIENT_H2D]
_NORM, _STEP_END = _K[OpKind.NORM], _K[OpKind.STEP_END]
_STATE_H2D, _STATE_D2H = _K[OpKind.STATE_H2D], _K[OpKind.STATE_D2H]
_UPDATE_HOST, _UPDATE_DEVICE = _K[OpKind.UPDATE_HOST], _K[OpKind.UPDATE_DEVICE]
_PARAMETER_H2D = _K[OpKind.PARAMETER_H2D]

# Columns of a layer's row, and entries of the scalars.
_L_FORWARD, _L_BACKWARD, _L_ACTIVATION, _L_GATHER, _L_REDUCE = range(5)
_S_WIRE, _S_GRAD, _S_IDLE, _S_VISIT, _S_HOST_DRAM, _S_CORES = range(6)
# Entries of the counts: ops and waits so far, and what the next op must know of earlier ones.
_N_OPS, _N_AFTER, _N_ITERATION, _N_BACKWARD, _N_REDUCE, _N_STEP_END, _N_VISITS, _N_BACK = range(8)
_N_PASS, _N_PASS_BEFORE = 8, 9
_P_SLOTS, _P_PREFETCH, _P_PREFETCH_LAYER, _P_OVERLAP, _P_MICRO_BATCHES, _P_ITERATIONS = range(6)


@inlined
def _wait(n: Ints, after: Ints, op: int) -> None:
    """The op that comes next waits for ``op``; -1 is nobody."""
    if op >= 0:
        after[n[_N_AFTER]] = op
        n[_N_AFTER] += 1


@inlined
def _add(
    n: Ints, ops: Floats, after_first: Ints, kind: int, lane: int, work: float, rate: int,
    dram: float, cores: float, share: float, alloc: float, free: float,
) -> int:  # fmt: skip
    i = n[_N_OPS]  # columns that no op here sets stay as they were allocated: zero
    ops[i, kernel.LANE] = lane
    ops[i, kernel.KIND] = kind
    ops[i, kernel.ITERATION] = n[_N_ITERATION]
    ops[i, kernel.WORK] = work
    ops[i, kernel.RATE] = rate
    ops[i, kernel.DRAM] = dram
    ops[i, kernel.CORES] = cores
    ops[i, kernel.DEVICE_SHARE] = share
    ops[i, kernel.DEVICE_ALLOC] = alloc
    ops[i, kernel.DEVICE_FREE] = free
    n[_N_OPS] = i + 1
    after_first[i + 1] = n[_N_AFTER]
    return int(i)


@inlined
def _pass_done(n: Ints, op: int) -> None:
    n[_N_PASS_BEFORE] = n[_N_PASS]
    n[_N_PASS] = op


@inlined
def _state_h2d(
    n: Ints, ops: Floats, after_first: Ints, after: Ints, size: float, slots: int,
    written_back: Ints, behind: int,
) -> int:  # fmt: skip
    _wait(n, after, behind)
    if n[_N_VISITS] >= slots:
        _wait(n, after, written_back[n[_N_VISITS] - slots])
    n[_N_VISITS] += 1
    return _add(n, ops, after_first, _STATE_H2D, _H2D, size, _R_H2D, size, 0.0, 0.0, 0.0, 0.0)


@compiled
def _forward(
    n: Ints, ops: Floats, after_first: Ints, after: Ints, micro_batch: int, layers: Floats,
    share_first: Ints, share_subgroup: Ints, new: Ints,
) -> None:  # fmt: skip
    for layer in range(layers.shape[0]):
        if micro_batch == 0:
            _wait(n, after, n[_N_STEP_END])
            for j in range(share_first[layer], share_first[layer + 1]):
                _wait(n, after, new[share_subgroup[j]])
        if layers[layer, _L_GATHER] > 0:
            _wait(n, after, n[_N_PASS_BEFORE])
            gather = _add(n, ops, after_first, _GATHER, _NETWORK, layers[layer, _L_GATHER],
                          _R_NETWORK, 0.0, 0.0, 0.0, 0.0, 0.0)  # fmt: skip
            _wait(n, after, gather)
        op = _add(n, ops, after_first, _FORWARD, _COMPUTE, layers[layer, _L_FORWARD], _WALL, 0.0,
                  0.0, 1.0, layers[layer, _L_ACTIVATION], 0.0)  # fmt: skip
        _pass_done(n, op)


@compiled
def _gradient_home(
    n: Ints, ops: Floats, after_first: Ints, after: Ints, micro_batch: int, size: float,
    previous: int, behind: int,
) -> int:  # fmt: skip
    """Of a host subgroup; from the second micro-batch on, the sum so far is fetched first."""
    _wait(n, after, behind)
    if micro_batch > 0:
        _wait(n, after, previous)
        fetched = _add(n, ops, after_first, _GRADIENT_H2D, _PARAMETERS, size, _R_H2D, size, 0.0,
                       0.0, 0.0, 0.0)  # fmt: skip
        _wait(n, after, fetched)
    return _add(n, ops, after_first, _GRADIENT_D2H, _D2H, size, _R_D2H, size, 0.0, 0.0, 0.0, 0.0)


@compiled
def _backward(
    n: Ints, ops: Floats, after_first: Ints, after: Ints, micro_batch: int, layers: Floats,
    share_first: Ints, share_subgroup: Ints, share_elements: Floats, layer_count: Ints,
    sizes: Floats, placement: Any, plan: Ints, scalars: Floats, written_back: Ints, home: Ints,
    arrived: Ints,
) -> None:  # fmt: skip
    missing = layer_count.copy()
    grad = scalars[_S_GRAD]
    starts = min(plan[_P_PREFETCH_LAYER], layers.shape[0] - 1)
    for layer in range(layers.shape[0] - 1, -1, -1):
        stays = 0.0
        for j in range(share_first[layer], share_first[layer + 1]):
            if placement[share_subgroup[j]] != HOST and micro_batch == 0:
                stays += share_elements[j]
        if layers[layer, _L_GATHER] > 0:
            _wait(n, after, n[_N_PASS_BEFORE])
            gather = _add(n, ops, after_first, _GATHER, _NETWORK, layers[layer, _L_GATHER],
                          _R_NETWORK, 0.0, 0.0, 0.0, 0.0, 0.0)  # fmt: skip
            _wait(n, after, gather)
        op = _add(n, ops, after_first, _BACKWARD, _COMPUTE, layers[layer, _L_BACKWARD], _WALL, 0.0,
                  0.0, 1.0, stays * grad, layers[layer, _L_ACTIVATION])  # fmt: skip
        _pass_done(n, op)
        n[_N_BACKWARD] = op
        if layers[layer, _L_REDUCE] > 0:
            _wait(n, after, op)
            op = _add(n, ops, after_first, _REDUCE, _NETWORK, layers[layer, _L_REDUCE],
                      _R_NETWORK, 0.0, 0.0, 0.0, 0.0, 0.0)  # fmt: skip
            n[_N_REDUCE] = op
        for j in range(share_first[layer + 1] - 1, share_first[layer] - 1, -1):
            s = share_subgroup[j]
            missing[s] -= 1
            if missing[s] == 0:
                if placement[s] == HOST:
                    home[s] = _gradient_home(n, ops, after_first, after, micro_batch,
                                             sizes[s] * grad, home[s], op)  # fmt: skip
                else:
                    home[s] = op
        if layer == starts and micro_batch == plan[_P_MICRO_BATCHES] - 1:
            _prefetch(n, ops, after_first, after, sizes, placement, plan, scalars[_S_VISIT],
                      written_back, arrived)  # fmt: skip


@compiled
def _prefetch(
    n: Ints, ops: Floats, after_first: Ints, after: Ints, sizes: Floats, placement: Any,
    plan: Ints, visit_bytes: float, written_back: Ints, arrived: Ints,
) -> None:  # fmt: skip
    begun = 0
    for s in range(sizes.size):
        if placement[s] == DEVICE and begun < plan[_P_PREFETCH]:
            arrived[s] = _state_h2d(n, ops, after_first, after, sizes[s] * visit_bytes,
                                    plan[_P_SLOTS], written_back, n[_N_BACKWARD])  # fmt: skip
            begun += 1


@compiled
def _update_host(
    n: Ints, ops: Floats, after_first: Ints, after: Ints, size: float, scalars: Floats,
    norm: int, home: int,
) -> int:  # fmt: skip
    _wait(n, after, norm)
    _wait(n, after, home)
    update = _add(n, ops, after_first, _UPDATE_HOST, _HOST, size, _R_HOST_ADAM,
                  size * scalars[_S_HOST_DRAM], scalars[_S_CORES], 0.0, 0.0, 0.0)  # fmt: skip
    wire = size * scalars[_S_WIRE]
    _wait(n, after, update)
    return _add(n, ops, after_first, _PARAMETER_H2D, _PARAMETERS, wire, _R_H2D, wire,
                0.0, 0.0, 0.0, 0.0)  # fmt: skip


@compiled
def _step(
    n: Ints, ops: Floats, after_first: Ints, after: Ints, sizes: Floats, placement: Any,
    plan: Ints, scalars: Floats, written_back: Ints, home: Ints, arrived: Ints, new: Ints,
) -> None:  # fmt: skip
    _wait(n, after, n[_N_BACKWARD])
    _wait(n, after, n[_N_REDUCE])
    norm = _add(n, ops, after_first, _NORM, _COMPUTE, 0.0, _WALL, 0.0, 0.0, 0.0, 0.0, 0.0)
    for s in range(sizes.size):
        if placement[s] == HOST:
            new[s] = _update_host(n, ops, after_first, after, sizes[s], scalars, norm, home[s])
            continue
        visit = sizes[s] * scalars[_S_VISIT]
        if placement[s] == DEVICE and arrived[s] < 0:
            arrived[s] = _state_h2d(n, ops, after_first, after, visit, plan[_P_SLOTS],
                                    written_back, norm)  # fmt: skip
        _wait(n, after, norm)
        _wait(n, after, arrived[s])
        _wait(n, after, home[s])
        new[s] = _add(n, ops, after_first, _UPDATE_DEVICE, _UPDATE, sizes[s], _R_DEVICE_ADAM, 0.0,
                      0.0, 1.0, 0.0, sizes[s] * scalars[_S_GRAD])  # fmt: skip
        if placement[s] == DEVICE:
            _wait(n, after, new[s])
            back = _add(n, ops, after_first, _STATE_D2H, _D2H, visit, _R_D2H, visit,
                        0.0, 0.0, 0.0, 0.0)  # fmt: skip
            written_back[n[_N_BACK]] = back
            n[_N_BACK] += 1
            arrived[s] = -1
    _wait(n, after, norm)
    if not plan[_P_OVERLAP]:
        for s in range(sizes.size):
            _wait(n, after, new[s])
            new[s] = -1
        if n[_N_BACK] > 0:  # the D2H lane is in order: the last one is enough
            _wait(n, after, written_back[n[_N_BACK] - 1])
    n[_N_STEP_END] = _add(n, ops, after_first, _STEP_END, _COMPUTE, 0.0, _WALL, 0.0, 0.0, 0.0,
                          0.0, 0.0)  # fmt: skip


@compiled
def build(
    layers: Floats, share_first: Ints, share_subgroup: Ints, share_elements: Floats,
    layer_count: Ints, sizes: Floats, placement: Any, plan: Ints, scalars: Floats, ops: Floats,
    after_first: Ints, after: Ints,
) -> int:  # fmt: skip
    """Writes the schedule of `build_schedule` into the arrays; returns how many ops it has."""
    subgroups = sizes.size
    n = np.full(10, -1, dtype=np.int64)
    n[_N_OPS] = n[_N_AFTER] = n[_N_VISITS] = n[_N_BACK] = 0
    after_first[0] = 0
    new = np.full(subgroups, -1, dtype=np.int64)
    home = np.full(subgroups, -1, dtype=np.int64)
    arrived = np.full(subgroups, -1, dtype=np.int64)
    written_back = np.empty(subgroups * plan[_P_ITERATIONS], dtype=np.int64)
    for iteration in range(plan[_P_ITERATIONS]):
        n[_N_ITERATION] = iteration
        if scalars[_S_IDLE] > 0:
            _add(n, ops, after_first, _IDLE, _COMPUTE, scalars[_S_IDLE], _WALL, 0.0, 0.0, 0.0,
                 0.0, 0.0)  # fmt: skip
        for micro_batch in range(plan[_P_MICRO_BATCHES]):
            _forward(n, ops, after_first, after, micro_batch, layers, share_first,
                     share_subgroup, new)  # fmt: skip
            _backward(n, ops, after_first, after, micro_batch, layers, share_first,
                      share_subgroup, share_elements, layer_count, sizes, placement, plan,
                      scalars, written_back, home, arrived)  # fmt: skip
        _step(n, ops, after_first, after, sizes, placement, plan, scalars, written_back, home,
              arrived, new)  # fmt: skip
    return int(n[_N_OPS])


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
                    layer.network_gather_bytes, layer.network_reduce_bytes,
                )
                for layer in workload.layers
            ],
            dtype=np.float64,
        )  # fmt: skip
        shares = workload.shares()
        self.share_first = np.cumsum([0, *(len(held) for held in shares)]).astype(np.int64)
        flat = [pair for held in shares for pair in held]
        self.share_subgroup = np.array([s for s, _ in flat], dtype=np.int64)
        self.share_elements = np.array([n for _, n in flat], dtype=np.float64)
        counts = [len(held) for held in workload.layers_of_subgroups()]
        self.layer_count = np.array(counts, dtype=np.int64)
        self.sizes = np.array(workload.subgroups, dtype=np.float64)
        self.capacity = capacity_vector(machine, workload.ranks_per_node)
        self.machine_facts = machine_vector(machine)
        self.rates = self._rates()
        self._allocate(len(flat))

    def _rates(self) -> Floats:
        optional = set() if self.layers[:, _L_GATHER:].any() else {_R_NETWORK}
        return np.array(
            [1.0 if i in optional else self.machine.rate(name) for i, name in enumerate(_RATES)]
        )

    def _allocate(self, shares: int) -> None:
        layers, subgroups = len(self.workload.layers), len(self.sizes)
        micro = self.workload.gradient_accumulation_steps
        per_iteration = micro * (5 * layers + 2 * subgroups) + 4 * subgroups + 3
        count = per_iteration * self.iterations
        self.ops = np.zeros((count, kernel.OP_COLUMNS))
        self.after_first = np.zeros(count + 1, dtype=np.int64)
        waits = 3 * count + self.iterations * (shares + layers + 2 * subgroups)
        self.after = np.zeros(waits, dtype=np.int64)
        self.start_s, self.end_s = np.zeros(count), np.zeros(count)

    def evaluate(
        self,
        placement: NDArray[np.int8],
        staging_slots: int = 2,
        prefetch: int = 0,
        prefetch_after_layer: int = 0,
        threads: int = 0,
        overlap_forward: bool = True,
        split_master: bool = False,
    ) -> Floats:
        """One row with `COLUMNS` for one plan.

        Args:
            placement: shape (subgroups,), values of PLACEMENT_CODES; the rest as in `Plan`.

        Raises:
            PlanError: another number of placements than subgroups, or prefetch without slots.
        """
        self._check(placement, staging_slots, prefetch)
        visiting = placement == DEVICE
        slots = min(staging_slots, int(visiting.sum()))
        split = split_master and self.workload.wire_dtype == "bf16"
        visit = SPLIT_STATE_BYTES_PER_PARAM if split else STATE_BYTES_PER_PARAM
        plan = np.array(
            [
                slots, prefetch, prefetch_after_layer, int(overlap_forward),
                self.workload.gradient_accumulation_steps, self.iterations,
            ],
            dtype=np.int64,
        )  # fmt: skip
        count = build(
            self.layers, self.share_first, self.share_subgroup, self.share_elements,
            self.layer_count, self.sizes, placement, plan, self._scalars(visit, threads),
            self.ops, self.after_first, self.after,
        )  # fmt: skip
        row = self._run(count, self._rates_with(threads))
        staging = slots * (self.sizes[visiting].max() if slots else 0.0)
        resident = self.sizes[placement == RESIDENT].sum()
        row[kernel.DEVICE_PEAK] += self.workload.device_base_bytes + (resident + staging) * visit
        row[kernel.HOST_PEAK] += (
            self.workload.params - resident
        ) * STATE_BYTES_PER_PARAM + self.sizes[
            placement == HOST
        ].sum() * self.workload.grad_bytes_per_param
        return row

    def evaluate_plan(self, plan: Plan) -> Floats:
        """One row with `COLUMNS` for a plan."""
        codes = np.array([PLACEMENT_CODES[p] for p in plan.placements], dtype=np.int8)
        return self.evaluate(
            codes, plan.staging_slots, plan.prefetch, plan.prefetch_after_layer, plan.threads,
            plan.overlap_forward, plan.split_master,
        )  # fmt: skip

    def _check(self, placement: NDArray[np.int8], staging_slots: int, prefetch: int) -> None:
        if placement.shape != self.sizes.shape:
            raise PlanError(
                "a placement is needed for each subgroup of the workload, but got "
                f"{placement.size} for {self.sizes.size} subgroups"
            )
        if not 0 <= prefetch <= staging_slots or (staging_slots < 1 and DEVICE in placement):
            raise PlanError(
                "0 <= prefetch <= staging_slots must hold, with at least one slot for visiting "
                f"subgroups, but got prefetch={prefetch}, staging_slots={staging_slots}"
            )

    def _scalars(self, visit_bytes: int, threads: int) -> Floats:
        w = self.workload
        host_dram = 2 * STATE_BYTES_PER_PARAM + w.grad_bytes_per_param
        if visit_bytes == STATE_BYTES_PER_PARAM:
            host_dram += w.wire_bytes
        return np.array(
            [
                w.wire_bytes, w.grad_bytes_per_param, w.pipeline_idle_s, visit_bytes, host_dram,
                threads or np.inf,
            ]
        )  # fmt: skip

    def _rates_with(self, threads: int) -> Floats:
        if not 0 < threads < self.machine.cpu_cores:
            return self.rates
        rates = self.rates.copy()
        rates[_R_HOST_ADAM] = self.machine.host_adam_rate(threads)
        return rates

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


def iteration_s_many(workload: Workload, plans: Sequence[Plan], machine: Machine) -> Floats:
    """Steady-state iteration time under each plan, shape (plans,)."""
    sweep = PlanSweep(workload, machine)
    return np.array([sweep.evaluate_plan(plan)[kernel.ITERATION_S] for plan in plans])
