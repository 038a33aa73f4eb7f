"""The conversion of recorded training steps of a DeepSpeed ZeRO engine into a workload for the planner."""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

import torch
from ebbtide.profiler.rates.sampling import doubts
from ebbtide.profiler.watcher import ProfiledStep, partitions_parameters, unit_of, units
from ebbtide.runtime.hardware.cores import near_cores
from ebbtide.runtime.hardware.launcher import local_ranks, world_size
from ebbtide.runtime.kernels import host
from ebbtide.simulator.estimates.deepspeed_config import REDUCE_BUCKET_ELEMENTS
from ebbtide.simulator.quantity import Quantity
from ebbtide.simulator.schedules.buckets import bucket_fields, planned_bucket
from ebbtide.simulator.schedules.gathers import Gathered
from ebbtide.simulator.workload import Layer, WireDtype, Workload, cut_flat

# DeepSpeed records its trace in the first two steps, and the allocators need two more to settle.
WARMUP_STEPS = 4
UNCACHED_BYTES = 2**30  # bytes of gradients and their copies, which do not fit into most caches
LEAST_STEPS = 3  # steps needed to estimate their spread
_STOCK_OPTIMIZERS = ("DeepSpeedZeroOptimizer_Stage3", "DeepSpeedZeroOptimizer")
_WIRE: dict[torch.dtype, WireDtype] = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def check_iterations(iterations: int) -> None:
    """Raise ValueError unless the number of steps to profile is at least 1."""
    if iterations < 1:
        raise ValueError(f"iterations must be >= 1, but got {iterations}")


def check_engine(engine: Any) -> None:
    """Raise ValueError if a DeepSpeed engine's configuration cannot be profiled. The message names the config key."""
    kind = type(engine.optimizer).__name__
    if kind not in _STOCK_OPTIMIZERS:
        raise ValueError(
            "the engine must run stock ZeRO-1, 2 or 3 (neither zero_optimization.zenflow nor "
            "zero_optimization.offload_optimizer.super_offload nor ebbtide.runtime.attach), but its "
            f"optimizer is {kind}. Set zero_optimization.stage to 1, 2 or 3"
        )
    if not partitions_parameters(engine.optimizer) and world_size() > 1:
        raise ValueError(
            f"an engine with ZeRO-{engine.zero_optimization_stage()} can be profiled on one rank only, but this job "
            f"has {world_size()}. Train with ebbtide.runtime.initialize(plan='auto'), which needs no profile"
        )
    for key, settings in (
        ("offload_optimizer", engine.zero_offload_optimizer()),
        ("offload_param", engine.zero_offload_param()),
    ):
        device = str(getattr(settings, "device", None) or "none").rpartition(".")[2]
        allowed = ("none", "cpu") if key == "offload_optimizer" else ("none",)
        if device not in allowed:
            raise ValueError(f"zero_optimization.{key}.device must be {' or '.join(allowed)}, but got {device}")


def workload_of(engine: Any, traces: list[ProfiledStep], name: str, gathers: Gathered | None = None) -> Workload:
    """Build a workload from recorded steps of a DeepSpeed engine.

    Args:
        gathers: The engine's gathers of parameters. None: DeepSpeed is asked for them.

    Raises:
        ValueError: A recorded step had no forward or no backward.
    """
    from ebbtide.runtime.zero.checks import private

    _check_phases(traces)
    bare, traces = [t for t in traces if t.bare], [t for t in traces if not t.bare]
    plain, traces = [t for t in traces if t.plain], [t for t in traces if not t.plain]
    timed = plain or traces
    optimizer = engine.optimizer
    forward_s = _median(trace.phases["forward"] for trace in timed)
    micro = int(engine.gradient_accumulation_steps())
    own_s = 0.0 if torch.cuda.is_available() else _own_gradient_path_s(optimizer, micro)
    backward_s = _backward_s(plain, traces)
    stock_extra_s = max(0.0, _median(t.phases["backward"] for t in timed) - backward_s)
    if gathers is None and partitions_parameters(optimizer):
        gathers = private.gathers(optimizer)
    seconds = {"forward_s": forward_s, "backward_s": backward_s + own_s}
    if bare:
        seconds["planned_forward_s"] = _median(t.phases["forward"] for t in bare)
        watched = [t for t in bare if not t.plain]
        seconds["planned_backward_s"] = _backward_s([t for t in bare if t.plain], watched) + own_s
    layers = _layers(engine, traces, {name: s / micro for name, s in seconds.items()}, gathers)
    # The step with the highest peak, because a plan must fit into the memory that is free in each step.
    fullest = max(traces, key=lambda trace: trace.device_peak_bytes)
    times, notes = _phase_times(timed)
    return Workload(
        name=name,
        layers=layers,
        **_settings(engine),
        tokens_per_iteration=_tokens(engine, traces),
        device_base_bytes=_base_bytes(traces, fullest, layers),
        live_params=None if gathers is None else gathers.live,
        module_issue_s=module_issue_s(traces) if torch.cuda.is_available() else 0.0,
        step_issue_s=_median(t.step_issue_s for t in plain) if plain else 0.0,
        planned_step_issue_s=_median(t.step_issue_s for t in bare) if plain and bare else None,
        stock_backward_extra_s=max(0.0, stock_extra_s - own_s),
        memory_curve=tuple(sorted(fullest.memory, key=lambda point: point.t_s)),
        provenance=f"medians of {len(timed)} steps of a live engine, memory of the fullest of {len(traces)}"
        + (f", and {len(bare)} steps without DeepSpeed's hooks on modules" if bare else ""),
        phase_times=times,
        memory_peaks=_memory_peaks(traces),
        warnings=tuple(notes),
    )


def _settings(engine: Any) -> dict[str, Any]:
    from ebbtide.runtime.zero.checks.other_steps import recomputes

    optimizer, ranks = engine.optimizer, local_ranks()
    groups = [[elements for _, elements in group] for group in _held(optimizer)]
    if partitions_parameters(optimizer):
        subgroups, size = [int(n) for n in optimizer.fp16_partitioned_groups_flat_numel], int(optimizer.sub_group_size)
    else:  # DeepSpeed has one flat partition of each group, which a plan cuts at any element
        groups, size = [[sum(group)] for group in groups], int(engine.zero_sub_group_size())
        subgroups = cut_flat([sum(group) for group in groups], size)
    return {
        "subgroups": tuple(subgroups),
        "subgroup_size": size,
        "parameters": tuple(map(tuple, groups)),
        "zero_stage": engine.zero_optimization_stage(),
        "wire_dtype": _WIRE.get(optimizer.dtype, "fp32"),
        "grad_bytes_per_param": optimizer.gradient_accumulation_dtype.itemsize,
        "clip": optimizer.clip_grad > 0,
        "gradient_accumulation_steps": int(engine.gradient_accumulation_steps()),
        **_bucket_params(optimizer),
        "ranks_per_node": ranks,
        "nodes": max(1, world_size() // ranks),
        "stock_threads": _fewer_threads(),
        "samples_per_iteration": int(engine.train_batch_size()),
        "micro_batch": int(engine.train_micro_batch_size_per_gpu()),
        "recompute": recomputes(engine.module),
    }


def _bucket_params(optimizer: Any) -> dict[str, int]:
    """Return the sizes of the gradient bucket. A plan sets another size only for the default one."""
    own = int(optimizer.reduce_bucket_size)
    planned = planned_bucket(world_size()) if own == REDUCE_BUCKET_ELEMENTS else None
    return bucket_fields(own, planned, int(optimizer.partition_count) if partitions_parameters(optimizer) else 1)


def _backward_s(plain: list[ProfiledStep], watched: list[ProfiledStep]) -> float:
    """Return the shorter seconds of both kinds: plain steps may wait for copies, watched steps for the GPU."""
    # Per step, because a disturbance of one step's gradient copies must not be subtracted from another step's backward.
    times = [_median(t.phases["backward"] - t.gradient_path_s for t in watched)] if watched else []
    if plain:
        times.append(_median((t.computed_s or t.phases["backward"]) - t.gradient_path_s for t in plain))
    return max(0.0, min(times))


def _check_phases(traces: list[ProfiledStep]) -> None:
    for phase in ("forward", "backward"):
        without = [number for number, trace in enumerate(traces, 1) if not trace.phases[phase] > 0]
        if without:
            raise ValueError(
                f"every profiled step must run the model's {phase}, but step {without[0]} did not. "
                "Check the step function"
            )


def module_issue_s(traces: Iterable[ProfiledStep]) -> float:
    """Return the CPU seconds that one module with parameters takes to issue its forward to the GPU."""
    return _median(trace.issued_s / max(1, trace.modules) for trace in traces)


def _fewer_threads() -> int | None:
    threads = torch.get_num_threads()
    return threads if threads < len(near_cores(None)) else None


def _held(optimizer: Any) -> list[list[tuple[Any, int]]]:
    """Return this rank's elements of each group's parameters. Below ZeRO-3 they include padding."""
    if partitions_parameters(optimizer):
        groups: dict[int, list[tuple[Any, int]]] = defaultdict(list)
        for index, subgroup in enumerate(optimizer.fp16_groups):
            held = [(param, int(param.partition_numel())) for param in subgroup]
            groups[optimizer.sub_group_to_group_id[index]] += held
        return list(groups.values())
    rows = zip(
        optimizer.round_robin_bit16_groups, optimizer.round_robin_bit16_offsets, optimizer.partition_size, strict=True
    )
    return [
        [(param, int(end - begin)) for param, begin, end in zip(params, begins, [*begins[1:], size], strict=True)]
        for params, begins, size in rows
    ]


def _phase_times(traces: list[ProfiledStep]) -> tuple[dict[str, Quantity], list[str]]:
    samples = {name: [trace.phases[name] for trace in traces] for name in ("forward", "backward", "step")}
    samples["iteration"] = [trace.ended_s - trace.began_s for trace in traces]
    times: dict[str, Quantity] = {}
    notes: list[str] = []
    for name, seconds in samples.items():
        if min(seconds) > 0:
            times[name] = Quantity.from_samples(seconds, "measured", f"{len(seconds)} steps")
            notes += doubts(f"the {name}'s time", seconds, LEAST_STEPS)
    return times, notes


def _memory_peaks(traces: list[ProfiledStep]) -> dict[str, Quantity]:
    peaks = {
        "device": [float(trace.device_peak_bytes) for trace in traces],
        "host": [float(max(p.host_bytes for p in trace.memory)) for trace in traces],
    }
    detail = f"{len(traces)} steps"
    return {name: Quantity.from_samples(peak, "measured", detail) for name, peak in peaks.items() if min(peak) > 0}


def _tokens(engine: Any, traces: list[ProfiledStep]) -> int | None:
    result = [trace.tokens for trace in traces]
    if any(not tokens for tokens in result):
        return None
    return int(_median(tokens for tokens in result if tokens)) * int(engine.dp_world_size)


def _base_bytes(traces: list[ProfiledStep], fullest: ProfiledStep, layers: Iterable[Layer]) -> int:
    least = min(point.device_bytes for trace in traces for point in trace.memory)
    activations = sum(layer.activation_bytes for layer in layers)
    return max(least, fullest.device_peak_bytes - activations)


def _median(values: Any) -> float:
    return float(statistics.median(values))


def _own_gradient_path_s(optimizer: Any, micro: int) -> float:
    times = [_gradients_to_host_s(optimizer) for _ in range(LEAST_STEPS)]
    copy_s, norm_s = (_median(part) for part in zip(*times, strict=True))
    return micro * copy_s + norm_s


def _gradients_to_host_s(optimizer: Any) -> tuple[float, float]:
    """Measure the CPU seconds to copy all gradients and for their norm, scaled from about 0.5 GiB."""
    sizes = [sum(elements for _, elements in group) for group in _held(optimizer)]
    pairs, dtype = list[tuple[torch.Tensor, torch.Tensor]](), optimizer.gradient_accumulation_dtype
    copy_s = norm_s = taken = 0.0
    for size in sizes:
        if 2 * dtype.itemsize * taken < UNCACHED_BYTES:
            # The tensors are written to first, so that no page is allocated while the copy is timed.
            pairs.append((torch.ones(size, dtype=dtype), torch.ones(size, dtype=dtype)))
            taken += size
    for source, buffer in pairs:
        began_s = time.perf_counter()
        buffer.copy_(source)
        copied_s = time.perf_counter()
        host.norm(buffer)
        copy_s, norm_s = copy_s + copied_s - began_s, norm_s + time.perf_counter() - copied_s
    of_all = sum(sizes) / max(1.0, taken)
    return copy_s * of_all, norm_s * of_all


def _layers(
    engine: Any, traces: list[ProfiledStep], passes: Mapping[str, float], gathers: Gathered | None
) -> tuple[Layer, ...]:
    """Return the layers. ``passes`` (seconds by field) are divided in proportion to the forward times."""
    names = {param: name for name, param in engine.module.named_parameters()}
    unit_names = [name for name, _ in units(engine.module)]
    ordered = [pair for group in _held(engine.optimizer) for pair in group]
    owners = [unit_of(names.get(param, ""), unit_names) for param, _ in ordered]
    elements: dict[str, int] = defaultdict(int)
    for (_, size), owner in zip(ordered, owners, strict=True):
        elements[owner] += size
    seconds = {n: _median(trace.units.get(n, 0.0) for trace in traces) for n in set(owners)}
    held = _activations(unit_names, set(owners), traces)
    timed_s = sum(seconds.values()) or 1.0
    layers = []
    for owner, run in groupby(zip(ordered, owners, strict=True), key=lambda pair: pair[1]):
        held_here = [pair for pair, _ in run]
        size = sum(n for _, n in held_here)
        part = size / elements[owner]
        share = seconds[owner] / timed_s * part
        layers.append(
            Layer(
                name=owner,
                params=size,
                **{name: whole_s * share for name, whole_s in passes.items()},
                activation_bytes=int(held[owner] * part),
                **({} if gathers is None else gathers.of_layer((param.ds_id, n) for param, n in held_here)),
            )
        )
    return tuple(layers)


def _activations(unit_names: list[str], owners: set[str], traces: list[ProfiledStep]) -> Mapping[str, int]:
    held: dict[str, int] = defaultdict(int)
    last = next((name for name in unit_names if name in owners), "model")
    for name in ["", *unit_names]:
        last = name if name in owners else last
        held[last] += max(0, *(trace.activations.get(name, 0) for trace in traces))
    return held
