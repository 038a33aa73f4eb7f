"""torchao's CPUOffloadOptimizer with the interface of a DeepSpeed engine, for comparison.

torchao keeps master copies of the parameters in the model's own precision of 16 bits. So it does
not train the same numbers as stock DeepSpeed.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from studies.bench.byte_gpt import ds_config

MakeOptimizer = Callable[[Iterable[torch.nn.Parameter], dict[str, Any]], Any]


def cpu_offload_adamw(parameters: Iterable[torch.nn.Parameter], settings: dict[str, Any]) -> Any:
    """Return torchao's AdamW optimizer that keeps its state in host memory, set to offload gradients too."""
    from torchao.optim import CPUOffloadOptimizer

    return CPUOffloadOptimizer(parameters, torch.optim.AdamW, offload_gradients=True, fused=True, **settings)


class TorchaoEngine:
    """A torch model under torchao's optimizer, with the interface of a DeepSpeed engine.

    The interface is ``engine(*batch)``, ``backward(loss)`` and ``step()``.
    """

    def __init__(self, model: torch.nn.Module, clipping: float, make: MakeOptimizer = cpu_offload_adamw) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.module = model.to(self.device, torch.bfloat16)
        given = ds_config(1, 1)["optimizer"]["params"]
        settings = {k: given[k] for k in ("lr", "betas", "eps", "weight_decay") if k in given}
        self._inner = make(self.module.parameters(), settings)
        self._clipping = clipping
        self.optimizer = self  # the trial hashes `optimizer.fp32_partitioned_groups_flat`

    @property
    def fp32_partitioned_groups_flat(self) -> list[torch.Tensor]:
        return [parameter.detach().float() for parameter in self.module.parameters()]

    @property
    def state(self) -> dict[Any, Any]:
        return {}

    def __call__(self, *batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.module(*batch)
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        # With offloaded gradients, nothing is left on the GPU to clip. torchao's users clip in the same way.
        if self._clipping > 0:
            kept = [p for p in self.module.parameters() if p.grad is not None]
            torch.nn.utils.clip_grad_norm_(kept, self._clipping)
        self._inner.step()
        self._inner.zero_grad()

    def destroy(self) -> None:
        """Do nothing. DeepSpeed's engines release resources here, but a torchao engine has none to release."""
