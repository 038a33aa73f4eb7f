"""The builder of schedules of training with checkpoints: saves wait for updates, and training goes on during writes.

If a subgroup's update is due before its state is written, the state is copied first (copy on update). The
ops of checkpoints share DRAM, CPU cores, the link and storage with those of training.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace

from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import CheckpointPlan, Plan
from ebbtide.simulator.schedule import Lane, OpKind
from ebbtide.simulator.schedules.ebbtide import EbbtideLoop
from ebbtide.simulator.schedules.write_order import REST, Segment, Writing
from ebbtide.simulator.workload import Workload

COPY_TRAFFIC = 3  # DRAM traffic per byte copied: read, written, and the cache line that is read before the write
# DRAM traffic per byte written to disk: read from the state, and read by the disk's DMA. The writer's buffer, which is
# hashed too, stays in a cache.
WRITE_TRAFFIC = 2
# Time in which one core gathers, hashes and writes a byte, if the machine has no value. Measured on an AMD EPYC.
WRITER_S_PER_BYTE = 0.15e-9
COPY_BYTES_PER_S = 8e9  # rate of one thread's memmove, however fast all threads together are


class CheckpointedLoop(EbbtideLoop):
    """The simulated training loop of ebbtide with checkpoints, which are saved at the end of some iterations.

    A checkpoint's bytes are written in the order that ``writing`` gives. The state of subgroups that live in GPU memory
    is copied to the host in parts, during forwards and backwards. If the previous checkpoint is still being written, a
    save waits for it. A plan's field ``busy`` can select another rule. Other rules are not simulated.
    """

    def __init__(
        self,
        workload: Workload,
        plan: Plan,
        machine: Machine,
        writing: Writing,
        *,
        saves: Container[int] = (),
        save_s: float = 0.0,
        hooks_s: Sequence[float] = (0.0,),
    ) -> None:
        """Set up the simulation of a training loop that saves checkpoints.

        Args:
            hooks_s: Times after a save, in seconds, at which a layer's forward begins or its backward ends. At each of
                these times, one part of the optimizer state in GPU memory is copied to the host for the checkpoint.
                `CheckpointSimulation` computes the times.
        """
        super().__init__(workload, plan)
        self.machine, self.saving, self.writing = machine, plan.checkpoint, writing
        self.saves, self.save_s, self.hooks_s = saves, save_s, hooks_s
        self.cuts = list(self._cut_at_hooks())
        self.pending: deque[tuple[Segment, int]] = deque()  # each with its hook, or -1 for state in host memory
        self.hook, self.save_op, self.norm = -1, -1, -1
        self.live_ops: dict[int, list[int]] = {}  # subgroup -> ops that write its live bytes to disk
        self.unread: dict[int, int] = {}  # subgroup -> number of live segments without an op yet
        self.snapshots: dict[int, int] = {}  # subgroup -> op that copies it before its update overwrites it
        self.pieces: dict[int, int] = {}  # hook -> op that copies a part of the GPU-resident state to the host
        self.commits: list[int] = []

    def run(self, iterations: int) -> None:
        super().run(iterations)
        self._emit(lambda: bool(self.pending))

    # -- where the training loop calls in ----------------------------------------------------

    def _parameter_waits(self, layer: int) -> list[int]:
        self._pass_begins()
        return super()._parameter_waits(layer)

    def after_backward(self) -> None:
        self._pass_begins()

    def step(self) -> None:
        self.norm = len(self.out.ops)  # the first op that is appended here
        super().step()
        self._emit(lambda: bool(self.pending))
        if self.out.iteration in self.saves:
            self._save()

    def may_overwrite(self, subgroup: int) -> list[int]:
        """Return the checkpoint ops that must end before an update may overwrite a subgroup's state.

        These ops copy the state to reserved host memory, or write it to storage from the memory that the update
        overwrites.
        """
        if subgroup not in self.unread:
            return []
        waits = [self._snapshot(subgroup)] if subgroup in self.writing.copied else []
        self._emit(lambda: self.unread[subgroup] > 0)
        del self.unread[subgroup]
        return [*waits, *self.live_ops.pop(subgroup, [])]

    # -- the checkpoint's own ops ------------------------------------------------------------

    def _save(self) -> None:
        assert self.step_end is not None
        waits = [self.step_end, *self.parameters_new.values(), *self.ends]
        self.save_op = self.step_end = self.out.add(
            OpKind.SNAPSHOT, Lane.COMPUTE, 0.0, after=[*waits, *self.commits[-1:]], latency_s=self.save_s
        )
        self.hook = -1
        self.pending = deque(self.cuts)
        if not self.pending:  # all state is on drives, where the steps have already written it
            self.commits.append(self._durable())
        self.live_ops, self.snapshots, self.pieces = {}, {}, {}
        self.unread = dict.fromkeys(range(len(self.sizes)), 0)
        for segment, _ in self.cuts:
            if segment.part != "copied" and segment.subgroup != REST:
                self.unread[segment.subgroup] += 1
        if self.saving.mode in ("sync", "in_place"):
            self._emit(lambda: bool(self.pending))
            self.step_end, self.unread = self.commits[-1], {}

    def _pass_begins(self) -> None:
        if self.save_op < 0 or self.hook >= len(self.hooks_s):
            return
        self.hook += 1
        self._emit(lambda: bool(self.pending) and self._is_ready(*self.pending[0]))

    def _is_ready(self, segment: Segment, hook: int) -> bool:
        if segment.part == "copied":
            return segment.subgroup in self.snapshots
        return hook <= self.hook and segment.part != "urgent"

    def _emit(self, more: Callable[[], bool]) -> None:
        while more():
            segment, hook = self.pending.popleft()
            subgroup = segment.subgroup
            op = self._persist(segment, self._source(segment, hook))
            if segment.part != "copied" and subgroup != REST:
                self.live_ops.setdefault(subgroup, []).append(op)
                self.unread[subgroup] -= 1
            if not self.pending:
                self.commits.append(self._durable())

    def _source(self, segment: Segment, hook: int) -> int:
        if segment.part == "copied":
            return self._snapshot(segment.subgroup)
        if hook < 0:
            return self.save_op
        if segment.part == "urgent":
            return self._copy_to_host(segment.size_bytes, self.norm, segment.subgroup)
        if hook not in self.pieces:
            size = sum(s.size_bytes for s, h in self.cuts if h == hook and s.part == "live")
            behind = self.passes[-1] if self.hook > 0 else self.save_op
            self.pieces[hook] = self._copy_to_host(size, max(behind, self.save_op))
        return self.pieces[hook]

    def _copy_to_host(self, size_bytes: float, after: int, subgroup: int = -1) -> int:
        return self.out.add(
            OpKind.SNAPSHOT, Lane.D2H, size_bytes, "d2h_bytes_per_s", [after], dram_bytes=size_bytes, subgroup=subgroup
        )

    def _snapshot(self, subgroup: int) -> int:
        # The copy is for a checkpoint that has not written this state yet. State in host memory is copied by the thread
        # that is about to overwrite it.
        if subgroup not in self.snapshots:
            size, recipe = self.writing.copied[subgroup], self.recipes[subgroup]
            if recipe.state == "device":
                self.snapshots[subgroup] = self._copy_to_host(size, self.norm, subgroup)
            else:
                lane = next(step.lane for step in recipe.steps if step.overwrites)
                self.snapshots[subgroup] = self.out.add(
                    OpKind.SNAPSHOT,
                    lane,
                    size / copy_rate(self.machine),
                    after=[self.norm],
                    dram_bytes=COPY_TRAFFIC * size,
                    cores=1.0,
                    subgroup=subgroup,
                )
        return self.snapshots[subgroup]

    def _persist(self, segment: Segment, after: int) -> int:
        # The user's limit for the rate is ignored if an update waits for this write.
        size = segment.size_bytes
        full = self.machine.rate("storage_write_bytes_per_s")
        cap = self.saving.write_bytes_per_s
        rate = full if cap is None or segment.part == "urgent" else min(full, cap)
        cores = writer_cores(self.machine, self.saving) * rate / full
        return self.out.add(
            OpKind.PERSIST,
            Lane.STORAGE,
            size,
            "storage_write_bytes_per_s",
            [after],
            latency_s=size / rate - size / full,
            dram_bytes=WRITE_TRAFFIC * size,
            cores=cores,
            subgroup=segment.subgroup,
        )

    def _durable(self) -> int:
        return self.out.add(OpKind.PERSIST, Lane.STORAGE, 0.0, latency_s=self.machine.storage_fsync_s)

    def _cut_at_hooks(self) -> Iterator[tuple[Segment, int]]:
        for segment in self.writing.segments:
            if segment.subgroup == REST or self.recipes[segment.subgroup].state != "device":
                yield segment, -1
            elif segment.part != "live":
                yield segment, 0
            else:
                yield from self._cut(segment)

    def _cut(self, segment: Segment) -> Iterator[tuple[Segment, int]]:
        rate = segment.size_bytes / (segment.end_s - segment.begin_s)
        at = segment.begin_s
        while at < segment.end_s:
            hook = max(0, bisect_right(self.hooks_s, at) - 1)
            last = hook + 1 >= len(self.hooks_s)
            end = segment.end_s if last else min(segment.end_s, self.hooks_s[hook + 1])
            yield replace(segment, size_bytes=(end - at) * rate, begin_s=at, end_s=end), hook
            at = end


def writer_cores(machine: Machine, saving: CheckpointPlan) -> float:
    """Return the number of CPU cores that a checkpoint's writer threads use at the full rate of storage."""
    measured = machine.writer_s_per_byte
    cost_s = WRITER_S_PER_BYTE if measured is None else measured.median
    return min(saving.writer_threads, cost_s * machine.rate("storage_write_bytes_per_s"))


def copy_rate(machine: Machine) -> float:
    """Return the speed, in bytes per second, at which one thread copies a checkpoint's state inside host memory."""
    return min(machine.rate("host_copy_bytes_per_s"), COPY_BYTES_PER_S)
