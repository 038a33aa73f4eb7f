"""An interval around a predicted iteration time that is meant to contain the measured times of nine runs in ten.

The width of the interval has these parts:

- The spread of each speed of the machine: wide for a preset, narrow for a measured or calibrated machine. The effect of
  each spread is simulated.
- The errors of the simulator and the noise of single iterations. For a calibrated machine, they are the error that its
  calibration left, which is at least `MODEL_SPREAD`. For all other machines, they are `MODEL_SPREAD`.
- `CAMPAIGN_SPREAD`, if the machine is a preset. A preset describes a kind of node, and the user's node has other
  software and another training loop.
- `OFFLOAD_SPREAD`, if three conditions hold: the machine is a preset, the prediction is for DeepSpeed's own offload,
  and no published run shows the speed of the preset's host.

`MODEL_SPREAD` was chosen on the published runs in the repository, so these runs are no proof of it. After a calibration
on three random runs, the intervals contain the measured times of seven to nine in ten other runs
(`studies.published_runs --triples`).
"""

import math
from collections.abc import Callable

import numpy as np
from ebbtide.simulator.analysis.many_plans import PlanSweep
from ebbtide.simulator.engines.compiled import compile_schedule, simulate_fast
from ebbtide.simulator.estimates.presets import PRESET
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import Plan
from ebbtide.simulator.quantity import NINETY_PERCENT, Quantity
from ebbtide.simulator.schedule import Schedule
from ebbtide.simulator.schedules.strategies import STOCK_OFFLOADS
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.calibrate.calibration import MODEL_SPREAD, predicted_s
from ebbtide.tuner.calibrate.knobs import Knob, knobs_of, turned

# Rates with independent errors.
APART = (
    Knob("matrix products", ("device_flops_per_s", "attention_flops_per_s"), 0.2),
    Knob("issuing a layer", ("layer_issue_s",), 0.3),
    Knob("pinned copies", ("h2d_bytes_per_s", "d2h_bytes_per_s"), 0.1),
    Knob("unpinned copies", ("pageable_h2d_bytes_per_s", "pageable_d2h_bytes_per_s"), 0.2),
    Knob("host updates", ("stock_host_adam_params_per_s", "host_adam_params_per_s"), 0.25),
    Knob("host updates on one thread", ("stock_host_adam_thread_params_per_s",), 0.3),
    Knob("network", ("network_bytes_per_s",), 0.5),
)
# Rates that matter for predictions, but that runs with offloaded state cannot reveal.
BESIDE = (Knob("DRAM", ("dram_bytes_per_s",), 0.1), Knob("device updates", ("device_adam_params_per_s",), 0.1))
# Part of the spread of matrix products in the spread of a layer's estimated time. Products and the host's time to
# launch them are equally uncertain, and their errors are independent.
ESTIMATE_PART = math.sqrt(0.5)
# Standard deviation, in log units, of the error that all runs of a campaign share, between campaigns. Measured on nodes
# of several makers with the same A100s, benchmarks and batch size in MLPerf Training 2.0
# (`studies.published_runs.makers`: 0.0615 with 40 degrees of freedom. SXM4 nodes have 0.03 and PCIe nodes 0.11. We pool
# them, because offloaded steps use PCIe on both). All of these runs use one maker's code, so differences between
# software are not included. Intervals are tested on other published runs.
CAMPAIGN_SPREAD = 0.06
# Standard deviation, in log units, of the additional error for DeepSpeed's offload on a preset whose host has no
# published run: cores, memory, copies, threads and builds of the software differ between hosts. In the training rows of
# `studies.published_runs`, from eight sources, the log errors have a root mean square of 0.22. An interval for nine in
# ten sources should contain all eight. The largest error, from a source that publishes neither its launcher nor its
# optimizer, requires 0.5 (`studies.published_runs.families.spread`).
OFFLOAD_SPREAD = 0.5
# Step of the numerical derivatives, in sigmas of the rate. It is large, because a rate may limit training at one value
# and not at another.
STEP = 0.5


def interval_s(build: Callable[[Machine], Schedule], machine: Machine) -> tuple[float, float]:
    """Return the interval (low, high) in seconds that holds the iteration time of nine runs in ten.

    Args:
        build: Function from a machine to the schedule of one iteration. Layers' times may depend on the machine.
        machine: Machine with rates and their spread.
    """

    def seconds(turned_machine: Machine) -> float:
        return predicted_s(build(turned_machine), turned_machine)["iteration"]

    spread = model_spread(machine, build(machine).strategy)
    return _around(seconds(machine), spread, rates_sigma(seconds, machine))


def workload_interval_s(
    build: Callable[[Workload], Schedule], workload: Workload, machine: Machine
) -> tuple[float, float]:
    """Return the interval (low, high), in seconds, that is expected to hold the iteration times of nine in ten runs of
    a workload.

    The width of the interval follows from the uncertainty of the machine's bandwidths and compute speeds, and from the
    error of the simulator. If layer times were estimated from a model's config, their uncertainty is included too. This
    uncertainty is derived from that of the GPU's compute speed.

    Args:
        build: Function from a workload to a schedule. It is called with workloads that differ in layer times.
        workload: Training job of one rank.
        machine: Machine with the median and the quartiles of each bandwidth and compute speed.
    """
    compiled = compile_schedule(build(workload))

    def seconds(turned_machine: Machine) -> float:
        return simulate_fast(compiled, turned_machine).iteration_s

    def passes(times: float) -> float:
        return simulate_fast(build(_with_passes(workload, times)), machine).iteration_s

    return _estimated(seconds, passes, workload, machine, compiled.schedule.strategy)


def plan_interval_s(sweep: PlanSweep, plan: Plan) -> tuple[float, float]:
    """Return the interval (low, high), in seconds, that is expected to hold the iteration times of nine in ten runs
    under a plan.

    The interval is that of `workload_interval_s`, for steps that clip no gradients.
    """

    def seconds(turned_machine: Machine) -> float:
        return sweep.on(turned_machine).result(plan).iteration_s

    def passes(times: float) -> float:
        return sweep.paced(times).result(plan).iteration_s

    return _estimated(seconds, passes, sweep.workload, sweep.machine, "ebbtide")


def _estimated(
    seconds: Callable[[Machine], float],
    passes: Callable[[float], float],
    workload: Workload,
    machine: Machine,
    strategy: str,
) -> tuple[float, float]:
    """Return the interval around the predicted seconds of an iteration.

    Args:
        seconds: Function that predicts the seconds for a given machine.
        passes: Function that predicts the seconds if each layer's forward and backward takes a given multiple of its
            time.
    """
    sigma = rates_sigma(seconds, machine)
    if machine.device_flops_per_s is not None and workload.provenance.startswith("estimated"):
        width = ESTIMATE_PART * machine.device_flops_per_s.log_sigma
        sigma = math.hypot(sigma, _secant(lambda turn: passes(math.exp(turn)), width))
    return _around(seconds(machine), model_spread(machine, strategy), sigma)


def _with_passes(workload: Workload, times: float) -> Workload:
    layers = tuple(
        layer.model_copy(update={"forward_s": times * layer.forward_s, "backward_s": times * layer.backward_s})
        for layer in workload.layers
    )
    return workload.model_copy(update={"layers": layers})


def _around(centre: float, spread: float, sigma: float) -> tuple[float, float]:
    factor = math.exp(NINETY_PERCENT * math.hypot(spread, sigma))
    return centre / factor, centre * factor


def model_spread(machine: Machine, strategy: str = "") -> float:
    """Return the error of a predicted iteration time that would remain if the machine's bandwidths and compute speeds
    were known exactly, as a standard deviation in log units.

    Args:
        strategy: Name of the simulated strategy, such as stock DeepSpeed's offload.
    """
    if machine.unexplained_spread is not None:
        return machine.unexplained_spread
    if machine.measured_with != PRESET:
        return MODEL_SPREAD
    offload = OFFLOAD_SPREAD if strategy in STOCK_OFFLOADS and not _published_host(machine) else 0.0
    return math.hypot(MODEL_SPREAD, CAMPAIGN_SPREAD, offload)


def _published_host(machine: Machine) -> bool:
    """Return True if a published training run shows how fast the CPU of this machine updates optimizer state of several
    ranks at once.

    If no published run shows it and the machine is a preset, predictions of DeepSpeed's own offload get a wider
    interval.
    """
    return any("dram" in shares and shares["dram"].source == "published" for shares in machine.rank_shares.values())


def rates_sigma(seconds: Callable[[Machine], float], machine: Machine) -> float:
    """Return how much a predicted time varies because the machine's bandwidths and compute speeds are uncertain.

    Args:
        seconds: Function that predicts the time for a given machine.
        machine: Machine with the median and the quartiles of each bandwidth and compute speed.

    Returns:
        The standard deviation of the logarithm of the predicted time.
    """
    variance = 0.0
    for knob in (*knobs_of(machine, APART), *BESIDE):
        width = knob_sigma(machine, knob)

        def of(turn: float, knob: Knob = knob) -> float:
            return seconds(turned(machine, [knob], np.array([turn])))

        variance += _secant(of, width) ** 2 if width else 0.0
    return math.sqrt(variance)


def _secant(of: Callable[[float], float], width: float) -> float:
    low, high = of(-STEP * width), of(STEP * width)
    return math.log(high / low) / (2 * STEP)


def knob_sigma(machine: Machine, knob: Knob) -> float:
    """Return the uncertainty of a group of a machine's speeds, as a standard deviation in log units.

    A `Knob` names a group of speeds, such as bandwidths, that get one common correction factor. The result is the
    standard deviation of the first speed in the group.
    """
    value = getattr(machine, knob.fields[0])
    quantity: Quantity = value[knob.ranks]["dram"] if knob.ranks else value
    return quantity.log_sigma
