"""What DeepSpeed does again for every engine, and a process that makes many need not."""

import atexit
import functools
import gc


def answer_once() -> None:
    """For a process that makes many engines, of which none is timed."""
    import deepspeed.runtime.engine  # noqa: F401 - what is frozen below

    remember_processor()
    freeze_heap()


def remember_processor() -> None:
    """Every CPU optimizer of DeepSpeed's, and every op that it loads, reads the processor's name in
    a process of its own, which takes over a second.
    """
    import cpuinfo

    if not hasattr(cpuinfo.get_cpu_info, "cache_info"):
        cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)


def freeze_heap() -> None:
    """DeepSpeed collects all garbage whenever it makes a ZeRO-3 engine, and Accelerate whenever it
    prepares one: 1.5 s to look at what was imported, and more with each engine before, which its
    own hooks keep. Nobody looks at what is there by now again.
    """
    _unfreeze_at_exit()
    gc.collect()
    gc.freeze()


@functools.cache
def _unfreeze_at_exit() -> None:
    """Else Triton calls its own types leaked. Asked of gc, whether anything is frozen takes 0.1 s:
    it counts all of it.
    """
    atexit.register(gc.unfreeze)
