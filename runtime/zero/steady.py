"""A switch for DeepSpeed's timer that makes the host wait for the whole device in every step."""

from typing import Any


def keep_flowing(engine: Any) -> None:
    """Stop DeepSpeed's `ThroughputTimer` from synchronizing the device, until the engine is destroyed.

    It synchronizes twice per step, which prevents all overlap. Without this its samples per second come
    from the host's clock, and agree after the first steps. ZeRO's own waits remain: the end of
    backward and the norm, which the update needs anyway.
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
