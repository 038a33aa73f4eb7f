"""A published testbed as physical rates, and what they predict for a run.

Forward and backward are closed forms of rates; the optimizer step is simulated: `simulate_fast` on
the schedules `twin_flow` (offloaded, with resident subgroups) and `deep_optimizer_states`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from simulator import Layer, Machine, Quantity, Workload, build_strategy
from simulator.engines.compiled import CompiledSchedule, compile_schedule, simulate_fast
from studies.bench.offload_runs import VOCABULARY, Run, shape, subgroup_sizes

GRADIENT_BYTES = 4  # published runs send fp32 gradients home
WIRE_BYTES = 2
BACKWARD_FLOPS = 3  # of a forward: recomputed, then two products per weight

# What is fitted of a testbed: name -> (the centre of its prior, the prior's width in log units).
STEP_PRIORS: dict[str, tuple[float, float]] = {
    "host_adam_params_per_s": (8e9, 0.5),
    "rank_dram_bytes_per_s": (8e10, 0.6),
    "dram_bytes_per_s": (1.5e11, 1.0),
    "pageable_h2d_bytes_per_s": (8e9, 1.0),
    "subgroup_s": (2e-3, 1.0),
    "interleaved_share": (0.85, 0.3),
}
PASS_PRIORS: dict[str, tuple[float, float]] = {
    "flops_per_s": (2e14, 0.6),
    "forward_layer_s": (5e-3, 0.7),
    "reduced_params_per_s": (2e10, 0.7),
    "launch_power": (3.0, 0.5),
    "blocking_params_per_s": (1.7e9, 1.0),
    "blocking_dram_bytes": (25.0, 1.0),
    "gradient_bytes_per_s": (2e10, 1.0),
    "overlap_power": (2.0, 0.5),
    "network_bytes_per_s": (1e10, 1.0),
    "tensor_forward_bytes_per_s": (1e11, 1.0),
    "tensor_backward_bytes_per_s": (3e10, 1.0),
    "between_s": (0.3, 0.7),
    "between_rank_s": (0.05, 0.7),
    "between_prefetch_s": (0.08, 0.8),
}
PCIE_BYTES_PER_S = {"a100": 25e9, "h100x4": 52e9}  # published; reference of the data set
DEVICE_ADAM_PARAMS_PER_S = {"a100": 45e9, "h100x4": 90e9}  # HBM data sheet over 32 B/param
CORES = {"a100": 32, "h100x4": 96}


@dataclass(frozen=True)
class Testbed:
    """Fitted rates of one testbed.

    Attributes:
        rates: by the names of STEP_PRIORS and PASS_PRIORS.
        dram_of_family: DRAM rate of a campaign over the testbed's: how its ranks were pinned.
        unsaid_families: campaigns whose logs do not say how gradients flow.
        async_families: those of them whose gradients flow asynchronously.
        dram_of_micro_batch: logarithm of a campaign's factor, and the micro-batch it ran with; for
            campaigns with several ranks on a node, the ones whose factor shows.
        trust: see `offload_runs.shape`.
    """

    name: str
    rates: Mapping[str, float]
    dram_of_family: Mapping[str, float] = field(default_factory=dict)
    dram_of_micro_batch: Sequence[tuple[float, int]] = ()
    unsaid_families: frozenset[str] = frozenset()
    async_families: frozenset[str] = frozenset()
    trust: float = 0.75

    def machine(self, ranks: int = 1, dram_factor: float = 1.0) -> Machine:
        """One of its nodes, as ``ranks`` equal ranks find it."""
        pcie = PCIE_BYTES_PER_S.get(self.name, 25e9)
        fitted = {name: Quantity.exact(rate, "fitted") for name, rate in self.rates.items()}
        return Machine(
            name=self.name, device_kind="cuda", gpus_per_node=4,
            cpu_cores=CORES.get(self.name, 32), host_memory_bytes=512 * 2**30,
            device_memory_bytes=80 * 2**30 if self.name.startswith("h100") else 40 * 2**30,
            h2d_bytes_per_s=Quantity.exact(pcie, "published"),
            d2h_bytes_per_s=Quantity.exact(pcie, "published"),
            pageable_h2d_bytes_per_s=fitted["pageable_h2d_bytes_per_s"],
            dram_bytes_per_s=Quantity.exact(
                ranks * self.rank_dram_bytes_per_s(ranks, dram_factor), "fitted"
            ),
            copy_latency_s=self.rates["subgroup_s"],
            host_adam_params_per_s=fitted["host_adam_params_per_s"],
            stock_host_adam_params_per_s=fitted["host_adam_params_per_s"],
            device_adam_params_per_s=Quantity.exact(
                DEVICE_ADAM_PARAMS_PER_S.get(self.name, 45e9), "datasheet"
            ),
            storage_write_bytes_per_s=Quantity.exact(1e9, "assumed"),
        )  # fmt: skip

    def rank_dram_bytes_per_s(self, ranks: int, dram_factor: float) -> float:
        """What one rank's threads can draw, alone or from their part of the node's memory."""
        node = self.rates["dram_bytes_per_s"] * dram_factor
        return 1 / _power_sum(1 / self.rates["rank_dram_bytes_per_s"], ranks / node, 4)

    def dram_factor(self, run: Run) -> float:
        """Of the run's campaign; for an unknown one, the mean over those that were fitted.

        Campaigns count by how near their micro-batches are: whoever changed one changed how ranks
        were pinned too.
        """
        if run.family in self.dram_of_family:
            return self.dram_of_family[run.family]
        weights = [
            math.exp(-(math.log2(run.micro_batch / size) ** 2))
            for _, size in self.dram_of_micro_batch
        ]
        if not sum(weights):
            return 1.0
        return math.exp(
            float(np.average([f for f, _ in self.dram_of_micro_batch], weights=weights))
        )

    def asynchronous(self, run: Run) -> bool:
        """More likely than not: the marginal median, which errs least in absolute terms."""
        return self.asynchronous_probability(run) > 0.5

    def asynchronous_probability(self, run: Run) -> float:
        """1 or 0 where the log says it or its campaign's backward showed it.

        Else the share among campaigns whose logs do not say it, the data set's note that such
        builds blocked counting as two of them.
        """
        if run.async_grads is not None:
            return float(run.async_grads)
        if run.family in self.unsaid_families:
            return float(run.family in self.async_families)
        return len(self.async_families) / (len(self.unsaid_families) + 2)

    def predict(self, run: Run) -> dict[str, float]:
        """Milliseconds by the columns fwd_ms, bwd_ms, step_ms and iter_ms."""
        forward, backward = self.forward_s(run), self.backward_s(run)
        step = self.step_s(run)
        total = forward + backward + step + self.between_s(run)
        seconds = {"fwd_ms": forward, "bwd_ms": backward, "step_ms": step, "iter_ms": total}
        return {name: 1e3 * value for name, value in seconds.items()}

    # -- the optimizer step --------------------------------------------------------------------

    def step_s(self, run: Run) -> float:
        """Simulated; the interleaved build saves host passes that stock's schedule has."""
        schedule = step_schedule(run, self.trust)
        step = simulated_step_s(schedule, self.machine(run.ranks_per_node, self.dram_factor(run)))
        return step * (self.rates["interleaved_share"] if visits(run, self.trust) else 1.0)

    # -- forward and backward ------------------------------------------------------------------

    def _flops(self, run: Run) -> float:
        layers, hidden = shape(run, self.trust)
        tokens = run.micro_batch * run.seq
        weights = 12 * layers * hidden**2 + VOCABULARY * hidden
        attention = 4 * layers * run.seq * hidden
        return tokens * (2 * weights + attention) / run.tp

    def _network_s(self, run: Run) -> float:
        """A ring over all ranks carries the whole model once; its slowest link is the network."""
        if run.nodes == 1:
            return 0.0
        size = elements(run, self.trust) / run.tp * WIRE_BYTES
        return size * (run.dp - 1) / run.dp / self.rates["network_bytes_per_s"]

    def _tensor_bytes(self, run: Run) -> float:
        """What one direction's all-reduces of tensor parallelism move."""
        layers, hidden = shape(run, self.trust)
        moved = 2 * layers * run.micro_batch * run.seq * hidden * WIRE_BYTES
        return 2 * moved * (run.tp - 1) / run.tp

    def forward_s(self, run: Run) -> float:
        """The device's or the host's time, whichever is longer, and the network's."""
        tensor = self._tensor_bytes(run) / self.rates["tensor_forward_bytes_per_s"]
        device = self._flops(run) / self.rates["flops_per_s"] + tensor
        launches = shape(run, self.trust)[0] * self.rates["forward_layer_s"]
        return self._overlapped(device, launches) + self._network_s(run)

    def _overlapped(self, device_s: float, host_s: float) -> float:
        """The host issues kernels, gathers and reductions while the device computes."""
        return _power_sum(device_s, host_s, 1 + self.rates["launch_power"])

    def backward_s(self, run: Run) -> float:
        """Three forwards' products, two passes of the network, and the gradients' way home."""
        rates = self.rates
        tensor = self._tensor_bytes(run) / rates["tensor_backward_bytes_per_s"]
        device = BACKWARD_FLOPS * self._flops(run) / rates["flops_per_s"] + tensor
        reduced = elements(run, self.trust) / run.tp / rates["reduced_params_per_s"]
        compute = self._overlapped(device, reduced) + 2 * self._network_s(run)
        hosted = hosted_elements(run, self.trust)
        if self.asynchronous(run):
            copies = hosted * GRADIENT_BYTES / rates["gradient_bytes_per_s"]
            return _power_sum(compute, copies, 1 + rates["overlap_power"])
        node = self.rates["dram_bytes_per_s"] * self.dram_factor(run) / run.ranks_per_node
        alone = 1 / rates["blocking_params_per_s"]
        return compute + hosted * _power_sum(alone, rates["blocking_dram_bytes"] / node, 4)

    def between_s(self, run: Run) -> float:
        """What an iteration spends outside its phases: data, logging, waiting for other ranks."""
        rates = self.rates
        contended = rates["between_rank_s"] * (run.ranks_per_node - 1)
        return rates["between_s"] + contended + rates["between_prefetch_s"] * run.prefetch


def _power_sum(a: float, b: float, power: float) -> float:
    """Between the sum (power 1: nothing overlaps) and the maximum (all does)."""
    largest = max(a, b)
    if largest == 0:
        return 0.0
    return float(largest * ((a / largest) ** power + (b / largest) ** power) ** (1 / power))


def rank_sizes(run: Run, trust: float) -> list[int]:
    layers, hidden = shape(run, trust)
    return subgroup_sizes(layers, hidden, run.seq, run.dp * run.tp, run.subgroup)


def elements(run: Run, trust: float) -> float:
    """Of the whole model."""
    return float(sum(rank_sizes(run, trust))) * run.dp * run.tp


def residents(run: Run, trust: float) -> int:
    """Subgroups in device memory, as DeepSpeed counts them."""
    return int((1 - run.offload_ratio) * len(rank_sizes(run, trust)) + 1e-9)


def visits(run: Run, trust: float) -> int:
    """Subgroups that visit the device; fewer than a stride of them: none does."""
    if not run.prefetch or run.stride < 2:
        return 0
    return (len(rank_sizes(run, trust)) - residents(run, trust)) // run.stride


def hosted_elements(run: Run, trust: float) -> float:
    """Whose gradients go to host memory, on one rank."""
    sizes = rank_sizes(run, trust)[residents(run, trust) :]
    stays = visits(run, trust) / len(sizes) if sizes else 0.0
    return float(sum(sizes)) * (1 - stays)


@functools.cache
def step_schedule(run: Run, trust: float) -> CompiledSchedule:
    """One iteration whose forward and backward take no time: the step alone is of interest."""
    sizes = rank_sizes(run, trust)
    workload = Workload(
        name=run.model, layers=(Layer(params=sum(sizes), forward_s=0, backward_s=0),),
        subgroups=tuple(sizes), ranks_per_node=run.ranks_per_node, stock_backward_extra_s=0.0,
    )  # fmt: skip
    if visits(run, trust):
        schedule = build_strategy(
            "deep_optimizer_states", workload, iterations=1, stride=run.stride,
            ratio=run.offload_ratio,
        )  # fmt: skip
    else:
        schedule = build_strategy("twin_flow", workload, iterations=1, ratio=run.offload_ratio)
    return compile_schedule(schedule)


def simulated_step_s(schedule: CompiledSchedule, machine: Machine) -> float:
    """From the norm barrier to the end of the step."""
    result = simulate_fast(schedule, machine)
    ops = schedule.schedule.ops
    norm = next(op.id for op in ops if op.kind == "norm")
    return float(np.max(result.end_s) - result.end_s[norm])
