"""An emulated GPU: threads make real copies and real arithmetic on a machine without a GPU."""

from typing import Any

import torch
from ebbtide.runtime.devices.base import Device


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
