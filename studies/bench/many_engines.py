"""What DeepSpeed does again for every engine that a process makes, and need not."""

from __future__ import annotations

import atexit
import functools
import gc


@functools.cache
def answer_once() -> None:
    """For a process that makes many engines, of which none is timed.

    Every CPU optimizer of DeepSpeed's reads the processor's name in a process of its own (over a
    second), and every ZeRO-3 engine has all garbage collected (1.5 s to look at what was imported,
    at which nobody looks from here on).
    """
    import cpuinfo
    import deepspeed.runtime.engine  # noqa: F401 - what is frozen below

    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # else Triton calls its own types leaked
