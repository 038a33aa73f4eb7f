"""The physical upper limits of a machine's rates (bandwidths, FLOP/s, CPU updates per second), which
calibration does not exceed.
"""

from ebbtide.simulator.estimates.presets import FUSED_UPDATE_BYTES, STOCK_UPDATE_BYTES, sheet_limits
from ebbtide.simulator.machine import Machine


def rate_limits(machine: Machine) -> dict[str, float]:
    """Return the physical upper limits of bandwidths and compute speeds of a machine, as a dict by field name of
    `Machine`. Fields without a known limit are left out.

    The limits of matrix products and of copies between GPU and pinned host memory come from the GPU's data sheet, if
    ebbtide has a preset with this GPU. The limits for pageable host memory equal those for pinned host memory. The
    limits of CPU updates are computed from the machine's DRAM bandwidth.
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
