"""Predictions of published runs with the functions that users of ebbtide call before they train.

`predict` calls `workload_from_model`, `build_strategy` and the simulator for a given machine. The machine is one of
ebbtide's presets, or a preset that was calibrated with published runs, as `tune calibrate` does.
"""

import functools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ebbtide.simulator import Machine, Workload, build_strategy, preset, workload_from_model
from ebbtide.simulator.engines.compiled import simulate_fast
from ebbtide.simulator.estimates.models.blocks import ModelError
from ebbtide.simulator.limits import GIB
from ebbtide.simulator.schedule import Schedule
from ebbtide.tuner.calibrate.calibration import Calibrated, Observation, calibrate, predicted_s
from ebbtide.tuner.calibrate.interval import interval_s

from studies.bench.offload_runs import PublishedRun, RunError, model_of

PRESETS = {"a100": "a100-node", "h100x4": "h100-node"}
# The runs had DeepSpeed's `memory_breakdown` on, which reports memory six times per iteration, before and after each
# phase, and collects garbage each time (`see_memory_usage`): 0.07 s in a process with about 200,000 objects. This time
# lies between the phases and does not depend on the strategy.
MEMORY_REPORTS, COLLECT_S = 6, 0.07
COLUMNS = {"forward": "fwd_ms", "backward": "bwd_ms", "step": "step_ms", "iteration": "iter_ms"}
HARNESS_S = MEMORY_REPORTS * COLLECT_S
# Rates from which `workload_from_model` computes the times of layers. A calibration also changes other rates, which do
# not require building the schedule again.
LAYER_RATES = (
    "device_flops_per_s",
    "device_memory_bytes_per_s",
    "layer_issue_s",
    "loop_s",
    "h2d_bytes_per_s",
    "d2h_bytes_per_s",
)
NETWORK = "network_bytes_per_s"  # the same, if tensor parallelism spans nodes
KEPT_SCHEDULES = 5000
_schedules: dict[Hashable, Schedule] = {}
# Campaigns whose logs do not say whether gradients were copied asynchronously, because the flag did not exist yet. The
# fork's build of 2024-03-25 blocks, and that of 03-28 does not (DataStates/DeepSpeed, commits fa8c1df2 and 8074cd62).
# We inferred the build from the measured backward: 2.51 s, where runs with the flag in their logs have 2.50 s
# (asynchronous) and 5.93 s (blocking). So a property of these runs, though no rate, comes from their measurements. The
# figures under ``as_logged`` count a blank as blocking.
BUILDS = {"scale-subg-size-motivation": True}


def machine_of(testbed: str) -> Machine:
    """Return ebbtide's preset machine for a testbed, the machine on which published runs were measured.

    Raises:
        RunError: If no preset describes the testbed.
    """
    if testbed not in PRESETS:
        raise RunError(
            f"testbed must be one of {', '.join(sorted(PRESETS))} (published nodes with a preset), but got {testbed!r}"
        )
    return preset(PRESETS[testbed])


def workload_of(run: PublishedRun, machine: Machine) -> Workload:
    """Return the workload of a published run, computed from the run's model and settings without measurements.

    Raises:
        RunError: If there is no such model, or it cannot be divided over the run's ranks. The message
            names the run's row in the CSV file.
    """
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, "sub_group_size": run.subgroup}}
    try:
        return workload_from_model(
            model_of(run),
            machine,
            config,
            sequence=run.seq,
            micro_batch=run.micro_batch,
            gradient_accumulation_steps=run.accumulation,
            data_parallel=run.dp,
            tensor_parallel=run.tp,
            flash_attention=False,  # the logs say ``use_flash_attn .... False``
        )
    except ModelError as error:
        raise RunError(f"{run.where or run.model}: {error}") from None


def schedule_of(run: PublishedRun, machine: Machine) -> Schedule:
    """Return the ops of one iteration of a published run, in the form that the simulator takes.

    If the run's log does not tell whether gradients were copied asynchronously, the run used an older build of
    DeepSpeed. Then the table `BUILDS` tells this for the run's campaign (series of runs by one source). For a campaign
    that is not in the table, blocking copies of gradients are assumed.
    """
    names = LAYER_RATES if run.tp <= machine.gpus_per_node else (*LAYER_RATES, NETWORK)
    rates = (getattr(machine, name) for name in names)
    key = (run, machine.name, *(rate and rate.median for rate in rates))
    if key not in _schedules:
        if len(_schedules) >= KEPT_SCHEDULES:
            _schedules.clear()
        _schedules[key] = _schedule_of(run, machine)
    return _schedules[key]


def _schedule_of(run: PublishedRun, machine: Machine) -> Schedule:
    work = workload_of(run, machine)
    options: dict[str, Any] = {"iterations": 1, "ratio": _ratio_of_today(run.offload_ratio, len(work.subgroups))}
    if run.prefetch and run.stride:
        return build_strategy("deep_optimizer_states", work, stride=run.stride, **options)
    flows = BUILDS.get(run.family, False) if run.async_grads is None else run.async_grads
    return build_strategy("twin_flow", work, async_gradients=flows, **options)


def _ratio_of_today(ratio: float, count: int) -> float:
    # ``ratio`` is the fraction of the subgroups with state in host memory. DeepSpeed 0.19.8 rounds the number of
    # subgroups on the GPU down. The published runs used builds of 2024, which rounded the number of subgroups in host
    # memory down.
    on_device = count - int(ratio * count + 1e-9)
    return max(0.0, 1 - (on_device + 0.5) / count)  # plus half a subgroup, so that rounding cannot lose one


def as_logged(run: PublishedRun) -> PublishedRun:
    """Return the published run, with blocking gradient copies assumed if the run's log does not tell how gradients were
    copied.
    """
    return run if run.async_grads is not None else replace(run, async_grads=False)


def predict(run: PublishedRun, machine: Machine) -> dict[str, float]:
    """Return the predicted times of a published run, in milliseconds by CSV column, and its memory in GiB."""
    # ``missing_gb`` and ``missing_host_gb`` tell how much memory a GPU and a node lack for this run. If one of them is
    # above 0, the run cannot have taken place as described.
    return _predicted(replace(run, measured={}), machine.model_dump_json())


@functools.lru_cache(maxsize=4096)
def _predicted(run: PublishedRun, machine_json: str) -> dict[str, float]:
    machine = _machine(machine_json)
    schedule = schedule_of(run, machine)
    seconds = predicted_s(schedule, machine)
    if machine.loop_s is None:  # otherwise the calibration has set it
        seconds["iteration"] += HARNESS_S
    result = simulate_fast(schedule, machine)
    peak = result.device_peak_bytes
    host = schedule.ranks_per_node * result.host_peak_bytes
    return {
        **{COLUMNS[phase]: 1e3 * value for phase, value in seconds.items()},
        "memory_gb": peak / GIB,
        "missing_gb": _missing_gb(peak + machine.device_reserved_bytes, machine.device_memory_bytes),
        "missing_host_gb": _missing_gb(host, machine.host_memory_bytes),
    }


def _missing_gb(needed_bytes: int, there_bytes: int) -> float:
    return max(0, needed_bytes - there_bytes) / GIB


def fits(predicted: Mapping[str, float]) -> bool:
    """Return True if a published run, as predicted, fits into the GPU memory and host memory of its machine."""
    return not (predicted["missing_gb"] or predicted["missing_host_gb"])


@functools.lru_cache(maxsize=64)
def _machine(machine_json: str) -> Machine:
    return Machine.model_validate_json(machine_json)


def interval_ms(run: PublishedRun, machine: Machine) -> tuple[float, float]:
    """Return both ends of the 90% interval around a published run's predicted iteration time, in milliseconds."""
    low, high = interval_s(functools.partial(schedule_of, run), machine)
    between = 0.0 if machine.loop_s is not None else HARNESS_S
    return 1e3 * (low + between), 1e3 * (high + between)


def calibrated(machines: Mapping[str, Machine], seen: Sequence[PublishedRun]) -> dict[str, Calibrated]:
    """Return the machine of each testbed, calibrated on the measured runs of that testbed.

    Raises:
        RunError: If a testbed has no measured run.
    """
    result = {}
    for name, machine in machines.items():
        own = [as_seen(run, seen) for run in seen if run.testbed == name and run.measured]
        if not own:
            known = ", ".join(sorted({run.testbed for run in seen}))
            raise RunError(
                f"every testbed of --predict must have rows in --calibrate, but {name!r} has none (calibrated: {known})"
            )
        result[name] = calibrate(machine, [observation(run) for run in own])
    return result


def as_seen(run: PublishedRun, seen: Sequence[PublishedRun]) -> PublishedRun:
    """Return a published run with the kind of its gradient copies (asynchronous or blocking) filled in.

    An unknown kind is inferred from the measured backward times of other runs of the same campaign (series of runs by
    one source). If the kind is known already, or if there are no such runs, the run is returned unchanged.

    Args:
        seen: Runs with measured times that the inference may use, such as the runs for a calibration.
    """
    if run.async_grads is not None or run.prefetch or run.family in BUILDS:
        return run
    fellows = [
        other
        for other in seen
        if (other.testbed, other.family) == (run.testbed, run.family)
        and other.async_grads is None
        and not other.prefetch
        and "bwd_ms" in other.measured
    ]
    flows = [replace(run, async_grads=_looks_asynchronous(other)) for other in fellows]
    asynchronous = sum(bool(one.async_grads) for one in flows)
    return replace(run, async_grads=2 * asynchronous > len(flows)) if flows else run


def _looks_asynchronous(run: PublishedRun) -> bool:
    machine = machine_of(run.testbed)
    misses = {
        flows: abs(math.log(predict(replace(run, async_grads=flows), machine)["bwd_ms"] / run.measured["bwd_ms"]))
        for flows in (True, False)
    }
    return misses[True] < misses[False]


def observation(run: PublishedRun) -> Observation:
    """Return a published run as an observation, the form that `tune calibrate` takes."""
    # An observation has a name, a function that returns the schedule, and the measured times.
    seconds = {phase: run.measured[column] / 1e3 for phase, column in COLUMNS.items() if column in run.measured}
    name = f"{run.model}, dp {run.dp}, tp {run.tp}, micro-batch {run.micro_batch} ({run.family})"
    return Observation(name, functools.partial(schedule_of, run), seconds)
