"""Checkpoints that a DeepSpeed engine writes in the background while training continues.

``install(engine, CheckpointPlan(...))`` makes a DeepSpeed engine save such checkpoints while its optimizer
stays DeepSpeed's own. For an engine under a plan, ``ebbtide.initialize`` calls ``install``. Names are
resolved on first use, so that importing a submodule of this package is fast.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbtide.runtime.checkpoint.deepspeed.installation import install

__all__ = ["install"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        import ebbtide.runtime.checkpoint.deepspeed.installation

        return getattr(ebbtide.runtime.checkpoint.deepspeed.installation, name)
    raise AttributeError(f"module 'ebbtide.runtime.checkpoint' has no attribute {name!r}")
