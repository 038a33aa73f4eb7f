"""Estimates for collective operations: the time of their transfers inside a node, and the bytes that a node receives
from other nodes.

All-gather and reduce-scatter run as rings, as in NCCL: all data except a rank's own part passes each rank's port once.
A ring is as slow as its slowest hop. An all-reduce is a reduce-scatter followed by an all-gather (Patarasu and Yuan,
Bandwidth optimal all-reduce algorithms, 2009; NCCL tests, PERFORMANCE.md). Between nodes, NCCL may use trees instead of
rings for an all-reduce. Trees bring no fewer bytes into the busiest node than rings.
"""

import math
from dataclasses import dataclass

from ebbtide.simulator.machine import Machine

LINK = "nvlink_bytes_per_s"  # key of machine.other_rates: all NVLink ports of a GPU together, in one direction
PAIR = "nvlink_pair_bytes_per_s"  # the same if NVLink connects GPUs in pairs, without a switch
EFFICIENCY = 0.8  # share of the wire's rate that NCCL's tests reach with large messages
# Share of the rate of pinned copies that NCCL's rings reach from GPU to GPU over PCIe. Four and eight RTX A6000 trained
# as with 12 of 25 GB/s (PCIe 4, runs of whyNLP/tinyllama), and RTX PRO 6000 as with more than 30 of 52 (PCIe 5, runs of
# llmq). Cards without peer access are slower: see `ebbtide.simulator.estimates.presets`.
PCIE_EFFICIENCY = 0.6
LATENCY_S = 2e-5  # of one collective inside a node: kernel launch and one round of a ring


@dataclass(frozen=True)
class Links:
    """The rates, in bytes per second, at which a GPU receives data from the other GPUs of its node in collectives.

    Attributes:
        pair: Fraction of these rates that two GPUs have, if NVLink connects each pair directly, without a switch.
    """

    gather_bytes_per_s: float
    reduce_bytes_per_s: float
    pair: float | None = None

    @classmethod
    def of(cls, machine: Machine) -> "Links":
        """Return the links between the GPUs of a machine, from its measured rates. Without these: NVLink if the machine
        has NVLink, otherwise PCIe through host memory.
        """
        port, pair = (machine.other_rates.get(name) for name in (LINK, PAIR))
        if machine.gather_bytes_per_s is not None:
            gather = machine.gather_bytes_per_s.median
        elif port is not None:
            gather = EFFICIENCY * port.median
        else:
            gather = PCIE_EFFICIENCY * min(machine.h2d_bytes_per_s.median, machine.d2h_bytes_per_s.median)
        reduce = gather if machine.reduce_bytes_per_s is None else machine.reduce_bytes_per_s.median
        return cls(gather, reduce, pair.median / port.median if pair and port else None)

    def gather_s(self, size_bytes: float, ranks: int) -> float:
        """Return the seconds of an all-gather of ``size_bytes`` among ``ranks`` ranks of a node."""
        return ring_s(size_bytes, ranks, self.gather_bytes_per_s * self.share(ranks))

    def reduce_s(self, size_bytes: float, ranks: int) -> float:
        """Return the seconds of a reduce-scatter of ``size_bytes`` among ``ranks`` ranks of a node."""
        return ring_s(size_bytes, ranks, self.reduce_bytes_per_s * self.share(ranks))

    def all_reduce_s(self, size_bytes: float, ranks: int) -> float:
        return self.reduce_s(size_bytes, ranks) + self.gather_s(size_bytes, ranks)

    def share(self, ranks: int) -> float:
        """Return the fraction of the rates that a ring of ``ranks`` GPUs of the node has."""
        return 1.0 if self.pair is None else min(1.0, self.pair * max(1, ranks - 1))


def ring_s(size_bytes: float, ranks: int, bytes_per_s: float) -> float:
    """Return the seconds of an all-gather or a reduce-scatter among ranks that are connected as a ring."""
    return LATENCY_S + passed_on(size_bytes, ranks) / bytes_per_s if ranks > 1 else 0.0


def passed_on(size_bytes: float, ranks: int) -> float:
    """Return the bytes that an all-gather in a ring brings to each rank: all data except the rank's own part."""
    # The same number of bytes enters each node, because a ring through all ranks enters each node once.
    return (ranks - 1) / ranks * size_bytes


@dataclass(frozen=True)
class Topology:
    """The assignment of a training job's ranks to nodes.

    Nodes are filled one after the other. Ranks are numbered first along tensor parallelism, then data parallelism, then
    pipeline stages, as in Megatron-LM and in DeepSpeed's ``PipeModelDataParallelTopology``. The node that receives the
    most bytes from other nodes determines the time of the traffic between nodes.
    """

    gpus_per_node: int
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    stage: int = 0

    @property
    def gpus(self) -> int:
        return self.data * self.tensor * self.pipeline

    @property
    def nodes(self) -> int:
        return math.ceil(self.gpus / self.gpus_per_node)

    @property
    def ranks_per_node(self) -> int:
        return min(self.gpus, self.gpus_per_node)

    @property
    def ring_in_node(self) -> int:
        """Return the largest number of ranks on one node that belong to the same ring of ZeRO's collectives."""
        return min(self.data, math.ceil(self.gpus_per_node / self.tensor))

    def entering_bytes(self, size_bytes: float) -> float:
        """Return a rank's share of the bytes that enter its node from other nodes while ZeRO gathers parameters."""
        rings = self._rings_entering()
        return rings * passed_on(size_bytes, self.data) / self.ranks_per_node

    def _rings_entering(self) -> int:
        span = self.data * self.tensor
        first = self.stage * span // self.gpus_per_node
        last = ((self.stage + 1) * span - 1) // self.gpus_per_node
        # All nodes between the second and the last one hold as many ranks of this pipeline stage as the second one.
        return max(self._crossing(node) for node in {first, min(first + 1, last), last})

    def _crossing(self, node: int) -> int:
        span = self.data * self.tensor
        begin = node * self.gpus_per_node
        end = min(self.gpus, begin + self.gpus_per_node)
        rings = {(rank // span, rank % self.tensor) for rank in range(begin, end)}
        firsts = (stage * span + number for stage, number in rings)
        return sum(first < begin or first + (self.data - 1) * self.tensor >= end for first in firsts)

    @property
    def tensor_groups_cut(self) -> int:
        """Count, on each node, the tensor-parallel groups that also have ranks on other nodes, and return the largest
        count.
        """
        if self.gpus <= self.gpus_per_node or self.gpus_per_node % self.tensor == 0:
            return 0
        if self.tensor % self.gpus_per_node == 0:
            return 1
        return min(2, self.data * self.pipeline)  # at most one neighbor stage on each side of the node
