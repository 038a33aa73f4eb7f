"""The order of updating subgroups of optimizer state, separately for the CPU's updates and the GPU's.

Backward completes the last layers' gradients first, but the next forward needs the first layers' parameters
first. The machine determines which order is better, so the order is part of the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from ebbtide.simulator.rules import RuleError
from ebbtide.simulator.update.recipes import RECIPES
from ebbtide.simulator.update.steps import Placement, Queue
from pydantic import BaseModel, ConfigDict

Spans = tuple[tuple[int, int], ...]
Direction = Literal["forward", "arrival"]


class UpdateOrder(BaseModel):
    """The order of updates in a plan: ``host`` for subgroups that the CPU updates, ``device`` for all others.

    The update order ``forward`` is the order of the layers. The update order ``arrival`` is the reverse order of the
    layers, in which backward completes gradients. An update order may also be a list of ranges of subgroups, each
    range with its first and its last subgroup. For example, the ranges ``((40, 20), (41, 63), (19, 0))`` update
    subgroups 40 down to 20, then 41 up to 63, then 19 down to 0. The order ``host`` skips
    subgroups that the CPU does not update, so its ranges may include such subgroups. The order ``device`` skips
    subgroups that the CPU updates, so its ranges may include these.

    Attributes:
        host: Order of the subgroups that the CPU updates.
        device: Order of all other subgroups.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: Direction | Spans = "forward"
    device: Direction | Spans = "forward"

    def of(self, queue: Queue, members: Sequence[int]) -> list[int]:
        """Return subgroups in the order in which the plan updates them.

        Args:
            members: Subgroups of the queue, in ascending order.

        Raises:
            ValueError: The order does not contain a subgroup, or contains it twice.
        """
        order = self.host if queue == Queue.HOST else self.device
        if order == "forward":
            return list(members)
        if order == "arrival":
            return list(reversed(members))
        wanted = set(members)
        named = [i for first, last in order for i in _walk(first, last) if i in wanted]
        if len(named) != len(wanted) or set(named) != wanted:
            twice = sorted({i for i in named if named.count(i) > 1})
            missing = sorted(wanted - set(named))
            wrong = [f"leave out the subgroups {missing}"] if missing else []
            wrong += [f"name the subgroups {twice} more than once"] if twice else []
            raise RuleError(
                f"plan.order.{queue.value} must name exactly once each subgroup that the "
                f"{'CPU' if queue == Queue.HOST else 'GPU'} updates, but the ranges {order} {' and '.join(wrong)}",
                key=f"order.{queue.value}",
            )
        return named

    @classmethod
    def from_sequences(cls, host: Sequence[int], device: Sequence[int]) -> UpdateOrder:
        """Build a plan's order of updates from two lists of subgroups. The order is stored in its shortest form."""
        return cls(host=compact(host), device=compact(device))


def _walk(first: int, last: int) -> range:
    return range(first, last + 1) if first <= last else range(first, last - 1, -1)


def compact(sequence: Sequence[int]) -> Direction | Spans:
    """Return an order of updating subgroups in its shortest form, as a plan file stores it.

    ``forward`` is the order of the layers, ``arrival`` is the reverse. Any other order is returned as spans:
    pairs of the first and the last of consecutive subgroups.
    """
    rank = {subgroup: i for i, subgroup in enumerate(sorted(sequence))}
    ranks = [rank[subgroup] for subgroup in sequence]
    if ranks == list(range(len(ranks))):
        return "forward"
    if ranks == list(range(len(ranks)))[::-1]:
        return "arrival"
    spans: list[tuple[int, int]] = []
    begin = 0
    for end in range(1, len(ranks) + 1):
        step = ranks[begin + 1] - ranks[begin] if end - begin > 1 else 0
        goes_on = end < len(ranks) and abs(ranks[end] - ranks[end - 1]) == 1
        if goes_on and step in (0, ranks[end] - ranks[end - 1]):
            continue
        spans.append((sequence[begin], sequence[end - 1]))
        begin = end
    return tuple(spans)


def arrival_order(layers_of_subgroups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return all subgroups, sorted by the time at which backward completes their gradients."""
    first = [layers[0] if layers else -1 for layers in layers_of_subgroups]
    return tuple(sorted(range(len(first)), key=lambda s: (first[s], s), reverse=True))


def issue_order(placements: Sequence[Placement], order: UpdateOrder) -> tuple[int, ...]:
    """Merge the order of the CPU's updates and the order of the GPU's updates into one sequence of all subgroups.

    Training itself does not depend on this sequence, because CPU and GPU do not wait for each other. Other code needs
    the sequence, such as the code that writes checkpoints.

    The sequence keeps both orders. Place n of the sequence belongs to the CPU if the CPU updates subgroup n, and
    otherwise to the GPU. The places of the CPU are filled in the CPU's order, and those of the GPU in the GPU's order.

    Raises:
        ValueError: ``order`` does not name each subgroup that the CPU updates, or that the GPU updates, exactly once.
    """
    if order == FORWARD:
        return tuple(range(len(placements)))
    queues = [RECIPES[placement].queue for placement in placements]
    heads = {queue: iter(order.of(queue, [i for i, q in enumerate(queues) if q == queue])) for queue in Queue}
    return tuple(next(heads[queue]) for queue in queues)


def order_of(issue: Iterable[int], placements: Sequence[Placement]) -> UpdateOrder:
    """Return the order of the CPU's updates and the order of the GPU's updates, given one sequence of all subgroups."""
    lanes: dict[Queue, list[int]] = {queue: [] for queue in Queue}
    for subgroup in issue:
        lanes[RECIPES[placements[subgroup]].queue].append(subgroup)
    return UpdateOrder.from_sequences(lanes[Queue.HOST], lanes[Queue.DEVICE])


FORWARD = UpdateOrder()
