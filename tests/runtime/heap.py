"""What every engine of a test process would pay for again."""

import atexit
import functools
import gc
import sys


@functools.cache
def freeze():
    """DeepSpeed collects all garbage whenever it makes a ZeRO-3 engine: 1.5 s to look at what was
    imported, each time. From here on nobody looks at that.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # else Triton calls its own types leaked


def freeze_imports():
    """Once DeepSpeed is there."""
    if "deepspeed.runtime.engine" in sys.modules:
        freeze()
