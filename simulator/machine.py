"""What one node can do: rates, capacities and how they share."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from simulator.quantity import Quantity

SCHEMA_VERSION = 1
DeviceKind = Literal["cuda", "emulated"]

# A Machine field that gives the full speed of an op, or "wall_s" for work that is already seconds.
RateName = Literal[
    "wall_s",
    "h2d_bytes_per_s",
    "d2h_bytes_per_s",
    "pageable_h2d_bytes_per_s",
    "pageable_d2h_bytes_per_s",
    "host_adam_params_per_s",
    "stock_host_adam_params_per_s",
    "device_adam_params_per_s",
    "device_flops_per_s",
    "storage_write_bytes_per_s",
    "host_copy_bytes_per_s",
    "network_bytes_per_s",
]


class Machine(BaseModel):
    """One node as the simulator sees it. Rates are those of one rank alone on the node.

    Shared capacities (`dram_bytes_per_s`, `cpu_cores`, `storage_write_bytes_per_s`) belong to the
    whole node; with N ranks per node each rank gets an N-th of them at most.

    Attributes:
        device_kind: ``cuda``, or ``emulated`` where no GPU was there: then every rate of the
            device and of the copies describes the emulation, not a GPU.
        unified_memory: device memory is host memory (a machine without a GPU, not emulating
            one): gradients and parameters need no copy at all.
        duplex_factor: (bytes/s of both directions at once) / (h2d + d2h alone); 1 is full duplex.
        device_shares_host_cores: forward and backward run on the host's cores (no GPU).
        dram_bytes_per_s: what a triad loop reaches on the node, reads plus writes.
        copy_latency_s: fixed cost of one copy; launch_latency_s: of one device kernel.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = SCHEMA_VERSION
    name: str
    device_kind: DeviceKind
    device_name: str = ""
    unified_memory: bool = False
    device_shares_host_cores: bool = False
    gpus_per_node: int = Field(1, ge=1)
    cpu_cores: int = Field(ge=1)
    numa_nodes: int = Field(1, ge=1)
    host_memory_bytes: int = Field(gt=0)
    device_memory_bytes: int = Field(gt=0)

    h2d_bytes_per_s: Quantity
    d2h_bytes_per_s: Quantity
    duplex_factor: Quantity = Quantity.exact(1.0)
    pageable_h2d_bytes_per_s: Quantity | None = None
    pageable_d2h_bytes_per_s: Quantity | None = None
    copy_latency_s: float = Field(1e-5, ge=0)
    launch_latency_s: float = Field(5e-6, ge=0)

    dram_bytes_per_s: Quantity
    host_copy_bytes_per_s: Quantity | None = None
    host_adam_params_per_s: Quantity
    stock_host_adam_params_per_s: Quantity
    device_adam_params_per_s: Quantity
    host_adam_by_threads: dict[int, Quantity] = Field(default_factory=dict)
    device_flops_per_s: Quantity | None = None
    storage_write_bytes_per_s: Quantity
    storage_read_bytes_per_s: Quantity | None = None
    storage_fsync_s: float = Field(1e-3, ge=0)
    network_bytes_per_s: Quantity | None = None
    contention: dict[str, Quantity] = Field(
        default_factory=dict,
        description="measured slow-downs, e.g. 'host_adam_while_h2d': speed then over speed alone",
    )
    versions: dict[str, str] = Field(default_factory=dict)
    measured_with: str = ""
    warnings: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.schema_version > SCHEMA_VERSION:
            raise ValueError(
                f"machine.schema_version must be at most {SCHEMA_VERSION}, but got "
                f"{self.schema_version}: it was written by a newer ebbtide; upgrade, or measure "
                f"again with `tune profile`"
            )
        if not 0.3 <= self.duplex_factor.median <= 1.25:
            raise ValueError(
                "duplex_factor must lie in [0.3, 1.25] (0.5: one direction at a time, 1: both "
                f"at full speed), but got {self.duplex_factor.median}"
            )
        return self

    def rate(self, name: RateName) -> float:
        """Full speed of an op, in its unit per second.

        A rate that was not measured falls back on its nearest relative: pageable copies on a
        quarter of the pinned rate (reference/README.md: "unpinned a few GB/s"), host copies on a
        third of the triad rate (read + write + allocate).

        Raises:
            ValueError: the machine has no such rate and none to derive it from.
        """
        if name == "wall_s":
            return 1.0
        quantity: Quantity | None = getattr(self, name)
        if quantity is not None:
            return quantity.median
        if name == "pageable_h2d_bytes_per_s":
            return self.h2d_bytes_per_s.median / 4
        if name == "pageable_d2h_bytes_per_s":
            return self.d2h_bytes_per_s.median / 4
        if name == "host_copy_bytes_per_s":
            return self.dram_bytes_per_s.median / 3
        raise ValueError(
            f"machine.{name} is needed by this workload, but machine {self.name!r} does not "
            f"give it: add {name} to the machine file"
        )

    @property
    def fingerprint(self) -> str:
        """Identifies the hardware, not the measurement: equal for two profiles of one machine."""
        fields = ("device_kind", "device_name", "unified_memory", "gpus_per_node", "cpu_cores")
        facts: dict[str, Any] = {name: getattr(self, name) for name in fields}
        facts["host_memory_gib"] = round(self.host_memory_bytes / 2**30)
        facts["device_memory_gib"] = round(self.device_memory_bytes / 2**30)
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    def save(self, path: str | Path) -> None:
        """Writes the machine as one JSON page."""
        Path(path).write_text(self.model_dump_json(indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Machine:
        """Reads what `save` wrote.

        Raises:
            pydantic.ValidationError: a field is missing, unknown or out of its range.
        """
        return cls.model_validate_json(Path(path).read_text())
