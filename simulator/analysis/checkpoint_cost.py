"""A prediction of the cost of a checkpoint, from one simulated iteration and the rates of the drive and of copies.

State is written while training goes on. An update must not overwrite state that is not written yet. Such state is first
copied in host memory, up to the plan's budget for copies, and beyond the budget the update waits for the drive.
"""

from functools import cached_property

from ebbtide.simulator.analysis.goodput import CheckpointCost
from ebbtide.simulator.engines.compiled import SimResult, simulate_fast
from ebbtide.simulator.engines.reference import capacities
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import BLOCK_BYTES, CheckpointPlan, Plan
from ebbtide.simulator.schedules.ebbtide import build_schedule
from ebbtide.simulator.update.recipes import RECIPES
from ebbtide.simulator.update.steps import Queue
from ebbtide.simulator.workload import Workload

# Time of `save_checkpoint` itself (state dicts, file headers, agreement of the ranks) if neither the machine nor the
# workload gives it. Measured with 40 M parameters in 125 tensors on two cores.
SAVE_S = 0.012
# DRAM traffic per byte written to disk: read from the state, and read by the disk's DMA. The writer's buffer, which is
# hashed too, stays in a cache.
WRITE_TRAFFIC = 2
# Time in which one core gathers, hashes and writes a byte, if the machine has no value. Measured on an AMD EPYC.
WRITER_S_PER_BYTE = 0.15e-9
COPY_BYTES_PER_S = 8e9  # rate of one thread's memmove, however fast all threads together are


def save_seconds(workload: Workload, machine: Machine) -> float:
    """Return the seconds of a checkpoint save that depend on the number of tensors and not on their bytes.

    The checkpoint has one tensor for each parameter of the model, and a few for each subgroup's optimizer state.
    """
    each = machine.save_s_per_tensor
    named = sum(len(group) for group in workload.parameters)
    if each is None or not named:
        return SAVE_S
    states = workload.optimizer_state.tensor_count * len(workload.subgroups)
    return each.median * (named + states)


def gathered_seconds(workload: Workload, plan: Plan, machine: Machine) -> float:
    """Return the seconds that a checkpoint save waits while state is copied to DeepSpeed's own tensors.

    The copies are needed only under ZeRO-3, if the plan's subgroups are parts of DeepSpeed's subgroups. Two kinds of
    state are then not in DeepSpeed's tensors:

    - State of subgroups that are resident in GPU memory.
    - Half of the state of subgroups with early updates (before the gradient norm is known), on average. Each of their
      updates writes alternately to DeepSpeed's tensors and to spare buffers.
    """
    if workload.zero_stage < 3 or not workload.state_stays:
        return 0.0
    state_bytes = workload.optimizer_state.state_bytes
    pairs = list(zip(workload.subgroups, plan.ways, strict=True))
    resident = sum(n for n, way in pairs if RECIPES[way.placement].state == "device")
    early = sum(n for n, way in pairs if way.early) / 2
    from_device_s = resident * state_bytes / machine.rate("d2h_bytes_per_s")
    return from_device_s + early * state_bytes / machine.rate("host_copy_bytes_per_s")


def streamed_sizes(workload: Workload, plan: Plan) -> list[int]:
    """Return a list of the bytes of each subgroup's state that a checkpoint writes: 0 for state on a drive."""
    each = workload.optimizer_state.state_bytes
    return [
        0 if RECIPES[placement].state == "storage" else n * each
        for n, placement in zip(workload.subgroups, plan.placements, strict=True)
    ]


def streamed_bytes(workload: Workload, plan: Plan) -> int:
    """Return the number of bytes that one rank writes for a checkpoint."""
    # Parameters in the model's precision and optimizer state are written. State that a plan stores on drives is
    # not counted, because it is not written again.
    return sum(streamed_sizes(workload, plan)) + workload.model_checkpoint_bytes


def writer_cores(machine: Machine, saving: CheckpointPlan) -> float:
    """Return the number of CPU cores that a checkpoint's writer threads use at the full rate of storage."""
    measured = machine.writer_s_per_byte
    cost_s = WRITER_S_PER_BYTE if measured is None else measured.median
    return min(saving.writer_threads, cost_s * machine.rate("storage_write_bytes_per_s"))


class CheckpointPrice:
    """A prediction of what checkpoints cost under a plan, for any checkpoint settings.

    It was held against a simulation of each write of 24 cases (four jobs, three budgets, with and without early
    updates): the interval between checkpoints that follows from it loses at most 0.02 points of goodput.
    """

    def __init__(self, workload: Workload, plan: Plan, machine: Machine, save_s: float | None = None) -> None:
        """Simulate iterations under a plan, to learn the times that the price of a checkpoint depends on.

        Args:
            save_s: Seconds of ``save_checkpoint`` that do not depend on the amount of data. None: estimated by
                `save_seconds`.
        """
        workload = workload.cut_as(plan)
        self.workload, self.machine = workload, machine
        self.plan = plan.model_copy(update={"checkpoint": CheckpointPlan()})
        own_s = save_seconds(workload, machine) + gathered_seconds(workload, plan, machine)
        self.save_s = own_s if save_s is None else save_s
        self.storage = capacities(machine, workload.ranks_per_node)["storage"]

    @property
    def iteration_s(self) -> float:
        """Return the seconds of a training iteration without any checkpoint."""
        return self._result.iteration_s

    @cached_property
    def _result(self) -> SimResult:
        return simulate_fast(build_schedule(self.workload, self.plan), self.machine)

    @cached_property
    def _drained_s(self) -> float:
        """Return the seconds that a save takes because it waits for updates that else overlap the next forward."""
        if not self.plan.overlap_forward:
            return 0.0
        serial = self.plan.model_copy(update={"overlap_forward": False})
        after_s = simulate_fast(build_schedule(self.workload, serial), self.machine).iteration_s
        return max(0.0, after_s - self.iteration_s)

    @cached_property
    def _window_s(self) -> float:
        r = self._result
        if any(self.plan.updated_early):
            return max(0.0, r.iteration_s - r.update_s - r.backward_s)
        before = 0.0 if self.plan.overlap_forward else 1 - 1 / max(1, self.plan.subgroup_count)
        return r.forward_s + r.backward_s + before * r.update_s

    def cost(self, saving: CheckpointPlan) -> CheckpointCost:
        """Return the cost of one checkpoint: the seconds that training loses, and the memory that the checkpoint needs.

        The checkpoint is assumed to be completely written before the next checkpoint is saved.
        """
        sizes = streamed_sizes(self.workload, self.plan)
        full, budget = self.storage, saving.copy_budget_bytes // BLOCK_BYTES * BLOCK_BYTES
        rate = min(full, saving.write_bytes_per_s or full)
        written_s = (sum(sizes) + self.workload.model_checkpoint_bytes) / rate + self.machine.storage_fsync_s
        if saving.mode in ("sync", "in_place"):
            stall_s = self.save_s + self._drained_s + written_s
            return CheckpointCost(stall_s, persist_s=stall_s, reserved_bytes=saving.reserved_bytes)
        left = max(0.0, sum(sizes) - rate * self._window_s)
        copied, waited = min(budget, left), max(0.0, left - budget)
        hosted = sum(n for n, way in zip(sizes, self.plan.ways, strict=True) if way.recipe.queue == Queue.HOST)
        by_threads = copied * hosted / max(1, sum(sizes)) / copy_rate(self.machine)
        # Updates wait for the drive at its full rate. Meanwhile, copies are made, and overlapped updates end.
        stall_s = self.save_s + max(waited / full, by_threads, self._drained_s)
        persist_s = self.save_s + max(written_s - waited / rate + waited / full, 0.0)
        interference_s = persist_s * self._slowdown(saving, rate)
        return CheckpointCost(
            stall_s=stall_s,
            interference_s=interference_s,
            persist_s=persist_s,
            slowdown=self._slowdown(saving, rate),
            copied_bytes=copied,
            waited_bytes=waited,
            reserved_bytes=saving.reserved_bytes,
        )

    def _slowdown(self, saving: CheckpointPlan, rate: float) -> float:
        cores = writer_cores(self.machine, saving) * rate / self.storage
        hosted = any(way.recipe.queue == Queue.HOST for way in self.plan.ways)
        busy = 1.0 if self.machine.device_shares_host_cores else self._result.update_s / self.iteration_s * hosted
        return min(1.0, cores / self.machine.cpu_cores) * min(1.0, busy)


def copy_rate(machine: Machine) -> float:
    """Return the speed, in bytes per second, at which one thread copies a checkpoint's state inside host memory."""
    return min(machine.rate("host_copy_bytes_per_s"), COPY_BYTES_PER_S)
