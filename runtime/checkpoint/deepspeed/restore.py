"""Picks the checkpoint to resume from: the one that DeepSpeed would load, if it is whole."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ebbtide.runtime.checkpoint.errors import CheckpointError, ManifestError
from ebbtide.runtime.checkpoint.files import Files
from ebbtide.runtime.checkpoint.format.manifest import GLOBAL_NAME, RANKS_FOLDER, GlobalManifest, parse, stored_name
from ebbtide.runtime.checkpoint.protocol.drain import Tiers
from ebbtide.runtime.checkpoint.protocol.inspect import Problem, verify
from ebbtide.runtime.checkpoint.protocol.peers import Peers
from ebbtide.runtime.checkpoint.protocol.publishing import recover_replaced
from ebbtide.runtime.checkpoint.protocol.retention import Committed, committed, damaged, named_latest
from ebbtide.runtime.checkpoint.protocol.rotation import restore_deleted, settle, siblings


@dataclass(frozen=True)
class Choice:
    """The newest checkpoint that verifies; ``tag`` is None where none does.

    Attributes:
        passed_over: newer ones (and unreadable ones) by tag, with the reason.
        directory: the tier that holds it.
    """

    tag: str | None
    step: int | None = None
    passed_over: dict[str, str] = field(default_factory=dict)
    directory: Path | None = None

    @property
    def folder(self) -> Path | None:
        if self.tag is None or self.directory is None:
            return None
        return self.directory / self.tag

    @property
    def summary(self) -> str:
        """Return one line for the log."""
        chosen = "no checkpoint verifies" if self.tag is None else f"resuming from {self.tag!r}"
        over = "; ".join(f"passed over {tag!r}: {why}" for tag, why in self.passed_over.items())
        return f"{chosen}{'; ' + over if over else ''}"


def newest_valid(directory: str | Path, check: Callable[[str], list[Problem]] | None = None) -> Choice:
    """Return the newest committed checkpoint of a folder with every byte as in its manifest.

    Args:
        check: verifies one tag. The default reads all of it; ranks pass a check that shares the work.
    """
    directory = Path(directory)
    check_one = check or (lambda tag: verify(directory, tag))
    return newest_of_tiers([directory], lambda _, tag: check_one(tag))


def counted(candidate: Committed) -> float:
    return candidate.manifest.sequence


def committed_at(candidate: Committed) -> float:
    """Return the commit time, to order checkpoints of folders with separate numbering."""
    return candidate.manifest.committed_unix_s


def newest_of_tiers(
    directories: Sequence[Path],
    check: Callable[[Path, str], list[Problem]] = verify,
    when: Callable[[Committed], float] = counted,
) -> Choice:
    """Return the newest checkpoint of all tiers that verifies; of two copies, the first folder's."""
    passed_over: dict[str, str] = {}
    candidates = []
    for directory in directories:
        recover_replaced(directory, Files())
        for tag, reason in damaged(directory).items():
            passed_over[_named(directory / tag, directories)] = reason
        candidates += committed(directory)
    # Stable: of two copies of one checkpoint, the first tier's comes first.
    for candidate in sorted(candidates, key=when, reverse=True):
        folder = candidate.folder
        problems = check(folder.parent, folder.name)
        if not problems:
            return Choice(folder.name, candidate.manifest.step, passed_over, folder.parent)
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        passed_over[_named(folder, directories)] = f"{problems[0]}{more}"
    return Choice(None, None, passed_over)


def _named(folder: Path, directories: Sequence[Path]) -> str:
    """Return a tag alone where there is one folder only."""
    return folder.name if len(directories) == 1 else str(folder)


class Resumption:
    """Decides, the same on all ranks, what ``load_checkpoint`` loads.

    ``latest`` is the law: it is what DeepSpeed goes by, what people edit by hand to go back, and
    what a save with ``save_latest=False`` leaves alone. A damaged target is an error and no silent
    step back; only the other tier's copy of the same checkpoint may stand for it.
    """

    def __init__(self, peers: Peers, tiers: Tiers | None) -> None:
        self._peers = peers
        self._tiers = tiers
        self._needed: Callable[[str], bool] = lambda _: True
        # Of a checkpoint's folder: what this rank misses of the state that lies on storage.
        self.stored_problem: Callable[[Path], str] = lambda _: ""

    def choose(self, load_dir: Path, tag: str | None, needed: Callable[[str], bool] = lambda _: True) -> Choice:
        """Return the checkpoint to load; ``tag`` is None where there is none, as DeepSpeed has it.

        Args:
            needed: by a file's path in the checkpoint: whether it will be read.

        Raises:
            CheckpointError: it is not whole; names the newest one that is.
        """
        self._needed = needed
        # Rank 0 writes `latest` last, when the others have seen their commit already: one that went
        # by what it finds before that would load nothing, and wait for ever for those that do.
        self._peers.concat([])
        directories = self._directories(load_dir)
        for directory in directories:
            settle(directory)
            restore_deleted(directory)
            restore_deleted(directory.parent)
            recover_replaced(directory, Files())
        if tag is None:
            named = [Candidate.of(d, t) for d in directories if (t := named_latest(d))]
            if not named:
                self._refuse_empty(directories)
                return Choice(None, None, {}, load_dir)
            # Stable: of two copies of one checkpoint, the first tier's.
            target = max(named, key=lambda c: c.sequence)
        else:
            copies = [Candidate.of(d, tag) for d in directories]
            target = next((c for c in copies if c.ours), copies[0])
        return self._whole(target, directories)

    def _refuse_empty(self, directories: Sequence[Path]) -> None:
        for directory in directories:
            if named_latest(directory) is not None:
                raise CheckpointError(
                    f"the file {directory / 'latest'} must name the checkpoint to load, but is "
                    f"empty. {self._advice(directories)}"
                )

    def _directories(self, load_dir: Path) -> list[Path]:
        if self._tiers is None or not self._tiers.holds(load_dir):
            return [load_dir]
        tiers = [self._tiers.fast, self._tiers.durable]
        return sorted(tiers, key=lambda tier: tier.resolve() != load_dir.resolve())

    def _whole(self, target: "Candidate", directories: Sequence[Path]) -> Choice:
        copies = [target, *(Candidate.of(d, target.tag) for d in directories)]
        passed_over: dict[str, str] = {}
        for copy in copies:
            if copy.nonce != target.nonce or str(copy.folder) in passed_over:
                continue
            problem = self._problem(copy)
            if not problem:
                return Choice(copy.tag, copy.step, passed_over, copy.directory)
            passed_over[str(copy.folder)] = problem
        raise CheckpointError(
            f"the checkpoint to load, {target.folder}, must be whole, but "
            f"{next(iter(passed_over.values()))}. {self._advice(directories)}"
        )

    def _problem(self, copy: "Candidate") -> str:
        if copy.ours:
            problems = self._problems(copy.directory, copy.tag)
            more = f" and {len(problems) - 1} problems more" if len(problems) > 1 else ""
            return f"{problems[0]}{more}" if problems else ""
        if not copy.folder.is_dir():
            return "there is no such folder"
        if (copy.folder / RANKS_FOLDER).exists():
            return f"it has no {GLOBAL_NAME}: it was not committed, or was torn since"
        return ""  # DeepSpeed's own: nothing tells whether it is whole

    def _problems(self, directory: Path, tag: str) -> list[Problem]:
        """Return the problems found by all ranks, each reading its share."""
        share = (self._peers.rank, self._peers.world_size)
        problems = verify(directory, tag, share=share, needed=self._needed)
        missing = self.stored_problem(directory / tag)
        if missing:
            problems.append(Problem(stored_name(self._peers.rank), missing))
        return self._peers.concat(problems)

    def _advice(self, directories: Sequence[Path]) -> str:
        good = newest_of_tiers(directories, self._problems)
        if good.folder is None:
            good = newest_of_tiers(siblings(directories[0]), self._problems, when=committed_at)
        if good.folder is None:
            return "No other checkpoint here is whole"
        return (
            f"The newest one that is: {good.folder} of step {good.step} "
            f"(load_dir={str(good.directory)!r}, tag={good.tag!r})"
        )


@dataclass(frozen=True)
class Candidate:
    """A folder that may hold a checkpoint, and what its manifest says; ``nonce`` empty: none."""

    directory: Path
    tag: str
    nonce: str = ""
    step: int | None = None
    sequence: int = 0

    @classmethod
    def of(cls, directory: Path, tag: str) -> "Candidate":
        try:
            data = (directory / tag / GLOBAL_NAME).read_bytes()
            page = parse(data, GlobalManifest, GLOBAL_NAME)
        except (OSError, ManifestError):
            return cls(directory, tag)
        return cls(directory, tag, page.nonce, page.step, page.sequence)

    @property
    def folder(self) -> Path:
        return self.directory / self.tag

    @property
    def ours(self) -> bool:
        return (self.folder / GLOBAL_NAME).is_file()
