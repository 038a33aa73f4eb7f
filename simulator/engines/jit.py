"""Compilation of Python functions by numba."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

from ebbtide.simulator.engines.cache import cache_dir
from numba import config, njit
from numba.core import event
from numba.core.options import DefaultOptions

logger = logging.getLogger("ebbtide")

Function = TypeVar("Function", bound=Callable[..., object])
Names = dict[str, Any]  # the names that a module defines

# numba's private option. If a later numba renames it, references are counted as usual, which is slower.
_UNCOUNTED = {"_nrt": False, "forceinline": True} if hasattr(DefaultOptions, "_nrt") else {}


class _CompileNotice(event.Listener):
    """A log message when numba compiles a function of ebbtide, because it is not in the cache on disk."""

    written = False  # once in a process

    def on_start(self, event: Any) -> None:
        if not self.written and event.data["dispatcher"].py_func.__module__.startswith("ebbtide."):
            self.written = True
            # A warning, because Python shows warnings on stderr where no program has configured logging.
            logger.warning("ebbtide compiles its simulator for this machine, once: 10 to 30 s")

    def on_end(self, event: Any) -> None:
        pass


event.register("numba:compile", _CompileNotice())  # type: ignore[no-untyped-call]


def compiled(function: Function) -> Function:
    """Compile a function with numba, and cache the machine code on disk. The compiled function releases the GIL."""
    # numba's option for fast maths is off, because results must be identical to those of the reference simulator.
    return _compiled(function)


def uncounted(function: Function) -> Function:
    """Compile a function with numba as `compiled` does, but without counting references to arrays."""
    # Such functions run in inner loops, where counting would take longer than their arithmetic. They must not allocate
    # arrays, and their callers must keep the arrays alive.
    return _compiled(function, **_UNCOUNTED)


def _compiled(function: Function, **options: Any) -> Function:
    decorate = njit(cache=True, nogil=True, error_model="numpy", **options)
    with _cached_below(_built_in(function)):
        return cast("Function", decorate(function))


def _built_in(function: Callable[..., object]) -> str:
    # numba's cache on disk checks only the function's own file. Without this hash it would run outdated code.
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
    settings: Any = config
    before, here = settings.CACHE_DIR, Path(__file__).parent
    own = here / "__pycache__" if os.access(here, os.W_OK) else cache_dir()
    settings.CACHE_DIR = str(Path(before or own) / name)
    try:
        yield
    finally:
        settings.CACHE_DIR = before
