"""Which device a plan runs on."""

from __future__ import annotations

from runtime.devices.base import Device
from runtime.devices.cuda import CudaDevice
from runtime.devices.emulated import EmulatedDevice


def choose_device(kind: str = "auto") -> Device:
    """``auto``: CUDA where DeepSpeed runs on it, unified host memory elsewhere.

    Raises:
        ValueError: an unknown kind, or CUDA where there is none.
    """
    from deepspeed.accelerator import get_accelerator

    on_cuda = get_accelerator()._name == "cuda"
    if kind == "auto":
        kind = "cuda" if on_cuda else "unified"
    if kind == "cuda" and not on_cuda:
        raise ValueError("device 'cuda' needs a CUDA GPU, but DeepSpeed found none: use 'auto'")
    if kind in ("unified", "emulated") and on_cuda:
        raise ValueError(
            f"device {kind!r} is for machines without a GPU, but DeepSpeed runs on CUDA: use 'auto'"
        )
    choices = {"cuda": CudaDevice, "emulated": EmulatedDevice, "unified": Device}
    if kind not in choices:
        raise ValueError(f"device must be 'auto' or one of {sorted(choices)}, but got {kind!r}")
    chosen: Device = choices[kind]()
    return chosen
