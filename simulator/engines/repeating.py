"""The repetition of one micro-batch in the arrays of a simulated schedule.

Micro-batches in the middle of a step have the same ops. So a few micro-batches are made from
Python objects, and the arrays of one of them are repeated.
"""

from typing import NamedTuple

import numpy as np
from ebbtide.simulator.engines.kernel import Ints


class Repeated(NamedTuple):
    """The arrays of a schedule with a repeated micro-batch.

    Attributes:
        after_first, after: Op i waits for the ops after[after_first[i]:after_first[i + 1]].
    """

    of: Ints
    after_first: Ints
    after: Ints


def repeat(after_first: Ints, after: Ints, first: int, last: int, times: int) -> Repeated:
    """Repeat the ops of one micro-batch, so that the micro-batch is in the schedule ``times`` times.

    Args:
        after_first, after: Op i waits for the ops after[after_first[i]:after_first[i + 1]].
        first, last: The ops of the micro-batch are those from number ``first`` to before number ``last``. They
            may wait for each other, for the micro-batch before, and for what all repetitions share. The micro-batch
            before must have as many of them, in the same order.
    """
    counts, size = np.diff(after_first), last - first
    begin, end = after_first[first], after_first[last]
    # Ops from `first` on get their numbers in the last repetition, or after it.
    moved = after + (times - 1) * size * (after >= first)
    inside = after[begin:end]
    near = (inside >= first - size) & (inside < last)  # ops of the same micro-batch, or of the one before
    turns = [np.where(near, inside + turn * size, moved[begin:end]) for turn in range(times)]
    of = np.concatenate([np.arange(first), np.tile(np.arange(first, last), times), np.arange(last, counts.size)])
    return Repeated(
        of,
        np.cumsum(np.concatenate([[0], counts[of]])).astype(np.int64),
        np.concatenate([moved[:begin], *turns, moved[end:]]),
    )
