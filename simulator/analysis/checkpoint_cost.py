"""A prediction of the cost of a checkpoint, from simulations of training with and without the checkpoint."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ebbtide.simulator.analysis.goodput import CheckpointCost
from ebbtide.simulator.engines.compiled import CompiledSchedule, SimResult, compile_schedule, simulate_fast
from ebbtide.simulator.engines.kernel import CORES, DRAM
from ebbtide.simulator.engines.reference import capacities
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import BLOCK_BYTES, CheckpointPlan, Plan
from ebbtide.simulator.schedule import Lane, Op, OpKind, Schedule
from ebbtide.simulator.schedules.checkpointed import CheckpointedLoop, copy_rate
from ebbtide.simulator.schedules.write_order import Due, Pace, Writing, order_writing
from ebbtide.simulator.update.recipes import RECIPES
from ebbtide.simulator.workload import Workload

LEAD_IN = 2  # iterations before the save: the second one ends in the steady state
FOLLOWED = 4  # iterations after the save. If writing takes longer, the last of these iterations is extrapolated
ROUNDS = 2
# Time of `save_checkpoint` itself (state dicts, file headers, agreement of the ranks) if neither the machine nor the
# workload gives it. Measured with 40 M parameters in 125 tensors on two cores.
SAVE_S = 0.012
_NOTHING = Writing((), {})


@dataclass(frozen=True)
class _Run:
    """A simulated schedule of training with one checkpoint save. Times are seconds from the start of that save."""

    ops: tuple[Op, ...]
    result: SimResult

    def of(self, *kinds: OpKind, iteration: int | None = None) -> list[int]:
        return [op.id for op in self.ops if op.kind in kinds and (iteration is None or op.iteration == iteration)]

    def save_s(self) -> float:
        saves = [op.id for op in self.ops if op.kind == OpKind.SNAPSHOT and op.lane == Lane.COMPUTE]
        return float(self.result.end_s[saves[0]])

    def norm_s(self) -> float:
        # Updates of that iteration, which overwrite state, begin after the norm.
        return float(self.result.end_s[self.of(OpKind.NORM, iteration=LEAD_IN)[0]]) - self.save_s()

    def backward_end_s(self, iteration: int) -> float:
        return float(self.result.end_s[self.of(OpKind.BACKWARD, iteration=iteration)[-1]])

    def persists(self) -> list[int]:
        return self.of(OpKind.PERSIST)

    def persist_end_s(self) -> float:
        return max((float(self.result.end_s[i]) for i in self.persists()), default=0.0)

    def persist_rate(self) -> float:
        # If there are none, the result is infinity. After the norm, updates begin to overwrite state.
        # `CheckpointSimulation.writing` uses the result to plan which state is written before its update, and limits it
        # to the drive's speed and to the plan's limit for checkpoint writes.
        until = self.norm_s() + self.save_s()
        early = [i for i in self.persists() if self.result.end_s[i] <= until and self.ops[i].work]
        busy_s = sum(float(self.result.end_s[i] - self.result.start_s[i]) for i in early)
        return sum(self.ops[i].work for i in early) / busy_s if busy_s else math.inf

    def hooks_s(self) -> tuple[float, ...]:
        save_s, layers = self.save_s(), max(op.layer for op in self.ops) + 1
        forwards = self.of(OpKind.FORWARD, iteration=LEAD_IN)[:layers]
        backwards = self.of(OpKind.BACKWARD, iteration=LEAD_IN)
        times = [self.result.start_s[i] for i in forwards]
        times += [self.result.end_s[i] for i in backwards]
        return tuple(float(t) - save_s for t in times)

    def due(self, plan: Plan) -> list[Due]:
        save_s, results = self.save_s(), []
        recipes = [way.recipe for way in plan.ways]
        overwriting = [{s.kind for s in recipe.steps if s.overwrites} for recipe in recipes]
        for i in self.of(*set().union(*overwriting), iteration=LEAD_IN):
            op, at_s = self.ops[i], float(self.result.start_s[i]) - save_s
            if op.kind in overwriting[op.subgroup]:
                results.append(Due(op.subgroup, at_s, recipes[op.subgroup].queue.value))
        return _monotone(results, plan.issue_order)


def _monotone(due: list[Due], issue_order: Sequence[int]) -> list[Due]:
    # `order_writing` sorts these times, and must find the updates of a queue in the order in which they run. Simulated
    # times may decrease along a queue: one update overwrites state while it computes, another one only when it copies
    # state back to host memory.
    latest, ordered = dict[str, float](), []
    rank = {subgroup: position for position, subgroup in enumerate(issue_order)}
    for one in sorted(due, key=lambda d: rank[d.subgroup]):
        latest[one.queue] = max(latest.get(one.queue, 0.0), one.at_s)
        ordered.append(replace(one, at_s=latest[one.queue]))
    return ordered


def _without_traffic(compiled: CompiledSchedule) -> CompiledSchedule:
    ops = compiled.ops.copy()
    persists = [op.id for op in compiled.schedule.ops if op.kind == OpKind.PERSIST]
    ops[persists, DRAM] = ops[persists, CORES] = 0.0
    return replace(compiled, ops=ops)


def save_seconds(workload: Workload, machine: Machine) -> float:
    """Return the seconds of a checkpoint save that depend on the number of tensors and not on their bytes.

    A save takes a fixed time for each tensor. The checkpoint has one tensor for each parameter of the model,
    and a few for each subgroup's optimizer state.
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
    # They are the parameters in the model's precision, and the optimizer state. State that a plan stores on drives is
    # not counted, because it is not written again.
    return sum(streamed_sizes(workload, plan)) + workload.model_checkpoint_bytes


class CheckpointSimulation:
    """A prediction of what checkpoints cost under a plan, for any checkpoint settings.

    The cost is found by simulating training with one checkpoint and without any, from `LEAD_IN` iterations before the
    save to `FOLLOWED` iterations after it. If an update would overwrite state that the checkpoint has not written yet,
    the state is first copied in host memory. If there is no room for the copy, the update waits.

    Which state must be copied depends on the times of the updates after the save. These times come from a simulation of
    a save that writes nothing. They are then multiplied by a factor, because writes slow training down. The factor is
    the time from the save to the next gradient norm in a simulation with all writes, divided by the same time in the
    simulation without writes.
    """

    def __init__(self, workload: Workload, plan: Plan, machine: Machine, save_s: float | None = None) -> None:
        """Set up the simulation of checkpoints while training under a plan.

        Args:
            save_s: Seconds of ``save_checkpoint`` that do not depend on the amount of data. None: estimated by
                `save_seconds`.
        """
        workload = workload.cut_as(plan)
        self.workload, self.plan, self.machine = workload, plan, machine
        own_s = save_seconds(workload, machine) + gathered_seconds(workload, plan, machine)
        self.save_s = own_s if save_s is None else save_s
        self.iterations = LEAD_IN + FOLLOWED
        self.sizes = streamed_sizes(workload, plan)
        self.storage = capacities(machine, workload.ranks_per_node)["storage"]

    def schedule(self, saving: CheckpointPlan) -> Schedule:
        """Return the schedule of ops of training iterations with one checkpoint save, to simulate or draw it."""
        return self._schedule(saving, self.writing(saving))

    def cost(self, saving: CheckpointPlan) -> CheckpointCost:
        """Return the cost of one checkpoint: the seconds that training loses, and the memory that the checkpoint needs.

        The checkpoint is assumed to be completely written before the next checkpoint is saved.
        """
        writing = self.writing(saving)
        compiled = compile_schedule(self._schedule(saving, writing))
        run = self._run(compiled)
        lost_s = self._lost_s(run)
        stall_s = min(lost_s, self._lost_s(self._run(_without_traffic(compiled))))
        persist_s = run.persist_end_s() - run.save_s() + self.save_s
        interference_s = lost_s - stall_s + self._later_s(run)
        beside = max(1, math.ceil(persist_s / self.iteration_s))
        return CheckpointCost(
            stall_s=stall_s,
            interference_s=interference_s,
            persist_s=persist_s,
            slowdown=interference_s / (beside * self.iteration_s),
            copied_bytes=writing.bytes_of("copied"),
            waited_bytes=writing.bytes_of("urgent"),
            reserved_bytes=saving.reserved_bytes,
        )

    def _lost_s(self, run: _Run) -> float:
        last = self.iterations - 1
        return max(0.0, run.backward_end_s(last) - self._plain.backward_end_s(last))

    def _later_s(self, run: _Run) -> float:
        # Each later iteration is assumed to be slowed as much as the last simulated one, until the checkpoint is
        # written.
        last = self.iterations - 1
        with_s, without_s = (r.backward_end_s(last) - r.backward_end_s(last - 1) for r in (run, self._plain))
        left = max(0.0, run.persist_end_s() - run.backward_end_s(last)) / self.iteration_s
        return left * max(0.0, with_s - without_s)

    @property
    def iteration_s(self) -> float:
        """Return the seconds of a training iteration without any checkpoint."""
        return self._plain.result.iteration_s

    @cached_property
    def _plain(self) -> _Run:
        return self._run(compile_schedule(self._loop(CheckpointPlan(), _NOTHING, ())))

    @cached_property
    def _quiet(self) -> _Run:
        # The order of writing the checkpoint is planned from these times. The save only delays the training thread.
        saves = (LEAD_IN - 1,)
        return self._run(compile_schedule(self._loop(CheckpointPlan(), _NOTHING, saves)))

    def _run(self, compiled: CompiledSchedule) -> _Run:
        return _Run(compiled.schedule.ops, simulate_fast(compiled, self.machine))

    def writing(self, saving: CheckpointPlan) -> Writing:
        """Predict in which order a checkpoint's bytes are written, and which bytes are first copied in host memory
        because an update would overwrite them before they are written.

        The order depends on the speed of the writes and on how much they slow training down, and both depend on the
        order. So the order is computed `ROUNDS` times: first for full speed and no slowdown, and then for the speed and
        the slowdown in a simulation of the previous order.
        """
        paced = min(self.storage, saving.write_bytes_per_s or math.inf)
        rate, stretch = paced, 1.0
        writing = self._ordered(saving, rate, stretch)
        for _ in range(ROUNDS - 1):
            run = self._run(compile_schedule(self._schedule(saving, writing)))
            rate, stretch = min(paced, run.persist_rate()), run.norm_s() / self._quiet.norm_s()
            writing = self._ordered(saving, rate, stretch)
        return writing

    def _ordered(self, saving: CheckpointPlan, rate: float, stretch: float) -> Writing:
        due = [replace(d, at_s=d.at_s * stretch) for d in self._quiet.due(self.plan)]
        return order_writing(
            self.sizes,
            [] if saving.mode in ("sync", "in_place") else due,
            Pace(rate, self.storage, copy_rate(self.machine)),
            saving.copy_budget_bytes // BLOCK_BYTES * BLOCK_BYTES,
            self.workload.model_checkpoint_bytes,
            self.plan.issue_order,
        )

    def _schedule(self, saving: CheckpointPlan, writing: Writing) -> Schedule:
        return self._loop(saving, writing, (LEAD_IN - 1,), self._quiet.hooks_s())

    def _loop(
        self, saving: CheckpointPlan, writing: Writing, saves: Sequence[int], hooks_s: Sequence[float] = (0.0,)
    ) -> Schedule:
        # One checkpoint in all of these iterations, so that its host memory is counted.
        once = saving.model_copy(update={"interval_steps": self.iterations})
        plan = self.plan.model_copy(update={"checkpoint": once})
        loop = CheckpointedLoop(
            self.workload, plan, self.machine, writing, saves=saves, save_s=self.save_s, hooks_s=hooks_s
        )
        loop.run(self.iterations)
        return loop.schedule(self.iterations)
