"""What DeepSpeed's config offloads, and the strategy that simulates it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simulator.estimates.blocks import ModelError
from simulator.estimates.deepspeed_config import loaded

_DEVICES = ("none", "cpu", "nvme")


@dataclass(frozen=True)
class Offloading:
    """By DeepSpeed's keys.

    Attributes:
        optimizer: ``offload_optimizer.device``; None: the config has no such section.
        parameters: ``offload_param.device``.
        activations: ``activation_checkpointing.cpu_checkpointing``.
        pipelined: ``offload_optimizer.pipeline_read`` or ``pipeline_write``.
    """

    optimizer: str | None = None
    parameters: str = "none"
    activations: bool = False
    pipelined: bool = False

    @property
    def beyond_plans(self) -> str:
        """The key of what no plan can be applied to; empty: there is none."""
        if self.optimizer == "nvme":
            return "zero_optimization.offload_optimizer.device (nvme)"
        if self.parameters != "none":
            return f"zero_optimization.offload_param.device ({self.parameters})"
        return "activation_checkpointing.cpu_checkpointing (true)" if self.activations else ""

    def strategy(self, zero_stage: int) -> tuple[str, dict[str, Any]]:
        """What `simulator.build_strategy` takes: stock DeepSpeed under this config.

        Raises:
            ModelError: parameters on NVMe, which are not simulated, or offload that needs ZeRO-3.
        """
        if self.beyond_plans and zero_stage < 3:
            raise ModelError(f"{self.beyond_plans} must be absent under ZeRO-{zero_stage}: it is "
                             "simulated for ZeRO-3 (zero_optimization.stage)")  # fmt: skip
        if self.parameters == "nvme":
            raise ModelError(
                "zero_optimization.offload_param.device must be none or cpu to be simulated, but "
                "got 'nvme'"
            )
        if self.beyond_plans and self.optimizer in (None, "none"):
            raise ModelError(
                f"{self.beyond_plans} is simulated with offload_optimizer.device cpu or nvme, but "
                f"got {self.optimizer!r}"
            )
        if self.beyond_plans:
            return "zero_infinity", {
                "optimizer": self.optimizer,
                "parameters": "cpu" if self.parameters == "cpu" else "device",
                "activations": "cpu" if self.activations else "device",
                "pipelined": self.pipelined,
            }
        if self.optimizer == "none":
            return "no_offload", {}
        return ("zero3_offload" if zero_stage == 3 else "zero_offload"), {}


def offloading(config: Mapping[str, Any] | str | Path | None) -> Offloading:
    """Reads a DeepSpeed config's.

    Raises:
        ModelError: the file cannot be read, or a device that DeepSpeed does not have.
    """
    read = loaded(config)
    zero = read.get("zero_optimization") or {}
    state = zero.get("offload_optimizer")
    legacy = {"device": "cpu"} if zero.get("cpu_offload") else None  # the key of old
    state = state or legacy
    parameters = (zero.get("offload_param") or {}).get("device", "none")
    optimizer = None if state is None else state.get("device", "none")
    for key, device in (("optimizer", optimizer), ("param", parameters)):
        if device is not None and device not in _DEVICES:
            raise ModelError(
                f"zero_optimization.offload_{key}.device must be one of {', '.join(_DEVICES)}, but "
                f"got {device!r}"
            )
    checkpointing = read.get("activation_checkpointing") or {}
    return Offloading(
        optimizer, parameters, bool(checkpointing.get("cpu_checkpointing")),
        bool(state and (state.get("pipeline_read") or state.get("pipeline_write"))),
    )  # fmt: skip
