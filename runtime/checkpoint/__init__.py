"""The lazy asynchronous checkpoint engine.

``install(engine, CheckpointPlan(...))`` makes a DeepSpeed engine use it without a plan's
placements; under a plan ``ebbtide.initialize`` does so itself. The name is resolved on first use,
so that the leaves of this package stay light.
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
