"""DeepSpeed's calls in every step that make the host wait for the whole device."""

from typing import Any


def keep_flowing(engine: Any) -> None:
    """Switch it off until the engine is destroyed.

    `ThroughputTimer` synchronises the device twice a step, so that nothing overlaps: its samples
    per second are then those of the host's clock, which after the first steps are the same. What
    stays is what ZeRO needs: the end of backward and the norm, which the update waits for anyway.
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
