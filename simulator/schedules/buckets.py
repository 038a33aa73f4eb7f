"""The point of backward at which DeepSpeed reduces each layer's gradients, given the size of its bucket.

Under ZeRO-2 and 3, DeepSpeed collects gradients in a bucket of ``reduce_bucket_size`` elements. When the next gradient
would not fit, it first reduces the bucket's gradients, which then leave for the host. So gradients leave later than
they are computed. Sources: ``DeepSpeedZeroOptimizer_Stage3.reduce_independent_p_g_buckets_and_remove_grads`` and the
method of the same name in ``stage_1_and_2.py``.
"""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from ebbtide.simulator.workload import Workload

# Bucket size that ebbtide sets if the config gives none, so that gradients leave early. With more ranks it is left
# alone, because the division of gradients into buckets can change the bits of their sum.
PLANNED_BUCKET_ELEMENTS, PLANNED_BUCKET_RANKS = 50_000_000, 2
# Limits the time of building a schedule with small buckets. The number is even, so that a part ends in the middle of a
# layer.
MOST_PIECES = 64


class Leaving(NamedTuple):
    """A layer with gradients that leave DeepSpeed's bucket. Gradients wait in this bucket to be reduced together.

    Attributes:
        ascending: True if the layer's gradients leave in the order of the layer's parameters. False if they leave in
            the reverse order, in which backward computes them.
    """

    layer: int
    ascending: bool = False


Leavings = tuple[tuple[Leaving, ...], ...]


class _Gradient(NamedTuple):
    """The gradient of one parameter, or a part of a layer's gradient if the layer's parameters are not known.

    Attributes:
        done: Fraction of the layer's gradient elements that backward has computed when this gradient is complete.
    """

    layer: int
    elements: int
    done: float


def planned_bucket(ranks: int) -> int | None:
    """Return the ``reduce_bucket_size`` that ebbtide sets if the DeepSpeed config has none, in elements."""
    # The result is None for more than `PLANNED_BUCKET_RANKS` ranks: DeepSpeed's default then stays, because another
    # size could change the bits of the gradients' sum over the ranks.
    return PLANNED_BUCKET_ELEMENTS if ranks <= PLANNED_BUCKET_RANKS else None


def in_order(leave: Leavings) -> list[int]:
    """Return the layers in the order that their gradients leave DeepSpeed's bucket in backward."""
    return [left.layer for some in reversed(leave) for left in some]


def bucket_fields(elements: int, planned: int | None, ranks: int) -> dict[str, int]:
    """Return the fields of a workload that contain the size of DeepSpeed's gradient bucket, as a dict."""
    sizes = {"reduce_bucket_params": elements, "planned_bucket_params": planned or elements}
    return {field: max(1, size // ranks) for field, size in sizes.items()}


def bucket_of(workload: Workload) -> int:
    """Return the size of DeepSpeed's gradient bucket in training under a plan, in elements."""
    return workload.planned_bucket_params or workload.reduce_bucket_params


def leavings(workload: Workload, bucket: int) -> Leavings:
    """Return, for each layer, the layers whose gradients leave DeepSpeed's bucket after this layer's backward.

    The layers are in the order in which their gradients leave. The gradients of a layer may leave in several portions.
    The layer is then listed once, for the portion with which half of its elements have left. If a portion leaves in the
    middle of a backward, it counts as leaving at the start or at the end of this backward, whichever is nearer.

    Args:
        bucket: Elements that the bucket holds, counted as in ``workload.layers``. 0: there is no bucket.
    """
    layers = range(len(workload.layers))
    if not bucket or workload.zero_stage == 1:  # ZeRO-1 reduces after the end of backward
        return tuple((Leaving(layer),) for layer in layers)
    left, whole = [0] * len(layers), _elements(workload)
    found = [[] if whole[layer] else [Leaving(layer)] for layer in layers]
    for gradients, at in _flushes(workload, bucket):
        own = Counter[int]()
        for gradient in gradients:
            own[gradient.layer] += gradient.elements
        # DeepSpeed's ZeRO-3 sorts the gradients of a bucket by the numbers of their parameters.
        for layer in sorted(own) if workload.zero_stage == 3 else own:
            before, left[layer] = left[layer], left[layer] + own[layer]
            if 2 * before < whole[layer] <= 2 * left[layer]:
                ascending = workload.zero_stage == 3 and own[layer] == whole[layer]
                found[min(at, layer)].append(Leaving(layer, ascending))
    return tuple(map(tuple, found))


def _flushes(workload: Workload, bucket: int) -> Iterator[tuple[list[_Gradient], int]]:
    held: list[_Gradient] = []
    size = 0
    for gradient in _gradients(workload, bucket):
        if held and size + gradient.elements > bucket:
            yield held, gradient.layer + (gradient.done <= 0.5)
            held, size = [], 0
        held.append(gradient)
        size += gradient.elements
    yield held, 0


def _gradients(workload: Workload, bucket: int) -> Iterator[_Gradient]:
    whole, each = _elements(workload), _parameters(workload)
    for layer in reversed(range(len(whole))):
        done = 0
        for elements in reversed(each[layer] if each else _pieces(whole[layer], bucket)):
            done += elements
            yield _Gradient(layer, elements, done / whole[layer])


def _elements(workload: Workload) -> list[int]:
    return [layer.params + layer.params_of_others for layer in workload.layers]


def _parameters(workload: Workload) -> list[list[int]]:
    if workload.zero_stage < 3:  # the workload contains only the flat partition
        return []
    sizes = iter([n for group in workload.parameters for n in group if n])
    found = []
    for layer in workload.layers:
        held, left = list[int](), layer.params
        while left > 0:
            held.append(next(sizes, left + 1))
            left -= held[-1]
        if left:
            return []
        found.append(held)
    return found


def _pieces(elements: int, bucket: int) -> list[int]:
    # The parts are used if the sizes of the layer's parameters are not known. Their number is at most `MOST_PIECES`, so
    # with a small bucket they may be too large for it. Each part is then alone in its bucket. `leavings` returns the
    # same result as for parts that fit, because it only asks when half of the layer's gradient has left the bucket.
    count = min(-(-elements // bucket), MOST_PIECES)
    return [elements * (i + 1) // count - elements * i // count for i in range(count)]
