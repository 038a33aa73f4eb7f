"""A simulation of when ZeRO-3 gathers parameters, as DeepSpeed's ``PartitionedParameterCoordinator`` does.

Between two uses DeepSpeed keeps parameters that are used again soon. It also prefetches parameters of the
next modules. So a parameter may be gathered once for a forward and its backward, or once for each.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

# The parameters of a module, each with its number of elements before partitioning.
Module = Sequence[tuple[Hashable, int]]


@dataclass(frozen=True, slots=True)
class GatherRules:
    """The keys of DeepSpeed's ``zero_optimization`` that control gathers. Sizes are in elements of whole parameters.

    Attributes:
        reuse: ``stage3_max_reuse_distance``: a parameter stays gathered if fewer elements than this are used
            before its next use.
        ahead: ``stage3_prefetch_bucket_size``: number of elements to prefetch.
        live: ``stage3_max_live_parameters``: no parameter is prefetched while this many elements are gathered.
        persistent: ``stage3_param_persistence_threshold``: a parameter of at most this size stays gathered until
            the end of the step.
    """

    reuse: int = 10**9
    ahead: int = 50_000_000
    live: int = 10**9
    persistent: int = 100_000


@dataclass(frozen=True)
class Gathered:
    """ZeRO-3's gathers of parameters in the forward and backward of one micro-batch that starts with nothing gathered.

    Attributes:
        persistent: Parameters that stay gathered until the end of the step.
        live: Largest number of elements that are gathered at the same time. None with several data-parallel ranks,
            because the sizes of whole parameters are then unknown: only those of this rank's partitions are known.
    """

    times: Mapping[Hashable, int]
    persistent: frozenset[Hashable]
    live: int | None

    def of_layer(self, pieces: Iterable[tuple[Hashable, int]]) -> dict[str, int]:
        """Return the fields of a `Layer` for elements that ZeRO-3 keeps gathered, and that backward gathers again.

        ``pieces`` has the elements on this rank by parameter. A parameter that no module uses is never gathered.
        """
        read = [(key, n) for key, n in pieces if key in self.times]
        return {
            "persistent_params": sum(n for key, n in read if key in self.persistent),
            "regathered_params": sum(n * (self.times[key] - 1) for key, n in read),
        }


def gathered(modules: Sequence[Module], rules: GatherRules) -> Gathered:
    """Return the parameter gathers of DeepSpeed's ZeRO-3 in a forward and its backward, with modules in order of use.

    Modules without parameters must be listed too, because DeepSpeed also prefetches there. One exception is not
    simulated: if activation checkpointing stops early, DeepSpeed does not release the module.
    """
    play = _Coordinator(modules, rules)
    for step, module in enumerate(modules):
        play.fetch(step, module)
        play.ask_ahead()
        play.release(step + 1, module)
    return Gathered(play.times, play.persistent, play.most)


@dataclass
class _Coordinator:
    modules: Sequence[Module]
    rules: GatherRules
    times: Counter[Hashable] = field(default_factory=Counter)
    there: dict[Hashable, int] = field(default_factory=dict)
    available: int = 0
    most: int = 0

    def __post_init__(self) -> None:
        self.queue = [(key, n, i) for i, module in enumerate(self.modules) for key, n in module]
        self.next = 0  # position in the queue of modules
        sums = (sum(n for _, n in module) for module in self.modules)
        # For each module, the number of elements of all earlier modules.
        self.before = list(accumulate(sums, initial=0))
        self.uses: dict[Hashable, list[int]] = defaultdict(list)
        for key, _, step in self.queue:
            self.uses[key].append(step)
        small = (key for key, n, _ in self.queue if n <= self.rules.persistent)
        self.persistent = frozenset(small)
        self.seen: dict[Hashable, int] = {}  # for each parameter, the latest use that the queue has reached

    def _gather(self, wanted: Mapping[Hashable, int]) -> None:
        self.there.update(wanted)
        self.times.update(dict.fromkeys(wanted, 1))
        self.available += sum(wanted.values())
        self.most = max(self.most, self.available)

    def fetch(self, step: int, module: Module) -> None:
        self._gather({key: n for key, n in module if key not in self.there})
        missed = {key for key, _ in module if self.seen.get(key, -1) < step}
        popped: set[Hashable] = set()
        while self.next < len(self.queue) and len(popped) < len(missed):
            popped.add(self._pop()[0])

    def _pop(self) -> tuple[Hashable, int]:
        key, n, step = self.queue[self.next]
        self.next += 1
        self.seen[key] = max(step, self.seen.get(key, -1))
        return key, n

    def ask_ahead(self) -> None:
        room = min(self.rules.live - self.available, self.rules.ahead)
        wanted: dict[Hashable, int] = {}
        asked = 0
        while self.next < len(self.queue) and asked < room:
            key, n = self._pop()
            if key not in self.there and key not in wanted:
                wanted[key] = n
                asked += n
        self._gather(wanted)

    def release(self, step: int, module: Module) -> None:
        for key, _ in module:
            if key in self.there and not self._kept(key, step):
                self.available -= self.there.pop(key)

    def _kept(self, key: Hashable, step: int) -> bool:
        if key in self.persistent or self.seen.get(key, -1) > step:
            return True
        uses = self.uses[key]
        following = bisect_left(uses, step)
        if following == len(uses):
            return False
        return self.before[uses[following]] - self.before[step] < self.rules.reuse
