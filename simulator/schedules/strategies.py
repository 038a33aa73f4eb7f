"""The offloading strategies that can be simulated, by name: DeepSpeed's own, published improvements, and ebbtide."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import product
from numbers import Integral, Real
from typing import Any, get_args, get_type_hints

from ebbtide.simulator.plan import Plan, Way
from ebbtide.simulator.rules import RuleError, suggestion
from ebbtide.simulator.schedule import Schedule
from ebbtide.simulator.schedules.ebbtide import build_schedule
from ebbtide.simulator.schedules.infinity import InfinityLoop, InfinityOptions
from ebbtide.simulator.schedules.stock import (
    DeviceLoop,
    FlatOffloadLoop,
    FlatOptions,
    OverflowCheck,
    StockLoop,
    StockOptions,
)
from ebbtide.simulator.workload import Workload

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
