"""The search for the best training plan, and the ``tune`` command."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbtide.tuner.placements.division import ImpossibleError
    from ebbtide.tuner.placements.planning import plan

__all__ = ["ImpossibleError", "plan"]


def __getattr__(name: str) -> Any:
    # numba loads on first use, so that `tune --help` stays fast.
    if name == "plan":
        from ebbtide.tuner.placements.planning import plan

        return plan
    if name == "ImpossibleError":
        from ebbtide.tuner.placements.division import ImpossibleError

        return ImpossibleError
    raise AttributeError(f"module 'ebbtide.tuner' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
