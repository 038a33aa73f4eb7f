"""A pause of Python's cyclic garbage collector, for commands that plan."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disable Python's cyclic garbage collector in the ``with`` block.

    Importing and planning create many long-lived objects and hardly any reference cycles. To traverse them again and
    again would take up to a fifth of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
