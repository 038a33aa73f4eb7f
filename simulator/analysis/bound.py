"""The lower bound of a training iteration's time: no plan for the workload can be faster on this machine.

The rules from which the bound follows are in `ebbtide.simulator.analysis.bounds`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from ebbtide.simulator.analysis.bounds.model import Model
from ebbtide.simulator.analysis.bounds.sharing import Sharing
from ebbtide.simulator.analysis.bounds.window import NAMED, Window
from ebbtide.simulator.analysis.many_plans import PlanSweep
from ebbtide.simulator.engines import kernel
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.quantity import Quantity
from ebbtide.simulator.update.footprint import Holding, fetched_elements, moved_out
from ebbtide.simulator.update.recipes import RECIPES, Placement
from ebbtide.simulator.update.tiers import Memory
from ebbtide.simulator.update.way import PLACEMENT_CODES, plain_ways
from ebbtide.simulator.workload import Workload
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Numbers = Mapping[Placement, int]  # of subgroups
SizeRange = tuple[int, int] | None
EACH = 30  # subgroups that are looked at one by one
BLOCKS = 24  # of neighbours, and of each size in them, where there are more
FEWEST_BLOCKS = 6
FEWEST_MANY = 4  # staging slots; fewer are looked at number by number
MOST_STAGED_RANGES = 6  # ranges of sizes
MANY = 128  # subgroups, of more of which no whole numbers are asked for
NODES_OF_FEW, NODES_OF_EACH, NODES_OF_SOME = 3000, 100, 5  # of the search for whole numbers
NODES_OF_PLANNING = 300  # the others of few take ten times as long
NODES_OF_PROOF = 200  # where more is asked for than planning can wait for: seconds
AT_ONCE = 1e18  # parameters/s
ROUNDING, ROUNDING_S = 1e-5, 1e-6  # of the solver's tolerances: relative, and in seconds


@dataclass(frozen=True, slots=True)
class Bound:
    """A lower bound of an iteration's time under any plan, and the placement of parameters that would reach it.

    Attributes:
        iteration_s: Time of one iteration in a steady state that no plan can beat.
        update_s: Time of the updates in that iteration: from the gradient norm to the end of the next forward
            (of its first micro-batch), plus the time that backward waits. Updates that precede the gradient
            norm are not included.
        params: Number of this rank's parameters with each placement, if the bound were reached.
        binding: Names of the resources that limit the bound, such as DRAM bandwidth. ``(update)`` after a name
            means that the resource is fully used from the end of backward to the end of the next forward.
            Otherwise it is fully used in the whole iteration.
        promising: Combinations of numbers of subgroups (by placement) and of staging buffers that come close to
            the bound, the closest first.
    """

    iteration_s: float
    update_s: float
    params: Mapping[Placement, float]
    binding: tuple[str, ...]
    promising: tuple[tuple[Numbers, int], ...] = ()


def bound(
    workload: Workload,
    machine: Machine,
    device_bytes: float | None = None,
    locations: Sequence[Memory] | None = (),
    host_bytes: float | None = None,
    storage_bytes: float | None = None,
    early_updates: bool = False,
    *,
    enough_s: float | None = None,
) -> Bound:
    """Return the lower bound of an iteration's time for all plans that stay within given memory limits.

    Between the gradient norm and the end of the next forward (of its first micro-batch), three things have to
    happen: the subgroups that wait for the norm are updated, the new parameters of all others are copied, and
    that forward is computed. The bound assumes that they overlap, so it also holds for plans without overlap.
    It is a bound of the steady state. A simulation of three iterations can be shorter if the link to the GPU
    falls behind from iteration to iteration.

    Args:
        device_bytes: Limit of GPU memory. None: all memory of the machine's GPU.
        locations: Memory that holds each subgroup's 16-bit parameters. Empty: GPU memory for all. None: plans
            may choose.
        host_bytes, storage_bytes: Limits of host memory and storage. None: unlimited.
        early_updates: True if plans may update subgroups before the gradient norm is known. The bound assumes
            that no such update has to be redone. Plans may accumulate gradients on the GPU in either case.
        enough_s: Iteration time to prove, at most. The returned bound is not higher than this, and the search
            for whole numbers of subgroups runs far longer until it is proven. None: a shorter search.

    Raises:
        ValueError: The workload alone does not fit into GPU memory.
    """
    some = (workload, machine, device_bytes, locations, host_bytes, storage_bytes, early_updates)
    return tightened(fluid_bound(*some), *some, enough_s=enough_s)


def fluid_bound(
    workload: Workload,
    machine: Machine,
    device_bytes: float | None = None,
    locations: Sequence[Memory] | None = (),
    host_bytes: float | None = None,
    storage_bytes: float | None = None,
    early_updates: bool = False,
) -> Bound:
    """Return a fast lower bound of an iteration's time, as if parameters could be split freely over placements.

    It takes milliseconds, and is at most as high as `bound`, which places whole subgroups.

    Raises:
        ValueError: The workload alone does not fit into GPU memory.
    """
    some = (workload, machine, device_bytes, locations, host_bytes, storage_bytes)
    problem = _Problem(*some, early_updates=early_updates, pieces=1)
    window = problem.window(None, fewest=0)
    solved = window.rows.lowest(window.seconds)
    if solved is None:
        raise ValueError(
            "parameters, gradients and activations must fit into GPU memory, but do not fit into "
            f"{device_bytes or machine.device_memory_bytes:.0f} bytes"
        )
    rest_s, x = problem.model.rest_s, solved[1]
    least_s = max(_rounded_down(solved[0]), _passes_s(workload, machine) - rest_s)
    split = problem.by_placement(x[window.x] * problem.model.pieces.size[:, None])
    return Bound(rest_s + least_s, least_s, split, window.rows.full(x))


def _passes_s(workload: Workload, machine: Machine) -> float:
    """Return the seconds of an iteration if updates take no time, or 0 if the workload uses no network.

    The lower bound's linear program knows the GPU's computation, but not the network that it waits for.
    """
    over_network = (n.network_gather_bytes + n.network_reduce_bytes for n in workload.layers)
    if not (workload.network_step_gather_bytes or any(over_network)):
        return 0.0
    at_once = {"device_adam_params_per_s": Quantity.exact(AT_ONCE), "launch_latency_s": 0.0}
    sweep = PlanSweep(workload, machine.model_copy(update=at_once))
    placed = np.full(len(workload.subgroups), PLACEMENT_CODES["resident"], dtype=np.int8)
    row = sweep.evaluate(placed, 0, overlap_forward=workload.zero_stage == 3)
    return _rounded_down(float(row[kernel.ITERATION_S]))


def tightened(
    fluid: Bound,
    workload: Workload,
    machine: Machine,
    device_bytes: float | None = None,
    locations: Sequence[Memory] | None = (),
    host_bytes: float | None = None,
    storage_bytes: float | None = None,
    early_updates: bool = False,
    *,
    most_nodes: int = NODES_OF_FEW,
    enough_s: float | None = None,
) -> Bound:
    """Return the lower bound of an iteration's time as `bound` does, given the result of `fluid_bound`.

    Args:
        most_nodes: Limit of the search for whole numbers of subgroups. With 0 fractions of subgroups are
            allowed, and the result takes a fifth of a second.
    """
    if machine.unified_memory:
        return fluid
    count, sizes = len(workload.subgroups), len(set(workload.subgroups))
    pieces = count if count <= EACH else max(FEWEST_BLOCKS, BLOCKS // sizes)
    room = (device_bytes, locations, host_bytes, storage_bytes)
    problem = _Problem(workload, machine, *room, early_updates=early_updates, pieces=pieces)
    return problem.tightened(fluid, min(_nodes(count), most_nodes), enough_s)


def _rounded_down(seconds: float) -> float:
    return max(0.0, seconds * (1 - ROUNDING) - ROUNDING_S)


def _nodes(count: int) -> int:
    if count <= NAMED:
        return NODES_OF_FEW
    return NODES_OF_EACH if count <= EACH else NODES_OF_SOME if count <= MANY else 0


def _in_whole_numbers(
    window: Window, nodes: int, fractions: tuple[float, Floats], least_s: float
) -> tuple[float, Floats] | None:
    """Solve a lower bound's linear program for whole numbers of subgroups. Return the least seconds and the solution.

    Args:
        nodes: Largest number of nodes of the search.
        fractions: Least seconds and solution if subgroups may be divided.
        least_s: Seconds at which the search stops. If no solution takes less, these seconds are the result.

    Returns:
        None if there is no solution.
    """
    window.rows.upper[window.seconds] = least_s
    solved = window.rows.lowest(window.seconds, nodes)
    if solved is None:
        if math.isinf(least_s):
            return None
        return (least_s + ROUNDING_S) / (1 - ROUNDING), fractions[1]
    return max(fractions[0], solved[0]), solved[1] if solved[1].any() else fractions[1]


class NumberedBounds:
    """Lower bounds of the iteration time for given numbers of subgroups per placement and of staging buffers.

    All 16-bit parameters are in GPU memory.
    """

    def __init__(self, workload: Workload, machine: Machine, device_bytes: float) -> None:
        count = len(workload.subgroups)
        self._problem = _Problem(workload, machine, device_bytes, (), None, None, pieces=count)

    def iteration_s(self, numbers: Numbers, slots: int | None) -> float:
        """Return a lower bound of the iteration time in seconds for given numbers of subgroups per placement.

        The result is infinite if the subgroups do not fit into memory.

        Args:
            slots: Number of staging buffers (GPU memory for one staged subgroup each). None: any number.
        """
        problem = self._problem
        plain = dict.fromkeys(way.plain for way in problem.model.ways)
        exact = [numbers.get(way.placement, 0) for way in plain]
        window = problem.window(slots, fewest=0, numbers=exact)
        solved = window.rows.lowest(window.seconds)
        if solved is None:
            return math.inf
        Sharing(window, max(solved[0], problem.model.forward_s))
        whole = window.rows.lowest(window.seconds, nodes=1) or solved
        return float(problem.model.rest_s + _rounded_down(max(solved[0], whole[0])))


class _Problem:
    def __init__(
        self,
        workload: Workload,
        machine: Machine,
        device_bytes: float | None,
        locations: Sequence[Memory] | None,
        host_bytes: float | None,
        storage_bytes: float | None,
        pieces: int,
        *,
        early_updates: bool = False,
    ) -> None:
        everywhere: tuple[Memory, ...] = ("device",)
        where = () if locations is None else locations or everywhere * len(workload.subgroups)
        some = [way for way in plain_ways() if not where or way.parameters in where]
        held = Holding.of_workload(workload)
        each = max(held.per_param["host"]) + (held.early_bytes if early_updates else 0)
        most = each * workload.params
        if host_bytes is None or most <= host_bytes:
            # There is room: what is stored takes all the time that the host's takes, and more.
            host_bytes, storage_bytes = None, 0
        if storage_bytes == 0:
            some = [way for way in some if way.recipe.state != "storage"]
        self.model = Model(workload, machine, some, pieces, where, early_updates=early_updates, sums=held.sums)
        w = self.model.workload
        gone = moved_out(w, fetched_elements(w, where)) * w.wire_bytes if where else 0
        taken = max(0, w.device_base_bytes - gone) + w.activation_bytes
        there = device_bytes or machine.device_memory_bytes
        self.room: dict[Memory, float] = {"device": there - taken}
        if host_bytes is not None:
            self.room["host"] = host_bytes
        if storage_bytes:
            self.room["storage"] = storage_bytes

    def window(
        self,
        slots: int | None,
        fewest: int,
        numbers: Sequence[float] = (),
        largest_staged: tuple[int, int] | None = None,
    ) -> Window:
        return Window(self.model, self.room, slots, fewest, numbers, largest_staged)

    def by_placement(self, x: Floats) -> dict[Placement, float]:
        sums = zip(self.model.ways, x.sum(axis=0).tolist(), strict=True)
        split: dict[Placement, float] = dict.fromkeys(RECIPES, 0.0)
        for way, each in sums:
            split[way.placement] += each
        return split

    def tightened(self, fluid: Bound, nodes: int, enough_s: float | None = None) -> Bound:
        least_s, near = math.inf, []
        if enough_s is not None:
            least_s, nodes = enough_s - self.model.rest_s, NODES_OF_PROOF
        for low_s, _, slots, largest_staged in sorted(self._fractions(nodes), key=lambda case: case[:2]):
            if low_s >= least_s:
                break
            window = self.window(slots, FEWEST_MANY, largest_staged=largest_staged)
            Sharing(window, max(low_s, self.model.forward_s))
            solved = window.rows.lowest(window.seconds)
            if nodes and solved is not None and solved[0] < least_s:
                if enough_s is not None:
                    window.place_each()
                solved = _in_whole_numbers(window, nodes, solved, least_s)
            if solved is None:
                continue
            seconds = _rounded_down(max(low_s, solved[0]))
            near.append((seconds, window.slots or FEWEST_MANY, solved[1][window.x]))
            least_s = min(least_s, seconds)
        if math.isinf(least_s):  # no whole numbers of subgroups fit
            return fluid
        near.sort(key=lambda case: case[0])
        sizes, update_s = self.model.pieces.size[:, None], max(fluid.update_s, least_s)
        split = self.by_placement(near[0][2] * sizes) if near else fluid.params
        return replace(
            fluid,
            iteration_s=self.model.rest_s + update_s,
            update_s=update_s,
            params=split,
            promising=tuple((self._rounded(x), slots) for _, slots, x in near),
        )

    def _fractions(self, nodes: int) -> Iterator[tuple[float, int, int | None, SizeRange]]:
        cases = product((*range(1, FEWEST_MANY), None), self._staged_ranges() if nodes else (None,))
        for number, (slots, largest_staged) in enumerate([(0, None), *cases]):
            window = self.window(slots, FEWEST_MANY, largest_staged=largest_staged)
            solved = window.rows.lowest(window.seconds)
            if solved is not None:
                yield solved[0], number, slots, largest_staged

    def _staged_ranges(self) -> list[tuple[int, int]]:
        """Return ranges of sizes into which the subgroups of a workload are divided, as (smallest, largest)."""
        sizes = np.unique(self.model.workload.subgroups)
        some = np.array_split(sizes, min(len(sizes), MOST_STAGED_RANGES))
        return [(int(each[0]), int(each[-1])) for each in some]

    def _rounded(self, x: Floats) -> dict[Placement, int]:
        split = self.by_placement(x * self.model.pieces.size[:, None])
        count, total = len(self.model.workload.subgroups), sum(split.values())
        ends = np.round(count * np.cumsum(list(split.values())) / total).astype(int).tolist()
        numbers = np.diff([0, *ends]).tolist()
        return dict(zip(split, numbers, strict=True))
