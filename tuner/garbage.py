"""A pause of Python's search for garbage, for commands that plan."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Pause Python's search for garbage in reference cycles.

    Importing and planning keep many objects and make hardly any cycles. Looking through all objects of the process
    again and again would take up to a fifth of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
