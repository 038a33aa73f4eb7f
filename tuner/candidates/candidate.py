"""A plan in the form that a plan search scores, and simple changes of such a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from ebbtide.simulator.analysis.many_plans import PlanSweep
from ebbtide.simulator.plan import ParameterLocation, Placement, Plan
from ebbtide.simulator.update.order import FORWARD, UpdateOrder
from ebbtide.simulator.update.recipes import RECIPES
from ebbtide.simulator.update.steps import HOST_SLOTS
from ebbtide.simulator.update.way import EARLY, LOCATION_CODES, PARAMETERS_ON_HOST, PLACEMENT_CODES, SUMMED, of_codes
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.candidates.moves import (
    ALLOWED,
    CAN_BE_EARLY,
    PLACEMENTS,
    QUEUE_NUMBERS,
    QUEUES,
    STAGED,
    Codes,
    Freedom,
    Moved,
    placements_of,
)
from numpy.typing import NDArray

Row = NDArray[np.float64]  # the simulator's results for a plan
_WITHOUT_EARLY = bytes(code & ~EARLY for code in range(2**8))
_SUMMED_CODES = {placement: code + SUMMED for placement, code in PLACEMENT_CODES.items()}
_HAS = {bit: bytes(bool(code & bit) for code in range(2**8)) for bit in (EARLY, SUMMED, PARAMETERS_ON_HOST)}


@dataclass(frozen=True)
class Candidate:
    """A plan in the form that a plan search scores: only the fields of a plan file that the search varies.

    Attributes:
        ways: Code of each subgroup's placement, parameter location and flags (`Way.code`), one byte each. One flag
            requests that the subgroup's gradient sum stays on the GPU. If GPU memory cannot hold the gradient sums of
            all subgroups with this flag, only the subgroups with the lowest numbers keep the flag.
        staging_slots: Number of staging buffers (GPU memory for one staged subgroup each). Fewer are used if memory
            cannot hold them together with the activations.
        prefetch: Number of subgroups that are copied to the GPU ahead of time.
        threads: Number of CPU threads for updates, or 0 for the default.
        overlap_forward: True if updates may overlap the next forward.
        order: Order of the subgroups' updates. If None, the order that `UpdateOrders` proposes.
        host_slots: Number of buffers in host memory for subgroups that are stored on a drive.
    """

    ways: bytes
    staging_slots: int = 2
    prefetch: int = 0
    threads: int = 0
    overlap_forward: bool = True
    order: UpdateOrder | None = None
    host_slots: int = HOST_SLOTS

    @classmethod
    def of(
        cls,
        placements: Sequence[Placement],
        staging_slots: int = 2,
        prefetch: int = 0,
        locations: Sequence[ParameterLocation] = (),
        **fields: Any,
    ) -> Self:
        """Build a plan, in the form that a plan search scores, from the placement of each subgroup.

        The plan has no early updates, and on-device gradient accumulation wherever possible.
        """
        codes = bytes(map(_SUMMED_CODES.__getitem__, placements))
        if locations:
            codes = bytes(code + LOCATION_CODES[where] for code, where in zip(codes, locations, strict=True))
        return cls(codes.translate(ALLOWED), staging_slots, prefetch, **fields)

    @classmethod
    def of_plan(cls, plan: Plan) -> Self:
        return cls(
            bytes(way.code for way in plan.ways),
            max(1, plan.staging_slots),
            plan.prefetch,
            plan.threads,
            plan.overlap_forward,
            plan.order,
            plan.host_slots,
        )

    @property
    def settings(self) -> dict[str, Any]:
        """Return the fields of a plan's file that a search chooses."""
        staged = not STAGED.isdisjoint(self.placements)
        return {
            "ways": of_codes(self.ways),
            "order": self.order or FORWARD,
            "staging_slots": self.staging_slots if staged else 0,
            "prefetch": self.prefetch if staged else 0,
            "threads": self.threads,
            "overlap_forward": self.overlap_forward,
            "host_slots": self.host_slots,
        }

    def plan(self, workload: Workload, **fields: Any) -> Plan:
        """Convert this plan of a plan search into a `Plan`, the contents of a plan file. ``fields`` are
        further fields of the file.
        """
        made = {
            "workload_fingerprint": workload.fingerprint,
            "trained_as": workload.trained_as,
            "subgroup_size": workload.subgroup_size or max(workload.subgroups),
            "deepspeed_subgroup_size": workload.deepspeed_subgroup_size,
            "subgroups": workload.subgroups,
            **self.settings,
        }
        return Plan.model_validate({**made, **fields})

    def movable(self, free: Freedom) -> Moved:
        """Return this plan in the form that simulated annealing changes.

        Args:
            free: Changes that the search may make.
        """
        order = self.order or FORWARD
        sequences = [
            order.of(queue, [s for s, code in enumerate(self.ways) if QUEUE_NUMBERS[code] == number])
            for number, queue in enumerate(QUEUES)
        ]
        slots, prefetch = self.staging_slots, self.prefetch
        return Moved([*self.ways], sequences, slots, prefetch, free, self.host_slots, self.threads)

    def with_placements(self, placements: Sequence[Placement]) -> Self:
        """Return a copy of this plan with other placements, one per subgroup."""
        pairs = zip(self.ways, placements, strict=True)
        codes = bytes(code - code % SUMMED + PLACEMENT_CODES[placement] for code, placement in pairs)
        return replace(self, ways=codes.translate(ALLOWED))

    def count(self, bit: int) -> int:
        """Return the number of subgroups in this plan that have a given flag, such as early update."""
        return self.ways.translate(_HAS[bit]).count(1)

    @cached_property
    def _hash(self) -> int:
        return hash((self.ways, self.order, self.staging_slots, self.prefetch, self.threads))

    def __hash__(self) -> int:  # cached, because a search hashes each plan several times
        return self._hash

    @cached_property
    def codes(self) -> Codes:
        # Writable, because numba would compile a second version for read-only arrays.
        return np.frombuffer(bytearray(self.ways), dtype=np.int8)

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        return placements_of(self.ways)

    @cached_property
    def issue(self) -> NDArray[np.int64] | None:
        if self.order is None or self.order == FORWARD:
            return None
        queues, issue = np.frombuffer(self.ways.translate(QUEUE_NUMBERS), np.int8), np.empty(len(self.ways), np.int64)
        for number, queue in enumerate(QUEUES):
            own = np.flatnonzero(queues == number)
            issue[own] = self.order.of(queue, own.tolist())
        return issue


def turned(c: Candidate, subgroups: Iterable[int], bit: int) -> Candidate:
    """Return a copy of a plan with one flag, such as early update, inverted for the given subgroups."""
    ways = bytearray(c.ways)
    for subgroup in subgroups:
        ways[subgroup] ^= bit
    return replace(c, ways=bytes(ways))


def waiting(c: Candidate) -> Candidate:
    """Return a copy of a plan without early updates, so that every update waits for the gradient norm."""
    return replace(c, ways=c.ways.translate(_WITHOUT_EARLY))


def able_early(c: Candidate, placement: Placement) -> NDArray[np.int64]:
    """Return the numbers of the subgroups of a placement that can be updated before the gradient norm is known."""
    plain = c.codes & ~(EARLY | SUMMED)
    return np.flatnonzero(CAN_BE_EARLY[plain] & (plain % SUMMED == PLACEMENT_CODES[placement]))


def evenly(
    numbers: Mapping[Placement, int],
    slots: int = 1,
    fixed: Mapping[int, Placement] | None = None,
    locations: Sequence[ParameterLocation] = (),
) -> Candidate:
    """Build a plan that spreads the given number of subgroups per placement evenly over the model.

    Subgroups that stay on the GPU come first. The other placements are interleaved.

    Args:
        slots: Number of staging buffers (GPU memory for one staged subgroup each).
        locations: Location of each subgroup's 16-bit parameters. If empty, all are on the GPU.
    """
    there = [p for p in PLACEMENTS if numbers.get(p)]
    stay = [p for p in there if RECIPES[p].state == "device" for _ in range(numbers[p])]
    moving = [p for p in there if RECIPES[p].state != "device"]
    # Number k of n subgroups with a placement is sorted by (k + 1) / n. Ties are in the order of RECIPES.
    mixed = sorted(((k + 1) / numbers[p], rank, p) for rank, p in enumerate(moving) for k in range(numbers[p]))
    placements = [*stay, *(p for _, _, p in mixed)]
    for subgroup, placement in sorted((fixed or {}).items()):
        placements.insert(subgroup, placement)
    staged = sum(p in STAGED for p in placements)
    slots = max(1, min(slots, staged))
    return Candidate.of(placements, slots, min(slots, staged), locations)


def seconds_of(sweep: PlanSweep, c: Candidate) -> float:
    """Return the predicted seconds of an iteration under a plan, assuming that no early update must be undone."""
    from ebbtide.simulator.engines import summary

    return float(evaluated(sweep, c)[summary.ITERATION_S])


def options_of(c: Candidate) -> tuple[Any, ...]:
    """Return the arguments of `PlanSweep.evaluate` that describe a plan as a whole, such as the number of staging
    buffers.
    """
    return c.staging_slots, c.prefetch, c.threads, c.overlap_forward, c.issue, c.host_slots


def evaluated(sweep: PlanSweep, c: Candidate) -> Row:
    """Return the row of results (times and memory peaks) that the simulator gives for a plan."""
    return sweep.evaluate(c.codes, *options_of(c))
