"""Shortcuts for a process that makes many DeepSpeed engines: work repeated for each is done once."""

import atexit
import functools
import gc


def answer_once() -> None:
    """Speed up a process that makes many DeepSpeed engines and times none of them."""
    import deepspeed.runtime.engine  # noqa: F401 - what is frozen below

    remember_processor()
    freeze_heap()


def remember_processor() -> None:
    """Read the processor's name only once per process.

    Every CPU optimizer and every op of DeepSpeed reads the name in a separate process, which takes
    over a second.
    """
    import cpuinfo

    if not hasattr(cpuinfo.get_cpu_info, "cache_info"):
        cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)


def freeze_heap() -> None:
    """Exclude all present Python objects from later garbage collections.

    DeepSpeed collects all garbage whenever it makes a ZeRO-3 engine, and Accelerate whenever it
    prepares one. A collection takes 1.5 s for the imported modules, and longer with each earlier
    engine, which its own hooks keep alive.
    """
    _unfreeze_at_exit()
    gc.collect()
    gc.freeze()


@functools.cache
def _unfreeze_at_exit() -> None:
    """Register an unfreeze of all objects at exit, because Triton would report its own types as leaked.

    The call is cached, because asking gc for frozen objects takes 0.1 s.
    """
    atexit.register(gc.unfreeze)
