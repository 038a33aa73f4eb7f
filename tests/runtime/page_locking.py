"""An emulated device with memory of its own, so that a plan's host memory is the resident set of the process."""

import mmap

import torch
from ebbtide.runtime.devices.choice import EmulatedDevice

DEVICE_BYTES_PER_PARAM = 24  # memory of the emulated GPU: enough for two plans


class PageLocking(EmulatedDevice):
    """An emulated device that lets tests measure a plan's host memory as the resident set of the process.

    Host buffers are on separate memory pages, as page-locked buffers are. The memory that stands for GPU memory is
    touched when the device is built, and is never given back. So using it does not change the resident set.

    Attributes:
        used_bytes: Bytes of the device's memory that are in use.
    """

    def __init__(self, memory_bytes: int) -> None:
        super().__init__()
        self._pages: set[int] = set()
        self._memory = torch.frombuffer(mmap.mmap(-1, memory_bytes), dtype=torch.uint8).fill_(1)
        self.used_bytes = 0

    def device_empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        begin = -(-self.used_bytes // 256) * 256
        end = begin + elements * dtype.itemsize
        if end > self._memory.numel():
            raise torch.OutOfMemoryError(f"{end} bytes of {self._memory.numel()}")
        self.used_bytes = end
        return self._memory[begin:end].view(dtype)

    def host_empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        if not elements:
            return torch.empty(0, dtype=dtype)
        memory = mmap.mmap(-1, elements * dtype.itemsize)
        tensor = torch.frombuffer(memory, dtype=dtype, count=elements).zero_()
        self._pages.add(tensor.untyped_storage().data_ptr())
        return tensor

    def host_adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.numel() or tensor.untyped_storage().data_ptr() in self._pages:
            return tensor
        return self.host_empty(tensor.numel(), tensor.dtype).copy_(tensor)
