"""The choice of the checkpoint to resume from, which is the one that DeepSpeed would load.

If files of this checkpoint are missing or damaged, the load fails with an error that names the newest complete
checkpoint.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ebbtide.runtime.checkpoint.errors import CheckpointError, ManifestError
from ebbtide.runtime.checkpoint.files import Files
from ebbtide.runtime.checkpoint.format.manifest import GLOBAL_NAME, RANKS_FOLDER, GlobalManifest, parse, stored_name
from ebbtide.runtime.checkpoint.protocol.inspect import Problem, verify
from ebbtide.runtime.checkpoint.protocol.peers import Peers
from ebbtide.runtime.checkpoint.protocol.publishing import recover_replaced
from ebbtide.runtime.checkpoint.protocol.retention import Committed, committed, damaged, named_latest, siblings
from ebbtide.runtime.checkpoint.protocol.rotation import restore_deleted, settle


@dataclass(frozen=True)
class Choice:
    """The checkpoint that was chosen for loading.

    Attributes:
        tag: Name of the checkpoint's folder. None if there is no checkpoint to load.
        step: Number of optimizer steps done.
        passed_over: Rejected checkpoints, each with the reason. A checkpoint is rejected if it is newer than the chosen
            one and fails verification, or if its manifest is unreadable.
        directory: Parent of the checkpoint's folder.
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
        """Return one line for the log with the chosen checkpoint and the rejected ones."""
        chosen = "no checkpoint is intact" if self.tag is None else f"resuming from {self.tag!r}"
        over = "; ".join(f"skipped {tag!r}: {why}" for tag, why in self.passed_over.items())
        return f"{chosen}{'; ' + over if over else ''}"


def newest_valid(directory: str | Path, check: Callable[[str], list[Problem]] | None = None) -> Choice:
    """Return the newest committed checkpoint of a folder whose files agree with the checkpoint's manifest
    in every byte.

    Args:
        check: Function that verifies the checkpoint with a given tag. The default function reads all its
            files. With several ranks, pass a function that reads only this rank's share of the files.
    """
    directory = Path(directory)
    check_one = check or (lambda tag: verify(directory, tag))
    return newest_of([directory], lambda _, tag: check_one(tag))


def counted(candidate: Committed) -> float:
    return candidate.manifest.sequence


def committed_at(candidate: Committed) -> float:
    """Return the Unix time in seconds at which a checkpoint was committed.

    These times tell which of two checkpoints in different folders is newer. The checkpoints' numbers cannot tell,
    because each folder numbers its own checkpoints.
    """
    return candidate.manifest.committed_unix_s


def newest_of(
    directories: Sequence[Path],
    check: Callable[[Path, str], list[Problem]] = verify,
    when: Callable[[Committed], float] = counted,
) -> Choice:
    """Return the newest checkpoint that passes verification, among the checkpoints of several folders.

    Args:
        check: Function that returns the problems of the checkpoint with a given folder and tag.
        when: Function that returns the number or time by which checkpoints are ordered. The default is the
            checkpoint's number in its folder.
    """
    passed_over: dict[str, str] = {}
    candidates = []
    for directory in directories:
        recover_replaced(directory, Files())
        for tag, reason in damaged(directory).items():
            passed_over[_named(directory / tag, directories)] = reason
        candidates += committed(directory)
    for candidate in sorted(candidates, key=when, reverse=True):
        folder = candidate.folder
        problems = check(folder.parent, folder.name)
        if not problems:
            return Choice(folder.name, candidate.manifest.step, passed_over, folder.parent)
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        passed_over[_named(folder, directories)] = f"{problems[0]}{more}"
    return Choice(None, None, passed_over)


def _named(folder: Path, directories: Sequence[Path]) -> str:
    return folder.name if len(directories) == 1 else str(folder)


class Resumption:
    """The choice of the checkpoint that ``load_checkpoint`` loads, which is the same on all ranks.

    The choice follows the file ``latest``, as DeepSpeed does. Users edit this file to go back, and a save with
    ``save_latest=False`` leaves it unchanged. A damaged checkpoint is an error: an older checkpoint is never
    loaded silently in its place.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._needed: Callable[[str], bool] = lambda _: True
        # Of a checkpoint's folder: what this rank misses of the state that lies on storage.
        self.stored_problem: Callable[[Path], str] = lambda _: ""

    def choose(self, load_dir: Path, tag: str | None, needed: Callable[[str], bool] = lambda _: True) -> Choice:
        """Return the checkpoint to load. Its ``tag`` is None if the folder has no checkpoint, as in DeepSpeed.

        Args:
            needed: Function that returns whether a file, given by its path in the checkpoint, will be read.

        Raises:
            CheckpointError: The checkpoint is not complete. The message names the newest complete one.
        """
        self._needed = needed
        # Rank 0 writes `latest` last, when the others have seen their commit already: one that went
        # by what it finds before that would load nothing, and wait for ever for those that do.
        self._peers.concat([])
        settle(load_dir)
        restore_deleted(load_dir)
        restore_deleted(load_dir.parent)
        recover_replaced(load_dir, Files())
        if tag is None:
            tag = named_latest(load_dir)
            if not tag:
                self._refuse_empty(load_dir)
                return Choice(None, None, {}, load_dir)
        target = Candidate.of(load_dir, tag)
        problem = self._problem(target)
        if problem:
            raise CheckpointError(
                f"the checkpoint to load, {target.folder}, must be whole, but {problem}. {self._advice(load_dir)}"
            )
        return Choice(tag, target.step, {}, load_dir)

    def _refuse_empty(self, load_dir: Path) -> None:
        if named_latest(load_dir) is not None:
            raise CheckpointError(
                f"the file {load_dir / 'latest'} must name the checkpoint to load, but is "
                f"empty. {self._advice(load_dir)}"
            )

    def _problem(self, copy: "Candidate") -> str:
        if copy.ours:
            problems = self._problems(copy.directory, copy.tag)
            more = f" and {len(problems) - 1} more problems" if len(problems) > 1 else ""
            return f"{problems[0]}{more}" if problems else ""
        if not copy.folder.is_dir():
            return "there is no such folder"
        if (copy.folder / RANKS_FOLDER).exists():
            return f"it has no file {GLOBAL_NAME}: it was never committed, or was damaged later"
        return ""  # DeepSpeed's own: nothing tells whether it is whole

    def _problems(self, directory: Path, tag: str) -> list[Problem]:
        share = (self._peers.rank, self._peers.world_size)
        problems = verify(directory, tag, share=share, needed=self._needed)
        missing = self.stored_problem(directory / tag)
        if missing:
            problems.append(Problem(stored_name(self._peers.rank), missing))
        return self._peers.concat(problems)

    def _advice(self, load_dir: Path) -> str:
        good = newest_of([load_dir], self._problems)
        if good.folder is None:
            good = newest_of(siblings(load_dir), self._problems, when=committed_at)
        if good.folder is None:
            return "There is no other whole checkpoint here"
        return (
            f"The newest whole checkpoint: {good.folder} of step {good.step} "
            f"(load_dir={str(good.directory)!r}, tag={good.tag!r})"
        )


@dataclass(frozen=True)
class Candidate:
    """A folder that may hold a checkpoint, with values from the checkpoint's manifest.

    Attributes:
        directory: Parent of the folder. It has one folder per checkpoint.
        tag: Name of the folder.
        nonce: Identifier of the attempt to save that wrote the checkpoint. Empty if the folder has no readable
            manifest.
        step: Number of optimizer steps done. None if the folder has no readable manifest.
        sequence: Number of the checkpoint among those in ``directory``. The newest checkpoint has the highest number.
    """

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
