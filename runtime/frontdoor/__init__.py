"""Unchanged training scripts: the key ``"ebbtide"`` in DeepSpeed's JSON asks for a plan.

``enable`` wraps ``deepspeed.initialize`` in this process; ``tune run`` does it in every process of
a launcher. An engine whose config lacks the key is stock DeepSpeed's.
"""

from ebbtide.runtime.frontdoor import hook
from ebbtide.runtime.frontdoor.hook import disable

__all__ = ["disable", "enable"]


def enable() -> None:
    """`hook.enable` with ebbtide's own front door."""
    hook.enable("ebbtide.runtime.frontdoor.initialize")
