"""The result file of a study: its results, with the machine, the versions and the command."""

import contextlib
import json
import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ebbtide.profiler.nvml import handle_of
from ebbtide.runtime.hardware.cores import cpu_name
from ebbtide.simulator.page import versions, write_whole

_PACKAGES = ("ebbtide", "torch", "deepspeed", "triton", "numpy", "scipy")


def write_record(path: str | Path, study: str, figures: dict[str, Any]) -> Path:
    """Write the results of a study to a JSON file, and return the file's path.

    The file is written whole or not at all. Its field ``device_kind`` is ``cuda``, ``cpu``, or ``emulated`` if the
    study ran on the emulated device.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"study": study, **provenance(), **figures}
    write_whole(path, json.dumps(document, indent=2, default=str) + "\n")
    return path


def provenance() -> dict[str, Any]:
    """Return the machine, software versions and command of a measurement, as a dict for a study's result file."""
    import torch

    cuda = torch.cuda.is_available()
    return {
        "machine": {
            "cpu": cpu_name(),
            "cores": len(os.sched_getaffinity(0)),
            "host_memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "gpu": torch.cuda.get_device_name() if cuda else None,
            **(gpu_facts() if cuda else {}),
        },
        "device_kind": "cuda" if cuda else "cpu",
        "versions": {"python": platform.python_version(), **versions(*_PACKAGES)},
        "command": shlex.join(["python", "-m", _module(), *sys.argv[1:]]),
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def gpu_facts() -> dict[str, Any]:
    """Return a dict of facts about the GPU that help to judge a measurement on this GPU.

    Unknown facts are left out.
    """
    import torch
    from ebbtide.runtime.hardware.cores import near_cores
    from ebbtide.runtime.hardware.pci import pci_address

    index = torch.cuda.current_device()
    properties, address = torch.cuda.get_device_properties(index), pci_address(index)
    facts: dict[str, Any] = {
        "gpu_memory_bytes": properties.total_memory,
        "gpu_multiprocessors": properties.multi_processor_count,
        "gpu_pci_address": address,
        "cores_near_gpu": len(near_cores(address)),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))),
        "cuda": torch.version.cuda,
    }
    return facts | _nvml_facts(index)


def _nvml_facts(index: int) -> dict[str, Any]:
    try:
        import pynvml
    except ImportError:
        return {}
    facts: dict[str, Any] = {}
    requested = {
        "pcie_generation": pynvml.nvmlDeviceGetCurrPcieLinkGeneration,
        "pcie_generation_max": pynvml.nvmlDeviceGetMaxPcieLinkGeneration,
        "pcie_width": pynvml.nvmlDeviceGetCurrPcieLinkWidth,
        "pcie_width_max": pynvml.nvmlDeviceGetMaxPcieLinkWidth,
        "power_limit_w": lambda gpu: pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3,
    }
    try:
        pynvml.nvmlInit()
        gpu = handle_of(pynvml, index)
        facts["driver"] = _text(pynvml.nvmlSystemGetDriverVersion())
        for name, ask in requested.items():
            with contextlib.suppress(pynvml.NVMLError):
                facts[name] = ask(gpu)
    except pynvml.NVMLError as error:
        facts["nvml"] = f"not available: {error}"
    return facts


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _module() -> str:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec.name.removesuffix(".__main__") if spec is not None else Path(sys.argv[0]).stem
