"""The runtime: the part of ebbtide that runs DeepSpeed's optimizer updates in the order and memory that a plan gives.

``initialize`` has the interface of ``deepspeed.initialize``. ``attach`` puts a DeepSpeed engine that already exists
under a plan. After ``enable``, ``deepspeed.initialize`` itself obeys the key ``"ebbtide"`` in its config.

Names are resolved on first use, so that importing a submodule such as ``ebbtide.runtime.kernels`` is fast.
"""

from typing import TYPE_CHECKING, Any

from ebbtide.runtime.hardware import background as _background  # noqa: F401 - its ``atexit`` handler must run last

if TYPE_CHECKING:
    from ebbtide.runtime.frontdoor import disable, enable
    from ebbtide.runtime.zero.attach import attach, initialize, session_of

__all__ = ["attach", "disable", "enable", "initialize", "session_of"]


def __getattr__(name: str) -> Any:
    if name in ("enable", "disable"):  # both work before DeepSpeed, torch and numpy are imported
        import ebbtide.runtime.frontdoor

        return getattr(ebbtide.runtime.frontdoor, name)
    if name in __all__:
        import ebbtide.runtime.zero.attach

        return getattr(ebbtide.runtime.zero.attach, name)
    raise AttributeError(f"module 'ebbtide.runtime' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
