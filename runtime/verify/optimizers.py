"""A recorder for `tune verify` in training without DeepSpeed: losses, gradient norms, and parameters after each step.

A parameter is identified by its index in the optimizer's parameter groups. For a sharded parameter (FSDP2), the rank's
shard is recorded. The runs that are compared must therefore divide parameters among ranks in the same way.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from ebbtide.runtime.hardware.launcher import rank, world_size
from ebbtide.runtime.verify.lines import Lines, Piece, RecordingSettings, current_job, number

_watching: "list[_Watch]" = []


def watch(done: Callable[[], None]) -> None:
    """Start to record losses, gradient norms and parameters for `tune verify`, in training without DeepSpeed."""
    if not _watching:
        _watching.append(_Watch(current_job(), done))


def leave() -> None:
    """Stop recording torch's optimizers, because DeepSpeed trains here and its engine is recorded instead."""
    for watching in _watching:
        watching.stop()


class _Watch:
    def __init__(self, job: RecordingSettings, done: Callable[[], None]) -> None:
        from torch.optim import optimizer

        self._job, self._done = job, done
        self._lines: Lines | None = None
        self._optimizer: Any = None
        self._losses: list[torch.Tensor] = []
        self._norm: Any = None
        self._hooks = [
            optimizer.register_optimizer_step_pre_hook(self._before),
            optimizer.register_optimizer_step_post_hook(self._after),
        ]
        self._backward, self._clip = torch.Tensor.backward, torch.nn.utils.clip_grad_norm_
        torch.Tensor.backward = self._noted()  # type: ignore[method-assign]
        torch.nn.utils.clip_grad_norm_ = self._clipped()

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        torch.Tensor.backward = self._backward  # type: ignore[method-assign]
        torch.nn.utils.clip_grad_norm_ = self._clip

    def _noted(self) -> Callable[..., Any]:
        def backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if loss.numel() == 1:
                self._losses.append(loss.detach().clone())
            return self._backward(loss, *args, **kwargs)

        return backward

    def _clipped(self) -> Callable[..., Any]:
        def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
            self._norm = self._clip(*args, **kwargs)
            return self._norm

        return clip_grad_norm_

    def _before(self, optimizer: Any, *_: Any) -> None:
        if self._optimizer is not None:
            return
        self._optimizer = optimizer
        about = {
            "side": self._job.side,
            "ranks": world_size(),
            "key": False,
            "offload": _offloads(optimizer),
            "versions": {"torch": torch.__version__},
            "stage": None,
            "dtype": "bf16",
            "port": None,
        }
        self._lines = Lines(Path(self._job.folder), rank(), about)
        self._lines.step(_pieces(optimizer), losses=[], norm=None, rates=_rates(optimizer))

    def _after(self, optimizer: Any, *_: Any) -> None:
        if optimizer is not self._optimizer or self._lines is None:
            return
        self._lines.step(
            _pieces(optimizer),
            losses=[number(loss) for loss in self._losses],
            norm=number(self._norm),
            rates=_rates(optimizer),
        )
        self._losses.clear()
        if self._lines.steps == self._job.steps:
            self._done()


def _rates(optimizer: Any) -> list[float | None]:
    return [number(group.get("lr")) for group in optimizer.param_groups]


def _offloads(optimizer: Any) -> bool:
    if not torch.cuda.is_available():
        return False
    return any(_local(p).device.type == "cpu" for g in optimizer.param_groups for p in g["params"])


def _local(parameter: Any) -> torch.Tensor:
    made = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return made.detach()


def _pieces(optimizer: Any) -> Iterator[Piece]:
    for group, fields in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(fields["params"]):
            values = _local(parameter)
            if not values.is_contiguous() or values.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                continue
            shape = "x".join(map(str, parameter.shape))
            name = f"parameter {index} of group {group} ({shape})"
            if values.shape != parameter.shape:
                name += f", rank {rank()}"
            yield Piece(name, values.view(-1), 0, values.numel())
