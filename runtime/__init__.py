"""Applies a plan inside DeepSpeed.

``initialize`` mirrors ``deepspeed.initialize``; ``attach`` takes over a live engine. After
``enable``, ``deepspeed.initialize`` itself does what the key ``"ebbtide"`` in its config says.

Names are resolved on first use, so that importing a leaf such as ``runtime.kernels`` stays light.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.frontdoor import disable, enable
    from runtime.zero.attach import attach, initialize

__all__ = ["attach", "disable", "enable", "initialize"]


def __getattr__(name: str) -> Any:
    if name in ("enable", "disable"):  # without DeepSpeed, torch and numpy
        import runtime.frontdoor

        return getattr(runtime.frontdoor, name)
    if name in __all__:
        import runtime.zero.attach

        return getattr(runtime.zero.attach, name)
    raise AttributeError(f"module 'runtime' has no attribute {name!r}")
