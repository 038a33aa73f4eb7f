"""The figures of one machine from data sheets and publications."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ebbtide.simulator.estimates.hardware.compute_shares import Compute, compute_of
from ebbtide.simulator.quantity import Source

_TRIAD = {"DDR4": 0.8, "DDR5": 0.75, "LPDDR5X": 0.8}  # share of the data sheet's bandwidth that a STREAM triad reaches


@dataclass(frozen=True)
class Sheet:
    """The figures of one machine from data sheets and publications, from which its preset is computed.

    Attributes:
        dram_bytes_per_s: Memory bandwidth, by data sheet, of all memory channels of the CPU sockets that a run uses.
        link_raw_bytes_per_s: Rate of the link between host and GPU in one direction, before protocol overhead.
        link: Rate of copies between pinned host memory and the GPU, with its source.
        core: Bytes per second that a single CPU core can read and write in memory, and the name of the core.
        peer: True if a GPU can read another GPU's memory over PCIe. The drivers of GeForce cards do not allow it, so
            data passes through host memory.
        pageable: Rate of copies between unpinned host memory and the GPU, with its source and its quartiles divided by
            the median. None: the rate over PCIe.
        ranks_per_uplink: Number of neighboring GPUs that share one PCIe path to the host.
        stock_update: Published rates of DeepSpeed's update on the CPU, in parameters per second of one rank. They
            include the copy of new parameters to the GPU. The dict maps each number of concurrent ranks to the lowest
            rate, the highest rate, and the source. If it is empty, the rate is computed from ``alone``.
        stock_source: ``assumed`` if the rates in ``stock_update`` were published for a similar machine.
        alone: Fraction of a NUMA node's memory bandwidth that the CPU update of a single rank uses, if
            ``stock_update`` is empty. It is 0.5 for a server with many memory channels, as published for the A100
            node, and 1 for a desktop with two channels.
    """

    device_name: str
    flops: float
    hbm_bytes_per_s: float
    device_gib: float
    gpus: int
    cores: int
    host_gib: int
    dram_kind: str
    dram_bytes_per_s: float
    dram_detail: str
    link_raw_bytes_per_s: float
    link: tuple[float, Source, str]
    storage: tuple[float, Source, str]
    core: tuple[float, str]
    numa_nodes: int = 1
    peer: bool = True
    pageable: tuple[float, Source, str, tuple[float, float]] | None = None
    ranks_per_uplink: int = 1
    stock_update: Mapping[int, tuple[float, float, str]] = field(default_factory=dict)
    stock_source: Source = "published"
    alone: float = 0.5
    network: tuple[float, Source, str] | None = None
    nvlink: tuple[float, str] | None = None
    nvlink_pair: tuple[float, str] | None = None

    @property
    def compute(self) -> Compute:
        """Return the fractions of data sheet speed that matrix products and attention reach on this machine's GPU."""
        found = compute_of(self.device_name)
        if found is None:
            raise KeyError(self.device_name)
        return found

    @property
    def triad_bytes_per_s(self) -> float:
        """Return an estimate of the host memory bandwidth of a triad loop (``a = b + 2 c``), in bytes per second."""
        return _TRIAD[self.dram_kind] * self.dram_bytes_per_s
