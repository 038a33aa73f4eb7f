"""Picks the checkpoint to resume from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from runtime.checkpoint.commit import recover_replaced
from runtime.checkpoint.files import Files
from runtime.checkpoint.inspect import Problem, verify
from runtime.checkpoint.retention import committed, damaged


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
    def summary(self) -> str:
        """One line for the log."""
        chosen = "no checkpoint verifies" if self.tag is None else f"resuming from {self.tag!r}"
        over = "; ".join(f"passed over {tag!r}: {why}" for tag, why in self.passed_over.items())
        return f"{chosen}{'; ' + over if over else ''}"


def newest_valid(
    directory: str | Path,
    check: Callable[[str], list[Problem]] | None = None,
) -> Choice:
    """The newest committed checkpoint of a folder whose every byte matches its manifest.

    Args:
        check: verifies one tag; the default reads all of it. Ranks pass one that shares the work.
    """
    directory = Path(directory)
    check_one = check or (lambda tag: verify(directory, tag))
    return newest_of_tiers([directory], lambda _, tag: check_one(tag))


def newest_of_tiers(
    directories: Sequence[Path], check: Callable[[Path, str], list[Problem]] = verify
) -> Choice:
    """The newest checkpoint of all tiers that verifies; of two copies, the first folder's."""
    passed_over: dict[str, str] = {}
    candidates = []
    for directory in directories:
        recover_replaced(directory, Files())
        for tag, reason in damaged(directory).items():
            passed_over[_named(directory / tag, directories)] = reason
        candidates += committed(directory)
    # Stable: of two copies of one checkpoint, the first tier's comes first.
    for candidate in sorted(candidates, key=lambda c: c.manifest.sequence, reverse=True):
        folder = candidate.folder
        problems = check(folder.parent, folder.name)
        if not problems:
            return Choice(folder.name, candidate.manifest.step, passed_over, folder.parent)
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        passed_over[_named(folder, directories)] = f"{problems[0]}{more}"
    return Choice(None, None, passed_over)


def _named(folder: Path, directories: Sequence[Path]) -> str:
    """A tag alone where there is one folder only."""
    return folder.name if len(directories) == 1 else str(folder)
