"""The data type of a machine: rates and capacities of one node of a cluster, and how the node's ranks share them."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from ebbtide.simulator.display import Shown
from ebbtide.simulator.page import Page, digest_of
from ebbtide.simulator.quantity import THREADED, Quantity, Rate, RateName
from ebbtide.simulator.rules import RuleError, checked, suggestion
from pydantic import Field, model_validator

ANY_BYTES = 10**18  # if the size of a drive is unknown


class StorageRates(Page):
    """The rates of reading and writing in one folder, measured on its drive and not in the system's page cache.

    Attributes:
        write_bytes_per_s, read_bytes_per_s: Rate of only writing, and of only reading, with as many blocks in
            flight as the store of optimizer state uses.
        duplex_factor: Rate of reads and writes at once, divided by the sum of these two rates.
    """

    write_bytes_per_s: Quantity
    read_bytes_per_s: Quantity
    duplex_factor: Quantity = Quantity.exact(1.0)

    @property
    def busy_s_per_byte(self) -> float:
        """Return the seconds per byte of a drive that reads and writes the same number of bytes at the same time."""
        # A byte that is both read and written counts once.
        alone = (1 / self.read_bytes_per_s.median, 1 / self.write_bytes_per_s.median)
        return max(*alone, sum(alone) / max(1.0, 2 * self.duplex_factor.median))

    @classmethod
    def together(cls, drives: "Mapping[str, StorageRates]") -> Self:
        """Return the rates of several drives together, as if they were one drive.

        Each drive holds a part of every subgroup's state, and all drives work at the same time. The function `shares`
        gives the sizes of the parts. A read or write ends when the last drive has finished its part.
        """
        part = shares(drives)
        each = [(drives[name], part[name]) for name in drives]
        read = min((d.read_bytes_per_s.scaled(1 / s, _SHARED) for d, s in each), key=_median)
        write = min((d.write_bytes_per_s.scaled(1 / s, _SHARED) for d, s in each), key=_median)
        if len(each) == 1:
            return cls(write_bytes_per_s=write, read_bytes_per_s=read, duplex_factor=each[0][0].duplex_factor)
        busy_s = max(s * d.busy_s_per_byte for d, s in each)
        both = (1 / read.median + 1 / write.median) / busy_s / 2
        return cls(
            write_bytes_per_s=write,
            read_bytes_per_s=read,
            duplex_factor=Quantity.exact(min(1.0, both), read.source, _SHARED),
        )


_SHARED = "a share of each subgroup on each directory"


def shares(drives: Mapping[str, StorageRates]) -> dict[str, float]:
    """Return the fraction of every subgroup's state for each drive, so that all drives finish together."""
    speeds = {name: 1 / drive.busy_s_per_byte for name, drive in drives.items()}
    total = sum(speeds.values())
    return {name: speed / total for name, speed in speeds.items()}


def _median(quantity: Quantity) -> float:
    return quantity.median


SCHEMA_VERSION = 1
DeviceKind = Literal["cuda", "emulated"]
ShareName = Literal["h2d", "d2h", "link", "dram", "storage"]

OUT_OF_PLACE = 0.8  # relative to the speed in place. Measured: 0.81 to 0.98, on two cores of Zen 5
# Speed of flash attention, forward and backward over causal sequences, divided by the speed of matrix products.
ATTENTION_OF_PRODUCTS = 0.5
# Speed of the grouped products of experts, divided by that of large products. OLMoE with 64 experts trained at 23,600
# tokens/s a GPU, and the dense model with as many active parameters at 37,500 (H100, arXiv 2409.02060). If the other
# parts of the layers are equally fast, the experts' part is 0.55 times as fast, routing and permutation included.
EXPERTS_OF_PRODUCTS = 0.55
# Parameter and both moments, read and written, and an fp32 gradient, or a 16-bit gradient and parameter.
DEVICE_UPDATE_BYTES = 32


PRESET = "preset"  # value of `measured_with` of a preset machine
BUILDERS: "list[Callable[[str], Machine]]" = []  # `ebbtide.simulator.estimates.presets` adds its `preset`


class Machine(Shown, Page):
    """A machine (one node of a cluster) as the simulator knows it. Speeds are those of one rank that runs alone on the
    node.

    Three fields are for the whole node, and its ranks share them: `dram_bytes_per_s`, `cpu_cores` and
    `storage_write_bytes_per_s`.

    Attributes:
        device_kind: ``cuda``, or ``emulated`` if the machine has no GPU. All speeds of the device and of copies then
            describe the emulation.
        unified_memory: True if the machine has no GPU and emulates none. Device memory is then host memory, and
            gradients and parameters are not copied.
        duplex_factor: Total speed of copies in both directions at once, divided by the sum of the speeds of copies in
            one direction. 1 means full duplex.
        storage_duplex_factor: Total speed of reads and writes of storage at once, divided by the sum of the speeds of
            reads alone and writes alone. None if not measured. 1 is assumed then.
        drives: Speeds of the folders that were measured for stored optimizer state, by folder. The fields that begin
            with ``storage_`` are for the folder of checkpoints.
        device_shares_host_cores: True if forward and backward run on the CPU, because there is no GPU.
        dram_bytes_per_s: Host memory traffic of a triad loop on the whole node, reads plus writes.
        rank_shares: For several numbers of concurrent ranks, the share of each capacity that every rank gets: its speed
            while all ranks run, divided by the speed of one rank that runs alone. For example, the share ``h2d`` is 1
            if the ranks' copies do not slow each other down. `ebbtide.simulator.engines.reference` estimates the
            shares for other numbers of ranks.
        other_rates: Bandwidths of a preset's GPUs over NVLink. Their names end with the unit.
        facts: Texts for people: generation and width of the link, NUMA nodes, limits.
        copy_latency_s, launch_latency_s: Time of a copy in addition to the time for its bytes, and time of launching a
            kernel on the device.
        host_adam_params_per_s: Parameters per second of ebbtide's fused Adam kernel on all CPU cores. Like all update
            speeds, it includes no copy. The speeds of other optimizers follow from the bytes that they move
            (`OptimizerState.adams`).
        stock_host_adam_params_per_s: Parameters per second of DeepSpeed's three passes on all CPU cores: unscale,
            DeepSpeedCPUAdam, and conversion to 16 bits.
        host_adam_out_of_place: Speed of the fused kernel if it writes results to other buffers, divided by its speed in
            place. None if not measured. 0.8 is assumed then.
        stock_host_adam_thread_params_per_s: Parameters per second of DeepSpeed's passes on one thread.
        device_flops_per_s: Sustained speed of large matrix products. The speed of smaller ones follows from their shape
            (`ebbtide.simulator.estimates.compute`).
        attention_flops_per_s: Sustained speed of flash attention, forward and backward, where the masked half of a
            causal sequence does not count. None: half of `device_flops_per_s` is assumed.
        expert_flops_per_s: Sustained speed of the grouped products of a layer's experts, if each expert gets many
            tokens. None: a share of `device_flops_per_s` is assumed.
        gather_bytes_per_s: Bytes that each GPU receives per second in an all-gather among all GPUs of the node. None:
            computed from NVLink (`other_rates`) or from the copies (`ebbtide.simulator.estimates.collectives`).
        reduce_bytes_per_s: The same in a reduce-scatter. None: as in an all-gather.
        device_reserved_bytes: Device memory that PyTorch's allocator does not manage: the CUDA context, NCCL's buffers,
            cuBLAS' workspace.
        layer_issue_s: Time in which the host launches one layer's forward under ZeRO-3. None if not measured. A value
            measured on another machine is used then.
        writer_s_per_byte: Time in which one core hashes a byte of a checkpoint and hands it to the operating system.
            None if not measured. A value measured on another machine is used then
            (`ebbtide.simulator.analysis.goodput`).
        save_s_per_tensor: Time per tensor until `save_checkpoint` returns, in addition to the wait for updates.
        loop_s: Time per iteration outside forward, backward and step, such as for data and logging.
        unexplained_spread: Difference between calibration runs and their predictions beyond the uncertainty of the
            speeds and measurement noise, as a standard deviation of the logarithm of times. None without calibration.
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

    h2d_bytes_per_s: Annotated[Quantity, Rate(1e14, label="copy host to device")]
    d2h_bytes_per_s: Annotated[Quantity, Rate(1e14, label="copy device to host")]
    duplex_factor: Quantity = Quantity.exact(1.0)
    pageable_h2d_bytes_per_s: Annotated[Quantity | None, Rate(1e14, ("h2d_bytes_per_s", 1 / 4))] = None
    pageable_d2h_bytes_per_s: Annotated[Quantity | None, Rate(1e14, ("d2h_bytes_per_s", 1 / 4))] = None
    copy_latency_s: Annotated[float, Rate(1.0, changeable=False)] = Field(1e-5, ge=0)
    launch_latency_s: Annotated[float, Rate(1.0, changeable=False)] = Field(5e-6, ge=0)

    dram_bytes_per_s: Annotated[Quantity, Rate(1e15, label="host memory")]
    host_copy_bytes_per_s: Annotated[Quantity | None, Rate(1e15, ("dram_bytes_per_s", 1 / 3))] = None
    host_adam_params_per_s: Annotated[Quantity, Rate(1e14, label="host Adam, ebbtide")]
    host_adam_out_of_place: Quantity | None = None
    stock_host_adam_params_per_s: Annotated[Quantity, Rate(1e14, label="host Adam, stock")]
    stock_host_adam_thread_params_per_s: Annotated[Quantity | None, Rate(1e14)] = None
    device_adam_params_per_s: Annotated[Quantity, Rate(1e15, label="device Adam")]
    host_adam_by_threads: dict[int, Quantity] = Field(default_factory=dict)
    device_flops_per_s: Annotated[Quantity | None, Rate(1e19)] = None
    attention_flops_per_s: Annotated[Quantity | None, Rate(1e19, ("device_flops_per_s", ATTENTION_OF_PRODUCTS))] = None
    expert_flops_per_s: Annotated[Quantity | None, Rate(1e19, ("device_flops_per_s", EXPERTS_OF_PRODUCTS))] = None
    gather_bytes_per_s: Annotated[Quantity | None, Rate(1e14)] = None
    reduce_bytes_per_s: Annotated[Quantity | None, Rate(1e14, ("gather_bytes_per_s", 1.0))] = None
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
        default_factory=dict,
        description="Measured slow-downs. 'host_adam_while_h2d' is the speed of CPU updates during copies to the "
        "GPU, divided by their speed alone.",
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
                f"{self.schema_version}: the machine file was written by a newer ebbtide. "
                "Upgrade ebbtide, or measure the machine again with `tune profile`",
                key="schema_version",
            )
        if not 0.3 <= self.duplex_factor.median <= 1.25:
            raise RuleError(
                f"duplex_factor must lie in [0.3, 1.25], but got {self.duplex_factor.median}. This factor is the total "
                "speed of simultaneous copies to and from the GPU, divided by the sum of the speeds of both directions "
                "alone: 0.5 if the directions take turns, and 1 if both run at full speed",
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

    @property
    def is_preset(self) -> bool:
        """Return True if the machine's rates come from data sheets and publications, and not from measurements."""
        return self.measured_with == PRESET

    @property
    def default_gpus(self) -> int:
        """Return the default GPUs of a job: N for a preset with N cards (``rtx4090-x2``), otherwise 1."""
        found = re.search(r"-x(\d+)$", self.name) if self.is_preset else None
        return int(found[1]) if found and int(found[1]) == self.gpus_per_node else 1

    @staticmethod
    @checked
    def preset(name: str) -> "Machine":
        """Return a preset: a machine from data sheets and published figures.

        Capitals, spaces and hyphens in the name do not matter: "RTX 4090" means the preset "rtx4090".

        >>> round(Machine.preset("H200").device_memory_bytes / 2**30, 1)
        139.8

        Raises:
            ValueError: No preset has this name. The error suggests the nearest names.
        """
        return BUILDERS[0](name)

    def in_short(self) -> str:
        return (
            f"{self.name}, {self.gpus_per_node} x {self.device_name} with {self.device_memory_bytes / 2**30:.3g} GiB, "
            f"{self.cpu_cores} cores, {self.host_memory_bytes / 2**30:.4g} GiB of host memory"
        )

    def records(self) -> list[dict[str, Any]]:
        """Return a list of table rows, one for each main rate of a machine.

        A row has the rate's median and quartiles, in billions (of bytes or parameters) per second, its unit and its
        source.
        """
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
        """Return the rate of an op that runs alone. The name tells the unit, as in ``h2d_bytes_per_s``.

        A rate that was not measured is derived from a related one. Copies of unpinned memory run at a quarter of the
        rate of pinned copies, because the driver copies them through a pinned buffer of its own. Copies inside host
        memory run at a third of the bandwidth of a triad loop (``a = b + 2 c``): each byte is read, written, and
        fetched before the write.

        Raises:
            ValueError: The machine has neither this rate nor one from which it can be derived.
        """
        known = self.known_rate(name)
        if known is None:
            raise RuleError(
                f"machine.{name} is needed by this workload, but machine {self.name!r} does not "
                f"give it: add {name} to the machine file",
                key=f"machine.{name}",
            )
        return known

    def known_rate(self, name: RateName) -> float | None:
        """Return the same as `rate`, but None if the machine has neither this rate nor one from which it can be
        derived.
        """
        if name == "wall_s":
            return 1.0
        if name == "host_adam_out_of_place_params_per_s":
            return self.host_adam_params_per_s.median * self.out_of_place
        quantity: Quantity | None = getattr(self, name)
        if quantity is not None:
            return quantity.median
        if (instead := RATES[name].instead) is None:
            return None
        other: Quantity | None = getattr(self, instead[0])
        return None if other is None else other.median * instead[1]

    def op_rate(self, name: RateName, cores: float) -> float:
        """Return a rate for an op on a number of CPU cores, which matters only for the rates of CPU updates.

        Raises:
            ValueError: The machine has neither this rate nor one from which it can be derived.
        """
        if 0 < cores < self.cpu_cores and name in THREADED:
            if name == "stock_host_adam_params_per_s":
                return self.stock_host_adam_rate(cores)
            apart = name == "host_adam_out_of_place_params_per_s"
            return self.host_adam_rate(cores) * (self.out_of_place if apart else 1.0)
        return self.rate(name)

    @property
    def out_of_place(self) -> float:
        """Return the speed of ebbtide's CPU update with results in other buffers, divided by its speed in place."""
        measured = self.host_adam_out_of_place
        return OUT_OF_PLACE if measured is None else measured.median

    def stock_host_adam_rate(self, threads: float) -> float:
        """Return the parameters per second of DeepSpeed's CPU update: linear in the threads, up to that of all cores.

        If the rate of one thread is unknown, fewer threads slow it down as much as ebbtide's fused kernel.
        """
        full = self.stock_host_adam_params_per_s.median
        if (one := self.stock_host_adam_thread_params_per_s) is not None:
            return min(full, threads * one.median)
        return full * self.host_adam_rate(threads) / self.host_adam_params_per_s.median

    def host_adam_rate(self, threads: float) -> float:
        """Return the parameters per second that ebbtide's fused CPU update processes on a given number of threads.

        The rate is interpolated between measured numbers of threads. Without such measurements the rate of all
        cores is returned, because a few threads are enough to use all DRAM bandwidth.
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
        """Return a copy of the machine with other rates, for what-if questions: ``with_rates(h2d_bytes_per_s=5e10)``.

        Other fields that can be changed: ``duplex_factor``, ``device_memory_bytes``, ``host_memory_bytes`` and
        ``cpu_cores``.

        Raises:
            ValueError: A field does not exist, or a value is negative, zero, NaN, or more than 10,000 times larger or
                smaller than the machine's own.
        """
        changes: dict[str, Any] = {}
        for name, value in rates.items():
            changes[name] = self._changed(name, value)
        return Machine.model_validate({**self.model_dump(), **changes})

    def storage_of(self, directory: str) -> StorageRates:
        """Return the rates of reading and writing in a folder.

        If no rates were measured in this folder, return the machine's storage rates for checkpoints.
        """
        if directory in self.drives:
            return self.drives[directory]
        write, both = self.storage_write_bytes_per_s, self.storage_duplex_factor
        return StorageRates(
            write_bytes_per_s=write,
            read_bytes_per_s=self.storage_read_bytes_per_s or write,
            duplex_factor=both or Quantity.exact(1.0),
        )

    def storing_in(self, directories: Sequence[str]) -> "Machine":
        """Return a copy of the machine with the storage bandwidth of several folders that are used together.

        Each folder holds a part of every subgroup's optimizer state. The read and write bandwidth of all folders
        together is computed from that of each folder (`StorageRates.together`).
        """
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
        """Return a hash of the hardware, which is the same for all its profiles, whatever their rates."""
        return self.fingerprint_of(self)

    @staticmethod
    def fingerprint_of(hardware: "Machine | Mapping[str, Any]") -> str:
        """Return a hash of a machine's hardware, from a `Machine` or from a mapping with its hardware fields."""
        names = ("device_kind", "device_name", "unified_memory", "gpus_per_node", "cpu_cores")
        sizes = ("host_memory_bytes", "device_memory_bytes")
        values: Mapping[str, Any] = (
            hardware if isinstance(hardware, Mapping) else {name: getattr(hardware, name) for name in (*names, *sizes)}
        )
        facts = {name: values[name] for name in names}
        facts |= {f"{s.removesuffix('_bytes')}_gib": round(values[s] / 2**30) for s in sizes}
        return digest_of(facts)


RATES: Mapping[str, Rate] = {
    name: known for name, field in Machine.model_fields.items() for known in field.metadata if isinstance(known, Rate)
}
# The rates that `Machine.with_rates` can change.
CHANGEABLE = (*(name for name, known in RATES.items() if known.changeable), "duplex_factor")
