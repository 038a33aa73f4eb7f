"""The lazy asynchronous checkpoint engine.

``install(engine, CheckpointPlan(...))`` makes a DeepSpeed engine use it without a plan for the
optimizer. Under a plan ``ebbtide.initialize`` installs it. The name is resolved on first use, so that
importing a submodule of this package is fast.
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
