"""PCIe traffic and utilization of a GPU, as counted by NVML."""

import time
from dataclasses import dataclass
from typing import Any

from ebbtide.profiler.nvml import handle_of

# Bytes/s of one lane and direction, after the line code (8b/10b, 128b/130b, FLIT).
LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}


@dataclass(frozen=True)
class LinkSample:
    """One reading of a GPU's PCIe traffic and utilization counters.

    NVML counts the traffic over 20 ms, and the utilization (0 to 1) over up to a second.
    """

    t_s: float
    to_device_bytes_per_s: float
    from_device_bytes_per_s: float
    gpu_utilisation: float


class LinkCounters:
    """A reader of one GPU's NVML counters, for use by a single thread."""

    def __init__(self, index: int) -> None:
        """Connect to NVML's counters of one GPU.

        Args:
            index: Index of the GPU in torch. NVML finds the GPU by its UUID, since
                ``CUDA_VISIBLE_DEVICES`` renumbers torch's GPUs and not NVML's.

        Raises:
            RuntimeError: If NVML is missing or forbids the counters.
        """
        import pynvml

        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
            self._gpu = handle_of(pynvml, index)
            self.capacity_bytes_per_s = self._capacity()
            self.read()
        except pynvml.NVMLError as error:
            raise RuntimeError(f"PCIe traffic is read from NVML, which must give its counters, but: {error}") from error

    def _capacity(self) -> float | None:
        """Return the bandwidth of a GPU's PCIe link in each direction, at the link's present generation and
        width.

        None if the generation is unknown.
        """
        generation = self._nvml.nvmlDeviceGetCurrPcieLinkGeneration(self._gpu)
        width = self._nvml.nvmlDeviceGetCurrPcieLinkWidth(self._gpu)
        lane = LANE_BYTES_PER_S.get(generation)
        return None if lane is None else lane * width

    def read(self) -> LinkSample:
        """Return one reading of the GPU's NVML counters (PCIe traffic and utilization), with the middle of
        the call as time.
        """
        nvml, begun_s = self._nvml, time.perf_counter()
        # From the GPU's side: what it receives comes from the host. NVML counts in KB/s.
        received = nvml.nvmlDeviceGetPcieThroughput(self._gpu, nvml.NVML_PCIE_UTIL_RX_BYTES)
        sent = nvml.nvmlDeviceGetPcieThroughput(self._gpu, nvml.NVML_PCIE_UTIL_TX_BYTES)
        busy = nvml.nvmlDeviceGetUtilizationRates(self._gpu).gpu / 100
        middle_s = (begun_s + time.perf_counter()) / 2
        return LinkSample(middle_s, received * 1e3, sent * 1e3, busy)
