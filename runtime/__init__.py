"""Applies a plan inside DeepSpeed.

``initialize`` mirrors ``deepspeed.initialize``; ``attach`` takes over a live engine.

Names are resolved on first use, so that importing a leaf such as ``runtime.kernels`` stays light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.zero.attach import attach, initialize

__all__ = ["attach", "initialize"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        import runtime.zero.attach

        return getattr(runtime.zero.attach, name)
    raise AttributeError(f"module 'runtime' has no attribute {name!r}")
