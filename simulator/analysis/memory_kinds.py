"""The memory in use at the peak of a simulated iteration, divided by kind: parameters, state, gradients and others."""

from collections.abc import Callable

import numpy as np
from ebbtide.simulator.engines import kernel
from ebbtide.simulator.engines.compiled import SimResult
from ebbtide.simulator.engines.kernel import Floats
from ebbtide.simulator.schedule import KINDS, Held, Kind, OpKind, freed_of, taken_for
from ebbtide.simulator.update.holding import ByKind
from ebbtide.simulator.update.tiers import TIERS


def peaks_by_kind(held: Held, ops: Floats, simulated: SimResult) -> ByKind:
    """Return what a simulated schedule holds in each memory when the bytes in use there are at their peak.

    Args:
        held: Bytes that the schedule holds throughout an iteration, by memory and kind (`Schedule.held`).
        ops: Array with one row for each op of the schedule, as in `CompiledSchedule`.
        simulated: Result of the simulation, with the start and end of each op.

    Returns:
        By memory ("device", "host" ...), a dict from the kind of contents (parameters, state ...) to bytes.
        Kinds without bytes are left out.
    """
    peaks: ByKind = {m: {k: held.get(m, {}).get(k, 0) for k in KINDS} for m in TIERS}
    columns = {"device": (kernel.DEVICE_ALLOC, kernel.DEVICE_FREE), "host": (kernel.HOST_ALLOC, kernel.HOST_FREE)}
    for memory, (alloc, free) in columns.items():
        for kind, size in zip(KINDS, _at_peak(ops, simulated, alloc, free), strict=True):
            peaks[memory][kind] += size
    return {m: {kind: n for kind, n in kinds.items() if n} for m, kinds in peaks.items()}


def _at_peak(ops: Floats, simulated: SimResult, alloc: int, free: int) -> list[int]:
    starts, ends = (np.flatnonzero(ops[:, column]) for column in (alloc, free))
    lasts = simulated.end_s[ends] > simulated.start_s[ends]
    order = np.lexsort(
        (
            np.concatenate([2 * starts + 1, np.where(lasts, -1, 2 * ends + 2)]),
            np.concatenate([simulated.start_s[starts], simulated.end_s[ends]]),
        )
    )
    sizes = np.concatenate([ops[starts, alloc], -ops[ends, free]])[order]
    kinds = np.concatenate([_kinds(ops[starts], taken_for), _kinds(ops[ends], freed_of)])[order]
    total = np.cumsum(sizes)
    if not total.size or total.max() <= 0:
        return [0] * len(KINDS)
    until = int(total.argmax()) + 1
    return [int(sizes[:until][kinds[:until] == number].sum()) for number in range(len(KINDS))]


def _kinds(ops: Floats, kind_of: Callable[[OpKind], Kind]) -> kernel.Ints:
    table = [KINDS.index(kind_of(kind)) for kind in kernel.KINDS]
    return np.array([table[number] for number in ops[:, kernel.KIND].astype(int)], dtype=np.int64)
