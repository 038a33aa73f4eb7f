"""The memory that a plan takes, computed without a simulation.

If a plan does not fit into memory, its staging buffers and on-device gradient sums are reduced.
"""

import numpy as np
from ebbtide.simulator.analysis.many_plans import PlanSweep
from ebbtide.simulator.limits import Limits
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.schedule import Memory
from ebbtide.simulator.schedules.footprint import fetched_elements, moved_out, slots_within
from ebbtide.simulator.update.steps import HOST_SLOTS, Slot
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
        stay = np.flatnonzero(codes & SUMMED)
        if not (self.sums and stay.size):
            return crossing, slots
        held, sizes = self._sweep.held, self._sweep.sizes
        sent = sizes[CAN_SUM[crossing & ~EARLY]].sum()
        many = held.most_sums(sizes[stay].tolist(), self.limits.device_bytes - taken, sent)
        crossing[stay[:many]] += SUMMED
        return crossing, slots

    def _slots(self, codes: Codes, wanted: int, host_slots: int) -> int:
        sweep = self._sweep
        both = sweep.amounts(codes)
        users = sweep.slots(both, wanted)[Slot.STAGING]
        if not users or self.workload.zero_stage < 3 or self.machine.unified_memory:
            return wanted
        taken = sweep.held_bytes(both[0], 0, host_slots, both[1], 0.0)["device"]
        left = self.limits.device_bytes - taken - self._device_bytes(codes)
        slots = slots_within(left, users, sweep.each_bytes(Slot.STAGING, both))
        return slots if slots < users else wanted

    def holds(self, c: Candidate) -> bool:
        """Return True if the memory limits can hold a plan. Nothing is simulated."""
        return self.limits.hold(*self.taken(c.codes, c.staging_slots, c.host_slots))

    def taken(self, codes: Codes, slots: int, host_slots: int) -> tuple[int, int, int]:
        """Return a tuple with the peaks in bytes of GPU memory, host memory and storage under a plan, computed without
        a simulation.
        """
        held = self._sweep.held_under(codes, slots, host_slots)
        return held["device"] + self._device_bytes(codes), held["host"], held["storage"]

    def _device_bytes(self, codes: Codes) -> int:
        away = codes >= PARAMETERS_ON_HOST
        key = away.tobytes()
        if key not in self._gone:
            w = self.workload
            locations: list[Memory] = ["host" if gone else "device" for gone in away]
            self._gone[key] = moved_out(w, fetched_elements(w, locations)) * w.wire_bytes if away.any() else 0
        return max(0, self.workload.device_base_bytes - self._gone[key]) + self._active_bytes
