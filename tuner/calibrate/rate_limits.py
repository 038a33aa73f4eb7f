"""The physical upper limits of a machine's rates (bandwidths, FLOP/s, CPU updates per second), which
calibration does not exceed.
"""

from ebbtide.simulator.estimates.presets import FUSED_UPDATE_BYTES, STOCK_UPDATE_BYTES, sheet_limits
from ebbtide.simulator.machine import Machine


def rate_limits(machine: Machine) -> dict[str, float]:
    """Return a dict from rate to physical upper limit, for the rates of a machine that have a limit.

    The limits of links and matrix products are on the data sheet, if the device has a preset. Copies from
    pageable memory have the limit of their link. The limit of CPU updates follows from the measured DRAM
    bandwidth.
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
