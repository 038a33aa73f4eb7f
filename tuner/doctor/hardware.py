"""The checks in ``tune doctor`` of NUMA nodes, PCIe links and CPU threads."""

import os
from typing import Any

from ebbtide.tuner.doctor.finding import Finding, ok, slow

TIMED_ELEMENTS, TIMED_S = 2**23, 0.2
GAIN = 1.05  # a larger number of threads is recommended if it raises the rate by this factor


def numa() -> Finding:
    """Report, as a finding of ``tune doctor``, if this process is allowed to run on CPU cores far from its GPU.

    Far cores are those outside the GPU's NUMA node.
    """
    import torch
    from ebbtide.profiler.hardware import numa_layout
    from ebbtide.runtime.hardware.pci import pci_address

    address = pci_address(torch.cuda.current_device()) if torch.cuda.is_available() else None
    facts, warnings = numa_layout(address or "")
    nodes = sum(name.startswith("numa_node") for name in facts) or 1
    if warnings:
        return slow("NUMA", f"{nodes} nodes; {warnings[0]}", "deepspeed --bind_cores_to_rank, or numactl --cpunodebind")
    return ok("NUMA", f"{nodes} node{'s' if nodes > 1 else ''}")


def threads(ranks: int) -> Finding:
    """Report how many CPU threads DeepSpeed without a plan would use for each rank's optimizer updates, and
    what too few of them cost.
    """
    from ebbtide.runtime.hardware.cores import near_cores

    share = max(1, len(near_cores(None)) // ranks)
    given = os.environ.get("OMP_NUM_THREADS", "")
    few = int(given) if given.isdigit() and int(given) else (1 if ranks > 1 else share)
    if few >= share:
        return ok("threads", f"OMP_NUM_THREADS is {given or 'not set'}, {share} cores per rank")
    said = f"is {few}" if given else (f"is not set, and torchrun and accelerate launch set it to 1 for {ranks} ranks")
    slower, full = _rates(few, share)
    measured = f"Here {few} of them update {slower / 1e9:.2f} G params/s, and {share} update {full / 1e9:.2f}"
    if full < GAIN * slower:
        return ok("threads", f"OMP_NUM_THREADS {said}. {measured}, so more threads gain nothing")
    return slow(
        "threads",
        f"OMP_NUM_THREADS {said}. DeepSpeed alone updates with that many threads. "
        f"{measured}. ebbtide's own updates ignore the setting",
        f"export OMP_NUM_THREADS={share} before the launcher starts",
    )


def queues() -> list[Finding]:
    """Return a list with one finding if CUDA_DEVICE_MAX_CONNECTIONS is 1, otherwise an empty list.

    Megatron's launch scripts set this value. Copies then wait for earlier kernels of other CUDA streams.
    """
    given = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if given != "1":
        return []
    detail = "CUDA_DEVICE_MAX_CONNECTIONS is 1, so copies wait for earlier kernels of other streams"
    return [slow("CUDA queues", detail, "unset it, unless tensor parallelism needs it")]


def _rates(few: int, share: int) -> tuple[float, float]:
    from ebbtide.profiler.rates.adam import host_adam_by_threads

    rates, _ = host_adam_by_threads(TIMED_ELEMENTS, [few, share], TIMED_S)
    return rates[few].median, rates[share].median


def links() -> list[Finding]:
    """Report each GPU's PCIe link, compared with the widest and newest link that the GPU supports."""
    try:
        import pynvml

        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except Exception as error:  # without a driver or a library there is no usable GPU
        return [ok("PCIe", f"no NVIDIA GPU ({error})")]
    return [_link(pynvml, index) for index in range(count)]


def _link(nvml: Any, index: int) -> Finding:
    name = f"PCIe of GPU {index}"
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        width, widest = (nvml.nvmlDeviceGetCurrPcieLinkWidth(handle), nvml.nvmlDeviceGetMaxPcieLinkWidth(handle))
        # An idle link falls back to PCIe generation 1, so its present speed says nothing. Only the limits of slot and
        # card are compared.
        newest = nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)
    except Exception as error:  # virtual machines hide these values
        return ok(name, f"the driver does not report it ({error})")
    return link_finding(name, width, widest, newest, _card_generation(nvml, handle))


def _card_generation(nvml: Any, handle: Any) -> int | None:
    try:
        return int(nvml.nvmlDeviceGetGpuMaxPcieLinkGeneration(handle))
    except Exception:  # older drivers lack this function
        return None


def link_finding(name: str, width: int, widest: int, slot: int, card: int | None) -> Finding:
    """Check a GPU's PCIe link, which limits every copy to and from host memory.

    Args:
        slot: Newest PCIe generation that both the slot and the card support.
        card: Newest PCIe generation that the card supports, or None if unknown.
    """
    detail = f"x{width} of x{widest}, generation {slot}" + (f" of {card}" if card else "")
    if width < widest or (card is not None and slot < card):
        return slow(
            name,
            detail,
            "reseat the card, or move it to a slot with all lanes. Check the slot's generation in the BIOS",
        )
    return ok(name, detail)
