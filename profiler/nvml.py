"""Facts about a GPU from NVIDIA's management library (NVML): its PCIe link, clocks, and other programs that use it."""

import threading
from dataclasses import dataclass, field
from typing import Any, Self

SAMPLE_EVERY_S = 0.25
BUSY_PERCENT = 5  # share of time in which GPU kernels run although we have started none
BUSY_LINK_BYTES_PER_S = 100e6
_SLOW = ("HwSlowdown", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown", "SwPowerCap")


@dataclass
class GpuWatch:
    """A watch over one GPU during a measurement, as a context manager.

    A separate thread samples the GPU's state. The PCIe link is read under load, since an idle link falls back
    to a low generation. ``facts`` and ``warnings`` are complete after the exit. If NVML (NVIDIA's management
    library) refuses information, that becomes a warning and never an error.

    Args:
        index: torch's number of the GPU, which may differ from NVML's.
    """

    index: int
    facts: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        self._done = threading.Event()
        self._sampler: threading.Thread | None = None
        self._generation, self._width, self._reasons, self._replays = 0, 0, 0, 0

    def __enter__(self) -> Self:
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml, self._handle = pynvml, handle_of(pynvml, self.index)
            self._look_for_neighbours()
            self._replays = pynvml.nvmlDeviceGetPcieReplayCounter(self._handle)
            self._sample()
        except Exception as error:  # NVML may be missing or forbidden, which is reported as a warning
            self._give_up(error)
            return self
        self._sampler = threading.Thread(target=self._keep_sampling, daemon=True)
        self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._sampler is None:
            return
        self._done.set()
        self._sampler.join()
        if self._nvml is None:
            return
        try:
            self._judge()
        except Exception as unknown:  # the same
            self._give_up(unknown)

    def _give_up(self, error: Exception) -> None:
        self._nvml = None
        self.warnings.append(f"NVML does not report the PCIe link's width and the GPU's clocks: {error}")

    def _look_for_neighbours(self) -> None:
        n, handle = self._nvml, self._handle
        busy = n.nvmlDeviceGetUtilizationRates(handle).gpu
        if busy > BUSY_PERCENT:
            self.warnings.append(
                f"the GPU is busy for {busy}% of the time before anything is measured: another process uses it"
            )
        counters = (n.NVML_PCIE_UTIL_RX_BYTES, n.NVML_PCIE_UTIL_TX_BYTES)
        link = sum(n.nvmlDeviceGetPcieThroughput(handle, c) for c in counters) * 1e3  # KB/s
        self.facts["pcie_idle_bytes_per_s"] = f"{link:.3g}"
        if link > BUSY_LINK_BYTES_PER_S:
            self.warnings.append(
                f"{link / 1e9:.2f} GB/s cross the PCIe link before anything is copied: another process uses it"
            )

    def _keep_sampling(self) -> None:
        while not self._done.wait(SAMPLE_EVERY_S):
            try:
                self._sample()
            except Exception as error:  # the same
                self._give_up(error)
                return

    def _sample(self) -> None:
        n, handle = self._nvml, self._handle
        self._generation = max(self._generation, n.nvmlDeviceGetCurrPcieLinkGeneration(handle))
        self._width = max(self._width, n.nvmlDeviceGetCurrPcieLinkWidth(handle))
        self._reasons |= n.nvmlDeviceGetCurrentClocksThrottleReasons(handle)

    def _judge(self) -> None:
        self._sample()
        n, handle = self._nvml, self._handle
        newest = n.nvmlDeviceGetMaxPcieLinkGeneration(handle)
        widest = n.nvmlDeviceGetMaxPcieLinkWidth(handle)
        self.facts["pcie"] = f"generation {self._generation} of {newest}, {self._width} lanes of {widest}"
        if self._width < widest:
            self.warnings.append(f"the PCIe link runs with {self._width} lanes of {widest}")
        if self._generation < newest:
            self.warnings.append(f"the PCIe link runs at generation {self._generation} of {newest} even under load")
        slow = [name for name in _SLOW if self._reasons & getattr(n, f"nvmlClocksThrottleReason{name}", 0)]
        if slow:
            self.warnings.append(f"the GPU's clocks were throttled: {', '.join(slow)}")
        replays = n.nvmlDeviceGetPcieReplayCounter(handle) - self._replays
        self.facts["pcie_replays"] = str(replays)
        if replays > 0:
            self.warnings.append(f"the PCIe link retransmitted {replays} packets: the connection is faulty")


def handle_of(nvml: Any, index: int) -> Any:
    """Return NVML's handle of a torch GPU, found by the GPU's UUID.

    Numbers cannot be used, because CUDA_VISIBLE_DEVICES renumbers torch's GPUs but not NVML's.
    """
    import torch

    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    if uuid is None:
        return nvml.nvmlDeviceGetHandleByIndex(index)
    return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
