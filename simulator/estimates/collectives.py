"""How long collectives take inside a node, and what they bring in from other nodes.

Rings, as NCCL runs them for all-gather and reduce-scatter: everything but a rank's own part passes
each rank's port once; an all-reduce is both, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from simulator.machine import Machine

LINK = "nvlink_bytes_per_s"  # among machine.other_rates: one GPU's ports together, one direction
PAIR = "nvlink_pair_bytes_per_s"  # where GPUs are wired pair by pair, without a switch
EFFICIENCY = 0.8  # of the wire, what NCCL's tests reach on large messages
LATENCY_S = 2e-5  # of one collective in a node: launch and one round of a ring


@dataclass(frozen=True)
class Links:
    """Bytes/s of a GPU's ports inside a node, for groups of any size."""

    port_bytes_per_s: float
    pair_bytes_per_s: float | None = None

    @classmethod
    def of(cls, machine: Machine) -> Links:
        """NVLink where the machine has it, else through host memory over PCIe."""
        port, pair = (machine.other_rates.get(name) for name in (LINK, PAIR))
        if port is None:
            slower = min(machine.h2d_bytes_per_s.median, machine.d2h_bytes_per_s.median)
            return cls(slower)
        return cls(EFFICIENCY * port.median, EFFICIENCY * pair.median if pair else None)

    def bytes_per_s(self, ranks: int) -> float:
        """Two GPUs wired pair by pair have the pair's wires only, however many ports they have."""
        if self.pair_bytes_per_s is None:
            return self.port_bytes_per_s
        return min(self.port_bytes_per_s, self.pair_bytes_per_s * max(1, ranks - 1))

    def gather_s(self, size_bytes: float, ranks: int) -> float:
        """All-gather into, or reduce-scatter of, ``size_bytes`` on each of ``ranks`` ranks."""
        if ranks < 2:
            return 0.0
        return LATENCY_S + (ranks - 1) / ranks * size_bytes / self.bytes_per_s(ranks)

    def all_reduce_s(self, size_bytes: float, ranks: int) -> float:
        return 2 * self.gather_s(size_bytes, ranks)


def from_outside_bytes(size_bytes: float, ranks: int, nodes: int) -> float:
    """What a node receives while a ring gathers ``size_bytes``: all but one rank's part.

    A ring through all ranks enters each node once. Were each node to receive only what it lacks
    it would be ``(nodes - 1) / nodes``; NCCL's hierarchical algorithms are for all-reduce.
    """
    return 0.0 if nodes < 2 else (ranks - 1) / ranks * size_bytes
