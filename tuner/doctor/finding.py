"""A finding of ``tune doctor``."""

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "slow", "bad"]


@dataclass(frozen=True)
class Finding:
    """One line of the output of ``tune doctor``.

    Attributes:
        name: Name of the checked thing.
        state: ``slow`` means that training works, but slower than possible. ``bad`` means that training does
            not work, or not safely.
        detail: What was found.
        fix: Change to make. Empty if none is needed.
    """

    name: str
    state: State
    detail: str
    fix: str = ""

    def __post_init__(self) -> None:
        if (self.state != "ok") != bool(self.fix):
            raise ValueError(
                "a finding must have a fix exactly if something is wrong, but got "
                f"state={self.state!r} and fix={self.fix!r} ({self.name})"
            )


def ok(name: str, detail: str) -> Finding:
    return Finding(name, "ok", detail)


def slow(name: str, detail: str, fix: str) -> Finding:
    return Finding(name, "slow", detail, fix)


def bad(name: str, detail: str, fix: str) -> Finding:
    return Finding(name, "bad", detail, fix)
