"""A switch that stops DeepSpeed's throughput timer from making the host wait for the whole GPU in every
step.
"""

from typing import Any


def keep_flowing(engine: Any) -> None:
    """Stop DeepSpeed's `ThroughputTimer` from synchronizing the GPU, until the engine is destroyed.

    The timer synchronizes twice per step, which prevents all overlap of updates with forward. Without synchronization,
    the timer's samples per second come from the host's clock, and are wrong for the first steps only. ZeRO still waits
    for the end of backward and for the gradient norm, but updates need both anyway.
    """
    timer = getattr(engine, "tput_timer", None)
    if timer is None or not getattr(timer.config, "synchronized", False):
        return
    timer.config.synchronized = False
    destroy = engine.destroy

    def destroy_and_restore(*args: Any, **kwargs: Any) -> None:
        try:
            destroy(*args, **kwargs)
        finally:
            timer.config.synchronized = True

    engine.destroy = destroy_and_restore
