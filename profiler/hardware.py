"""Facts about this machine's hardware that need no timing: cores, memory, NUMA nodes, limits, and the GPU's link."""

import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ebbtide.runtime.hardware.cores import cpu_name, parse_cpulist, threads_of_updates
from ebbtide.runtime.hardware.pci import address_of
from ebbtide.runtime.hardware.usable import allowed_cores, usable


@dataclass(frozen=True)
class Hardware:
    """Facts about this machine's hardware that need no timing, such as its cores and the sizes of its memories.

    ``warnings`` holds sentences about likely problems with the hardware.

    Attributes:
        update_threads: Threads of a CPU update under a plan. With a GPU, the training thread keeps a core for itself.
    """

    cpu_name: str
    cores: int
    update_threads: int
    numa_nodes: int
    host_memory_bytes: int
    gpu_name: str
    gpus: int
    device_memory_bytes: int
    facts: dict[str, str]
    warnings: tuple[str, ...]

    @property
    def fields(self) -> dict[str, Any]:
        """Return a dict from field names of `Machine`, such as ``cpu_cores``, to facts about this machine."""
        return {
            "device_kind": "cuda" if self.gpu_name else "emulated",
            "device_name": self.gpu_name or self.cpu_name,
            "unified_memory": not self.gpu_name,
            "gpus_per_node": self.gpus,
            "cpu_cores": self.cores,
            "host_memory_bytes": self.host_memory_bytes,
            "device_memory_bytes": self.device_memory_bytes,
        }


def look(cuda: bool) -> Hardware:
    """Collect the facts about this machine's hardware from the operating system and, on CUDA, from the driver."""
    import torch

    mine = usable()
    host_bytes = mine.memory_bytes
    name, gpus, device_bytes, bus_id = "", 1, host_bytes, ""
    if cuda:
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
        name, gpus, device_bytes = gpu.name, torch.cuda.device_count(), gpu.total_memory
        bus_id = address_of(gpu) or ""
    numa, far = numa_layout(bus_id)
    nodes = sum(name.startswith("numa_node") for name in numa)
    return Hardware(
        cpu_name(),
        mine.cores,
        threads_of_updates(mine.cores) if cuda else mine.cores,
        max(1, nodes),
        host_bytes,
        name,
        gpus,
        device_bytes,
        {"memlock_bytes": _memlock(), **numa},
        tuple(far),
    )


def _memlock() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else str(soft)


def numa_layout(gpu_bus_id: str = "", root: Path = Path("/")) -> tuple[dict[str, str], list[str]]:
    """Return the layout of this machine's NUMA nodes, as a dict of facts and a list of warnings.

    The dict has the cores of each node (``numa_node0_cores`` ...) and, with several nodes, the node that the GPU
    belongs to (``gpu_numa_node``). There is a warning if this process may run on cores outside the GPU's node. Nodes
    without cores, such as the GPU memory of a superchip, do not count.
    """
    nodes = sorted((root / "sys/devices/system/node").glob("node[0-9]*"))
    facts = {f"numa_{node.name}_cores": cores for node in nodes if (cores := _line(node / "cpulist"))}
    near = _line(root / "sys/bus/pci/devices" / gpu_bus_id / "numa_node") if gpu_bus_id else ""
    if len(facts) < 2 or not near or int(near) < 0:
        return facts, []
    facts["gpu_numa_node"] = near
    there = set(parse_cpulist(facts.get(f"numa_node{near}_cores", "")))
    if not there or allowed_cores() <= there:
        return facts, []
    return facts, [
        f"this process may run on cores outside the GPU's NUMA node {near}, from whose host memory "
        "copies are slower. Bind the process (deepspeed --bind_cores_to_rank, numactl)"
    ]


def _line(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
