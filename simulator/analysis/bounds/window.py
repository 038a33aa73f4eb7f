"""The rules that no plan can break, as rows of a mixed-integer linear program for the lower bound.

A rule for a group of subgroups also includes all groups whose layers come earlier in the model, because a
forward needs the parameters of these groups even sooner.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from ebbtide.simulator.analysis.bounds.model import Inside, Model, Part
from ebbtide.simulator.analysis.bounds.room import wait_for_room
from ebbtide.simulator.analysis.bounds.rows import Columns, Rows, Term
from ebbtide.simulator.schedule import Lane
from ebbtide.simulator.update.footprint import GRADIENTS_UNDER_WAY_BYTES, Holding
from ebbtide.simulator.update.recipes import Slot, Wait, slot_limit
from ebbtide.simulator.update.tiers import Memory
from ebbtide.simulator.update.way import plain_ways
from numpy.typing import NDArray

Floats = NDArray[np.float64]
MANY = 2**20  # slots: as many as one likes
CLOSE = 1e-6
NAMED = 14  # subgroups: of so few each is placed whole, and it counts which one is the last
NUMBERED = 5  # alike subgroups, of more of which only the number is whole
MOST_NUMBERS = 8  # of gradients on their way that are asked for
PASSES_USE = ("device", "cores")
NAMES = {
    "dram": "DRAM bandwidth",
    "h2d": "host-to-device copies",
    "d2h": "device-to-host copies",
    "link": "copies in both directions",
    "cores": "CPU cores",
    "storage_read": "storage reads",
    "storage": "storage writes",
    "storage_both": "storage reads and writes",
    "device": "GPU compute",
    Lane.H2D_FETCH: "copies of parameters to the GPU",
    Lane.H2D_PARAMETERS: "copies of updated parameters to the GPU",
    Lane.H2D: "copies of state to the GPU",
    Lane.H2D_GRADIENTS: "copies of gradients to the GPU",
    Lane.D2H: "copies of state to the host",
    Lane.D2H_GRADIENTS: "copies of gradients to the host",
    Lane.COMPUTE: "GPU compute",
    Lane.DEVICE_UPDATE: "updates on the GPU",
    Lane.HOST: "updates on the CPU",
    Lane.STORAGE: "storage writes",
    Lane.STORAGE_READ: "storage reads",
    Lane.ISSUE: "the training thread",
}


class Window:
    """The linear program that minimizes the time between the gradient norm and the end of the next forward.

    It gives the lower bound of an iteration's time. This part of the iteration is called the window.

    Attributes:
        seconds: Variable that is minimized: the window's seconds (``inside``) plus the waits of backward.
        x: Number of a group's subgroups that are updated in each way: shape (groups, ways).
        early: For staged updates, the number of subgroups whose state is copied to the GPU before any buffer is
            reused: by way of updating, shape (groups,).
        kept: For staged updates, the number of subgroups whose buffer is not reused: by way, shape (groups,).
        beyond: By kind of buffer, 1 if there are more staged updates than buffers.
    """

    def __init__(
        self,
        model: Model,
        room: Mapping[Memory, float],
        slots: int | None = None,
        fewest: int = 0,
        numbers: Sequence[float] = (),
        largest_staged: tuple[int, int] | None = None,
    ) -> None:
        """Build the linear program for a lower bound of the iteration time.

        Args:
            room: Bytes in each memory that state, gradients and buffers may take.
            slots: Number of staging buffers. None: any number that is at least ``fewest``.
            numbers: Number of subgroups with each combination of placement and parameter location. Empty: free.
            largest_staged: Smallest and largest size, in elements, that the largest staged subgroup may have.
        """
        self.model, self.slots, self.fewest, self.largest_staged = model, slots, fewest, largest_staged
        self.rows, count = Rows(), len(model.pieces)
        self.seconds, self.inside = self.rows.one(), self.rows.one()
        self.waited = self.rows.one()
        self.rows.equal(0.0, (self.seconds, 1.0), (self.inside, -1.0), (self.waited, -1.0))
        self.x = self.rows.new(count * len(model.ways)).reshape(count, -1)
        self.early = {way: self.rows.new(count) for way in self._ways(Inside.TAKERS)}
        self.kept = {way: self.rows.new(count) for way in self._ways(Inside.GIVERS)}
        used_slots = sorted({p.slot for p in model.parts if p.slot is not None})
        self.beyond = {slot: self.rows.one(1.0, whole=True) for slot in used_slots}
        self._size = {slot: self.rows.one() for slot in used_slots}  # in units of the largest subgroup
        self._place(numbers)
        for slot in used_slots:
            self._hold_slot(slot)
        self._fit(room)
        wait_for_room(model, self.rows, self.x, self.waited)
        self._resources()
        self._iteration()

    def within(self, outside_s: float, *terms: Term, name: str = "") -> None:
        """Add a row to the linear program: the work in ``terms`` must fit into the window and ``outside_s`` seconds.

        The window is the time from the gradient norm to the end of the next forward, plus the waits of backward.

        Args:
            outside_s: Seconds outside the window in which the work may be done too.
            terms: Seconds of work.
            name: Name of the resource that does the work, for reports.
        """
        self.rows.at_most(outside_s, (self.seconds, -1.0), *terms, name=name)

    def behind_the_norm(self, behind_s: float, *terms: Term, name: str = "") -> None:
        """Add a row to the linear program: the work in ``terms`` and ``behind_s`` seconds must fit into the window.

        The window is the time from the gradient norm to the end of the next forward.

        Args:
            behind_s: Seconds of the forward that must follow the work.
            terms: Seconds of work.
            name: Name of the resource that does the work, for reports.
        """
        self.rows.at_most(-behind_s, (self.inside, -1.0), *terms, name=name)

    def least_inside_s(self, known_s: float) -> float:
        """Return a lower bound of the seconds from the gradient norm to the end of the next forward.

        Args:
            known_s: Known lower bound of these seconds plus the seconds that backward waits.
        """
        if not self.rows.upper[self.waited]:
            return known_s
        solved = self.rows.lowest(self.inside)
        return known_s if solved is None else solved[0] * (1 - CLOSE)

    def asked(self, part: Part, seconds: Floats, pieces: slice | NDArray[np.bool_]) -> list[Term]:
        """Return the linear program's terms for the seconds that an op of the updates runs after the gradient norm.

        The sum of the terms is part of a rule, such as that a copy direction has time for all copies.

        Args:
            part: Op of a subgroup's update, such as a copy.
            seconds: For each group of subgroups, seconds of the op for one subgroup.
            pieces: Groups of subgroups to include.
        """
        terms: list[Term] = [(self.x[pieces, part.way], seconds[pieces])]
        outside = {Inside.TAKERS: self.early, Inside.GIVERS: self.kept}.get(part.inside, {})
        if part.way in outside:
            terms.append((outside[part.way][pieces], -seconds[pieces]))
        return terms

    @property
    def sent(self) -> list[Part]:
        """Return the steps that copy gradients to host memory."""
        return [p for p in self.model.gradients if Wait.SUM not in p.step.waits]

    @property
    def sending(self) -> list[Part]:
        """Return the steps that copy gradients to the host from the limited GPU memory for outgoing gradients.

        Gradients that are accumulated on the GPU have their own memory there, and are left out.
        """
        return [p for p in self.sent if not self.model.ways[p.way].sum_on_device]

    @property
    def waiting(self) -> dict[Lane, list[Part]]:
        """Return, by lane, the steps of updates that wait for a gradient in host memory.

        A lane is a queue of ops that run one after the other, such as a copy direction.
        """
        lanes: dict[Lane, list[Part]] = {}
        for p in self.model.parts:
            if Wait.GRADIENT in p.step.waits and self.model.recipes[p.way].gradient_steps:
                lanes.setdefault(p.step.lane, []).append(p)
        return lanes

    def _ways(self, inside: Inside) -> list[int]:
        return sorted({p.way for p in self.model.parts if p.inside == inside})

    # -- what is where -----------------------------------------------------------------------

    def _place(self, numbers: Sequence[float]) -> None:
        pieces = self.model.pieces
        for p, location in enumerate(pieces.locations):
            self.rows.equal(pieces.count[p], (self.x[p], 1.0))
            for way, other in enumerate(self.model.ways):
                if location and location != other.parameters:
                    self.rows.upper[self.x[p, way]] = 0.0
        for way, number in enumerate(numbers):
            same = [n for n, other in enumerate(self.model.ways) if other.plain == self.model.ways[way]]
            self.rows.equal(number, (self.x[:, same].ravel(), 1.0))
        for size in () if len(numbers) else np.unique(pieces.size):
            alike = np.flatnonzero(pieces.size == size)
            if pieces.whole[alike].all():
                self._place_whole(alike)

    def _place_whole(self, alike: Columns) -> None:
        pieces = self.model.pieces
        if len(pieces) <= NAMED or pieces.count[alike].sum() < NUMBERED:
            for variable in self.x[alike].ravel():
                self.rows.whole[variable] = True
            return
        for way, number in enumerate(self.rows.new(len(self.model.ways), whole=True)):
            self.rows.equal(0.0, (self.x[alike, way], 1.0), (number, -1.0))

    def place_each(self) -> None:
        """Add the rule that a whole number of equally large subgroups is updated in each way."""
        some = self.x[self.model.pieces.whole].ravel()
        for variable in some:
            self.rows.whole[variable] = True

    def limit(self, slot: Slot) -> int:
        """Return the largest number of buffers of one kind (such as staging buffers) that a plan may have."""
        staging = MANY if self.slots is None else self.slots
        return slot_limit(slot, staging, MANY, host_slots=MANY)

    def _hold_slot(self, slot: Slot) -> None:
        """Add the rules that limit the staged updates to the buffers of one kind.

        Before a buffer is reused, no more subgroups are copied to the GPU than there are buffers. At the end no
        more subgroups stay in buffers than there are buffers. Each buffer is as large as the largest staged subgroup,
        including those that are updated early.
        """
        m, pieces, size = self.model, self.model.pieces, self._size[slot]
        users, limit = sorted({p.way for p in m.parts if p.slot == slot}), self.limit(slot)
        early = [n for n, r in enumerate(m.recipes) if m.ways[n].early and slot in r.slots]
        staged_ways = [*users, *early]
        if not limit:
            self.rows.at_most(0.0, (self.x[:, staged_ways].ravel(), 1.0))
        staged = slot_limit(slot, 0, MANY, host_slots=MANY) == 0
        each = limit if limit < MANY else max(1, self.fewest if staged else 1)
        if limit == MANY:
            number = self.rows.one(whole=True)
            least = self.largest_staged[0] if staged and self.largest_staged else min(m.workload.subgroups)
            self.rows.at_most(0.0, (number, least / m.largest), (size, -1.0))
        for outside in (self.early, self.kept):
            some = [outside[way] for way in users if way in outside]
            for way in users if some else ():
                self._apart(outside[way], way, self.beyond[slot])
            if some:
                fewer = [(number, -1.0)] if limit == MANY else []
                self.rows.at_most(limit % MANY, *((columns, 1.0) for columns in some), *fewer)
                taken = [(columns, pieces.size / m.largest) for columns in some]
                self.rows.at_most(0.0, (size, -1.0), *taken)
        for one in np.unique(pieces.least):
            there = self.rows.one(1.0, whole=bool(pieces.whole.all()))
            for p in np.flatnonzero(pieces.least == one):
                share = 1.0 / pieces.count[p]
                self.rows.at_most(0.0, (self.x[p, staged_ways], share), (there, -1.0))
            self.rows.at_most(0.0, (there, each * one / m.largest), (size, -1.0))
        if staged and self.largest_staged is not None:
            least, most = self.largest_staged
            self.rows.at_most(-each * least / m.largest, (size, -1.0))
            for variable in self.x[pieces.least > most][:, staged_ways].ravel():
                self.rows.upper[variable] = 0.0
        if 0 < limit < MANY:
            self._in_turn(slot, limit)

    def _apart(self, some: Columns, way: int, others: int) -> None:
        """Add the rule that the subgroups counted by the variables ``some`` are among those updated in one way.

        Args:
            some: For each group of subgroups, the variable that counts some of its subgroups.
            way: Number of the way of updating, such as a staged update.
            others: Variable that is 1 if this way also updates subgroups that ``some`` does not count.
        """
        count = self.model.pieces.count
        for p, variable in enumerate(some):
            self.rows.at_most(0.0, (variable, 1.0), (self.x[p, way], -1.0))
            here = (self.x[p, way], 1.0), (variable, -1.0)
            self.rows.at_most(0.0, *here, (others, -count[p]))

    def _in_turn(self, slot: Slot, limit: int) -> None:
        """Add the rule to the lower bound that a staging buffer serves one update at a time.

        The ops of all staged updates, divided by the number of buffers, must therefore fit into the iteration.

        Args:
            slot: Kind of buffer.
            limit: Number of buffers of this kind.
        """
        m = self.model
        parts = [p for p in m.parts if p.slot == slot]
        inside: list[Term] = []
        for part in parts:
            inside.append((self.x[:, part.way], part.seconds / limit))
            outside = self.kept if part.inside == Inside.GIVERS else self.early
            if part.way in outside:
                inside.append((outside[part.way], -part.seconds / limit))
        self.within(m.rest_s, *((self.x[:, p.way], p.seconds / limit) for p in parts))
        if all(p.way in self.early for p in parts):
            self.behind_the_norm(m.pieces.tail_s[-1], *inside)

    def _fit(self, room: Mapping[Memory, float]) -> None:
        """Add the rule that state, gradients, parameters and buffers fit into each memory.

        Amounts are in units of the largest subgroup's state.
        """
        m = self.model
        if m.machine.unified_memory:
            return
        held, free = Holding.of_workload(m.workload), not m.pieces.locations[0]
        unit = m.largest * m.workload.optimizer_state.state_bytes
        for memory, size_bytes in room.items():
            terms: list[Term] = []
            for number, way in enumerate(m.ways):
                per_param = float(held.per_param[memory][plain_ways().index(way.plain)])
                if memory == "host" and way.early:
                    per_param += held.early_bytes
                if way.sum_on_device:
                    per_param += {"device": 1, "host": -1}.get(memory, 0) * held.gradient_bytes
                if free and memory == "device" and way.parameters == "host":
                    per_param -= m.workload.wire_bytes  # which are in the workload's base
                terms.append((self.x[:, number], per_param * m.pieces.size / unit))
            if memory == "device" and self.sending:
                terms.append((self._under_way(), GRADIENTS_UNDER_WAY_BYTES / unit))
            slots = {
                slot: (size, held.slot_bytes(slot, m.largest) / unit)
                for slot, size in self._size.items()
                if slot.memory == memory
            }
            self.rows.at_most(
                size_bytes / unit, *terms, *slots.values(), name=f"{'GPU' if memory == 'device' else memory} memory"
            )

    def _under_way(self) -> int:
        """Return a variable for the GPU memory of gradients that are being copied to the host.

        It is at least the smaller of two amounts: the bytes of all such gradients, and the limit of this memory.
        """
        m, pieces, kept = self.model, self.model.pieces, self.rows.one()
        most = GRADIENTS_UNDER_WAY_BYTES / m.workload.grad_bytes_per_param
        users, count = sorted({g.way for g in self.sending}), len(m.workload.subgroups)
        each = pieces.size / max(most, float(m.workload.params))
        self.rows.at_most(0.0, (kept, -1.0), *((self.x[:, way], each) for way in users))
        together = np.minimum(1.0, np.cumsum(np.sort(m.workload.subgroups)) / most)
        enough = int(np.searchsorted(together, 1.0)) + 1
        for number in np.unique(np.linspace(1, min(enough, count), MOST_NUMBERS).astype(int)):
            there, others = self.rows.one(1.0, whole=True), float(number - 1)
            sent = (self.x[:, users].ravel(), 1.0)
            self.rows.at_most(others, sent, (there, others - count))
            self.rows.at_most(0.0, (there, float(together[number - 1])), (kept, -1.0))
        return kept

    # -- resources ---------------------------------------------------------------------------

    def _resources(self) -> None:
        """Add the rules to the lower bound that each resource has time for its work after the gradient norm.

        A lane (a queue of ops, such as a copy direction) must update a group of subgroups before the forward of the
        layers that need the group's parameters. A shared capacity, such as DRAM bandwidth, must do the work of all
        updates before the forward reaches the last subgroup's layers.
        """
        m, tails = self.model, self.model.pieces.tail_s
        last = len(tails) - 1
        # Updates go on in a pipeline's bubble, the training loop does not.
        self.behind_the_norm(m.forward_s + m.workload.pipeline_idle_s, name="training loop")
        for lane in m.lanes:
            parts = m.on(lane)
            givers = any(p.inside == Inside.GIVERS for p in parts)  # no layer waits for them
            for p in range(last if givers else 0, last + 1):
                asked = [t for q in parts for t in self.asked(q, q.seconds, slice(p + 1))]
                name = f"{NAMES.get(lane, lane.value)} (update)" if p == last else ""
                self.behind_the_norm(tails[p], *asked, name=name)
        inside = [p for p in m.parts if p.inside != Inside.NONE]
        for name in m.work.limits:
            asked = [t for q in inside for t in self.asked(q, q.taken_s[name], slice(None))]
            computes = name == "device" or (name == "cores" and m.machine.device_shares_host_cores)
            behind_s = m.forward_s if computes else tails[last]
            self.behind_the_norm(behind_s, *asked, name=f"{NAMES.get(name, name)} (update)")

    def _iteration(self) -> None:
        """Add the rule that all work of a training iteration fits into the iteration's time.

        State is copied to the GPU for updates only after the last layer's backward of the last micro-batch.
        """
        m, tails = self.model, self.model.pieces.tail_s
        everything = [*m.parts, *m.gradients]
        for lane in dict.fromkeys(p.step.lane for p in everything):
            if lane != Lane.DEVICE_UPDATE:
                asked = [(self.x[:, p.way], p.times * p.seconds) for p in everything if p.step.lane == lane]
                self.within(m.rest_s, *asked, name=NAMES.get(lane, lane.value))
        coming = self._coming()
        takers = [p for p in coming if p.inside == Inside.TAKERS]
        for name in (n for n in m.work.limits if n not in PASSES_USE):
            asked = [(self.x[:, p.way], p.times * p.taken_s[name]) for p in everything]
            self.within(m.rest_s, *asked, *self._fetched(name), name=NAMES.get(name, name))
            others = [(self.x[:, p.way], p.taken_s[name]) for p in coming if p not in takers]
            taken = [(self.x[:, p.way], p.taken_s[name]) for p in takers]
            self.within(m.early_s - tails[-1], *others, *taken)
        for part in takers:
            for p, tail_s in enumerate(tails):
                up_to = slice(p + 1)
                self.within(m.early_s - tail_s, (self.x[up_to, part.way], part.seconds[up_to]))

    def _coming(self) -> list[Part]:
        """Return the steps that, for a staged update, can run only after the last layer's last backward."""
        takers = [p for p in self.model.parts if p.inside == Inside.TAKERS and not p.ahead]
        return [*(p for p in self.model.parts if p.inside == Inside.ALL), *takers]

    def _fetched(self, capacity: str) -> Iterator[Term]:
        """Yield the linear program's terms for the copies of parameters that are kept in host memory.

        Such parameters are copied to the GPU for each forward and backward.

        Args:
            capacity: Shared capacity that the copies use, such as DRAM bandwidth. The terms are in seconds of it.
        """
        m = self.model
        sizes = m.pieces.size * m.workload.wire_bytes
        for way, each_way in enumerate(m.ways):
            if each_way.parameters == "host":
                each = np.array([m.work.fetched(float(n)).taken_s[capacity] for n in sizes])
                yield self.x[:, way], m.pieces.fetches * each
