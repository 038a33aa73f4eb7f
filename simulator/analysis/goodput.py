"""Goodput: the expected fraction of time that is useful training, given failures and the cost of checkpoints.

The job saves a checkpoint after every interval. The checkpoint is complete on storage some time later. After
a failure training restarts from the last complete checkpoint. Failures happen at a constant rate (number of
nodes / mean time between failures of a node), and also during restarts.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from ebbtide.simulator.engines.compiled import SimResult, simulate_fast
from ebbtide.simulator.engines.reference import capacities
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import BLOCK_BYTES, CheckpointPlan, Plan
from ebbtide.simulator.rules import RuleError
from ebbtide.simulator.schedules.ebbtide import build_schedule
from ebbtide.simulator.update.recipes import RECIPES
from ebbtide.simulator.update.steps import Queue
from ebbtide.simulator.workload import Workload

CHECKFREQ_OVERHEAD = 0.035  # CheckFreq (Mohan et al., FAST 2021): at most 3.5% overhead


@dataclass(frozen=True, slots=True)
class Failures:
    """The rate of failures of a training job on all its nodes, and the time that a restart takes.

    Attributes:
        mtbf_s: Mean time between two failures of the job, in seconds. `math.inf`: it never fails.
        restart_s: Seconds from a failure until training runs again from its checkpoint.

    Raises:
        ValueError: A time is negative, or the mean time between failures is zero.
    """

    mtbf_s: float
    restart_s: float = 0.0

    def __post_init__(self) -> None:
        check_positive("mtbf_s", self.mtbf_s)
        check_not_negative("restart_s", self.restart_s)


@dataclass(frozen=True, slots=True)
class CheckpointCost:
    """The cost of one checkpoint: the time that training loses, and the memory that the checkpoint needs.

    Attributes:
        stall_s: Seconds that training waits: in the save, for copies, and for bytes that must be written before
            an update may overwrite them.
        interference_s: Seconds that iterations take longer because writing uses memory bandwidth and CPU cores.
        persist_s: Seconds from the start of the save until all bytes are on storage.
        slowdown: Relative slowdown of iterations while the checkpoint is written, without waits. 0.02 means 2%.
        copied_bytes: Bytes that were copied in host memory because an update was about to overwrite them.
        waited_bytes: Bytes that were written while an update waited for them.
        reserved_bytes: Host memory reserved for these copies and for the writers' buffers.

    Raises:
        ValueError: A time is negative or not a number.
    """

    stall_s: float
    interference_s: float = 0.0
    persist_s: float = 0.0
    slowdown: float = 0.0
    copied_bytes: float = 0.0
    waited_bytes: float = 0.0
    reserved_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("stall_s", "interference_s", "persist_s"):
            check_not_negative(name, getattr(self, name))

    @property
    def cost_s(self) -> float:
        return self.stall_s + self.interference_s

    def fewest_steps(self, iteration_s: float) -> int:
        """Return the least number of iterations between checkpoints such that one is written before the next is due."""
        return max(1, math.ceil((self.persist_s - self.cost_s) / iteration_s * (1 - 1e-12)))


def expected_goodput(iteration_s: float, cost: CheckpointCost, failures: Failures, interval_steps: int) -> float:
    """Return the expected fraction of time, from 0 to 1, that is useful training.

    The formula is exact for failures at a constant rate. Its symbols are times:

    - ``M``: mean time between failures.
    - ``R``: time of a restart. A restart may fail as well, so it takes ``(exp(R/M) - 1) M`` on average.
    - ``work``: time of the iterations between two checkpoints.
    - ``stall`` and ``interference``: for how long a checkpoint stops training, and by how much it slows training down.
    - ``persist``: time from the start of a save until the checkpoint is on storage.
    - ``L = work + stall + interference``: time from one save to the next.

    Without a failure, a checkpoint is completed every ``L``. A failure also loses the work that was done while the last
    completed checkpoint was being written. So the first checkpoint after a restart takes ``L + persist``: training up
    to the next save, and writing it. The expected time per interval and the goodput are

        ``E = M exp(R/M) exp(persist/M) (exp(L/M) - 1)``  and  goodput = work / E.

    Args:
        iteration_s: Seconds of a training iteration without any checkpoint.
        interval_steps: Iterations between two checkpoints. 0: no checkpoint is saved.

    Raises:
        ValueError: An iteration takes no time, a job that can fail saves no checkpoint, or writing a checkpoint takes
            longer than the interval.
    """
    check_positive("iteration_s", iteration_s)
    mtbf_s = failures.mtbf_s
    if interval_steps < 0:
        raise RuleError(f"interval_steps must be >= 0, but got {interval_steps}", key="interval_steps")
    if interval_steps == 0:
        if math.isinf(mtbf_s):
            return 1.0
        raise RuleError(
            f"interval_steps must be >= 1 if the job can fail (mtbf_s={mtbf_s:g}), but got 0", key="interval_steps"
        )
    work_s = interval_steps * iteration_s
    interval_s = work_s + cost.cost_s
    check_commit(cost.persist_s, interval_s)
    if math.isinf(mtbf_s):
        return work_s / interval_s
    # Both E and the work are multiplied by exp(-(R + persist + L) / M), so that nothing overflows if M is tiny.
    kept = math.exp(-(failures.restart_s + cost.persist_s + interval_s) / mtbf_s)
    return work_s / mtbf_s * kept / -math.expm1(-interval_s / mtbf_s)


def best_interval_steps(iteration_s: float, cost: CheckpointCost, failures: Failures) -> int:
    """Return the iterations between two checkpoints with the highest expected goodput, or 0 if the job never fails.

    Goodput has a single maximum over the interval. So the best number is next to `optimal_interval`, but never less
    than the iterations that writing a checkpoint takes.

    Raises:
        ValueError: An argument is refused by `expected_goodput`.
    """
    check_positive("iteration_s", iteration_s)
    if math.isinf(failures.mtbf_s):
        return 0
    fewest = cost.fewest_steps(iteration_s)
    below = int(optimal_interval(cost.cost_s, failures.mtbf_s) / iteration_s)
    candidates = {max(fewest, below), max(fewest, below + 1)}
    return max(sorted(candidates), key=lambda k: expected_goodput(iteration_s, cost, failures, k))


def optimal_interval(cost_s: float, mtbf_s: float) -> float:
    """Return the seconds of training between two checkpoints that give the highest expected goodput.

    Goodput is useful training per time. The result is ``x M``, where M is the mean time between failures, and x solves
    ``x = 1 - exp(-x - cost/M)`` (Daly, FGCS 2006). ``cost`` is the training time that a checkpoint costs. The time of
    a restart, and the time for which a checkpoint is written in the background, do not change the result.

    Raises:
        ValueError: The cost is negative, or the mean time between failures is not > 0.
    """
    check_positive("mtbf_s", mtbf_s)
    check_not_negative("cost_s", cost_s)
    relative = cost_s / mtbf_s
    if relative == 0.0:
        return 0.0
    x = 1.0
    for _ in range(100):  # Newton's method on a convex, rising function, started above the root: it never overshoots
        step = (x + math.expm1(-(x + relative))) / -math.expm1(-(x + relative))
        x -= step
        if abs(step) <= 1e-14 * x:
            break
    return x * mtbf_s


def young_interval(cost_s: float, mtbf_s: float) -> float:
    """Return Young's checkpoint interval in seconds, ``sqrt(2 d M)`` (CACM 1974)."""
    return math.sqrt(2 * cost_s * mtbf_s)


def daly_interval(cost_s: float, mtbf_s: float) -> float:
    """Return Daly's first-order checkpoint interval in seconds, ``sqrt(2 d M) - d``, at least 0 (FGCS 2006)."""
    return max(0.0, young_interval(cost_s, mtbf_s) - cost_s)


def checkfreq_interval_steps(iteration_s: float, cost: CheckpointCost) -> int:
    """Return the number of iterations between two checkpoints according to CheckFreq (FAST 2021)."""
    steps = math.ceil(cost.cost_s / (CHECKFREQ_OVERHEAD * iteration_s) * (1 - 1e-12))
    return max(cost.fewest_steps(iteration_s), steps)


def check_positive(name: str, value: float) -> None:
    if not value > 0 or (math.isinf(value) and name == "iteration_s"):
        raise RuleError(f"{name} must be > 0, but got {value}", key=name)


def check_not_negative(name: str, value: float) -> None:
    if not (value >= 0 and math.isfinite(value)):
        raise RuleError(f"{name} must be finite and >= 0, but got {value}", key=name)


def check_commit(persist_s: float, interval_s: float) -> None:
    if persist_s > interval_s * (1 + 1e-9):
        raise RuleError(
            f"persist_s must be at most the interval of {interval_s:g} s (a checkpoint must be "
            f"committed before the next one is taken), but got {persist_s:g}: raise "
            "interval_steps",
            key="persist_s",
        )


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
    """Return the seconds that a save waits while state is copied to DeepSpeed's own tensors.

    Only state of subgroups that are parts of DeepSpeed's subgroups needs this, if it is resident or updated early.
    Early updates write alternately to DeepSpeed's tensors and to spare buffers, so half of their state counts.
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
    """A prediction of what checkpoints cost under a plan, for any checkpoint settings, from one simulated iteration and
    the rates of the drive and of copies.

    State is written while training goes on. An update must not overwrite state that is not written yet. Such state is
    first copied in host memory, up to the plan's budget for copies, and beyond the budget the update waits for the
    drive.

    It was held against a simulation of each write of 24 cases (four jobs, three budgets, with and without early
    updates): the interval between checkpoints that follows from it loses at most 0.02 points of goodput.
    """

    def __init__(self, workload: Workload, plan: Plan, machine: Machine, save_s: float | None = None) -> None:
        """Simulate iterations. ``save_s``: a save's seconds that do not depend on its size. None: estimated."""
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
        """Return the seconds that a save waits for updates that would otherwise overlap the next forward."""
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
