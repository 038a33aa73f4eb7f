"""The lazy asynchronous checkpoint engine.

``install(engine, CheckpointPlan(...))`` makes a DeepSpeed engine use it without a plan's
placements; under a plan ``runtime.initialize`` does so itself. The name is resolved on first use,
so that the leaves of this package stay light.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.checkpoint.deepspeed.installation import install

__all__ = ["install"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        import runtime.checkpoint.deepspeed.installation

        return getattr(runtime.checkpoint.deepspeed.installation, name)
    raise AttributeError(f"module 'runtime.checkpoint' has no attribute {name!r}")
