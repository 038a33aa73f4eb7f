"""The choice of the checkpoint to resume from, which is the one that DeepSpeed would load.

If files of this checkpoint are missing or damaged, the load fails with an error that names the newest complete
checkpoint.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from ebbtide.runtime.checkpoint.errors import CheckpointError
from ebbtide.runtime.checkpoint.files import Files
from ebbtide.runtime.checkpoint.format.manifest import GLOBAL_NAME, RANKS_FOLDER, stored_name
from ebbtide.runtime.checkpoint.protocol.inspect import Problem, verify
from ebbtide.runtime.checkpoint.protocol.peers import Peers
from ebbtide.runtime.checkpoint.protocol.publishing import recover_replaced
from ebbtide.runtime.checkpoint.protocol.retention import Committed, committed, named_latest, siblings
from ebbtide.runtime.checkpoint.protocol.rotation import restore_deleted, settle


def committed_at(candidate: Committed) -> float:
    """Return the Unix time in seconds at which a checkpoint was committed."""
    # These times tell which of two checkpoints in different folders is newer. The checkpoints' numbers cannot tell,
    # because each folder numbers its own checkpoints.
    return candidate.manifest.committed_unix_s


def newest_whole(
    directories: Sequence[Path],
    check: Callable[[Path, str], list[Problem]] = verify,
    when: Callable[[Committed], float] = lambda candidate: candidate.manifest.sequence,
) -> Committed | None:
    """Return the newest checkpoint that passes verification, among the checkpoints of several folders.

    Args:
        check: Function that returns the problems of the checkpoint with a given folder and tag.
        when: Function that returns the number or time by which checkpoints are ordered. The default is the
            checkpoint's number in its folder.
    """
    for directory in directories:
        recover_replaced(directory, Files())
    candidates = [found for directory in directories for found in committed(directory)]
    newest_first = sorted(candidates, key=when, reverse=True)
    return next((c for c in newest_first if not check(c.folder.parent, c.folder.name)), None)


class Resumption:
    """The choice of the checkpoint that ``load_checkpoint`` loads, which is the same on all ranks.

    The choice follows the file ``latest``, as DeepSpeed does. Users edit this file to go back, and a save with
    ``save_latest=False`` leaves it unchanged. A damaged checkpoint is an error: an older checkpoint is never
    loaded silently in its place.
    """

    def __init__(self, peers: Peers, stored_problem: Callable[[Path], str] = lambda _: "") -> None:
        """Create the object. Nothing is read yet."""
        self._peers, self._stored_problem = peers, stored_problem
        self._needed: Callable[[str], bool] = lambda _: True

    def choose(self, load_dir: Path, tag: str | None, needed: Callable[[str], bool] = lambda _: True) -> str | None:
        """Return the tag of the checkpoint to load. It is None if the folder has no checkpoint, as in DeepSpeed.

        Args:
            needed: Function that returns whether a file, given by its path in the checkpoint, will be read.

        Raises:
            CheckpointError: The checkpoint is not complete. The message names the newest complete one.
        """
        self._needed = needed
        # Wait for rank 0, which writes `latest` last, after the others have seen the commit. A rank that read the older
        # `latest` would load nothing, and wait forever for the ranks that load.
        self._peers.concat([])
        settle(load_dir)
        restore_deleted(load_dir)
        restore_deleted(load_dir.parent)
        recover_replaced(load_dir, Files())
        if tag is None:
            tag = named_latest(load_dir)
            if not tag:
                self._refuse_empty(load_dir)
                return None
        problem = self._problem(load_dir, tag)
        if problem:
            raise CheckpointError(
                f"the checkpoint to load, {load_dir / tag}, must be whole, but {problem}. {self._advice(load_dir)}"
            )
        return tag

    def _refuse_empty(self, load_dir: Path) -> None:
        if named_latest(load_dir) is not None:
            raise CheckpointError(
                f"the file {load_dir / 'latest'} must name the checkpoint to load, but is "
                f"empty. {self._advice(load_dir)}"
            )

    def _problem(self, load_dir: Path, tag: str) -> str:
        folder = load_dir / tag
        if (folder / GLOBAL_NAME).is_file():
            problems = self._problems(load_dir, tag)
            more = f" and {len(problems) - 1} more problems" if len(problems) > 1 else ""
            return f"{problems[0]}{more}" if problems else ""
        if not folder.is_dir():
            return "there is no such folder"
        if (folder / RANKS_FOLDER).exists():
            return f"it has no file {GLOBAL_NAME}: it was never committed, or was damaged later"
        return ""  # DeepSpeed's own checkpoint, which has no sign that it is complete

    def _problems(self, directory: Path, tag: str) -> list[Problem]:
        share = (self._peers.rank, self._peers.world_size)
        problems = verify(directory, tag, share=share, needed=self._needed)
        missing = self._stored_problem(directory / tag)
        if missing:
            problems.append(Problem(stored_name(self._peers.rank), missing))
        return self._peers.concat(problems)

    def _advice(self, load_dir: Path) -> str:
        good = newest_whole([load_dir], self._problems)
        if good is None:
            good = newest_whole(siblings(load_dir), self._problems, when=committed_at)
        if good is None:
            return "There is no other whole checkpoint here"
        return (
            f"The newest whole checkpoint: {good.folder} of step {good.manifest.step} "
            f"(load_dir={str(good.folder.parent)!r}, tag={good.folder.name!r})"
        )
