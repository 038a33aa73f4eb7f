"""What no calibration may exceed."""

from ebbtide.simulator.estimates.presets import FUSED_UPDATE_BYTES, STOCK_UPDATE_BYTES, sheet_limits
from ebbtide.simulator.machine import Machine


def rate_limits(machine: Machine) -> dict[str, float]:
    """Return the highest value of each field that has one; what is higher already stays as it is.

    Links and products: from the data sheet, where the machine's device has one among the presets.
    Unpinned copies pass the same link. Updates draw no more of DRAM than a triad loop does.
    """
    limits = sheet_limits(machine.device_name)
    for direction in ("h2d", "d2h"):
        if f"{direction}_bytes_per_s" in limits:
            limits[f"pageable_{direction}_bytes_per_s"] = limits[f"{direction}_bytes_per_s"]
    dram = machine.dram_bytes_per_s.median
    return {
        **limits,
        "stock_host_adam_params_per_s": dram / STOCK_UPDATE_BYTES,
        "stock_host_adam_thread_params_per_s": dram / STOCK_UPDATE_BYTES,
        "host_adam_params_per_s": dram / FUSED_UPDATE_BYTES,
    }
