"""The result of one check of ``tune doctor``."""

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "slow", "bad"]


@dataclass(frozen=True)
class Finding:
    """The result of one check of ``tune doctor``, which is one line of its output.

    Attributes:
        state: ``ok``, ``slow`` if training works but is slower than possible, or ``bad`` if training does not
            work or is not safe.
        detail: Text on what was found.
        fix: Change to make. Empty if none is needed.
    """

    name: str
    state: State
    detail: str
    fix: str = ""

    def __post_init__(self) -> None:
        if (self.state != "ok") != bool(self.fix):
            raise ValueError(
                "a finding of tune doctor must have a fix if its state is not 'ok', and none if its state is 'ok', "
                f"but {self.name!r} has state={self.state!r} and fix={self.fix!r}"
            )


def ok(name: str, detail: str) -> Finding:
    return Finding(name, "ok", detail)


def slow(name: str, detail: str, fix: str) -> Finding:
    return Finding(name, "slow", detail, fix)


def bad(name: str, detail: str, fix: str) -> Finding:
    return Finding(name, "bad", detail, fix)
