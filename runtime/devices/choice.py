"""The choice of the device that runs a plan: CUDA, unified memory or an emulated device."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from ebbtide.runtime.devices.base import Device
from ebbtide.runtime.devices.cuda import CudaDevice


class EmulatedDevice(Device):
    """An emulated GPU for development and tests: its memory is host memory and its streams are threads.

    It makes real copies and real arithmetic. A time measured on it says nothing about a real GPU.
    """

    name = "emulated"
    unified = False

    def leaving(self, source: torch.Tensor, stream: Any) -> torch.Tensor:
        del stream
        # Streams are threads here, so only a copy protects the source from being overwritten.
        return source.clone()


def choose_device(kind: str, *, on_cuda: bool, masks: Sequence[Collection[int]] = ()) -> Device:
    """Return the object that carries out a plan on a CUDA GPU, on an emulated GPU, or without a GPU.

    Args:
        kind: ``cuda``, ``emulated``, ``unified`` (no GPU: GPU memory is host memory), or ``auto``. ``auto`` selects
            ``cuda`` if training runs on CUDA, otherwise ``unified``.
        on_cuda: True if training runs on CUDA, as the training framework decides.
        masks: The CPU cores that each rank on this host may use, in the order of ranks.

    Raises:
        ValueError: The kind is unknown, CUDA is missing, or PyTorch is built for ROCm.
    """
    if kind == "auto":
        kind = "cuda" if on_cuda else "unified"
    if kind == "cuda" and torch.version.hip is not None:
        raise ValueError(
            "a plan needs a PyTorch built for CUDA, but this one is built for ROCm "
            f"{torch.version.hip}, which was never tested: train without a plan"
        )
    if kind == "cuda" and not on_cuda:
        raise ValueError("device 'cuda' needs a CUDA GPU, but there is none: use 'auto'")
    if kind in ("unified", "emulated") and on_cuda:
        raise ValueError(f"device {kind!r} is for machines without a GPU, but training runs on CUDA: use 'auto'")
    choices: dict[str, Callable[[], Device]] = {
        "cuda": partial(CudaDevice, masks),
        "emulated": EmulatedDevice,
        "unified": Device,
    }
    if kind not in choices:
        raise ValueError(f"device must be 'auto' or one of {sorted(choices)}, but got {kind!r}")
    return choices[kind]()
