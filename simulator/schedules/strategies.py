"""The offloading strategies that can be simulated, by name: DeepSpeed's own, published improvements, and ebbtide.

DeepSpeed's parameters or activations in host memory and its optimizer state on NVMe (``offload_param``,
``activation_checkpointing.cpu_checkpointing``, ``offload_optimizer.device: nvme``) are here too (Rajbhandari et al.,
ZeRO-Infinity, SC 2021). Activations in host memory work under a plan with identical results
(tests/runtime/contract/test_activation_offload.py), but the times of such training are not predicted.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from numbers import Integral, Real
from typing import Any, Literal, get_args, get_type_hints

from ebbtide.simulator.optimizer import FP32_BYTES
from ebbtide.simulator.plan import Plan, Way
from ebbtide.simulator.rules import RuleError, suggestion
from ebbtide.simulator.schedule import Kind, Lane, OpKind, Schedule
from ebbtide.simulator.schedules.ebbtide import build_schedule
from ebbtide.simulator.schedules.footprint import fetched_for, moved_out
from ebbtide.simulator.schedules.stock import (
    HOST_GRADIENT_BYTES,
    PAGEABLE_PASSES,
    DeviceLoop,
    FlatOffloadLoop,
    FlatOptions,
    OverflowCheck,
    StockLoop,
    StockOptions,
)
from ebbtide.simulator.workload import Workload

StateLocation = Literal["cpu", "nvme"]
Location = Literal["device", "cpu"]


@dataclass(frozen=True, slots=True)
class InfinityOptions:
    """The memories that hold optimizer state, parameters and activations between their uses, by DeepSpeed's config.

    Attributes:
        optimizer: Location of the optimizer state. With ``nvme`` its fp32 gradients are there too.
        parameters, activations: Location of these between their uses. With ``cpu`` they are copied to the GPU for
            a forward or backward. The last layer's activations (logits) are used immediately and stay on the GPU.
        pipelined: DeepSpeed's ``pipeline_read`` and ``pipeline_write``: while a subgroup is updated, the next
            one is read and the previous one is written.
        pinned: True if host memory of gradients and state is pinned.
        pinned_parameters: True if host memory of parameters is pinned. If False, training waits for each copy.
    """

    optimizer: StateLocation = "nvme"
    parameters: Location = "cpu"
    activations: Location = "device"
    pipelined: bool = False
    pinned: bool = True
    pinned_parameters: bool = True
    async_gradients: bool = True
    torch_adam: bool = False
    overflow_check: OverflowCheck = "host_fp16"

    def __post_init__(self) -> None:
        if self.pipelined and self.optimizer != "nvme":
            raise RuleError(
                "pipelined must be False if optimizer is not 'nvme', but got True with "
                f"optimizer={self.optimizer!r}. With pipelined, updates overlap with reads and writes of a drive "
                "(DeepSpeed's pipeline_read and pipeline_write)",
                key="options.pipelined",
            )


class InfinityLoop(StockLoop):
    """The simulated training loop of ZeRO-3 offload with copies of parameters and activations to and from the host.

    The simulation assumes that copies for a forward or backward start during the previous forward or backward.
    DeepSpeed's prefetcher may start them later.
    """

    def __init__(self, workload: Workload, options: InfinityOptions) -> None:
        stock = StockOptions(
            pinned=options.pinned,
            async_gradients=options.async_gradients,
            torch_adam=options.torch_adam,
            overflow_check=options.overflow_check,
        )
        super().__init__(workload, stock)
        self.where = options
        self.writes: list[int] = []  # writes of state in the latest step
        self.stored: dict[int, int] = {}  # layer -> op that copied its activations out of GPU memory
        self.ranks = workload.ranks_per_node * workload.nodes

    def schedule(self, iterations: int, name: str) -> Schedule:
        made, w, where = super().schedule(iterations, name), self.workload, self.where
        host, storage = dict(made.held["host"]), dict[Kind, int]()
        if where.parameters == "cpu":
            host["parameters"] = w.params * w.wire_bytes
        if where.optimizer == "nvme":
            sets = min(len(self.sizes), 2 if where.pipelined else 1)
            host["staging"] = sets * max(self.sizes) * (self.state_bytes + FP32_BYTES)
            # The partition buffer of gradients stays in host memory, and fp32 gradients go to storage.
            storage = {"state": host.pop("state"), "gradients": w.params * FP32_BYTES}
            host["gradients"] -= w.params * (HOST_GRADIENT_BYTES - FP32_BYTES)
        return replace(made, held={**made.held, "host": host, "storage": storage})

    @property
    def gone_bytes(self) -> int:
        w = self.workload
        if self.where.parameters == "device":
            return 0
        return moved_out(w, [layer.params for layer in w.layers]) * w.wire_bytes

    # -- passes ------------------------------------------------------------------------------

    def before_pass(self, layer: int, waits: list[int], *, backward: bool = False) -> list[int]:
        blocks = not self.where.pinned_parameters or (backward and self.ranks > 1 and self.where.parameters == "cpu")
        ahead = self.passes[-1:] if blocks else self.passes[-2:-1]
        of = self.workload.layers[layer]
        fetched = fetched_for(of, of.params, self.micro_step, backward=backward)
        if self.where.parameters == "cpu" and fetched:
            size = fetched * self.workload.wire_bytes
            waits = [self._come_in(OpKind.PARAMETER_FETCH, size, layer, [*waits, *ahead])]
        waits = super().before_pass(layer, waits, backward=backward)
        if backward and of.unhidden_s and self.where.parameters == "cpu":
            waits = [*waits, self.out.add(OpKind.GRADIENT_PASS, Lane.COMPUTE, of.unhidden_s, after=waits, layer=layer)]
        if backward and layer in self.stored:
            size = self.workload.layers[layer].activation_bytes
            behind = [self.stored.pop(layer), *ahead]
            return [*waits, self._come_in(OpKind.ACTIVATION_H2D, size, layer, behind)]
        return waits

    def after_forward(self, layer: int, op: int) -> None:
        size = self.workload.layers[layer].activation_bytes
        last = layer == len(self.workload.layers) - 1
        if self.where.activations == "device" or last or not size:
            return
        self.stored[layer] = self.out.add(
            OpKind.ACTIVATION_D2H,
            Lane.D2H,
            size,
            "d2h_bytes_per_s",
            [op],
            dram_bytes=size,
            device_free_bytes=size,
            host_alloc_bytes=size,
            layer=layer,
        )

    def _come_in(self, kind: OpKind, size_bytes: int, layer: int, after: list[int]) -> int:
        activations = size_bytes if kind == OpKind.ACTIVATION_H2D else 0
        pageable = kind == OpKind.PARAMETER_FETCH and not self.where.pinned_parameters
        return self.out.add(
            kind,
            Lane.H2D_PARAMETERS,
            size_bytes,
            "pageable_h2d_bytes_per_s" if pageable else "h2d_bytes_per_s",
            after,
            dram_bytes=size_bytes * (PAGEABLE_PASSES if pageable else 1),
            device_alloc_bytes=activations,
            host_free_bytes=activations,
            layer=layer,
        )

    # -- gradients and step ------------------------------------------------------------------

    def gradients(self, layer: int, micro_step: int, after: int) -> None:
        super().gradients(layer, micro_step, after)
        size = self.workload.layers[layer].params * FP32_BYTES
        if self.where.optimizer == "nvme" and micro_step == self.boundary and size:
            on_host = self.gradients_on_host[layer]  # the norm waits for the ops in this dict
            self.gradients_on_host[layer] = self._write(size, on_host, layer=layer)

    def _update(self, subgroup: int, after: int) -> int:
        if self.where.optimizer == "cpu":
            return super()._update(subgroup, after)
        # Without pipelining, reads, updates and writes follow one after the other. With pipelining, two sets of buffers
        # alternate, and each read follows the previous one. The first read waits for the norm.
        waits = [after, *self.writes[-1:]]
        if self.where.pipelined and self.writes:
            waits = self.writes[-2:-1]
        size = self.sizes[subgroup]
        read_bytes = size * (self.state_bytes + FP32_BYTES)
        read = self.out.add(
            OpKind.STATE_READ,
            Lane.STORAGE_READ,
            read_bytes,
            "storage_read_bytes_per_s",
            waits,
            dram_bytes=read_bytes,
            subgroup=subgroup,
        )
        updated = self._update_host(subgroup, [read, after])
        self.writes.append(self._write(size * self.state_bytes, updated, subgroup=subgroup))
        return self._parameters_to_device(subgroup, [after, updated])

    def _parameters_to_device(self, subgroup: int, waits: list[int]) -> int:  # type: ignore[override]
        if self.where.parameters == "cpu":
            return waits[-1]
        return super()._parameters_to_device(subgroup, waits)

    def step_ends(self, waits: list[int], pieces: Iterable[tuple[float, list[int]]] | None = None) -> None:
        super().step_ends([*waits, *self.writes], pieces)
        self.writes = []

    def _write(self, size_bytes: int, after: int, *, layer: int = -1, subgroup: int = -1) -> int:
        return self.out.add(
            OpKind.STATE_WRITE,
            Lane.STORAGE,
            size_bytes,
            "storage_write_bytes_per_s",
            [after],
            dram_bytes=size_bytes,
            layer=layer,
            subgroup=subgroup,
        )


STEPS = 10  # number of steps in which a share between 0 and 1 is varied
STRIDES = (2, 3, 4, 5, 6, 8, 10)


def settings(name: str, subgroups: int) -> Sequence[Mapping[str, Any]]:
    """Return the sets of options that a comparison tries for an offloading strategy, as arguments of `build_strategy`.

    A strategy without options has one empty set.
    """
    tried: Mapping[str, Sequence[Mapping[str, Any]]] = {
        "twin_flow": [{"ratio": i / STEPS} for i in range(STEPS + 1)],
        "deep_optimizer_states": [{"stride": k} for k in STRIDES if k <= max(2, subgroups)],
        "zero_infinity": [
            {"optimizer": optimizer, "parameters": parameters, "activations": activations, "pipelined": pipelined}
            for (optimizer, pipelined), parameters, activations in product(
                (("cpu", False), ("nvme", False), ("nvme", True)), ("device", "cpu"), ("device", "cpu")
            )
        ],
    }
    return tried.get(name, [{}])


LARGEST_STRIDE = 100  # some published runs have strides larger than their number of subgroups


def build_strategy(name: str, workload: Workload, /, **options: Any) -> Schedule:
    """Return the schedule of ops of an offloading strategy: ``build_strategy("twin_flow", workload, ratio=0.4)``.

    All strategies take the option ``iterations`` (default 3). `STRATEGIES` lists the names and further options.

    Raises:
        ValueError: The strategy or an option does not exist, an option is out of its range, or DeepSpeed does
            not have the strategy at the workload's ZeRO stage.
    """
    if name not in STRATEGIES:
        raise RuleError(
            f"strategy must be one of {', '.join(STRATEGIES)}, but got {name!r}{suggestion(name, STRATEGIES)}",
            key="strategy",
        )
    if workload.zero_stage not in stages(name):
        raise RuleError(
            f"strategy {name!r} needs ZeRO-{' or '.join(map(str, stages(name)))}, but got a "
            f"workload with ZeRO-{workload.zero_stage} (--zero-stage), which has the strategies "
            f"{', '.join(strategies_of(workload.zero_stage))}",
            key="strategy",
        )
    builder = STRATEGIES[name]
    known = _options(builder)
    for option, value in options.items():
        if option not in known:
            raise RuleError(
                f"strategy {name!r} takes the options {', '.join(known)}, "
                f"but got {option!r}{suggestion(option, known)}",
                key=f"options.{option}",
            )
        _check_kind(option, value, known[option])
    if options.get("iterations", 1) < 1:
        raise RuleError(f"iterations must be >= 1, but got {options['iterations']}", key="options.iterations")
    return builder(workload, **options)


@cache
def _options(builder: Callable[..., Schedule]) -> Mapping[str, tuple[type | str, ...]]:
    hints = get_type_hints(builder)
    del hints["workload"], hints["return"]
    if builder in _OPTIONS_OF:
        del hints["options"]
        hints |= get_type_hints(_OPTIONS_OF[builder])
    return {name: get_args(hint) or (hint,) for name, hint in hints.items()}


_KINDS: Mapping[type | str, tuple[type, str]] = {
    bool: (bool, "True or False"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    Plan: (Plan, "a Plan (Plan.load reads a file's)"),
}


def _check_kind(option: str, value: Any, types: tuple[type | str, ...]) -> None:
    if isinstance(types[0], str) and value not in types:
        raise RuleError(f"{option} must be one of {types}, but got {value!r}", key=f"options.{option}")
    kind = next((t for t in types if t in _KINDS), None)
    if kind is None or (value is None and type(None) in types):
        return
    accepted, rule = _KINDS[kind]
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise RuleError(f"{option} must be {rule}, but got {value!r}", key=f"options.{option}")


def _stock(workload: Workload, name: str, options: StockOptions, iterations: int) -> Schedule:
    loop = StockLoop(workload, options)
    loop.run(iterations)
    return loop.schedule(iterations, name)


def zero3_offload(
    workload: Workload,
    iterations: int = 3,
    async_gradients: bool = True,
    torch_adam: bool = False,
    overflow_check: OverflowCheck = "host_fp16",
) -> Schedule:
    """Return the schedule of ops of ZeRO-3 offload, as DeepSpeed 0.19.8 runs it by default."""
    # Gradients are copied to pinned buffers during backward, and updates run one after the other on the CPU.
    options = StockOptions(async_gradients=async_gradients, torch_adam=torch_adam, overflow_check=overflow_check)
    return _stock(workload, "zero3_offload", options, iterations)


def zero3_offload_unpinned(
    workload: Workload,
    iterations: int = 3,
    async_gradients: bool = True,
    torch_adam: bool = False,
    overflow_check: OverflowCheck = "host_fp16",
) -> Schedule:
    """Return the schedule of ZeRO-3 offload with ``"pin_memory": false`` (the default before DeepSpeed 0.19.5).

    Backward waits for each copy from and to unpinned memory.
    """
    options = StockOptions(
        pinned=False, async_gradients=async_gradients, torch_adam=torch_adam, overflow_check=overflow_check
    )
    return _stock(workload, "zero3_offload_unpinned", options, iterations)


def zero3_offload_async(workload: Workload, iterations: int = 3) -> Schedule:
    """Return the schedule of ZeRO-3 offload, with the time of gradient copies always simulated."""
    # The strategy `zero3_offload` simulates this time only if no profile has measured it.
    options = StockOptions(measured_copies=False)
    return _stock(workload, "zero3_offload_async", options, iterations)


def twin_flow(
    workload: Workload,
    iterations: int = 3,
    ratio: float = 0.5,
    async_gradients: bool = True,
    pinned: bool = True,
    overflow_check: OverflowCheck = "host_fp16",
) -> Schedule:
    """Return the schedule of Twin-Flow, which keeps the state of a fraction 1 - ``ratio`` of the subgroups on the GPU.

    Args:
        async_gradients: False for DeepSpeed's builds of 2024, in which the host waits for gradients and converts them
            to fp32.
        pinned: False for copies through unpinned memory, as in `zero3_offload_unpinned`.
    """
    if not (pinned or async_gradients):
        raise RuleError(
            "async_gradients must be True if pinned is False, but got False. With async_gradients=False, each gradient "
            "copy blocks the host, as in DeepSpeed of 2024. twin_flow simulates such copies with pinned buffers only. "
            "Set async_gradients or pinned to True",
            "options.async_gradients",
        )
    options = StockOptions(
        pinned=pinned, async_gradients=async_gradients, host_ratio=ratio, overflow_check=overflow_check
    )
    return _stock(workload, "twin_flow", options, iterations)


def deep_optimizer_states(
    workload: Workload, iterations: int = 3, stride: int = 2, ratio: float = 1.0, staging_slots: int = 1
) -> Schedule:
    """Return the schedule of Deep Optimizer States (Maurya et al., Middleware 2024).

    The state of every stride-th subgroup is copied to the GPU and updated there.
    """
    most = max(LARGEST_STRIDE, len(workload.subgroups))
    if stride > most:
        raise RuleError(
            f"stride must be at most {most}, because with a larger stride no subgroup is copied to the GPU for its "
            f"update, but got {stride}. Set stride to 0 if no subgroup shall be copied",
            key="options.stride",
        )
    options = StockOptions(
        measured_copies=False,
        updates="interleaved",
        host_ratio=ratio,
        stride=stride,
        staging_slots=staging_slots,
        pageable_parameters=False,
    )
    return _stock(workload, "deep_optimizer_states", options, iterations)


def superoffload(workload: Workload, iterations: int = 3, ratio: float = 1.0, clip: bool | None = None) -> Schedule:
    """Return the schedule of DeepSpeed's SuperOffload. Updates overlap backward only without gradient clipping."""
    clipping = workload.clip if clip is None else clip
    options = StockOptions(updates="sequential" if clipping else "with_backward", host_ratio=ratio, result_copy=True)
    return _stock(workload, "superoffload", options, iterations)


def zero_offload(workload: Workload, iterations: int = 3, **options: Any) -> Schedule:
    """Return the schedule of DeepSpeed's ZeRO-1 or 2 offload. All updates run on the CPU after the gradient norm."""
    loop = FlatOffloadLoop(workload, FlatOptions(**options))
    loop.run(iterations)
    return loop.schedule(iterations, "zero_offload")


def zero_infinity(workload: Workload, iterations: int = 3, **options: Any) -> Schedule:
    """Return the schedule of ZeRO-3 with parameters or activations in host memory, or optimizer state on NVMe."""
    loop = InfinityLoop(workload, InfinityOptions(**options))
    loop.run(iterations)
    return loop.schedule(iterations, "zero_infinity")


def no_offload(workload: Workload, iterations: int = 3) -> Schedule:
    """Return the schedule of ZeRO without offload: all optimizer state is in device memory."""
    loop = DeviceLoop(workload if workload.zero_stage == 3 else workload.one_subgroup)
    loop.run(iterations)
    return loop.schedule(iterations)


def ebbtide(workload: Workload, iterations: int = 3, plan: Plan | None = None) -> Schedule:
    """Return the schedule of training with ebbtide's runtime under a plan.

    Without a plan, the CPU updates all subgroups, during the next forward if possible.
    """
    if plan is None:
        ways = Way.each(["host"] * len(workload.subgroups))
        plan = Plan(subgroup_size=max(workload.subgroups), ways=ways, overlap_forward=workload.overlaps_forward)
    return build_schedule(workload, plan, iterations)


_OPTIONS_OF: Mapping[Callable[..., Schedule], type] = {zero_offload: FlatOptions, zero_infinity: InfinityOptions}
STRATEGIES: Mapping[str, Callable[..., Schedule]] = {
    builder.__name__: builder
    for builder in (
        zero3_offload,
        zero3_offload_unpinned,
        zero3_offload_async,
        zero_offload,
        zero_infinity,
        twin_flow,
        deep_optimizer_states,
        superoffload,
        no_offload,
        ebbtide,
    )
}

# The strategies that DeepSpeed itself offers.
STOCK_OFFLOADS = (
    "zero3_offload",
    "zero3_offload_unpinned",
    "zero3_offload_async",
    "zero_offload",
    "zero_infinity",
    "twin_flow",
    "superoffload",
)
_STAGES: Mapping[str, tuple[int, ...]] = {"zero_offload": (1, 2), "no_offload": (1, 2, 3), "ebbtide": (1, 2, 3)}


def stages(name: str) -> tuple[int, ...]:
    """Return the numbers of the ZeRO stages at which an offloading strategy exists in DeepSpeed or ebbtide."""
    return _STAGES.get(name, (3,))


def stock_offload(stage: int) -> str:
    """Return the name of the strategy that simulates DeepSpeed's own offload of optimizer state at a ZeRO stage."""
    return "zero3_offload" if stage == 3 else "zero_offload"


def strategies_of(stage: int) -> tuple[str, ...]:
    """Return the names of the offloading strategies that exist at a ZeRO stage, in DeepSpeed or ebbtide."""
    return tuple(name for name in STRATEGIES if stage in stages(name))
