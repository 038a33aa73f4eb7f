"""An interval around a predicted iteration time that is meant to contain the measured times of nine runs in ten.

The width of the interval has these parts:

- The spread of each speed of the machine: wide for a preset, narrow for a measured or calibrated machine. The effect of
  each spread is simulated (`Cause`).
- The errors of the simulator and the noise of single iterations. For a calibrated machine, they are the error that its
  calibration left, which is at least `MODEL_SPREAD`. For all other machines, they are `MODEL_SPREAD`.
- `CAMPAIGN_SPREAD`, if the machine is a preset. A preset describes a kind of node, and the user's node has other
  software and another training loop.
- `OFFLOAD_SPREAD`, if three conditions hold: the machine is a preset, the prediction is for DeepSpeed's own offload,
  and no published run shows the speed of the preset's host.

`MODEL_SPREAD` was chosen on the published runs in the repository, so these runs are no proof of it. After a calibration
on three random runs, the intervals contain the measured times of seven to nine in ten other runs
(`studies.published_runs --triples`).

The times of two ways to train depend on the same rates, such as the speed of the CPU's updates. So the interval of
their ratio is drawn from the same causes, and what both ways share cancels (`Spread.factor_over`).

A cause belongs to the rates of one activity, such as copies or matrix products. `Cause.moved` returns the machine and
the workload with these rates moved, so that one simulation shows the effect of the cause on any strategy.
`shared_spread` multiplies all times on a machine alike, so that it cancels in a ratio.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from ebbtide.simulator.analysis.many_plans import PlanSweep
from ebbtide.simulator.engines.compiled import compile_schedule, simulate_fast
from ebbtide.simulator.estimates.estimate import retimed
from ebbtide.simulator.estimates.rank import OF_EXPERTS
from ebbtide.simulator.machine import PRESET, Machine
from ebbtide.simulator.plan import Plan
from ebbtide.simulator.quantity import NINETY_PERCENT, Quantity
from ebbtide.simulator.schedule import Schedule
from ebbtide.simulator.schedules.strategies import STOCK_OFFLOADS
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.calibrate.calibration import MODEL_SPREAD, Correction, knobs_of, predicted_s, turned

# Rates with independent errors. The widths are for calibration only.
APART = (
    Correction("matrix products", ("device_flops_per_s", "attention_flops_per_s"), 0.2),
    Correction("products of experts", ("expert_flops_per_s",), 0.5),
    Correction("issuing a layer", ("layer_issue_s",), 0.3),
    Correction("collectives in a node", ("gather_bytes_per_s", "reduce_bytes_per_s"), 0.5),
    Correction("pinned copies", ("h2d_bytes_per_s", "d2h_bytes_per_s"), 0.1),
    Correction("unpinned copies", ("pageable_h2d_bytes_per_s", "pageable_d2h_bytes_per_s"), 0.2),
    Correction("host updates", ("stock_host_adam_params_per_s", "host_adam_params_per_s"), 0.25),
    Correction("host updates on one thread", ("stock_host_adam_thread_params_per_s",), 0.3),
    Correction("network", ("network_bytes_per_s",), 0.5),
    Correction("DRAM", ("dram_bytes_per_s",), 0.1),
    Correction("device updates", ("device_adam_params_per_s",), 0.1),
)
# Fields of a machine from which the times of layers are estimated (`ebbtide.simulator.estimates.rank`).
OF_LAYERS = frozenset(
    (
        "device_flops_per_s",
        "attention_flops_per_s",
        "expert_flops_per_s",
        "device_memory_bytes_per_s",
        "layer_issue_s",
        "gather_bytes_per_s",
        "reduce_bytes_per_s",
        "h2d_bytes_per_s",
        "d2h_bytes_per_s",
        "network_bytes_per_s",
    )
)

# The estimated times of a mixture-of-experts model's layers beyond the rates: routing, the load of experts, loops or
# grouped kernels, and how many gathers there are. Reports of such runs differ from each other by more than a factor of
# 10, and only three give nearly all settings (`studies.published_runs`). A factor of 2.5 either way in nine of ten.
LAYERS_OF_EXPERTS = Correction("layers of experts", (), 0.56)
EXPERTS_SPREAD = LAYERS_OF_EXPERTS.width
# Standard deviation, in log units, of the error that all runs of a campaign share, between campaigns. Measured on nodes
# of several makers with the same A100s, benchmarks and batch size in MLPerf Training 2.0
# (`studies.published_runs.makers`: 0.0615 with 40 degrees of freedom. SXM4 nodes have 0.03 and PCIe nodes 0.11. We pool
# them, because offloaded steps use PCIe on both). All of these runs use one maker's code, so differences between
# software are not included. Intervals are tested on other published runs.
CAMPAIGN_SPREAD = 0.06
# Standard deviation, in log units, of the additional error for DeepSpeed's offload on a preset whose host has no
# published run: cores, memory, threads and builds of the software differ between hosts. In the fitted training rows of
# `studies.published_runs`, from eight sources, the log errors have a root mean square of 0.22. With Student's t for
# eight sources, nine in ten further ones lie within 0.26 times 1.645 (`studies.published_runs.families.spread`). One
# of the eight, which publishes neither its launcher nor its optimizer, lies outside.
OFFLOAD_SPREAD = 0.26


@dataclass(frozen=True)
class Cause:
    """A cause of wrong predictions: one unknown factor on the rates of an activity.

    Attributes:
        knob: Activity and the fields of `Machine` that the factor multiplies.
        sigma: Standard deviation of the factor's logarithm. In nine of ten machines, the rates differ from the assumed
            ones by at most a factor of `most`.
        because: Source of the rate, as a sentence for people.
    """

    knob: Correction
    sigma: float
    because: str

    @property
    def name(self) -> str:
        return self.knob.name

    def moved(self, machine: Machine, workload: Workload, turn: float) -> tuple[Machine, Workload]:
        """Return the machine and the workload that result if the factor is ``turn`` standard deviations from 1."""
        other = self.on(machine, turn)
        return other, self._timed(workload, other, turn)

    def on(self, machine: Machine, turn: float) -> Machine:
        """Return the machine with the rates multiplied by ``exp(turn * sigma)``, at most up to their physical limit."""
        return turned(machine, [self.knob], np.array([turn * self.sigma]))

    def _timed(self, workload: Workload, machine: Machine, turn: float) -> Workload:
        if self.knob is LAYERS_OF_EXPERTS:
            return workload.paced(math.exp(-turn * self.sigma))
        if OF_LAYERS.isdisjoint(self.knob.fields) or not workload.provenance.startswith("estimated"):
            return workload
        if workload.job is not None:
            made: Workload = retimed(workload.job, workload, machine)
            return made
        # A file does not tell how its times were estimated. Products are most of them.
        return workload.paced(math.exp(-turn * self.sigma)) if "device_flops_per_s" in self.knob.fields else workload


def causes(machine: Machine, workload: Workload | None = None) -> tuple[Cause, ...]:
    """Return the causes of wrong predictions for a machine, and for a workload on it.

    Rates without a spread, such as those given by the user, are no cause.
    """
    found = []
    for knob in knobs_of(machine, APART):
        value = getattr(machine, knob.fields[0])
        quantity: Quantity = value[knob.ranks]["dram"] if knob.ranks else value
        if quantity.log_sigma:
            found.append(Cause(knob, quantity.log_sigma, f"{quantity.source}: {quantity.detail}"))
    if workload is not None and OF_EXPERTS in workload.provenance:
        found.append(Cause(LAYERS_OF_EXPERTS, EXPERTS_SPREAD, OF_EXPERTS))
    return tuple(found)


def own_spread(machine: Machine, strategy: str = "") -> float:
    """Return the error, as a standard deviation in log units, that no rate explains and no other strategy shares."""
    if machine.unexplained_spread is not None:
        return machine.unexplained_spread
    offload = OFFLOAD_SPREAD if strategy in STOCK_OFFLOADS and _unseen_host(machine) else 0.0
    return math.hypot(MODEL_SPREAD, offload)


def shared_spread(machine: Machine) -> float:
    """Return the error, as a standard deviation in log units, that multiplies all times on a machine alike."""
    return CAMPAIGN_SPREAD if machine.unexplained_spread is None and machine.measured_with == PRESET else 0.0


def _unseen_host(machine: Machine) -> bool:
    shown = any("dram" in parts and parts["dram"].source == "published" for parts in machine.rank_shares.values())
    return machine.measured_with == PRESET and not shown


# Step of the numerical derivatives, in sigmas of the rate. It is large, because a rate may limit training at one value
# and not at another.
STEP = 0.5


@dataclass(frozen=True)
class Spread:
    """The uncertainty of a predicted time, by cause.

    Attributes:
        parts: For each cause by name, the change of the time's logarithm if the cause moves by one standard deviation.
        own: Standard deviation of the logarithm that no cause explains and no other way to train shares.
        shared: Standard deviation of the logarithm that all ways to train on the machine share.
    """

    parts: dict[str, float]
    own: float
    shared: float

    @classmethod
    def of(
        cls, seconds: Callable[[Machine, Workload], float], workload: Workload, machine: Machine, strategy: str
    ) -> "Spread":
        """Simulate the effect of each cause, with a function that predicts the time."""

        def part(cause: Cause) -> float:
            return _secant(lambda turn: seconds(*cause.moved(machine, workload, turn)))

        parts = {cause.name: part(cause) for cause in causes(machine, workload)}
        return cls(parts, own_spread(machine, strategy), shared_spread(machine))

    @property
    def factor(self) -> float:
        """Return the largest factor between the predicted time and nine times in ten."""
        return math.exp(NINETY_PERCENT * math.hypot(*self.parts.values(), self.own, self.shared))

    def factor_over(self, other: "Spread") -> float:
        """Return the same factor for the ratio of this time to another one on the same machine."""
        names = self.parts.keys() | other.parts.keys()
        apart = (self.parts.get(name, 0.0) - other.parts.get(name, 0.0) for name in names)
        return math.exp(NINETY_PERCENT * math.hypot(*apart, self.own, other.own))


def interval_s(build: Callable[[Machine], Schedule], machine: Machine) -> tuple[float, float]:
    """Return the interval (low, high) in seconds that holds the iteration time of nine runs in ten.

    ``build`` gets a machine, since layers' times may depend on it.
    """

    def seconds(turned_machine: Machine) -> float:
        return predicted_s(build(turned_machine), turned_machine)["iteration"]

    spread = model_spread(machine, build(machine).strategy)
    return _around(seconds(machine), spread, rates_sigma(seconds, machine))


def workload_interval_s(
    build: Callable[[Workload], Schedule], workload: Workload, machine: Machine
) -> tuple[float, float]:
    """Return the interval (low, high) in seconds that holds the iteration time of nine runs in ten of a workload.

    The width follows from the uncertainty of the machine's rates and the error of the simulator. If layer times were
    estimated from a model's config, their uncertainty is included, so ``build`` gets workloads that differ in them.
    """
    compiled = compile_schedule(build(workload))

    def seconds(turned_machine: Machine, moved: Workload) -> float:
        on = compiled if moved is workload else compile_schedule(build(moved))
        return simulate_fast(on, turned_machine).iteration_s

    centre = seconds(machine, workload)
    factor = Spread.of(seconds, workload, machine, compiled.schedule.strategy).factor
    return centre / factor, centre * factor


def plan_interval_s(sweep: PlanSweep, plan: Plan) -> tuple[float, float]:
    """Return the interval (low, high) in seconds that holds the iteration time of nine runs in ten under a plan."""
    centre, factor = sweep.result(plan).iteration_s, plan_spread(sweep, plan).factor
    return centre / factor, centre * factor


def plan_spread(sweep: PlanSweep, plan: Plan) -> Spread:
    """Return the uncertainty of the iteration time under a plan, for steps that clip no gradients."""

    def seconds(turned_machine: Machine, moved: Workload) -> float:
        return sweep.on(turned_machine, moved).result(plan).iteration_s

    return Spread.of(seconds, sweep.workload, sweep.machine, "ebbtide")


def _around(centre: float, spread: float, sigma: float) -> tuple[float, float]:
    factor = math.exp(NINETY_PERCENT * math.hypot(spread, sigma))
    return centre / factor, centre * factor


def model_spread(machine: Machine, strategy: str = "") -> float:
    """Return the error, as a standard deviation in log units, that remains if all rates are known exactly."""
    return math.hypot(own_spread(machine, strategy), shared_spread(machine))


def rates_sigma(seconds: Callable[[Machine], float], machine: Machine) -> float:
    """Return how much a predicted time varies because the machine's bandwidths and compute speeds are uncertain."""

    def part(cause: Cause) -> float:
        return _secant(lambda turn: seconds(cause.on(machine, turn)))

    return math.hypot(*map(part, causes(machine)))


def _secant(of: Callable[[float], float]) -> float:
    return math.log(of(STEP) / of(-STEP)) / (2 * STEP)
