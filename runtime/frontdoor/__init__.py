"""The use of plans in unchanged training scripts: the key ``"ebbtide"`` in DeepSpeed's JSON config names a plan.

``enable`` wraps ``deepspeed.initialize`` in this process. ``tune run`` calls it in every process of a
launched training job. An engine whose config lacks the key is an unmodified DeepSpeed engine.
"""

from ebbtide.runtime.frontdoor import hook
from ebbtide.runtime.frontdoor.hook import disable

__all__ = ["disable", "enable"]


def enable() -> None:
    """Wrap ``deepspeed.initialize``, so that engines with the key ``"ebbtide"`` in their config run under a plan."""
    hook.enable("ebbtide.runtime.frontdoor.initialize")
