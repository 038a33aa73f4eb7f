"""One finding of the doctor."""

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "slow", "bad"]


@dataclass(frozen=True)
class Finding:
    """One line of `tune doctor`.

    Attributes:
        name: what was looked at.
        state: ``slow``: trains, but worse than it could; ``bad``: does not train, or not safely.
        detail: what is there.
        fix: what to change; empty where nothing needs to be.
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
