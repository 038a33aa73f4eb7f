"""The possible speeds of lanes that run at the same time, as columns of a linear program for the lower bound.

A lane is a queue of ops that run one after the other, such as a copy direction. At any moment each lane is
idle or runs one op, and the simulator shares the node's bandwidth among the running ops. So any period is a
mix of a few *modes*. A mode is a combination of running ops, with the speed of each. The mix of modes must
complete the work of each lane. Max-min sharing is fair, but not optimal: it slows the critical lane as much
as the others. A bound from the total use of each resource alone would miss that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from ebbtide.simulator.engines.reference import alone_s, demands
from ebbtide.simulator.engines.sharing import max_min_speeds
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.schedule import Lane, Op
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Lanes = Mapping[Lane, Sequence["Running"]]


@dataclass(frozen=True)
class Running:
    """A state of a lane (a queue of ops, such as a copy direction): the op that it runs, and that op's speed.

    The state holds the op's use of each shared capacity, and the speed relative to the lane's fastest state.
    """

    taken: Mapping[str, float]
    pace: float = 1.0


@dataclass(frozen=True)
class Modes:
    """The modes of a group of lanes that can slow each other, or of a single lane that no other lane slows.

    A lane is a queue of ops, such as a copy direction. A mode is a combination of ops that run together.

    Attributes:
        speeds: Progress of each lane in each mode, relative to an op that runs alone: shape (modes, lanes).
    """

    lanes: tuple[Lane, ...]
    speeds: Floats


def modes(ops: Mapping[Lane, Sequence[Op]], machine: Machine, limits: Mapping[str, float]) -> list[Modes]:
    """Return the possible speeds of lanes that run at the same time, for each group of lanes that slow each other.

    A lane is a queue of ops that run one after the other, such as a copy direction.

    Args:
        ops: Smallest and largest op of each lane. For updates on the CPU, one op for each number of threads.
    """
    lanes: dict[Lane, list[Running]] = {}
    for lane, some in ops.items():
        seconds = [alone_s(op, machine) for op in some]
        lanes[lane] = [
            Running(demands(op, machine, s), min(seconds) / s if op.cores else 1.0)
            for op, s in zip(some, seconds, strict=True)
        ]
    # Where rates by threads are known, an update may take just what others leave of DRAM.
    scaling = [lane for lane, some in ops.items() if some[0].cores and machine.host_adam_by_threads]
    return [
        Modes(
            tuple(group),
            _undominated(
                _speeds(
                    {lane: lanes[lane] for lane in group},
                    [lane for lane in group if lane in scaling],
                    limits,
                    machine.dram_bytes_per_s.median,
                )
            ),
        )
        for group in _groups(lanes, limits)
    ]


def _groups(lanes: Lanes, limits: Mapping[str, float]) -> list[list[Lane]]:
    """Return groups of lanes that together can exceed a shared capacity, such as DRAM bandwidth.

    A lane is a queue of ops, such as a copy direction. A lane that no other lane can slow is a group by itself.
    """
    groups: list[list[Lane]] = [[lane] for lane in lanes]
    for name, limit in limits.items():
        asked = {lane: max(r.taken.get(name, 0.0) for r in some) for lane, some in lanes.items()}
        if sum(asked.values()) > limit * (1 + 1e-9):
            together = [g for g in groups if any(asked[lane] > 0 for lane in g)]
            apart = [g for g in groups if g not in together]
            groups = [*apart, [lane for g in together for lane in g]]
    return groups


def _speeds(lanes: Lanes, scaling: Sequence[Lane], limits: Mapping[str, float], triad: float) -> Floats:
    rows = set()
    fixed = [lane for lane in lanes if lane not in scaling]
    for chosen in product(*([None, *lanes[lane]] for lane in fixed)):
        left = limits["dram"] - sum(r.taken["dram"] for r in chosen if r is not None)
        kinds = [[None, *_paced(lanes[lane], left, triad)] for lane in scaling]
        for rest in product(*kinds):
            both = zip([*fixed, *scaling], [*chosen, *rest], strict=True)
            on = {lane: r for lane, r in both if r is not None}
            speeds = max_min_speeds([r.taken for r in on.values()], limits)
            paces = (r.pace * speed for r, speed in zip(on.values(), speeds, strict=True))
            by_lane = dict(zip(on, paces, strict=True))
            rows.add(tuple(by_lane.get(lane, 0.0) for lane in lanes))
    return np.array(sorted(rows))


def _paced(choices: Sequence[Running], dram_left: float, triad: float) -> list[Running]:
    dram = max(r.taken["dram"] / r.pace for r in choices)
    cores = min(r.taken["cores"] / r.pace for r in choices)
    paces = [bytes_per_s / dram for bytes_per_s in (dram_left, triad)]
    most = max(r.pace for r in choices)
    between = [Running({"dram": p * dram, "cores": p * cores}, p) for p in paces if 0 < p < most]
    return [*choices, *between]


def _undominated(rows: Floats) -> Floats:
    better: NDArray[np.bool_] = np.all(rows[None, :, :] >= rows[:, None, :], axis=2)
    np.fill_diagonal(better, val=False)
    kept: Floats = rows[~better.any(axis=1)]
    return kept
