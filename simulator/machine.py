"""A node's figures: rates, capacities and their sharing."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from ebbtide.simulator.page import Page
from ebbtide.simulator.quantity import Quantity
from ebbtide.simulator.rules import RuleError, suggestion
from ebbtide.simulator.shown import Shown
from ebbtide.simulator.spelling import spelled
from ebbtide.simulator.storage import StorageRates
from pydantic import Field, model_validator

SCHEMA_VERSION = 1
DeviceKind = Literal["cuda", "emulated"]
ShareName = Literal["h2d", "d2h", "link", "dram", "storage"]

# A Machine field that gives the full speed of an op, or "wall_s" for work that is already seconds.
RateName = Literal[
    "wall_s",
    "h2d_bytes_per_s",
    "d2h_bytes_per_s",
    "pageable_h2d_bytes_per_s",
    "pageable_d2h_bytes_per_s",
    "host_adam_params_per_s",
    "host_adam_out_of_place_params_per_s",
    "stock_host_adam_params_per_s",
    "device_adam_params_per_s",
    "device_flops_per_s",
    "attention_flops_per_s",
    "storage_write_bytes_per_s",
    "storage_read_bytes_per_s",
    "host_copy_bytes_per_s",
    "network_bytes_per_s",
    "device_memory_bytes_per_s",
]
# Those that depend on the threads of an op.
THREADED: tuple[RateName, ...] = (
    "host_adam_params_per_s",
    "host_adam_out_of_place_params_per_s",
    "stock_host_adam_params_per_s",
)
OUT_OF_PLACE = 0.8  # of the speed in place: 0.81 to 0.98 on two cores of Zen 5, whose profile says
_OF_THE_NODE = ("dram", "storage")  # what all ranks draw from; the other shares are of links
# Of what products sustain, what flash attention reaches, forward and backward, over causal sequences.
ATTENTION_OF_PRODUCTS = 0.5
DEVICE_UPDATE_BYTES = 32  # p, m, v both ways; a fp32 gradient, or a 16-bit one with its parameter


@dataclass(frozen=True, slots=True)
class Rate:
    """The properties of a field of the machine, whatever its value.

    Attributes:
        most: far above anything built so far. A higher value means a mistaken unit.
        instead: if the field was not measured, another field and its factor.
        changeable: by `Machine.with_rates`.
        label: the name in tables of a machine. Empty: not shown.
        scatters: a robust plan allows for its spread.
    """

    most: float
    instead: tuple[str, float] | None = None
    changeable: bool = True
    label: str = ""
    scatters: bool = False


BUILDERS: "dict[str, Callable[[], Machine]]" = {}  # by name, filled by `ebbtide.simulator.estimates.presets`


class Machine(Shown, Page):
    """One node as the simulator sees it. Rates are those of one rank alone on the node.

    Shared capacities (`dram_bytes_per_s`, `cpu_cores`, `storage_write_bytes_per_s`) belong to the
    whole node; with N ranks per node each rank gets an N-th of them, or what ``rank_shares`` says.

    Attributes:
        device_kind: ``cuda``, or ``emulated`` where no GPU was there: then every rate of the
            device and of the copies describes the emulation, not a GPU.
        unified_memory: device memory is host memory (a machine without a GPU, not emulating
            one): gradients and parameters need no copy at all.
        duplex_factor: (bytes/s of both directions at once) / (h2d + d2h alone); 1 is full duplex.
        storage_duplex_factor: likewise of storage: (bytes/s read and written at once) / (read +
            write alone). None: not measured, taken as 1.
        drives: by directory, what was measured there for state that is stored; the rates of storage
            above are those of where checkpoints go.
        device_shares_host_cores: forward and backward run on the host's cores (no GPU).
        dram_bytes_per_s: what a triad loop reaches on the node, reads plus writes.
        rank_shares: by number of ranks that worked at once, what each had of the rate alone, by
            capacity; ranks whose copies do not touch each other have an ``h2d`` share of 1. Of
            other numbers of ranks `rank_share` tells.
        other_rates: what no schedule needs but people ask for, unit in the name.
        facts: the link's generation and width, NUMA nodes, limits: text for people.
        copy_latency_s: fixed cost of one copy; launch_latency_s: of one device kernel.
        host_adam_params_per_s: of the fused kernel; stock_host_adam_params_per_s: of stock's three
            passes together (unscale, DeepSpeedCPUAdam, downcast), on all cores;
            host_adam_out_of_place: of the fused kernel where it writes elsewhere than it reads,
            over its speed in place; None: not measured, taken as 0.8;
            stock_host_adam_thread_params_per_s: of these on one thread. None includes a copy. All
            update rates are Adam's: another optimizer's updates last as long as the bytes that they
            move (`OptimizerState.adams`).
        device_flops_per_s: what large matrix products sustain; what smaller ones reach follows
            from their shape (`ebbtide.simulator.estimates.compute`).
        attention_flops_per_s: what flash attention sustains, forward and backward, the future half
            of a causal sequence not counted. None: half of `device_flops_per_s`.
        device_reserved_bytes: device memory that no allocator of PyTorch sees: the CUDA context,
            NCCL's buffers, cuBLAS' workspace.
        layer_issue_s: what the host needs to issue one layer's forward under ZeRO-3, however
            little the device has to do; None: taken for that of another one.
        writer_s_per_byte: of one core, to hash a checkpoint and hand it to the kernel; None:
            `ebbtide.simulator.schedules.checkpointed` takes that of another machine.
        save_s_per_tensor: of `save_checkpoint` before it returns, beside waiting for updates.
        loop_s: time per iteration outside forward, backward and step (data, logging).
        unexplained_spread: standard deviation, in log units, of what the rates leave unexplained
            of the runs that they were calibrated on, beyond their own noise. None: none was.
    """

    schema_version: int = SCHEMA_VERSION
    name: str
    device_kind: DeviceKind
    device_name: str = ""
    unified_memory: bool = False
    device_shares_host_cores: bool = False
    gpus_per_node: Annotated[int, Rate(1e4)] = Field(1, ge=1)
    cpu_cores: Annotated[int, Rate(1e5)] = Field(ge=1)
    numa_nodes: Annotated[int, Rate(1e4, changeable=False)] = Field(1, ge=1)
    host_memory_bytes: Annotated[int, Rate(1e16)] = Field(gt=0)
    device_memory_bytes: Annotated[int, Rate(1e16)] = Field(gt=0)

    h2d_bytes_per_s: Annotated[Quantity, Rate(1e14, label="copy host to device", scatters=True)]
    d2h_bytes_per_s: Annotated[Quantity, Rate(1e14, label="copy device to host", scatters=True)]
    duplex_factor: Quantity = Quantity.exact(1.0)
    pageable_h2d_bytes_per_s: Annotated[Quantity | None, Rate(1e14, ("h2d_bytes_per_s", 1 / 4))] = None
    pageable_d2h_bytes_per_s: Annotated[Quantity | None, Rate(1e14, ("d2h_bytes_per_s", 1 / 4))] = None
    copy_latency_s: Annotated[float, Rate(1.0, changeable=False)] = Field(1e-5, ge=0)
    launch_latency_s: Annotated[float, Rate(1.0, changeable=False)] = Field(5e-6, ge=0)

    dram_bytes_per_s: Annotated[Quantity, Rate(1e15, label="host memory", scatters=True)]
    host_copy_bytes_per_s: Annotated[Quantity | None, Rate(1e15, ("dram_bytes_per_s", 1 / 3))] = None
    host_adam_params_per_s: Annotated[Quantity, Rate(1e14, label="host Adam, ebbtide", scatters=True)]
    host_adam_out_of_place: Quantity | None = None
    stock_host_adam_params_per_s: Annotated[Quantity, Rate(1e14, label="host Adam, stock")]
    stock_host_adam_thread_params_per_s: Annotated[Quantity | None, Rate(1e14)] = None
    device_adam_params_per_s: Annotated[Quantity, Rate(1e15, label="device Adam", scatters=True)]
    host_adam_by_threads: dict[int, Quantity] = Field(default_factory=dict)
    device_flops_per_s: Annotated[Quantity | None, Rate(1e19)] = None
    attention_flops_per_s: Annotated[Quantity | None, Rate(1e19, ("device_flops_per_s", ATTENTION_OF_PRODUCTS))] = None
    device_memory_bytes_per_s: Annotated[
        Quantity | None, Rate(1e15, ("device_adam_params_per_s", DEVICE_UPDATE_BYTES))
    ] = None
    device_reserved_bytes: Annotated[int, Rate(1e12, changeable=False)] = Field(0, ge=0)
    layer_issue_s: Annotated[Quantity | None, Rate(10.0, changeable=False)] = None
    loop_s: Annotated[Quantity | None, Rate(1e5, changeable=False)] = None
    unexplained_spread: float | None = Field(None, gt=0)
    storage_write_bytes_per_s: Annotated[Quantity, Rate(1e14, label="storage write with fsync")]
    storage_read_bytes_per_s: Annotated[Quantity | None, Rate(1e14, ("storage_write_bytes_per_s", 1.0))] = None
    storage_duplex_factor: Quantity | None = None
    drives: dict[str, StorageRates] = Field(default_factory=dict)
    storage_fsync_s: Annotated[float, Rate(1e3, changeable=False)] = Field(1e-3, ge=0)
    writer_s_per_byte: Annotated[Quantity | None, Rate(1e-3, changeable=False)] = None
    save_s_per_tensor: Annotated[Quantity | None, Rate(1e2, changeable=False)] = None
    network_bytes_per_s: Annotated[Quantity | None, Rate(1e14)] = None
    contention: dict[str, Quantity] = Field(
        default_factory=dict, description="measured slow-downs, e.g. 'host_adam_while_h2d': speed then over speed alone"
    )
    rank_shares: dict[int, dict[ShareName, Quantity]] = Field(default_factory=dict)
    other_rates: dict[str, Quantity] = Field(default_factory=dict)
    facts: dict[str, str] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    measured_with: str = ""
    warnings: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check_rates(self) -> Self:
        for name, known in RATES.items():
            value: Quantity | float | None = getattr(self, name)
            number = value.median if isinstance(value, Quantity) else value
            if number is not None and number > known.most:
                raise RuleError(
                    f"machine.{name} must be at most {known.most:g} (no real machine exceeds it), but "
                    f"got {number:g}: check its unit",
                    key=name,
                )
        return self

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.schema_version > SCHEMA_VERSION:
            raise RuleError(
                f"machine.schema_version must be at most {SCHEMA_VERSION}, but got "
                f"{self.schema_version}: it was written by a newer ebbtide. Upgrade, or measure "
                f"again with `tune profile`",
                key="schema_version",
            )
        if not 0.3 <= self.duplex_factor.median <= 1.25:
            raise RuleError(
                "duplex_factor must lie in [0.3, 1.25] (0.5: one direction at a time, 1: both "
                f"at full speed), but got {self.duplex_factor.median}",
                key="duplex_factor",
            )
        both = self.storage_duplex_factor
        if both is not None and not 0 < both.median <= 1.25:
            raise RuleError(
                "storage_duplex_factor must lie in (0, 1.25] (0.5: reads and writes take turns, 1: "
                f"both at full speed), but got {both.median}",
                key="storage_duplex_factor",
            )
        if any(ranks < 1 for ranks in self.rank_shares):
            raise RuleError(
                f"machine.rank_shares must have numbers of ranks >= 1 as keys, but got {sorted(self.rank_shares)}",
                key="rank_shares",
            )
        return self

    def rank_share(self, capacity: ShareName, ranks: int) -> float:
        """Return the share of a capacity that each of so many concurrent ranks has: measured, or plausible.

        One rank has all of it. Between known numbers of ranks, their total changes linearly. Beyond the
        largest known number, the node's DRAM and storage give the same total, and each further rank's link
        adds as much as the last ones' did. No share grows with the ranks. If nothing is known, DRAM and
        storage are divided, and every rank has its own link.
        """
        known = self._known_shares(capacity)
        if ranks <= 1 or ranks in known:
            return known[max(1, ranks)]
        counts = sorted(known)
        for fewer, more in pairwise(counts):
            if ranks < more:
                pace = (more * known[more] - fewer * known[fewer]) / (more - fewer)
                return (fewer * known[fewer] + pace * (ranks - fewer)) / ranks
        most = counts[-1]
        pace = 0.0 if capacity in _OF_THE_NODE else _last_pace(known, counts)
        return (most * known[most] + pace * (ranks - most)) / ranks

    def _known_shares(self, capacity: ShareName) -> dict[int, float]:
        """Return the known shares by number of ranks. One rank has all.

        Shares that grow with the ranks are noise, and so are those by which the ranks together would have
        more than the node: the lower value counts.
        """
        known, least = {1: 1.0}, 1.0
        for ranks in sorted(self.rank_shares):
            measured = self.rank_shares[ranks].get(capacity)
            if measured is not None and ranks > 1:
                whole = 1 / ranks if capacity in _OF_THE_NODE else 1.0
                least = min(least, measured.median, whole)
                known[ranks] = least
        return known

    @staticmethod
    def preset(name: str) -> "Machine":
        """Return a machine from data sheets and published figures, in any spelling of its name ("RTX 4090").

        >>> round(Machine.preset("H200").device_memory_bytes / 2**30, 1)
        139.8

        Raises:
            ValueError: there is no such preset. The error suggests the nearest.
        """
        return BUILDERS[spelled(name, BUILDERS, "machine preset", key="machine")]()

    def in_short(self) -> str:
        return (
            f"{self.name}, {self.gpus_per_node} x {self.device_name} with {self.device_memory_bytes / 2**30:.3g} GiB, "
            f"{self.cpu_cores} cores, {self.host_memory_bytes / 2**30:.4g} GiB of host memory"
        )

    def records(self) -> list[dict[str, Any]]:
        """Return a row for each rate that people ask for, in billions per second."""
        known = ((name, rate, getattr(self, name)) for name, rate in RATES.items() if rate.label)
        return [
            {
                "rate": rate.label,
                "median": value.median / 1e9,
                "q1": value.q1 / 1e9,
                "q3": value.q3 / 1e9,
                "unit": "GB/s" if name.endswith("_bytes_per_s") else "G params/s",
                "source": value.source,
            }
            for name, rate, value in known
            if value is not None
        ]

    def drawn(self) -> tuple[str, ...]:
        return ("median",)

    def rate(self, name: RateName) -> float:
        """Full speed of an op, in its unit per second.

        A rate that was not measured falls back on its nearest relative: pageable copies on a
        quarter of the pinned rate (the driver moves them through a pinned buffer of its own), host
        copies on a third of the triad rate (read + write + allocate).

        Raises:
            ValueError: the machine has no such rate and none to derive it from.
        """
        if name == "wall_s":
            return 1.0
        if name == "host_adam_out_of_place_params_per_s":
            return self.host_adam_params_per_s.median * self.out_of_place
        quantity: Quantity | None = getattr(self, name)
        if quantity is not None:
            return quantity.median
        if (instead := RATES[name].instead) is not None:
            other: Quantity | None = getattr(self, instead[0])
            if other is not None:
                return other.median * instead[1]
        raise RuleError(
            f"machine.{name} is needed by this workload, but machine {self.name!r} does not "
            f"give it: add {name} to the machine file",
            key=f"machine.{name}",
        )

    def has(self, name: RateName) -> bool:
        """Return whether `rate` has a value of this name."""
        known = RATES.get(name)
        if known is None or getattr(self, name) is not None:
            return True
        return known.instead is not None and getattr(self, known.instead[0]) is not None

    def op_rate(self, name: RateName, cores: float) -> float:
        """`rate` of an op on so many cores: that of host updates depends on their threads.

        Raises:
            ValueError: see `rate`.
        """
        if 0 < cores < self.cpu_cores and name in THREADED:
            if name == "stock_host_adam_params_per_s":
                return self.stock_host_adam_rate(cores)
            apart = name == "host_adam_out_of_place_params_per_s"
            return self.host_adam_rate(cores) * (self.out_of_place if apart else 1.0)
        return self.rate(name)

    @property
    def out_of_place(self) -> float:
        """Speed of the fused host update out of place, over its speed in place."""
        measured = self.host_adam_out_of_place
        return OUT_OF_PLACE if measured is None else measured.median

    def stock_host_adam_rate(self, threads: float) -> float:
        """Parameters/s of stock's host update with so many threads.

        Each thread draws what one core can of DRAM, until all together have what all cores have.
        Where one thread's rate is not known, it loses as much as the fused kernel does.
        """
        full = self.stock_host_adam_params_per_s.median
        if (one := self.stock_host_adam_thread_params_per_s) is not None:
            return min(full, threads * one.median)
        return full * self.host_adam_rate(threads) / self.host_adam_params_per_s.median

    def host_adam_rate(self, threads: float) -> float:
        """Parameters/s of the fused host update with so many threads.

        Between the thread counts that were measured the rate is interpolated; without any, the
        full rate is assumed, as the update is bound by DRAM from a few threads on.
        """
        full = self.host_adam_params_per_s.median
        counts = sorted(self.host_adam_by_threads)
        if not counts or threads >= self.cpu_cores:
            return full
        known = [(float(n), self.host_adam_by_threads[n].median) for n in counts]
        if threads <= known[0][0]:
            return known[0][1] * threads / known[0][0]
        for (n0, rate0), (n1, rate1) in pairwise(known):
            if threads <= n1:
                return rate0 + (rate1 - rate0) * (threads - n0) / (n1 - n0)
        return known[-1][1]

    def with_rates(self, **rates: float) -> "Machine":
        """Return this machine with other rates, for what-ifs: ``with_rates(h2d_bytes_per_s=5e10)``.

        Also takes ``duplex_factor``, ``device_memory_bytes``, ``host_memory_bytes`` and
        ``cpu_cores``.

        Raises:
            ValueError: no such field, or a value that is negative, zero, NaN or more than 10,000
                times away from the machine's own.
        """
        changes: dict[str, Any] = {}
        for name, value in rates.items():
            changes[name] = self._changed(name, value)
        return Machine.model_validate({**self.model_dump(), **changes})

    def storage_of(self, directory: str) -> StorageRates:
        """Return the rates measured in the directory, or the machine's own storage rates."""
        if directory in self.drives:
            return self.drives[directory]
        write, both = self.storage_write_bytes_per_s, self.storage_duplex_factor
        return StorageRates(
            write_bytes_per_s=write,
            read_bytes_per_s=self.storage_read_bytes_per_s or write,
            duplex_factor=both or Quantity.exact(1.0),
        )

    def storing_in(self, directories: Sequence[str]) -> "Machine":
        """Return this machine with the storage of these directories. State is divided among them."""
        together = StorageRates.together({name: self.storage_of(name) for name in directories})
        return self.model_copy(
            update={
                "storage_write_bytes_per_s": together.write_bytes_per_s,
                "storage_read_bytes_per_s": together.read_bytes_per_s,
                "storage_duplex_factor": together.duplex_factor,
            }
        )

    def _changed(self, name: str, value: float) -> Any:
        if name not in CHANGEABLE:
            raise RuleError(
                f"a what-if can change {', '.join(CHANGEABLE)}, but got {name!r}{suggestion(name, CHANGEABLE)}",
                key=name,
            )
        if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
            raise RuleError(f"{name} must be finite and greater than 0, but got {value!r}", key=name)
        own = getattr(self, name)
        reference = own.median if isinstance(own, Quantity) else own
        if reference is not None and not 1e-4 <= value / reference <= 1e4:
            raise RuleError(
                f"{name} must lie within a factor of 10,000 of this machine's "
                f"{reference:g}, but got {value:g}: check its unit",
                key=name,
            )
        if isinstance(own, int):
            return int(value)
        return Quantity.exact(float(value), "assumed", "what-if")

    @property
    def fingerprint(self) -> str:
        """Identifies the hardware, not the measurement: equal for two profiles of one machine."""
        return self.fingerprint_of(self)

    @staticmethod
    def fingerprint_of(hardware: "Machine | Mapping[str, Any]") -> str:
        """`fingerprint` of a machine, or of the fields that it is made of."""
        names = ("device_kind", "device_name", "unified_memory", "gpus_per_node", "cpu_cores")
        sizes = ("host_memory_bytes", "device_memory_bytes")
        values: Mapping[str, Any] = (
            hardware if isinstance(hardware, Mapping) else {name: getattr(hardware, name) for name in (*names, *sizes)}
        )
        facts = {name: values[name] for name in names}
        facts |= {f"{s.removesuffix('_bytes')}_gib": round(values[s] / 2**30) for s in sizes}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


RATES: Mapping[str, Rate] = {
    name: known for name, field in Machine.model_fields.items() for known in field.metadata if isinstance(known, Rate)
}
# By `Machine.with_rates`.
CHANGEABLE = (*(name for name, known in RATES.items() if known.changeable), "duplex_factor")


def _last_pace(known: Mapping[int, float], counts: Sequence[int]) -> float:
    """Return how much each rank added to the total between the two largest known numbers of ranks."""
    if len(counts) < 2:
        return 1.0
    fewer, more = counts[-2:]
    return max(0.0, (more * known[more] - fewer * known[fewer]) / (more - fewer))
