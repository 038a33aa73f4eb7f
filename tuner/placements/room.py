"""The memory that a plan takes, computed without a simulation.

If a plan does not fit into memory, its staging buffers and on-device gradient sums are reduced.
"""

import numpy as np
from ebbtide.simulator.analysis.many_plans import Counted, PlanSweep
from ebbtide.simulator.limits import Limits
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.schedule import Memory
from ebbtide.simulator.schedules.footprint import fetched_elements, moved_out, slots_within
from ebbtide.simulator.update.steps import HOST_SLOTS
from ebbtide.simulator.update.way import EARLY, PARAMETERS_ON_HOST, SUMMED
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.candidates.candidate import Candidate
from ebbtide.tuner.candidates.moves import CAN_SUM, Codes


class Room:
    """The memory limits of a plan search, with the bytes that its plans take.

    Attributes:
        sums: True if the plans may sum the gradients of several micro-batches on the GPU.
    """

    def __init__(self, workload: Workload, machine: Machine, limits: Limits, sweep: PlanSweep, *, sums: bool) -> None:
        self.workload, self.machine, self.limits, self.sums = workload, machine, limits, sums
        self._sweep = sweep
        self._gone: dict[bytes, int] = {}  # bytes, keyed by parameter locations
        self._active_bytes = workload.activation_bytes

    def fitted(self, codes: Codes, slots: int, host_slots: int = HOST_SLOTS) -> tuple[Codes, int]:
        """Reduce a plan's staging buffers and on-device gradient sums to what GPU memory can hold.

        If memory is short, first the staging buffers are reduced, then on-device gradient sums of later subgroups.

        Args:
            codes: For each subgroup, the code of its placement, parameter location and flags (`Way.code`).
            slots: Number of staging buffers. Each is GPU memory for one subgroup's optimizer state.

        Returns:
            The reduced ``codes`` and ``slots``.
        """
        crossing = codes & ~SUMMED
        taken = self.taken(crossing, slots, host_slots)[0]
        if taken > self.limits.device_bytes:
            slots = self._slots(crossing, slots, host_slots)
            taken = self.taken(crossing, slots, host_slots)[0]
        stay = np.flatnonzero(codes & SUMMED) if self.sums else ()
        if not len(stay):
            return crossing, slots
        held, sizes = self._sweep.held, self._sweep.sizes
        sent = sizes[CAN_SUM[crossing & ~EARLY]].sum()
        many = held.most_sums(sizes[stay].tolist(), self.limits.device_bytes - taken, sent)
        crossing[stay[:many]] += SUMMED
        return crossing, slots

    def _slots(self, codes: Codes, wanted: int, host_slots: int) -> int:
        counted = self._sweep.counted(codes)
        users = min(wanted, counted.staged)
        if not users or self.workload.zero_stage < 3 or self.machine.unified_memory:
            return wanted
        left = self.limits.device_bytes - counted.held(0, host_slots)["device"] - self._device_bytes(codes, counted)
        slots = slots_within(left, users, counted.staging_bytes)
        return slots if slots < users else wanted

    def holds(self, c: Candidate) -> bool:
        """Return True if the memory limits can hold a plan. Nothing is simulated."""
        return self.limits.hold(*self.taken(c.codes, c.staging_slots, c.host_slots))

    def taken(self, codes: Codes, slots: int, host_slots: int) -> tuple[int, int, int]:
        """Return a tuple with the peaks in bytes of GPU memory, host memory and storage under a plan, computed without
        a simulation.
        """
        counted = self._sweep.counted(codes)
        held = counted.held(slots, host_slots)
        return held["device"] + self._device_bytes(codes, counted), held["host"], held["storage"]

    def _device_bytes(self, codes: Codes, counted: Counted) -> int:
        key = (codes >= PARAMETERS_ON_HOST).tobytes() if counted.away else b""
        if key not in self._gone:
            w = self.workload
            locations: list[Memory] = ["host" if code >= PARAMETERS_ON_HOST else "device" for code in codes]
            self._gone[key] = moved_out(w, fetched_elements(w, locations)) * w.wire_bytes if counted.away else 0
        return max(0, self.workload.device_base_bytes - self._gone[key]) + self._active_bytes
