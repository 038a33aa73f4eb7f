"""The correction factors (knobs) of a machine's speeds, their physical limits, and machines corrected by them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from ebbtide.simulator.estimates.presets import FUSED_UPDATE_BYTES, STOCK_UPDATE_BYTES, sheet_limits
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.quantity import QUARTILE, Quantity
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Knob:
    """A correction in a machine's calibration: one factor for several speeds of the machine, such as bandwidths.

    Attributes:
        width: Prior standard deviation of the factor in log units: how wrong the machine's given speeds may be.
        ranks: If above 0, the factor is for a rank's share of DRAM bandwidth while that many ranks use it.
        varies: Standard deviation of the speeds between different days or nodes, in log units. A calibration on more
            runs does not reduce it.
    """

    name: str
    fields: tuple[str, ...]
    width: float
    ranks: int = 0
    varies: float = 0.0


# One knob for each kind of work. With seven finer knobs and wider priors, predictions of left-out published runs were
# no better on A100, and worse on H100.
KNOBS = (
    Knob("matrix products", ("device_flops_per_s", "attention_flops_per_s", "expert_flops_per_s"), 0.15),
    Knob(
        "copies", ("h2d_bytes_per_s", "d2h_bytes_per_s", "pageable_h2d_bytes_per_s", "pageable_d2h_bytes_per_s"), 0.15
    ),
    Knob(
        "host updates",
        ("stock_host_adam_params_per_s", "host_adam_params_per_s", "stock_host_adam_thread_params_per_s"),
        0.15,
    ),
    Knob("network", ("network_bytes_per_s",), 0.5),
)
# Width and variation of the DRAM bandwidth that each rank gets. It depends on how the ranks were bound, which may
# differ between runs. One node has two published rates, 0.475 and 0.75 G params/s per rank. If they are the ends of an
# interval of 80%, sigma is 0.18, and the difference of two days has 1.41 times this sigma. The prior is narrower, so
# that runs of one day do not spoil predictions for the next day. It was chosen on the fitted rows, like NOISE.
SHARE_WIDTH, SHARE_VARIES = 0.08, 0.25


def knobs_of(machine: Machine, knobs: Sequence[Knob] = KNOBS) -> list[Knob]:
    """Return descriptions of the correction factors that calibration may fit for a machine.

    One factor corrects a group of similar rates, such as all bandwidths of copies. Rates that the machine does not
    have are left out. Further factors correct the DRAM bandwidth per rank: one factor for each number of concurrent
    ranks in the machine's data.
    """
    known = [
        replace(knob, fields=fields)
        for knob in knobs
        if (fields := tuple(name for name in knob.fields if getattr(machine, name)))
    ]
    shared = sorted(n for n, parts in machine.rank_shares.items() if "dram" in parts)
    return known + [
        Knob(f"DRAM shared by {ranks} ranks", ("rank_shares",), SHARE_WIDTH, ranks, SHARE_VARIES) for ranks in shared
    ]


def turned(
    machine: Machine, knobs: Sequence[Knob], x: Floats, spread: Mapping[int, tuple[float, str]] | None = None
) -> Machine:
    """Return a copy of a machine with corrected bandwidths and compute speeds.

    Correction ``i`` multiplies each speed of the group ``knobs[i]`` by ``exp(x[i])``. A correction does not raise a
    speed above its physical limit.

    Args:
        x: Logarithm of the factor for each correction.
        spread: Dict from the index of a correction to two values for the speeds of its group: their new standard
            deviation in log units, and a text about the calibration, which is stored with them. The speeds of all other
            groups keep their spread and source.
    """
    update: dict[str, Any] = {}
    limits = rate_limits(machine)
    for i, (knob, turn) in enumerate(zip(knobs, x, strict=True)):
        deviation = (spread or {}).get(i)
        if deviation is None and not turn:
            continue
        for name in knob.fields:
            value = update.get(name, getattr(machine, name))
            update[name] = (
                _shares(value, knob.ranks, float(turn), deviation)
                if knob.ranks
                else _scaled(value, float(turn), deviation, limits.get(name, math.inf))
            )
    return machine.model_copy(update=update)


def _scaled(quantity: Quantity, turn: float, told: tuple[float, str] | None, limit: float) -> Quantity:
    turn = min(turn, max(0.0, math.log(limit / quantity.median)))
    scaled = quantity.scaled(math.exp(turn))
    if told is None:
        return scaled
    sigma, detail = told
    half = math.exp(QUARTILE * sigma)
    return Quantity(
        median=scaled.median,
        q1=scaled.median / half,
        q3=scaled.median * half,
        source="fitted",
        detail=f"{detail}; before: {quantity.median:.4g} ({quantity.source})",
    )


def _shares(
    shares: Mapping[int, Mapping[str, Quantity]], ranks: int, turn: float, told: tuple[float, str] | None
) -> dict[int, dict[str, Quantity]]:
    share = shares[ranks]["dram"]
    scaled = _scaled(share, turn, told, 1.0 / ranks)
    return {**{n: dict(parts) for n, parts in shares.items()}, ranks: {**shares[ranks], "dram": scaled}}


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
