"""Compilation of functions by numba. Without numba the same functions run as slower plain Python."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

from ebbtide.simulator.engines.cache import cache_dir

Function = TypeVar("Function", bound=Callable[..., object])
Names = dict[str, Any]  # of a module

try:
    from numba import config
    from numba import njit as _njit
    from numba.core.options import DefaultOptions

    HAS_NUMBA = True
    # numba's own name for it; where a later numba has another, references are counted again.
    _UNCOUNTED = {"_nrt": False, "forceinline": True} if hasattr(DefaultOptions, "_nrt") else {}
except ImportError:  # pragma: no cover - numba is a dependency; this is the way without it
    HAS_NUMBA, _UNCOUNTED = False, {}


def compiled(function: Function) -> Function:
    """Compile a function with numba, cached on disk, such that it releases the GIL while it runs.

    Fast maths is off, because the results must equal those of the reference engine.
    """
    return _compiled(function)


def uncounted(function: Function) -> Function:
    """Compile a function with numba like `compiled`, but without reference counts of arrays.

    This is for functions that allocate no array and run in loops, in which counting takes longer than the
    arithmetic. Their callers hold the arrays.
    """
    return _compiled(function, **_UNCOUNTED)


def _compiled(function: Function, **options: Any) -> Function:
    if not HAS_NUMBA:
        return function
    decorate = _njit(cache=True, nogil=True, error_model="numpy", **options)
    with _cached_below(_built_in(function)):
        return cast("Function", decorate(function))


def _built_in(function: Callable[..., object]) -> str:
    """Return a digest of all code and constants compiled into a function that its own file does not show.

    These are constants of other modules, functions of other files, and this file's settings. numba checks
    only the function's own file, and would otherwise run an outdated compilation.
    """
    spaces = _reached(function.__globals__, {})
    texts = [
        f"{file} {name} {value!r}"
        for file, known in spaces.items()
        for name, value in known.items()
        if isinstance(value, int | float | str | tuple) and not name.startswith("__")
    ]
    beside = {*spaces, __file__} - {function.__code__.co_filename}
    texts += [Path(file).read_text(encoding="utf-8") for file in beside]
    return sha256("\0".join(sorted(texts)).encode()).hexdigest()[:16]


def _reached(known: Names, found: dict[str, Names]) -> dict[str, Names]:
    """Return, by file, the names of a module and of all modules with compiled functions that it uses."""
    if known["__file__"] not in found:
        found[known["__file__"]] = known
        for value in [*known.values()]:
            if _is_compiled(value):
                _reached(value.py_func.__globals__, found)
            elif isinstance(value, ModuleType) and any(map(_is_compiled, vars(value).values())):
                _reached(vars(value), found)
    return found


def _is_compiled(value: object) -> bool:
    return hasattr(value, "py_func")


@contextmanager
def _cached_below(name: str) -> Iterator[None]:
    """Set numba's cache folder to a subfolder of this name within the context."""
    settings: Any = config
    before, here = settings.CACHE_DIR, Path(__file__).parent
    own = here / "__pycache__" if os.access(here, os.W_OK) else cache_dir()
    settings.CACHE_DIR = str(Path(before or own) / name)
    try:
        yield
    finally:
        settings.CACHE_DIR = before
