"""The description of a training job as its DeepSpeed engine gives it, for estimates of other settings."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from ebbtide.runtime.hardware.launcher import rank, world_size
from ebbtide.runtime.zero.checks.other_steps import recomputes

_FUSED = ("liger_kernel", "torch._dynamo")  # packages of modules with fused kernels
_SEEN = 16  # batches


class DescribedEngine:
    """The description of an engine's training job, with the shape of its batches, which a hook in forward observes."""

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.proxy(engine)
        self._shapes: list[torch.Size | None] = []
        if rank() == 0:
            # Not to be traced by torch.compile.
            see = torch.compiler.disable(self._see)
            self._hook = engine.module.register_forward_pre_hook(see, with_kwargs=True)
            engine.optimizer._hooks.append(self._hook)

    def _see(self, module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        from ebbtide.profiler.watcher import batch_of

        # torch.compile may keep on calling a hook that was removed.
        if module.training and len(self._shapes) < _SEEN:
            self._shapes.append(batch_of(module, args, kwargs))
        if len(self._shapes) == _SEEN:
            self._hook.remove()

    def fields(self) -> dict[str, Any]:
        """Return the fields model, config, shape and elements of `Run`, on the first rank after some steps.

        Raises:
            UnknownRunError: A part of the description is missing.
        """
        from ebbtide.tuner.advice.running import UnknownRunError

        self._hook.remove()
        engine, module = self._engine, self._engine.module
        config: Any = getattr(module, "config", None)
        if not hasattr(config, "model_type") or not hasattr(config, "to_dict"):
            raise UnknownRunError(f"{type(module).__name__} has no Hugging Face config")
        if engine.dp_world_size != world_size():
            raise UnknownRunError("the ranks divide layers or sequences")
        parameters = list(module.parameters())
        if any(not parameter.requires_grad for parameter in parameters):
            raise UnknownRunError("some parameters are not trained")
        if not self._shapes or None in self._shapes:
            raise UnknownRunError("the shape of a batch of tokens is not known")
        micro_batch, sequence = max((shape for shape in self._shapes if shape is not None), key=torch.Size.numel)
        recompute = recomputes(module)
        if recompute is None:
            raise UnknownRunError("the model does not tell whether it recomputes activations")
        given = {name: value for name, value in engine.config.items() if name != "train_batch_size"}
        batches = {
            "train_micro_batch_size_per_gpu": micro_batch,
            "gradient_accumulation_steps": int(engine.gradient_accumulation_steps()),
        }
        return {
            "model": config.to_dict(),
            "config": {**given, **batches},
            "shape": {
                "sequence": sequence,
                "data_parallel": world_size(),
                "recompute": recompute,
                "optimizer": engine.optimizer.update_rule().name,
                "kernels": "fused" if _compiled(engine) else "eager",
                "flash_attention": getattr(config, "_attn_implementation", None) != "eager",
            },
            "elements": sum(getattr(p, "ds_numel", p.numel()) for p in parameters),
        }


def _compiled(engine: Any) -> bool:
    kinds = {type(module) for module in engine.module.modules()}
    return bool(engine.is_compiled) or any(kind.__module__.startswith(_FUSED) for kind in kinds)
