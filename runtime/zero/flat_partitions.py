"""DeepSpeed's flat buffers of optimizer state, divided into subgroups that are smaller than DeepSpeed's own."""

from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

import torch
from ebbtide.runtime.devices.base import Device
from ebbtide.runtime.execution.session import Session
from ebbtide.runtime.execution.subgroup_state import Buffers, SubgroupState
from ebbtide.runtime.zero.windows import ZeroSlice
from ebbtide.simulator.workload import cut_flat, exchanged_pieces, pieces_of

MOST_GATHERED = 1 << 25  # elements that an all-gather brings, which takes as much memory once more
Cut = tuple[int, int, int]  # (parameter group, offset in its partition, number of elements)


def cuts(partitions: list[int], subgroup_size: int) -> list[Cut]:
    """Divide each parameter group's ZeRO partition into subgroups of about ``subgroup_size`` elements."""
    return _in_a_row(cut_flat([elements], subgroup_size) for elements in partitions)


def _in_a_row(groups: Iterable[list[int]]) -> list[Cut]:
    return [
        (group, offset, elements)
        for group, sizes in enumerate(groups)
        for offset, elements in zip(accumulate(sizes, initial=0), sizes, strict=False)
    ]


def cuts_at_parameters(groups: Iterable[Iterable[int]], subgroup_size: int) -> list[Cut]:
    """Divide each group of parameters into subgroups of at least ``subgroup_size`` elements."""
    return _in_a_row(pieces_of(parameters, subgroup_size) for parameters in groups)


def cuts_of(optimizer: Any, subgroup_size: int) -> list[Cut]:
    """Return how the flat partitions of a DeepSpeed ZeRO optimizer are divided into subgroups.

    The result is a list of (index of the flat partition, offset in it, number of elements), with one entry per
    subgroup. Under ZeRO-3, the flat partitions are DeepSpeed's own subgroups. They are divided further if
    ``subgroup_size`` is less than DeepSpeed's ``sub_group_size``.
    """
    numels = getattr(optimizer, "fp16_partitioned_groups_flat_numel", None)
    if numels is None:
        masters = getattr(optimizer, "single_partition_of_fp32_groups", [])
        return cuts([p.numel() for p in masters], subgroup_size)
    if subgroup_size >= optimizer.sub_group_size:
        return [(group, 0, int(n)) for group, n in enumerate(numels)]
    places, key = optimizer.grad_position, optimizer.get_param_id
    sizes = [[places[key(p)][2] for p in group] for group in optimizer.fp16_groups]
    return cuts_at_parameters(sizes, subgroup_size)


def subgroups_of(optimizer: Any, subgroup_size: int) -> tuple[int, ...]:
    """Return the number of elements of each subgroup of a DeepSpeed ZeRO optimizer, as a plan lists them."""
    return tuple(n for _, _, n in cuts_of(optimizer, subgroup_size))


State = tuple[torch.Tensor, ...]  # master and moments


class FlatState:
    """DeepSpeed's flat buffers with the masters and moments, in host memory from which the GPU can copy at full speed.

    DeepSpeed's checkpoints and other code read these buffers, so they exist under every plan. Under some plans,
    training keeps a subgroup's state in other tensors. The subgroup's slices of the flat buffers may then be out of
    date. Only the training thread uses this object.

    Attributes:
        cuts: By subgroup: (index of the flat master tensor, offset in this tensor, number of elements).
        shadows: By subgroup: slices of the flat buffers, if training keeps the subgroup's state in other tensors.
        published: True if the slices in ``shadows`` are up to date.
    """

    def __init__(self, optimizer: Any, masters: list[torch.nn.Parameter], pieces: list[Cut], device: Device) -> None:
        self.cuts = pieces
        self.shadows: dict[int, State] = {}
        self.published = True
        self._optimizer = optimizer
        self._flats = [_adopted(optimizer, master, device) for master in masters]

    def state(self, subgroup: int) -> State:
        """Return the parts of DeepSpeed's flat buffers that hold a subgroup's master parameters and moments."""
        group, offset, elements = self.cuts[subgroup]
        return tuple(flat.narrow(0, offset, elements) for flat in self._flats[group])

    def moments(self, group: int) -> dict[str, torch.Tensor]:
        """Return a parameter group's moments in DeepSpeed's flat buffers, by DeepSpeed's names of the moments."""
        return dict(zip(self._optimizer._rule.moments, self._flats[group][1:], strict=True))

    def adopt(self, state: SubgroupState) -> None:
        """Record whether a subgroup's optimizer state is now in DeepSpeed's flat buffers or in other tensors."""
        flat = self.state(state.index)
        if state.p.data_ptr() == flat[0].data_ptr():
            self.shadows.pop(state.index, None)
        else:
            self.shadows[state.index] = flat
            self.published = False

    def publish(self, session: Session) -> None:
        """Copy optimizer state from the plan's tensors to DeepSpeed's flat buffers, for code that reads these buffers,
        such as DeepSpeed's checkpoints.

        An early update leaves a subgroup's new state in a spare buffer. This state is copied too. Training then uses
        the flat buffers for this subgroup until its next early update.
        """
        session.executor.wait_all()
        if self.published:
            return
        for state in session.executor.bring_back():
            self.adopt(state)
        for subgroup, shadow in self.shadows.items():
            if session.executor.bodies.gate is not None:
                session.executor.bodies.gate.before_update(subgroup)  # a checkpoint may be reading the flat buffer
            _copy(shadow, session.executor.states[subgroup].state)
        self.published = True

    def take_back(self, session: Session) -> None:
        """Make the plan use the optimizer state that a checkpoint load has written to DeepSpeed's flat buffers."""
        self._copy_back(session)
        session.executor.state_loaded()

    def _copy_back(self, session: Session) -> None:
        for subgroup, shadow in self.shadows.items():
            _copy(session.executor.states[subgroup].state, shadow)

    def before_update(self, session: Session) -> None:
        """Copy optimizer state that other code may have changed in DeepSpeed's flat buffers back to the plan's tensors.

        Call this method before a step's updates. Nothing is copied unless `publish` has copied the plan's
        tensors to the flat buffers since the last step.
        """
        if self.published and self.shadows:
            self._copy_back(session)
            early = session.executor.early_updates.wires  # their state is in DeepSpeed's buffers
            session.executor.state_written(s.index for s in session.executor.states if s.index not in early)
        self.published = not self.shadows

    def let_go(self, session: Session) -> None:
        """Copy all optimizer state to DeepSpeed's flat buffers and release GPU memory, when the plan's execution ends.

        DeepSpeed's objects may still be used afterwards.
        """
        for subgroup, shadow in self.shadows.items():
            state = session.states[subgroup]
            if not self.published:
                _copy(shadow, state.state)
            state.state = shadow
        self.published = True


class FlatPartitions(FlatState):
    """The flat partitions of ZeRO-1 and 2, divided into subgroups without regard to parameter boundaries.

    Attributes:
        slices: By parameter id: slices of the parameter, one for each subgroup that holds a part of it, in order.
            Together they are the range that DeepSpeed's `grad_position` gives for the parameter on this rank.
        exchanges: The pieces of the parameters that the ranks exchange after their updates: index of the partition,
            first element, number of elements, and the subgroups that hold a part of it.
    """

    def __init__(self, optimizer: Any, masters: list[torch.nn.Parameter], plan_size: int, device: Device) -> None:
        pieces = cuts([p.numel() for p in masters], plan_size)
        self.slices = _slices(optimizer, pieces)
        self.exchanges = list(_exchanges(optimizer, pieces))
        self._device = device
        _give_back(optimizer, masters)
        super().__init__(optimizer, masters, pieces, device)
        self.find_parameters()

    def find_parameters(self) -> None:
        """Store references to DeepSpeed's buffers with this rank's 16-bit partition of each parameter group.

        Call this method again whenever DeepSpeed has replaced these buffers.
        """
        groups = self._optimizer.real_dp_process_group
        ranks = [torch.distributed.get_rank(group=group) for group in groups]
        partitions = self._optimizer.parallel_partitioned_bit16_groups
        self._wires = [p[rank].data for p, rank in zip(partitions, ranks, strict=True)]

    def buffers(self, subgroup: int, gradient: torch.Tensor | None) -> Buffers:
        """Return the tensors of a subgroup under ZeRO-1 or 2: optimizer state, gradient and parameters.

        If ``gradient`` is None, a gradient tensor of zeros is allocated in host memory.
        """
        group, offset, elements = self.cuts[subgroup]
        if gradient is None:
            dtype = _gradient_dtype(self._optimizer, group)
            gradient = self._device.host_empty(elements, dtype).zero_()
        wire = self._wires[group].narrow(0, offset, elements)
        return Buffers(self.state(subgroup), gradient, wire)


class HostSums(UserDict[int, torch.Tensor | None]):
    """A replacement of DeepSpeed's ``accumulated_grads_in_cpu``, a dict from parameter id to the sum of micro-batches'
    gradients.

    A sum that DeepSpeed computes is an entry of the dict. For a sum that ebbtide computes, the entry is only a
    placeholder (None), and code that reads the entry gets a copy of ebbtide's sum.
    """

    def __init__(self, known: Mapping[int, torch.Tensor | None], read: Callable[[int], torch.Tensor]) -> None:
        super().__init__(known)
        self._read = read

    def __getitem__(self, key: int) -> torch.Tensor:
        known = super().__getitem__(key)
        return self._read(key) if known is None else known


def _copy(to: State, source: State) -> None:
    for tensor, other in zip(to, source, strict=True):
        tensor.copy_(other)


def _adopted(optimizer: Any, master: torch.nn.Parameter, device: Device) -> State:
    master.data = device.host_adopt(master.data)
    state = optimizer.optimizer.state[master]
    if not optimizer._rule.own_step:
        state.setdefault("step", 0)
    for key in optimizer._rule.unused:
        state.setdefault(key, torch.zeros_like(master.data))
    for key in optimizer._rule.moments:
        if key in state:
            state[key] = device.host_adopt(state[key])
        else:  # before the first step, there are no moments yet
            state[key] = device.host_empty(master.numel(), master.dtype).zero_()
    return (master.data, *(state[key] for key in optimizer._rule.moments))


def _give_back(optimizer: Any, masters: list[torch.nn.Parameter]) -> None:
    copies = optimizer.param_buffer_of_bit16_for_cpu_offload_groups
    copies[:] = [copy.new_empty(0) for copy in copies]
    optimizer.offload_gradient_dict.clear()
    for group in optimizer.bit16_groups:
        for param in group:
            param._hp_mapping = None
    for master in masters:
        master.grad = None


def hand_back(optimizer: Any, masters: list[torch.nn.Parameter]) -> None:
    """Restore the buffers of a DeepSpeed optimizer if a plan could not be attached, so that it trains without one."""
    for master in masters:
        master.grad = torch.zeros_like(master.data)
        state = optimizer.optimizer.state[master]
        for key in optimizer._rule.moments if state else ():
            state.setdefault(key, torch.zeros_like(master.data))
    copies = optimizer.param_buffer_of_bit16_for_cpu_offload_groups
    copies[:] = [torch.empty_like(m.data, dtype=optimizer.dtype) for m in masters]
    optimizer._link_all_hp_params()
    optimizer._hp_optimizer_states_linked = False


def _gradient_dtype(optimizer: Any, group: int) -> torch.dtype:
    compact = optimizer._use_compact_grad_partition_buffer(group)
    asked: torch.dtype = optimizer.gradient_accumulation_dtype
    return asked if compact or optimizer.use_grad_accum_attribute else optimizer.dtype


def _exchanges(optimizer: Any, pieces: list[Cut]) -> Iterator[tuple[int, int, int, list[int]]]:
    first = 0
    for number, process_group in enumerate(optimizer.real_dp_process_group):
        sizes = [elements for group, _, elements in pieces if group == number]
        ranks = torch.distributed.get_world_size(group=process_group)
        if ranks > 1:
            for begin, elements, subgroups in exchanged_pieces(sizes, MOST_GATHERED // ranks):
                yield number, begin, elements, [first + subgroup for subgroup in subgroups]
        first += len(sizes)


def _slices(optimizer: Any, pieces: list[Cut]) -> dict[int, list[ZeroSlice]]:
    first: dict[int, int] = {}
    for subgroup, (group, _, _) in enumerate(pieces):
        first.setdefault(group, subgroup)
    size = max((elements for _, _, elements in pieces), default=1)
    slices: dict[int, list[ZeroSlice]] = {}
    for key, (group, _, begin, elements) in optimizer.grad_position.items():
        slices[key] = []
        subgroup = first[group] + begin // size
        position = begin
        while position < begin + elements:
            _, offset, length = pieces[subgroup]
            end = min(begin + elements, offset + length)
            slices[key].append(ZeroSlice(subgroup, position - offset, end - position, real=True, summed=False))
            position, subgroup = end, subgroup + 1
    return slices
