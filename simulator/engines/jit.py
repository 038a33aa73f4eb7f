"""numba where it is installed; else the same functions as plain Python, slower."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., object])

try:
    from numba import njit as _njit

    HAS_NUMBA = True
except ImportError:  # pragma: no cover - numba is a dependency; this is the way without it
    HAS_NUMBA = False


def compiled(function: Function) -> Function:
    """Compiles once per machine (cached on disk) and releases the GIL while running.

    No fast maths: the results must be those of the reference engine.
    """
    return _compiled(function, inline="never")


def inlined(function: Function) -> Function:
    """Becomes part of its caller: a call would count references of every array it is given."""
    return _compiled(function, inline="always")


def _compiled(function: Function, inline: Literal["never", "always"]) -> Function:
    if not HAS_NUMBA:
        return function
    decorate = _njit(cache=True, nogil=True, error_model="numpy", inline=inline)
    return cast("Function", decorate(function))
