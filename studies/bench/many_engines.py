"""Speed-ups for a process that builds many DeepSpeed engines: work common to all engines is done once."""

import atexit
import functools
import gc


def answer_once() -> None:
    """Speed up the building of many DeepSpeed engines in this process, by doing their common work only once, and by
    leaving out log texts and marks for a profiler that nobody reads.

    Call it only if the process measures no engine's speed.
    """
    import deepspeed.runtime.engine  # noqa: F401 - what is frozen below

    remember_processor()
    format_nothing()
    freeze_heap()


def remember_processor() -> None:
    """Make DeepSpeed read the name of the CPU model only once per process."""
    # Otherwise every CPU optimizer and every op builder of DeepSpeed starts a separate process to read the name, which
    # takes over a second.
    import cpuinfo

    if not hasattr(cpuinfo.get_cpu_info, "cache_info"):
        cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)


def format_nothing() -> None:
    """Make DeepSpeed neither format parameters nor mark functions for a profiler in this process.

    Each engine formats the values of all its parameters for a log that is not shown, and makes thousands of marks in
    each training step.
    """
    import deepspeed.utils.nvtx
    import torch

    torch.nn.Parameter.__repr__ = object.__repr__  # type: ignore[assignment,method-assign]
    deepspeed.utils.nvtx.enable_nvtx = False


def freeze_heap() -> None:
    """Exclude all present Python objects from later garbage collections, to speed up building engines."""
    # DeepSpeed collects garbage whenever it builds a ZeRO-3 engine, and Accelerate whenever it prepares one. A
    # collection takes 1.5 s for the imported modules. It takes longer with each earlier engine, because DeepSpeed's
    # hooks keep engines alive.
    _unfreeze_at_exit()
    gc.collect()
    gc.freeze()


@functools.cache
def _unfreeze_at_exit() -> None:
    # Without `gc.unfreeze`, Triton would report its own types as leaked. The function is cached, so only its first call
    # has an effect.
    atexit.register(gc.unfreeze)
