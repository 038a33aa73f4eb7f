"""A search for changes that make a training job fit into memory, such as a smaller micro-batch.

Of each kind of change, the smallest sufficient one is returned. The cheapest kind comes first.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ebbtide.simulator.estimates.deepspeed_keys import AUTO, BATCH_KEYS, WHOLE_BATCH, ZERO, at
from ebbtide.simulator.estimates.job import Job
from ebbtide.simulator.estimates.models.blocks import ModelError
from ebbtide.simulator.limits import GIB
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import Plan
from ebbtide.simulator.rules import RuleError
from ebbtide.tuner.advice.even import best_of
from ebbtide.tuner.placements.decision import MOST_PASSES, QUICK, Question, decide
from ebbtide.tuner.placements.fit import check_bytes
from ebbtide.tuner.placements.memory import ImpossibleError
from ebbtide.tuner.placements.storage import with_storage

# Sizes of memory that are sold. The smallest sufficient one is offered, but no GPU memory larger than the GPU's.
DEVICE_GIB = (8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 288)
STORAGE_TB = (0.5, 1, 2, 4, 8, 16, 32, 64)
HOST_GIB = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
SHORTEST_SEQUENCE = 256
MOST_GPUS = 256
Changes = Mapping[str, int | float | bool]


@dataclass(frozen=True)
class WayOut:
    """A set of changes to a training job or its machine with which a plan fits into memory.

    Attributes:
        changes: New values of fields of the job (``data_parallel``, ``sequence`` ...) or of the machine
            (``device_memory_bytes``, ``host_memory_bytes``, ``storage_bytes``).
        plan: Plan that fits, with its prediction.
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
        """Return how expensive a set of changes to a training job is, as a rank: 0 is the cheapest kind of change.

        The most expensive change of the set counts. Changing a flag is cheap, and buying hardware is expensive.
        """
        return _price(self.changes)

    @property
    def label(self) -> str:
        """Return the new values of the changed settings of job and machine as text, such as "ZeRO-3, micro-batch 4"."""
        words = [_KINDS[name].told(value) for name, value in self.changes.items()]
        return ", ".join([*words, *(["no limit of host memory"] if self.no_host_limit else [])])


_OF_MACHINE = ("device_memory_bytes", "host_memory_bytes")
_BOUGHT = (*_OF_MACHINE, "storage_bytes")
ANOTHER_WAY = (
    "Alternative: LoRA trains few parameters and needs little optimizer state, but gives another model. "
    "ebbtide does not plan it"
)


class _Kind(NamedTuple):
    """A kind of change: how it is told in words, and the ``tune`` option that makes it.

    Attributes:
        words, option: Formats of the value. Without an option, the words are told.
        unit: Number that a value is divided by before it is told, or None.
    """

    words: str
    option: str = ""
    unit: int | None = None

    def told(self, value: float, *, as_option: bool = False) -> str:
        text = (as_option and self.option) or self.words
        return text.format(value if self.unit is None else value / self.unit)


# From cheap to expensive: changes that affect no sample, changes of the samples, memory or GPUs to add or buy.
_KINDS = {
    "zero_stage": _Kind("ZeRO-{}", "--zero-stage {}"),
    "recompute": _Kind("activation checkpointing", "without --keep-activations"),
    "recompute_share": _Kind("activation checkpointing in all layers", "without --recompute-share"),
    "accumulation": _Kind("accumulation {}", "--accumulation {}"),
    "sequence": _Kind("sequence {}", "--sequence {}"),
    "micro_batch": _Kind("micro-batch {}", "--micro-batch {}"),
    "device_memory_bytes": _Kind("{:.4g} GiB of GPU memory", "--gpu-memory {:.4g}GiB", GIB),
    "storage_bytes": _Kind("state on a drive, {:g} TB per node", "--storage DIR:{:g}TB", 10**12),
    "data_parallel": _Kind("{} GPUs", "--data-parallel {}"),
    "host_memory_bytes": _Kind("{:.0f} GiB of host memory per node", unit=GIB),
}
_PRICES = tuple(_KINDS)


@dataclass
class _Tried:
    job: Job
    machine: Machine
    limits: Mapping[str, Any]
    freedom: Mapping[str, Any] = field(default_factory=dict)
    known: dict[tuple[tuple[str, float], ...], Question | None] = field(default_factory=dict)

    def way(self, changes: Changes) -> WayOut | None:
        question = self.fits(changes)
        if question is None:
            return None
        try:
            found = decide(question)
        except (ImpossibleError, RuleError):  # RuleError: too many micro-batches per step to plan
            return None
        made, tokens = best_of(found), found.search.workload.tokens_per_iteration
        assert made.prediction is not None
        speed = tokens and tokens / made.prediction.iteration_s
        return WayOut(changes, made, speed, *self._host_limit(changes))

    def _host_limit(self, changes: Changes) -> tuple[bool, bool]:
        """Return whether the user's limit of host memory must be left out, and whether it need only be raised."""
        wanted = changes.get("host_memory_bytes")
        if wanted is None or "host_memory_bytes" not in self.limits:
            return False, False
        return wanted > self.machine.host_memory_bytes, wanted <= self.machine.host_memory_bytes

    def fits(self, changes: Changes) -> Question | None:
        key = tuple(changes.items())
        if key not in self.known:
            self.known[key] = self._begun(changes)
        return self.known[key]

    def _begun(self, changes: Changes) -> Question | None:
        memory = {k: v for k, v in changes.items() if k in _OF_MACHINE}
        machine = self.machine.with_rates(**memory) if memory else self.machine
        asked = {k: v for k, v in self.limits.items() if k not in memory}
        storage = asked.pop("storage", None)
        if "storage_bytes" in changes:
            storage = {"": changes["storage_bytes"]}
        try:
            job = self.job.changed(**{k: v for k, v in changes.items() if k not in _BOUGHT})
            workload = job.workload(machine)
        except ModelError:
            return None
        if storage and self.freedom.get("pieces") and workload.zero_stage == 3:
            return None  # a drive holds whole subgroups of DeepSpeed, no parts of them
        limits, machine, _ = with_storage(workload, machine, storage, **asked)
        try:
            check_bytes(workload, machine, limits)
        except ImpossibleError:
            return None
        return Question(workload, machine, limits, effort=QUICK, **self.freedom)

    def nearest(self, steps: list[Changes]) -> WayOut | None:
        """Return the smallest change with which a training job fits into memory, or None.

        Args:
            steps: Changes of one kind. Each needs less memory than the one before.
        """
        # Memory that is large enough in bytes may still not hold whole subgroups.
        ways = (self.way(step) for step in self.enough(steps))
        return next((way for way in ways if way is not None), None)

    def enough(self, steps: list[Changes]) -> list[Changes]:
        """Return those changes with which the bytes of a training job fit into memory, the smallest change first."""
        if not steps or not self.fits(steps[-1]):
            return []
        return steps[bisect_left(steps[:-1], True, key=lambda step: self.fits(step) is not None) :]


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
    tried = _Tried(job, machine, {k: v for k, v in limits.items() if v is not None}, freedom or {})
    found: dict[str, WayOut] = {}
    for base in _bases(job):
        least = min((way.price for way in found.values() if not set(way.changes) & set(_BOUGHT)), default=len(_PRICES))
        for steps in _knobs(job, machine, tried.limits, base):
            name = [*steps[-1]][-1] if steps else ""
            if name == "micro_batch" and "accumulation" in found:
                continue  # the same number of samples per step fits with more accumulation
            milder = name == "sequence" and name in found
            new = bool(steps) and name not in found and _price(steps[-1]) < least
            if not new and not milder:
                continue
            for changes in _relaxed(tried.enough(steps), base, tried):
                if milder and (changes["sequence"] <= _longest(found) or _needless(changes, found)):
                    break
                way = tried.way(changes)
                if way is not None:
                    found["longer sequence" if milder else name] = way
                    break
        if least < _PRICES.index("sequence"):
            break
    return sorted(found.values(), key=lambda way: (way.price, -(way.tokens_per_s or 0.0)))


def asked_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the options of a plan search say on the plans and the memory, as further arguments of `ways_out`."""
    names = ("subgroup_sizes", "pieces", "offload_parameters")
    freedom = {name: value for name in names if (value := options.get(name)) is not None}
    limits = {name: options.get(name) for name in ("device_memory_bytes", "host_memory_bytes", "storage")}
    return {"freedom": freedom, **limits, "margin": options.get("memory_margin")}


def _needless(changes: Changes, found: Mapping[str, WayOut]) -> bool:
    """Return True if changes contain all changes of another set that is enough."""
    return any(changes.items() >= way.changes.items() for way in found.values())


def _price(changes: Changes) -> int:
    """Return the rank of the most expensive change. A smaller micro-batch that keeps the samples of a step costs as
    much as accumulation.
    """
    kept = "accumulation" in changes
    return max(_PRICES.index(name) for name in changes if not (kept and name == "micro_batch"))


def _longest(found: Mapping[str, WayOut]) -> float:
    return max(way.changes.get("sequence", 0) for way in found.values())


def another_gpu(job: Job, machine: Machine, freedom: Mapping[str, Any] | None = None, **limits: Any) -> str:
    """Return a sentence with the smallest usual size of GPU memory that is enough for an unchanged training job.

    The usual sizes are those of common GPUs, such as 24, 40 or 80 GiB. Return an empty string if no size is large
    enough, or if the GPU shares its memory with the CPU.
    """
    tried = _Tried(job, machine, {k: v for k, v in limits.items() if v is not None}, freedom or {})
    sizes = [n * GIB for n in DEVICE_GIB if n * GIB > machine.device_memory_bytes]
    steps: list[Changes] = [{"device_memory_bytes": n} for n in sizes]
    way = None if machine.unified_memory else tried.nearest(steps)
    return (
        "" if way is None else f"It fits on a GPU with {way.changes['device_memory_bytes'] / GIB:.4g} GiB (--machine)"
    )


def _relaxed(enough: list[Changes], base: Changes, tried: _Tried) -> Iterator[Changes]:
    """Yield sets of changes that are enough, the smallest first.

    Args:
        enough: Sets of changes that are enough, the smallest first. Each contains the base.
        base: Changes that each set contains, although it may not need all of them.
    """
    if enough:
        least = dict(enough[0])
        for name in ("zero_stage", "recompute", "recompute_share"):
            without = {k: v for k, v in least.items() if k != name}
            if name in base and tried.fits(without):
                least = without
        smaller: list[Changes] = [least]
        for steps in (_smaller_batches(tried.job), _shorter(tried.job)):
            if steps and set(steps[0]) <= set(base):
                smaller = tried.enough([{**smaller[0], **step} for step in steps]) or smaller
        yield from (changes for changes in smaller if changes not in enough)
    yield from enough


def _bases(job: Job) -> Iterator[Changes]:
    together: dict[str, float] = {}
    yield dict(together)
    for steps in (_partitioned(job), _recompute(job), _smaller_batches(job)[-1:], _shorter(job)[-1:]):
        if steps and _possible(job, {**together, **steps[0]}):
            together |= steps[0]
            yield dict(together)


def _possible(job: Job, changes: Changes) -> bool:
    try:
        job.changed(**changes)
    except ModelError:
        return False
    return True


def _knobs(job: Job, machine: Machine, limits: Mapping[str, Any], base: Changes) -> Iterator[list[Changes]]:
    all_steps = [
        _partitioned(job),
        _recompute(job),
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


def _partitioned(job: Job) -> list[Changes]:
    return [{"zero_stage": 3}] if job.zero_stage < 3 else []


def _recompute(job: Job) -> list[Changes]:
    if job.recompute and job.recompute_share == 1:
        return []
    return [{"recompute_share": 1.0} if job.recompute else {"recompute": True}]


def _smaller_batches(job: Job) -> list[Changes]:
    """Return smaller micro-batches, the largest first, with the accumulation that keeps the samples of a step."""
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
    """Return the ``tune`` options, as text, that make a set of changes to a training job.

    A change without an option is described in words.
    """
    in_config = config_values(way, job)
    changed = {
        name: _KINDS[name].told(value, as_option=True)
        for name, value in way.changes.items()
        if _KEYS.get(name) not in in_config
    }
    if way.host_limit:
        changed["host_memory_bytes"] = f"--host-memory {_gib(int(way.changes['host_memory_bytes']))}GiB"
    return ", ".join(
        [
            *(f'"{key}": {value} in the DeepSpeed config' for key, value in in_config.items()),
            *changed.values(),
            *(["without --host-memory"] if way.no_host_limit else []),
        ]
    )


def config_values(way: WayOut, job: Job) -> dict[str, Any]:
    """Return the values that a set of changes replaces in a job's DeepSpeed config, as a dict from key to new value.

    A key that the config leaves out or sets to ``"auto"`` is not included, because an option can set it.
    """
    after = job.changed(**{name: value for name, value in way.changes.items() if name not in _BOUGHT})
    new = {key: getattr(after, name) for name, key in _KEYS.items()}
    new[WHOLE_BATCH] = after.micro_batch * after.accumulation * after.data_parallel
    return {key: value for key, value in new.items() if at(job.config, key) not in (None, AUTO, value)}


def _gib(size_bytes: int) -> str:
    """Return a size in GiB as text, rounded up to two decimals, so that the text is never less than the size."""
    return f"{math.ceil(100 * size_bytes / GIB) / 100:.12g}"


_KEYS = {"zero_stage": f"{ZERO}.stage", **BATCH_KEYS}
