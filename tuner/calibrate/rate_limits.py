"""The upper limits that calibration keeps for a machine's rates."""

from ebbtide.simulator.estimates.presets import FUSED_UPDATE_BYTES, STOCK_UPDATE_BYTES, sheet_limits
from ebbtide.simulator.machine import Machine


def rate_limits(machine: Machine) -> dict[str, float]:
    """Return the physical upper limit of each rate of a machine that has one.

    Links and matrix products are limited by the data sheet, if there is a preset for the machine's device.
    Unpinned copies have the limit of the same link. Updates are limited by the measured DRAM bandwidth. A rate
    that is already higher stays unchanged.
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
