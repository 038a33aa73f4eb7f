"""The summary of a simulated schedule: iteration time, phases and memory peaks, as one row of numbers.

The values are those of `ebbtide.simulator.timeline.Timeline`, computed by loops over arrays that numba compiles.
"""

from __future__ import annotations

import numpy as np
from ebbtide.simulator.engines.jit import compiled
from ebbtide.simulator.engines.kernel import ITERATION, KIND, KINDS, LANE, LANES, Floats
from ebbtide.simulator.schedule import Lane, OpKind
from ebbtide.simulator.timeline import PHASE, UPDATES

# Columns of a row of the summary, in the order of the fields of `SimResult`.
(ITERATION_S, FORWARD_S, BACKWARD_S, STEP_S, UPDATE_S, LOOP_S, MAKESPAN_S, DEVICE_PEAK, HOST_PEAK, STORED) = range(10)
SUMMARY_COLUMNS = 10
WARM_UP = 1  # iterations that are not measured
_BACKWARD, _STEP_END = KINDS.index(OpKind.BACKWARD), KINDS.index(OpKind.STEP_END)
_COMPUTE = LANES.index(Lane.COMPUTE)
_UPDATES = tuple(KINDS.index(kind) for kind in UPDATES)
_COLUMNS = {"loop": LOOP_S, "forward": FORWARD_S, "backward": BACKWARD_S, "step": STEP_S}
_PHASE = tuple(
    _COLUMNS[PHASE[kind]] if kind in PHASE else -1 for kind in KINDS
)  # for each kind of op, the column of its phase, or -1


@compiled
def _period_s(ops: Floats, end_s: Floats, iterations: int, warm_up: int) -> float:
    ends = np.full(iterations, -1.0)
    for i in range(ops.shape[0]):
        if ops[i, KIND] == _BACKWARD:
            number = int(ops[i, ITERATION])
            ends[number] = max(ends[number], end_s[i])
    count = 0
    for number in range(iterations):
        if ends[number] >= 0:
            ends[count] = ends[number]
            count += 1
    if count < 2:
        return -1.0
    base = warm_up if count > warm_up + 1 else 0
    return float((ends[count - 1] - ends[base]) / (count - 1 - base))


@compiled
def _add_phases(ops: Floats, start_s: Floats, end_s: Floats, iteration: int, summary: Floats) -> None:
    previous = np.inf
    for i in range(ops.shape[0]):
        if ops[i, KIND] == _STEP_END and ops[i, ITERATION] == iteration - 1:
            previous = end_s[i]
    if previous == np.inf:
        for i in range(ops.shape[0]):
            if ops[i, ITERATION] == iteration:
                previous = min(previous, start_s[i])
    backward_end = previous
    update_end = -np.inf
    for i in range(ops.shape[0]):
        if ops[i, ITERATION] != iteration:
            continue
        kind = int(ops[i, KIND])
        phase = _PHASE[kind]
        if ops[i, LANE] == _COMPUTE and phase >= 0:
            summary[phase] += max(0.0, end_s[i] - previous)
            previous = max(previous, end_s[i])
            if phase == BACKWARD_S:
                backward_end = previous
        if kind in _UPDATES:
            update_end = max(update_end, end_s[i])
    summary[UPDATE_S] = max(0.0, update_end - backward_end)


@compiled
def summarise(
    ops: Floats, start_s: Floats, end_s: Floats, iterations: int, summary: Floats, warm_up: int = WARM_UP
) -> None:
    """Write the iteration time, the phases and the total time of a simulated schedule into the array ``summary``.

    The iteration time is the mean over all iterations but the first ``warm_up``.
    """
    summary[:] = 0.0
    if ops.shape[0] == 0:
        return
    first_s, last_s, last = np.inf, -np.inf, int(np.int64(0))
    for i in range(ops.shape[0]):
        first_s, last_s = min(first_s, start_s[i]), max(last_s, end_s[i])
        if ops[i, KIND] == _STEP_END:
            last = max(last, int(ops[i, ITERATION]))
    summary[MAKESPAN_S] = last_s - first_s
    period = _period_s(ops, end_s, iterations, warm_up)
    summary[ITERATION_S] = period if period >= 0 else summary[MAKESPAN_S]
    _add_phases(ops, start_s, end_s, last, summary)
