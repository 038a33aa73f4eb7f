"""What every engine of a test process would pay for again."""

import atexit
import gc
import sys


def freeze():
    """DeepSpeed collects all garbage whenever it makes a ZeRO-3 engine: 1.5 s to look at what was
    imported, and more with each engine before, which its own hooks keep. Nobody looks at what is
    there by now again.
    """
    if not gc.get_freeze_count():
        atexit.register(gc.unfreeze)  # else Triton calls its own types leaked
    gc.collect()
    gc.freeze()


def freeze_imports():
    """Once DeepSpeed is there."""
    if "deepspeed.runtime.engine" in sys.modules:
        freeze()
