"""DeepSpeed's repeated work for every engine, done once in a process that makes many engines."""

import atexit
import functools
import gc


def answer_once() -> None:
    """Prepare a process that makes many engines and times none of them."""
    import deepspeed.runtime.engine  # noqa: F401 - what is frozen below

    remember_processor()
    freeze_heap()


def remember_processor() -> None:
    """Read the processor's name once.

    Every CPU optimizer of DeepSpeed, and every op that it loads, reads it in a separate process, which
    takes over a second.
    """
    import cpuinfo

    if not hasattr(cpuinfo.get_cpu_info, "cache_info"):
        cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)


def freeze_heap() -> None:
    """Freeze the present objects, so that garbage collections do not look at them again.

    DeepSpeed collects all garbage whenever it makes a ZeRO-3 engine, and Accelerate whenever it
    prepares one. That takes 1.5 s for the imported modules, and more with each earlier engine, which
    its own hooks keep alive.
    """
    _unfreeze_at_exit()
    gc.collect()
    gc.freeze()


@functools.cache
def _unfreeze_at_exit() -> None:
    """Unfreeze at exit, because Triton would report its own types as leaked.

    Asking gc whether anything is frozen takes 0.1 s: it counts everything.
    """
    atexit.register(gc.unfreeze)
