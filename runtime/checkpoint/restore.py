"""Picks the checkpoint to resume from."""

from __future__ import annotations

from collections.abc import Callable
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
    """

    tag: str | None
    step: int | None = None
    passed_over: dict[str, str] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """One line for the log."""
        chosen = "no checkpoint verifies" if self.tag is None else f"resuming from {self.tag!r}"
        over = "; ".join(f"passed over {tag!r}: {why}" for tag, why in self.passed_over.items())
        return f"{chosen}{'; ' + over if over else ''}"


def newest_valid(
    directory: str | Path, check: Callable[[str], list[Problem]] | None = None
) -> Choice:
    """The newest committed checkpoint of a folder whose every byte matches its manifest.

    Args:
        check: verifies one tag; the default reads all of it. Ranks pass one that shares the work.
    """
    directory = Path(directory)
    recover_replaced(directory, Files())
    check = check or (lambda tag: verify(directory, tag))
    passed_over = damaged(directory)
    for candidate in committed(directory):
        tag = candidate.folder.name
        problems = check(tag)
        if not problems:
            return Choice(tag, candidate.manifest.step, passed_over)
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        passed_over[tag] = f"{problems[0]}{more}"
    return Choice(None, None, passed_over)
