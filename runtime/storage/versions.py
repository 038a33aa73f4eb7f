"""The ledger of a store of optimizer state: which place on the drives holds which version of each subgroup."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from ebbtide.runtime.storage.errors import StorageError
from ebbtide.runtime.storage.pages import ExtentRecord, StepRecord


@dataclass
class Extents:
    """The extents of one subgroup: the regions of the drives that hold its state.

    Attributes:
        versions: Version of the state in each extent. None if the extent is empty or partly written.
        hashes: Hashes of each extent's tensors.
        live: The extent written last. -1 if none.
        unchecked: True if the hashes of the live extent must still be compared: at the next read, or before other code
            uses the store's memory-mapped tensors of the subgroup.
        reads: Number of reads in progress.
    """

    versions: list[int | None]
    hashes: list[list[str]]
    live: int = -1
    unchecked: bool = False
    reads: int = 0

    def holding(self, announced: Announced) -> int | None:
        """Return the extent that holds this subgroup's part of an announced version. None if it is not written yet."""
        held = {v: e for e, v in enumerate(self.versions) if v is not None}
        newest = max((v for v in held if v <= announced.version), default=-1)
        return held[newest] if newest >= announced.due else None


@dataclass(frozen=True)
class Announced:
    """A version of optimizer state on drives that is to be committed.

    Attributes:
        version: Number of the version. The version consists of the newest state of each subgroup with at most this
            number.
        due: Least number that the state of a subgroup must have. If the state of a subgroup has a lower number, its
            write has not ended yet.
        subgroups: Subgroups that belong to the version.
    """

    version: int
    due: int
    subgroups: frozenset[int]


@dataclass(frozen=True)
class Retention:
    """The rule that selects the steps of optimizer state that stay on the drives.

    Attributes:
        keep: Number of steps to keep.
        stands: Function that returns whether the checkpoint of a step exists. It does not exist if the run was killed
            before the checkpoint's commit, or if the checkpoint was deleted.
        protects: Function that returns True for a step that is to outlast newer steps, such as that of the best
            checkpoint.
    """

    keep: int
    stands: Callable[[StepRecord], bool]
    protects: Callable[[StepRecord], bool]

    def of(self, steps: Sequence[StepRecord]) -> list[StepRecord]:
        """Return the steps that stay on the drives, newest first.

        The newest step always stays. Steps without a checkpoint are dropped first, then the oldest steps that are not
        protected, then the oldest protected steps.
        """
        kept, excess = list(steps), max(0, len(steps) - self.keep)
        oldest_first = kept[:0:-1]  # without the newest
        first_to_go = sorted(oldest_first, key=lambda s: (self.stands(s), self.protects(s)))
        gone = {s.name for s in first_to_go[:excess]}
        return [s for s in kept if s.name not in gone]


class Versions:
    """The ledger of a store's versions and committed steps. It knows neither threads nor files.

    A version is the result of one optimizer update. Whoever uses this object serializes its calls.

    Attributes:
        extents: Number of extents per subgroup.
        subgroups: The extents of each subgroup.
        steps: The committed steps, newest first.
        announced: The versions that are being committed, by number.
        unclaimed: Numbers of an earlier run's steps that this run has not restored.
        adopted: Subgroups that were restored since the last look at this set.
        due: The latest version that all subgroups write.
        passed_over: Names of steps that were not restored although they are newer. The next commit drops them.
    """

    def __init__(self, subgroups: Iterable[int], extents: int, steps: list[StepRecord], unclaimed: list[int]) -> None:
        self.extents = extents
        self.subgroups: dict[int, Extents] = {}
        self.grow(subgroups)
        self.steps = steps
        self.announced: dict[int, Announced] = {}
        self.unclaimed = unclaimed
        self.adopted = set[int]()
        self.passed_over = set[str]()
        self.due = 0
        self._clock = 0  # the latest version

    def grow(self, subgroups: Iterable[int]) -> None:
        """Add subgroups with empty extents."""
        self.subgroups |= {s: Extents([None] * self.extents, [[]] * self.extents) for s in subgroups}

    def tick(self) -> int:
        """Begin a version that every subgroup will write, and return its number."""
        self.due = self._clock = self._clock + 1
        return self._clock

    def announce(self, version: int | None, subgroups: Collection[int]) -> int:
        """Protect a version (None: the latest) of the given subgroups (none given: all) until it is committed or
        abandoned. Return the version.
        """
        due = self.due if version is None else version
        version = self._clock if version is None else version
        self.announced[version] = Announced(version, due, frozenset(subgroups or self.subgroups))
        return version

    def begin(self, version: int | None) -> int:
        """Return the version of a write that begins. None as argument makes a new version of one subgroup alone."""
        self._clock = max(self._clock, version or 0) + (version is None)
        return self._clock if version is None else version

    def take_extent(self, subgroup: int) -> int | None:
        """Return an extent of a subgroup for a write, marked as partly written. None if all extents hold a committed
        step or an announced version.

        The extent that was written last is returned only if no other one is free.
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
        """Mark an extent as the subgroup's latest state."""
        held = self.subgroups[subgroup]
        held.versions[extent], held.hashes[extent] = version, hashes
        held.live, held.unchecked = extent, unchecked

    def missing(self, version: int) -> list[int]:
        """Return the subgroups that have not yet written an announced version.

        Raises:
            StorageError: The version was not announced.
        """
        asked = self.announced.get(version)
        if asked is None:
            raise StorageError(
                "a version of the stored state must be announced with announce() before prepare() is called, but "
                f"version {version} was not"
            )
        return [s for s in sorted(asked.subgroups) if self.subgroups[s].holding(asked) is None]

    def extents_of(self, version: int) -> list[ExtentRecord]:
        """Return where an announced version, which all subgroups have written, lies on the drives."""
        asked = self.announced[version]
        found = [(s, self.subgroups[s].holding(asked)) for s in sorted(asked.subgroups)]
        return [
            ExtentRecord(subgroup=s, extent=e, hashes=self.subgroups[s].hashes[e]) for s, e in found if e is not None
        ]

    def not_passed_over(self) -> list[StepRecord]:
        """Return the committed steps without those that are newer than the restored one."""
        return [s for s in self.steps if s.name not in self.passed_over]

    def restore(self, record: StepRecord) -> None:
        """Make a committed step the latest state of its subgroups."""
        self.passed_over = {s.name for s in self.steps[: self.steps.index(record)]}
        self.due, self.unclaimed = 0, []
        for one in record.extents:
            held = self.subgroups[one.subgroup]
            held.versions = [None] * self.extents
            self.end_write(one.subgroup, one.extent, 0, one.hashes, unchecked=True)
            self.adopted.add(one.subgroup)
