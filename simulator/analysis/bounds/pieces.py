"""The groups of neighboring subgroups that the lower bound of an iteration's time treats as one unit.

A group is a single subgroup of the optimizer state, or several similar ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np
from ebbtide.simulator.update.footprint import fetches_of_a_step
from ebbtide.simulator.update.tiers import Memory
from ebbtide.simulator.workload import Workload
from numpy.typing import NDArray

Floats = NDArray[np.float64]
LAST = 3
MOST_SIZES = 4  # of neighbours that are one piece for each of their sizes; more are a fluid


@dataclass(frozen=True)
class Pieces:
    """Groups of neighboring, similar subgroups of optimizer state, as the lower bound of an iteration uses them.

    Each attribute has one entry per group, in the order of the model's layers.

    Attributes:
        size: Elements of a subgroup of the group (of its largest one, if they differ).
        count: Number of subgroups in the group. If their sizes differ, all elements divided by ``size``.
        least: Elements of the group's smallest subgroup.
        whole: True if all subgroups of the group have one size. Only whole numbers of them are then placed.
            Otherwise the group's elements are split freely.
        locations: Memory that holds the subgroups' 16-bit parameters. Empty: host or GPU memory.
        tail_s: Seconds of a forward that remain when it reaches the first layer of the group's last subgroup.
        fetches: Number of copies to the GPU of each parameter per step, if the parameters are in host memory.
        sent_s: Seconds of backward that remain when the first part of the last subgroup's gradient is complete.
        left_s: Seconds of backward that remain when the last subgroup's whole gradient is complete.
        completes: Fraction of the last subgroup's gradient that backward computes last, in a single layer.
        part: Elements of the group's largest part of a gradient. A part is what one layer contributes.
        single: True if each gradient of the group comes from a single layer.
        first, last: Numbers of the group's first and last subgroup.
        end_s: Seconds of backward that remain when all gradients of the group are complete.
        block: Number of the block of neighboring subgroups to which the group belongs.
        passes: Number of layers whose backward computes gradients of that block.
    """

    size: NDArray[np.int64]
    least: NDArray[np.int64]
    count: Floats
    whole: NDArray[np.bool_]
    locations: tuple[str, ...]
    tail_s: Floats
    sent_s: Floats
    left_s: Floats
    completes: Floats
    part: NDArray[np.int64]
    single: NDArray[np.bool_]
    fetches: Floats
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    end_s: Floats
    block: NDArray[np.int64]
    passes: NDArray[np.int64]

    @classmethod
    def of(cls, w: Workload, most: int, locations: Sequence[Memory]) -> Self:
        """Return the groups of similar subgroups of a workload, for the lower bound of an iteration's time.

        Args:
            most: Largest number of blocks of neighboring subgroups. Only subgroups of one block form a group.
            locations: Memory that holds each subgroup's parameters. Empty: host or GPU memory.
        """
        forward = np.array([layer.forward_s for layer in w.layers])
        backward = np.array([layer.backward_s for layer in w.layers])
        behind = np.cumsum(forward[::-1])[::-1]
        below = np.concatenate([[0.0], np.cumsum(backward)])
        held = parts_of_subgroups(w)
        first = [some[0][0] for some in held]
        blocks = _blocks(first, most)
        parts = [part for block in blocks for part in _alike(w.subgroups, block, locations, fluid=most == 1)]
        parts.sort(key=lambda part: part[-1])
        block = [next(b for b, some in enumerate(blocks) if part[0] in some) for part in parts]
        passes = [len({layer for s in some for layer, _ in held[s]}) for some in blocks]
        sizes = [[w.subgroups[s] for s in part] for part in parts]
        layer = [first[part[-1]] for part in parts]
        highest = [held[part[-1]][-1][0] for part in parts]
        often = _fetches(w)
        return cls(
            np.array([max(some) for some in sizes]),
            np.array([min(some) for some in sizes]),
            np.array([sum(some) / max(some) for some in sizes]),
            np.array([len(set(some)) == 1 for some in sizes]),
            tuple(locations[part[-1]] if locations else "" for part in parts),
            behind[layer],
            below[highest],
            below[layer],
            np.array([held[part[-1]][0][1] / w.subgroups[part[-1]] for part in parts]),
            np.array([max(n for s in part for _, n in held[s]) for part in parts]),
            np.array([all(len(held[s]) == 1 for s in part) for part in parts]),
            np.array([min(often[s] for s in part) for part in parts]),
            np.array([part[0] for part in parts]),
            np.array([part[-1] for part in parts]),
            below[[first[part[0]] for part in parts]],
            np.array(block),
            np.array([passes[b] for b in block]),
        )

    def __len__(self) -> int:
        return len(self.size)

    def ahead(self, p: int) -> NDArray[np.bool_]:
        """Return which groups of subgroups have all their gradients when backward reaches the group ``p``.

        These are the groups of later layers. The group ``p`` itself is included if it is a single subgroup.

        Returns:
            An array with True or False for each group.
        """
        ahead: NDArray[np.bool_] = self.first > self.last[p]
        ahead[p] = self.count[p] == 1
        return ahead


def parts_of_subgroups(w: Workload) -> list[list[tuple[int, int]]]:
    """Return, for each subgroup, its layers and the number of the subgroup's elements in each: (layer, elements).

    The pairs have the order of the layers.
    """
    held: list[list[tuple[int, int]]] = [[] for _ in w.subgroups]
    for layer, shares in enumerate(w.shares()):
        for subgroup, elements in shares:
            held[subgroup].append((layer, elements))
    return held


def _fetches(w: Workload) -> list[float]:
    elements = [0.0] * len(w.subgroups)
    for held, often in zip(w.shares(), fetches_of_a_step(w), strict=True):
        for subgroup, share in held:
            elements[subgroup] += share * often
    return [n / size for n, size in zip(elements, w.subgroups, strict=True)]


def _blocks(layers: Sequence[int], most: int) -> list[range]:
    """Divide the subgroups into blocks of neighbors, for the lower bound. Return the blocks.

    Each of the last few subgroups is a block of its own. These subgroups decide the lower bound most, because
    little of the forward remains when it reaches their parameters. Each other block begins where a layer begins,
    so that the backward of one layer completes the block's gradients.

    Args:
        layers: First layer of each subgroup.
        most: Largest number of blocks, apart from those of the last few subgroups.
    """
    count = len(layers)
    alone = min(LAST, count - 1) if most > 1 else 0
    blocks = min(most, count - alone)
    borders = np.linspace(0, count - alone, blocks + 1).round().astype(int).tolist()
    if 1 < blocks < count - alone:
        begins = np.flatnonzero(np.diff(layers, prepend=-1))
        inner = {int(begins[np.abs(begins - b).argmin()]) for b in borders[1:-1]}
        borders = sorted({0, *inner, count - alone})
        borders = [b for b in borders if b <= count - alone]
    borders += range(count - alone + 1, count + 1)
    return [range(first, end) for first, end in pairwise(borders)]


def _alike(sizes: Sequence[int], block: range, locations: Sequence[Memory], *, fluid: bool) -> list[list[int]]:
    """Divide a block of neighboring subgroups into groups with equal parameter location. Return the groups.

    The subgroups of a group also have the same size, unless the block has many different sizes.

    Args:
        sizes: Elements of each subgroup of the model.
        fluid: If True, sizes are ignored.
    """
    many = fluid or len({sizes[s] for s in block}) > MOST_SIZES
    parts: dict[tuple[int, str], list[int]] = {}
    for s in block:
        parts.setdefault((0 if many else sizes[s], locations[s] if locations else ""), []).append(s)
    return list(parts.values())
