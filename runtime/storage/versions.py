"""The ledger of a store of optimizer state: which place on the drives holds which version of each subgroup."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from ebbtide.runtime.storage.errors import StorageError
from ebbtide.runtime.storage.pages import CommittedStep, ExtentRecord


@dataclass
class Extents:
    """The extents of one subgroup: the regions of the drives that hold its state.

    Attributes:
        versions: Version of the state in each extent. None if the extent is empty or partly written.
        live: The extent written last. -1 if none.
        unchecked: True if the hashes of the live extent must still be compared: at the next read, or before other code
            uses the store's memory-mapped tensors of the subgroup.
    """

    versions: list[int | None]
    hashes: list[list[str]]
    live: int = -1
    unchecked: bool = False
    reads: int = 0

    def holding(self, announced: Announced) -> int | None:
        """Return the index of the extent that holds this subgroup's state in the version ``announced``."""
        held = {v: e for e, v in enumerate(self.versions) if v is not None}
        newest = max((v for v in held if v <= announced.version), default=-1)
        return held[newest] if newest >= announced.due else None


@dataclass(frozen=True)
class Announced:
    """A version of optimizer state on drives that is to be committed.

    Writes of subgroups' state are numbered in ascending order. For each subgroup, the version contains the newest write
    with a number from ``due`` to ``version``. If a subgroup has no such write yet, the commit waits for one.

    Attributes:
        version: Number of this version, and highest number of a write that belongs to it.
        due: Lowest number of a write that belongs to this version. State from an earlier write is too old.
    """

    version: int
    due: int
    subgroups: frozenset[int]


@dataclass(frozen=True)
class Retention:
    """The rule that selects which committed optimizer state stays on the drives. It selects the state by training step.

    Attributes:
        stands: Function that returns whether the checkpoint of a step exists. It does not exist if the run was killed
            before the checkpoint's commit, or if the checkpoint was deleted.
        protects: Function that returns True for a step whose state is to stay longer than the state of newer steps, for
            example because the step's checkpoint is the best one.
    """

    keep: int
    stands: Callable[[CommittedStep], bool]
    protects: Callable[[CommittedStep], bool]

    def of(self, steps: Sequence[CommittedStep]) -> list[CommittedStep]:
        """Return the committed steps with optimizer state that stays on the drives, newest first.

        At most ``keep`` steps stay, and the newest always does. Steps without a checkpoint are dropped first, then
        unprotected steps, then protected steps. Within each of these groups, the oldest step is dropped first.
        """
        kept, excess = list(steps), max(0, len(steps) - self.keep)
        oldest_first = kept[:0:-1]  # the newest step is left out
        first_to_go = sorted(oldest_first, key=lambda s: (self.stands(s), self.protects(s)))
        gone = {s.name for s in first_to_go[:excess]}
        return [s for s in kept if s.name not in gone]


class Versions:
    """The bookkeeping of optimizer state on drives: which versions exist, where they are, and which are committed.

    A version is the state after an optimizer update, or after another write of a subgroup's state. In this class, a
    committed version is called a step. An extent is a region of the drives for one subgroup's state in one version.
    This class uses neither threads nor files. The caller must not call its methods concurrently.

    Attributes:
        extents: Number of extents per subgroup.
        unclaimed: Numbers of training steps. For each of them, an earlier run left a checkpoint with its state on the
            drives. Empty once this run has restored one of these checkpoints.
        adopted: Subgroups that were restored since the last call of `ExtentStore.take_adopted`.
        due: Number of the version that the last `tick` began, with new state of all subgroups. 0 after a restore.
        passed_over: Names (`CommittedStep.name`) of the committed steps that are newer than the restored step. The next
            commit drops these steps.
    """

    def __init__(
        self, subgroups: Iterable[int], extents: int, steps: list[CommittedStep], unclaimed: list[int]
    ) -> None:
        self.extents = extents
        self.subgroups: dict[int, Extents] = {}
        self.grow(subgroups)
        self.steps = steps
        self.announced: dict[int, Announced] = {}
        self.unclaimed = unclaimed
        self.adopted = set[int]()
        self.passed_over = set[str]()
        self.due = 0
        self._clock = 0  # number of the latest version

    def grow(self, subgroups: Iterable[int]) -> None:
        """Add subgroups to this bookkeeping of optimizer state on drives. They have no state on the drives yet."""
        self.subgroups |= {s: Extents([None] * self.extents, [[]] * self.extents) for s in subgroups}

    def tick(self) -> int:
        """Begin a new version of the optimizer state on drives, and return its number."""
        self.due = self._clock = self._clock + 1
        return self._clock

    def announce(self, subgroups: Collection[int]) -> int:
        """Protect the latest version of the state on drives from being overwritten. Return the version's number."""
        self.announced[self._clock] = Announced(self._clock, self.due, frozenset(subgroups or self.subgroups))
        return self._clock

    def begin(self, version: int | None) -> int:
        """Return the version number for a write of a subgroup's optimizer state to the drives."""
        self._clock = max(self._clock, version or 0) + (version is None)
        return self._clock if version is None else version

    def take_extent(self, subgroup: int) -> int | None:
        """Choose an extent (a region of the drives) for a write of a subgroup's state, and mark it as partly written.

        Return None if each extent of the subgroup holds state that is committed or is to be committed. The extent that
        was written last is chosen only if no other one is free.
        """
        held = self.subgroups[subgroup]
        kept = {record.extent for step in self.steps for record in step.extents if record.subgroup == subgroup}
        kept |= {e for one in self.announced.values() if (e := held.holding(one)) is not None}
        free = [extent for extent in range(self.extents) if extent not in kept]
        extent = min(free, key=lambda extent: extent == held.live, default=None)
        if extent is not None:
            held.versions[extent] = None
        return extent

    def end_write(self, subgroup: int, extent: int, version: int, hashes: list[str], *, unchecked: bool) -> None:
        """Record the end of a write: the extent (a region of the drives) now holds the subgroup's latest state."""
        held = self.subgroups[subgroup]
        held.versions[extent], held.hashes[extent] = version, hashes
        held.live, held.unchecked = extent, unchecked

    def missing(self, version: int) -> list[int]:
        """Return the subgroups that must still be written to the drives before the given version can be committed.

        Raises:
            StorageError: `announce` has not been called for the version.
        """
        asked = self.announced.get(version)
        if asked is None:
            raise StorageError(
                "a version of the stored state must be announced with announce() before prepare() is called, but "
                f"version {version} was not"
            )
        return [s for s in sorted(asked.subgroups) if self.subgroups[s].holding(asked) is None]

    def extents_of(self, version: int) -> list[ExtentRecord]:
        """Return where a version of the optimizer state lies on the drives, as one record per subgroup.

        Call this only after `announce` for the version, and after the state of all its subgroups has been written.
        """
        asked = self.announced[version]
        found = [(s, self.subgroups[s].holding(asked)) for s in sorted(asked.subgroups)]
        return [
            ExtentRecord(subgroup=s, extent=e, hashes=self.subgroups[s].hashes[e]) for s, e in found if e is not None
        ]

    def not_passed_over(self) -> list[CommittedStep]:
        """Return the committed steps of the optimizer state on drives, without those that a restore has skipped."""
        # If training has resumed from one of the steps, the steps that were newer at that time are left out.
        return [s for s in self.steps if s.name not in self.passed_over]

    def restore(self, record: CommittedStep) -> None:
        """Make the optimizer state of a committed step the latest state on the drives.

        Steps that are newer than this step will be dropped at the next commit.
        """
        self.passed_over = {s.name for s in self.steps[: self.steps.index(record)]}
        self.due, self.unclaimed = 0, []
        for one in record.extents:
            held = self.subgroups[one.subgroup]
            held.versions = [None] * self.extents
            self.end_write(one.subgroup, one.extent, 0, one.hashes, unchecked=True)
            self.adopted.add(one.subgroup)
