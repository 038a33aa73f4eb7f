"""A search for changes that make a training job fit into memory, such as a smaller micro-batch.

Of each kind of change, the smallest sufficient one is returned. The cheapest kind comes first.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ebbtide.simulator.estimates.job import Job
from ebbtide.simulator.estimates.knobs import BOUGHT_BESIDE, PRICES, Changes, possible, present, price
from ebbtide.simulator.limits import GIB
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import Plan
from ebbtide.tuner.advice.flags import label_of, options_of
from ebbtide.tuner.advice.tried import Changing, Tried
from ebbtide.tuner.placements.decision import MOST_PASSES

# Sizes of memory that are sold. The smallest sufficient one is offered, but no GPU memory larger than the GPU's.
DEVICE_GIB = (8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 288)
STORAGE_TB = (0.5, 1, 2, 4, 8, 16, 32, 64)
HOST_GIB = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
SHORTEST_SEQUENCE = 256
MOST_GPUS = 256


@dataclass(frozen=True)
class WayOut:
    """A set of changes to a training job or its machine with which a plan fits into memory.

    Attributes:
        changes: New values of fields of the job (``data_parallel``, ``sequence`` ...) or of the machine
            (``device_memory_bytes``, ``host_memory_bytes``, ``storage_bytes``).
        tokens_per_s: Throughput of all ranks, or None if unknown.
        no_host_limit: True if the user's limit of host memory must be left out, because the node gets more memory.
        host_limit: True if the machine has the host memory of ``changes`` already, so that the user's limit of it need
            only be raised.
    """

    changes: Changes
    plan: Plan
    tokens_per_s: float | None
    no_host_limit: bool = False
    host_limit: bool = False

    @property
    def iteration_s(self) -> float:
        assert self.plan.prediction is not None
        return self.plan.prediction.iteration_s

    @property
    def price(self) -> int:
        """Return how expensive a set of changes to a training job is, as a rank: 0 is the cheapest kind of change."""
        # Where a loss without whole logits is enough, the logits were too large.
        return -1 if set(self.changes) == {"fused_loss"} else price(self.changes)

    @property
    def label(self) -> str:
        """Return the new values of the changed settings of job and machine as text, such as "ZeRO-3, micro-batch 4"."""
        return label_of(self.changes, no_host_limit=self.no_host_limit)


ANOTHER_WAY = (
    "Alternative: LoRA trains few parameters and needs little optimizer state, but gives another model. "
    "ebbtide does not plan it"
)


@dataclass
class _WaysOut:
    space: Changing

    def way(self, changes: Changes) -> WayOut | None:
        tried = self.space.tried(changes)
        outcome = tried.outcome() if isinstance(tried, Tried) else None
        if outcome is None or outcome.plan is None or not outcome.fits:
            return None
        assert isinstance(tried, Tried)
        return WayOut(changes, outcome.plan, outcome.tokens_per_s, *self._host_limit(changes))

    def _host_limit(self, changes: Changes) -> tuple[bool, bool]:
        """Return whether the user's limit of host memory must be left out, and whether only raised."""
        wanted = changes.get("host_memory_bytes")
        if wanted is None or self.space.asked.get("host_memory_bytes") is None:
            return False, False
        return wanted > self.space.machine.host_memory_bytes, wanted <= self.space.machine.host_memory_bytes

    def fits(self, changes: Changes) -> bool:
        tried = self.space.tried(changes)
        return isinstance(tried, Tried) and tried.unfit is None

    def nearest(self, steps: list[Changes]) -> WayOut | None:
        # Memory that is large enough in bytes may still not hold whole subgroups.
        ways = (self.way(step) for step in self.enough(steps))
        return next((way for way in ways if way is not None), None)

    def enough(self, steps: list[Changes]) -> list[Changes]:
        if not steps or not self.fits(steps[-1]):
            return []
        return steps[bisect_left(steps[:-1], True, key=self.fits) :]


def ways_out(job: Job, machine: Machine, freedom: Mapping[str, Any] | None = None, **limits: Any) -> list[WayOut]:
    """Return a list of the smallest changes that make a training job fit into memory, the cheapest first.

    Among equally cheap changes, the one with the fastest training comes first. No change needs more GPU memory than the
    card has.

    First, each change is tried alone. A change either concerns the job, such as ZeRO-3, a shorter sequence or more
    GPUs, or only memory and storage. Then each change is tried again in combination with ZeRO-3, and after that also
    with activation checkpointing, with a smaller micro-batch, and with a shorter sequence. A combination is only tried
    if it is cheaper than all changes of the job that were found before it. An expensive change, such as a shorter
    sequence, therefore does not end the search for a cheap combination. The search ends when a change is enough that
    leaves the samples of a step and the hardware as they are. Parts of a combination that are not needed are left out.

    A combination with a longer sequence is also offered, if one is found before the search ends.

    Args:
        freedom: Arguments of `Question` on what plans may do, such as ``subgroup_sizes``. None: their defaults.
        limits: Further arguments of `with_storage`, such as memory limits.
    """
    tried = _WaysOut(Changing(job, machine, limits, freedom or {}))
    found: dict[str, WayOut] = {}
    for base in _bases(job):
        least = min(
            (way.price for way in found.values() if not set(way.changes) & set(BOUGHT_BESIDE)), default=len(PRICES)
        )
        for steps in _knobs(job, machine, limits, base):
            name = [*steps[-1]][-1] if steps else ""
            if name == "micro_batch" and "accumulation" in found:
                continue  # the same number of samples per step fits with more accumulation
            milder = name == "sequence" and name in found
            new = bool(steps) and name not in found and price(steps[-1]) < least
            if not new and not milder:
                continue
            for changes in _relaxed(tried.enough(steps), base, tried):
                if milder and (changes["sequence"] <= _longest(found) or _needless(changes, found)):
                    break
                way = tried.way(changes)
                if way is not None:
                    found["longer sequence" if milder else name] = way
                    break
        if least < PRICES.index("sequence"):
            break
    return sorted(found.values(), key=lambda way: (way.price, -(way.tokens_per_s or 0.0)))


def _needless(changes: Changes, found: Mapping[str, WayOut]) -> bool:
    return any(changes.items() >= way.changes.items() for way in found.values())


def _longest(found: Mapping[str, WayOut]) -> float:
    return float(max(way.changes.get("sequence", 0) for way in found.values()))


def another_gpu(job: Job, machine: Machine, freedom: Mapping[str, Any] | None = None, **limits: Any) -> str:
    """Return a sentence with the smallest usual size of GPU memory that is enough for an unchanged training job.

    The usual sizes are those of common GPUs, such as 24, 40 or 80 GiB. Return an empty string if no size is large
    enough, or if the GPU shares its memory with the CPU.
    """
    tried = _WaysOut(Changing(job, machine, limits, freedom or {}))
    sizes = [n * GIB for n in DEVICE_GIB if n * GIB > machine.device_memory_bytes]
    steps: list[Changes] = [{"device_memory_bytes": n} for n in sizes]
    way = None if machine.unified_memory else tried.nearest(steps)
    return (
        "" if way is None else f"It fits on a GPU with {way.changes['device_memory_bytes'] / GIB:.4g} GiB (--machine)"
    )


def _relaxed(enough: list[Changes], base: Changes, tried: _WaysOut) -> Iterator[Changes]:
    if enough:
        least = dict(enough[0])
        for name in reversed(tuple(LEANER)):
            without = {k: v for k, v in least.items() if k != name}
            if name in base and tried.fits(without):
                least = without
        smaller: list[Changes] = [least]
        for steps in (_smaller_batches(tried.space.job), _shorter(tried.space.job)):
            if steps and set(steps[0]) <= set(base):
                smaller = tried.enough([{**smaller[0], **step} for step in steps]) or smaller
        yield from (changes for changes in smaller if changes not in enough)
    yield from enough


def _bases(job: Job) -> Iterator[Changes]:
    together: dict[str, Any] = {}
    yield dict(together)
    for steps in (*_to_lean(job), _smaller_batches(job)[-1:], _shorter(job)[-1:]):
        if steps and possible(job, {**together, **steps[0]}):
            together |= steps[0]
            yield dict(together)


def _knobs(job: Job, machine: Machine, limits: Mapping[str, Any], base: Changes) -> Iterator[list[Changes]]:
    all_steps: list[list[Changes]] = [
        *_to_lean(job),
        _smaller_batches(job),
        _fewer_samples(job),
        _shorter(job),
        _more_ranks(job, machine),
        _stored(job, limits, base),
        _more_host_memory(machine, limits),
        [] if machine.unified_memory else _more_device_memory(machine, limits),
    ]
    for steps in all_steps:
        yield [{**base, **step} for step in steps if not set(step) & set(base)]


# Settings that leave the samples of a step as they are -> the value that needs the least memory. A smaller micro-batch
# with more accumulation (`_smaller_batches`) is the other way to need less for the same samples.
LEANER: Mapping[str, Any] = {
    "fused_loss": True,
    "kernels": "fused",
    "flash_attention": True,
    "zero_stage": 3,
    "recompute": True,
    "recompute_share": 1.0,
}


def _to_lean(job: Job) -> list[list[Changes]]:
    names = [name for name, value in LEANER.items() if present(job, name) != value]
    return [[{name: LEANER[name]}] for name in names if name != "recompute_share" or job.recompute]


def _smaller_batches(job: Job) -> list[Changes]:
    samples = job.micro_batch * job.accumulation
    return [
        {"micro_batch": samples // more, "accumulation": more}
        for more in range(job.accumulation + 1, min(samples, MOST_PASSES) + 1)
        if samples % more == 0
    ]


def _fewer_samples(job: Job) -> list[Changes]:
    steps, size = list[Changes](), job.micro_batch
    while size > 1:
        size //= 2
        steps.append({"micro_batch": size})
    return steps


def _shorter(job: Job) -> list[Changes]:
    steps, length = list[Changes](), job.sequence
    while length // 2 >= SHORTEST_SEQUENCE:
        length //= 2
        steps.append({"sequence": length})
    return steps


def _more_ranks(job: Job, machine: Machine) -> list[Changes]:
    beside = job.tensor_parallel * job.pipeline_parallel
    most = MOST_GPUS if machine.network_bytes_per_s is not None else machine.gpus_per_node
    steps, ranks = list[Changes](), job.data_parallel
    while ranks * 2 * beside <= most:
        ranks *= 2
        steps.append({"data_parallel": ranks})
    return steps


def _stored(job: Job, limits: Mapping[str, Any], base: Changes) -> list[Changes]:
    there = sum((limits.get("storage") or {}).values())
    if base.get("zero_stage", job.zero_stage) < 3:
        return []
    return [{"storage_bytes": int(n * 1e12)} for n in STORAGE_TB if n * 1e12 > there]


def _more_device_memory(machine: Machine, limits: Mapping[str, Any]) -> list[Changes]:
    own, asked = machine.device_memory_bytes, limits.get("device_memory_bytes")
    if asked is None:
        return []
    sold = [size * GIB for size in DEVICE_GIB if asked < size * GIB < own]
    return [{"device_memory_bytes": n} for n in (*sold, own) if n > asked]


def _more_host_memory(machine: Machine, limits: Mapping[str, Any]) -> list[Changes]:
    own, asked = machine.host_memory_bytes, limits.get("host_memory_bytes")
    least = own if asked is None else min(own, asked)
    sizes = sorted({*(size * GIB for size in HOST_GIB), own})
    return [{"host_memory_bytes": size} for size in sizes if size > least]


def flags(way: WayOut, job: Job) -> str:
    """Return the ``tune`` options, as text, that make a set of changes to a training job."""
    return options_of(way.changes, job, host_limit=way.host_limit, no_host_limit=way.no_host_limit)
