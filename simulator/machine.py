"""The machine: rates and capacities of one node, and how its ranks share them."""

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
    """The properties of a rate field of `Machine`, whatever its value.

    Attributes:
        most: Limit far above anything built so far. A higher value means a mistaken unit.
        instead: Another field, and a factor, from which the rate is derived if it was not measured.
        changeable: True if `Machine.with_rates` may change the field.
        label: Name of the rate in tables of a machine. Empty: not shown.
        scatters: True if a robust plan allows for the spread of this rate.
    """

    most: float
    instead: tuple[str, float] | None = None
    changeable: bool = True
    label: str = ""
    scatters: bool = False


BUILDERS: "dict[str, Callable[[], Machine]]" = {}  # by name, filled by `ebbtide.simulator.estimates.presets`


class Machine(Shown, Page):
    """A node of a cluster as the simulator knows it. Rates are those of one rank that runs alone on the node.

    Shared capacities (`dram_bytes_per_s`, `cpu_cores`, `storage_write_bytes_per_s`) belong to the whole node.
    With N ranks per node each rank gets an N-th of them, or the part given by ``rank_shares``.

    Attributes:
        device_kind: ``cuda``, or ``emulated`` if there was no GPU. In that case every rate of the device and
            of the copies describes the emulation, not a GPU.
        unified_memory: True if device memory is host memory (a machine without a GPU that does not emulate
            one). Gradients and parameters then need no copy.
        duplex_factor: (bytes/s of both directions together) / (h2d + d2h alone). 1 is full duplex.
        storage_duplex_factor: (bytes/s read and written together) / (read + write alone) of storage. None if
            not measured. 1 is assumed then.
        drives: Rates measured for stored state, by directory. The storage rates above are for the directory
            of checkpoints.
        device_shares_host_cores: True if forward and backward run on the host's cores (no GPU).
        dram_bytes_per_s: Host memory traffic of a triad loop on the node, reads plus writes.
        rank_shares: By number of concurrent ranks and by capacity, the fraction of the rate alone that each
            rank had. If the ranks' copies do not slow each other down, their ``h2d`` share is 1. `rank_share`
            gives other numbers of ranks.
        other_rates: Rates that no schedule uses but people ask for, with the unit in the name.
        facts: Texts for people: the link's generation and width, NUMA nodes, limits.
        copy_latency_s, launch_latency_s: Fixed time of one copy, and of one device kernel.
        host_adam_params_per_s: Adam updates per second of ebbtide's fused host kernel on all cores. No update
            rate includes a copy. All update rates are Adam's. Another optimizer's updates take time in
            proportion to the bytes that they move (`OptimizerState.adams`).
        stock_host_adam_params_per_s: Adam updates per second of DeepSpeed's three host passes together
            (unscale, DeepSpeedCPUAdam, downcast), on all cores.
        host_adam_out_of_place: Speed of the fused kernel if it writes its results to other buffers, over its
            speed in place. None if not measured. 0.8 is assumed then.
        stock_host_adam_thread_params_per_s: Rate of DeepSpeed's host passes on one thread.
        device_flops_per_s: Sustained rate of large matrix products. The rate of smaller ones follows from
            their shape (`ebbtide.simulator.estimates.compute`).
        attention_flops_per_s: Sustained rate of flash attention, forward and backward, without the masked
            half of a causal sequence. None: half of `device_flops_per_s`.
        device_reserved_bytes: Device memory outside PyTorch's allocator: the CUDA context, NCCL's buffers,
            cuBLAS' workspace.
        layer_issue_s: Host time to issue one layer's forward under ZeRO-3, however little the device
            computes. None: another machine's value is used.
        writer_s_per_byte: Time of one core to hash a checkpoint's byte and hand it to the operating system.
            None: `ebbtide.simulator.schedules.checkpointed` uses another machine's value.
        save_s_per_tensor: Time per tensor before `save_checkpoint` returns, in addition to the wait for
            updates.
        loop_s: Time per iteration outside forward, backward and step (data, logging).
        unexplained_spread: Standard deviation, in log units, of calibration runs' times that the rates do not
            explain, beyond the runs' own noise. None if the machine was not calibrated.
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
        """Return the fraction of a machine's rate that each of several concurrent ranks gets.

        A single rank gets 1. Between measured numbers of ranks the total rate is interpolated linearly. Beyond
        the largest measured number, the total of DRAM and storage stays constant, and each further rank's link
        adds as much as the last ones did. The fraction never grows with the number of ranks. If nothing was
        measured, DRAM and storage are divided equally, and every rank has its own link.
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
        """Return the measured fractions of a capacity per rank, by number of ranks.

        A fraction that grows with the number of ranks, or gives the ranks more than the node has, is measurement
        noise. The lower value is used instead.
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
        """Return a machine from data sheets and published figures, by name in any spelling ("RTX 4090").

        >>> round(Machine.preset("H200").device_memory_bytes / 2**30, 1)
        139.8

        Raises:
            ValueError: no preset has this name. The error suggests the nearest names.
        """
        return BUILDERS[spelled(name, BUILDERS, "machine preset", key="machine")]()

    def in_short(self) -> str:
        return (
            f"{self.name}, {self.gpus_per_node} x {self.device_name} with {self.device_memory_bytes / 2**30:.3g} GiB, "
            f"{self.cpu_cores} cores, {self.host_memory_bytes / 2**30:.4g} GiB of host memory"
        )

    def records(self) -> list[dict[str, Any]]:
        """Return a table row for each main rate of a machine, in billions per second."""
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
        """Return a machine's full rate for an op, in the op's unit per second.

        If the rate was not measured, it is derived from a related one. Pageable copies take a quarter of the
        pinned rate, because the driver moves them through its own pinned buffer. Host copies take a third of the
        triad rate (read + write + allocate).

        Raises:
            ValueError: the machine has neither this rate nor one from which it can be derived.
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
        """Return whether a machine has the named rate, or can derive it from another rate."""
        known = RATES.get(name)
        if known is None or getattr(self, name) is not None:
            return True
        return known.instead is not None and getattr(self, known.instead[0]) is not None

    def op_rate(self, name: RateName, cores: float) -> float:
        """Return a machine's rate for an op on a number of cores. Host updates depend on their threads.

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
        """Return the speed of the fused host update with separate output buffers, over its speed in place."""
        measured = self.host_adam_out_of_place
        return OUT_OF_PLACE if measured is None else measured.median

    def stock_host_adam_rate(self, threads: float) -> float:
        """Return the parameters per second that DeepSpeed's host update processes with a number of threads.

        The rate grows linearly with the threads until it reaches the rate of all cores. If one thread's rate is
        not known, fewer threads slow it down as much as they slow down the fused kernel.
        """
        full = self.stock_host_adam_params_per_s.median
        if (one := self.stock_host_adam_thread_params_per_s) is not None:
            return min(full, threads * one.median)
        return full * self.host_adam_rate(threads) / self.host_adam_params_per_s.median

    def host_adam_rate(self, threads: float) -> float:
        """Return the parameters per second that the fused host update processes with a number of threads.

        The rate is interpolated between measured thread counts. Without any, the full rate is assumed, because
        DRAM limits the update from a few threads on.
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
        """Return a machine with other rates, for what-ifs: ``with_rates(h2d_bytes_per_s=5e10)``.

        Also takes ``duplex_factor``, ``device_memory_bytes``, ``host_memory_bytes`` and ``cpu_cores``.

        Raises:
            ValueError: a field does not exist, or a value is negative, zero, NaN or more than 10,000 times away
                from the machine's own.
        """
        changes: dict[str, Any] = {}
        for name, value in rates.items():
            changes[name] = self._changed(name, value)
        return Machine.model_validate({**self.model_dump(), **changes})

    def storage_of(self, directory: str) -> StorageRates:
        """Return the storage rates measured in a directory, or the machine's general storage rates."""
        if directory in self.drives:
            return self.drives[directory]
        write, both = self.storage_write_bytes_per_s, self.storage_duplex_factor
        return StorageRates(
            write_bytes_per_s=write,
            read_bytes_per_s=self.storage_read_bytes_per_s or write,
            duplex_factor=both or Quantity.exact(1.0),
        )

    def storing_in(self, directories: Sequence[str]) -> "Machine":
        """Return a machine with the joint storage rates of several directories that share each subgroup's state."""
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
        """Return a hash of a machine's hardware. Two profiles of the same machine have the same hash."""
        return self.fingerprint_of(self)

    @staticmethod
    def fingerprint_of(hardware: "Machine | Mapping[str, Any]") -> str:
        """Return the hardware hash of a machine, or of a mapping with the hardware fields of a machine."""
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
    if len(counts) < 2:
        return 1.0
    fewer, more = counts[-2:]
    return max(0.0, (more * known[more] - fewer * known[fewer]) / (more - fewer))
