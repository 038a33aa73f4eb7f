"""An interval around a predicted iteration time that is meant to contain the measured times of nine runs in ten.

The width of the interval has these parts:

- The spread of each speed of the machine: wide for a preset, narrow for a measured or calibrated machine. The effect of
  each spread is simulated (`ebbtide.tuner.calibrate.causes`).
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
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from ebbtide.simulator.analysis.many_plans import PlanSweep
from ebbtide.simulator.engines.compiled import compile_schedule, simulate_fast
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import Plan
from ebbtide.simulator.quantity import NINETY_PERCENT
from ebbtide.simulator.schedule import Schedule
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.calibrate.calibration import predicted_s
from ebbtide.tuner.calibrate.causes import Cause, causes, own_spread, shared_spread

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
        """Simulate the effect of each cause.

        Args:
            seconds: Function that predicts the time for a machine and a workload.
        """

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
    error of the simulator. If layer times were estimated from a model's config, their uncertainty is included too.

    Args:
        build: Function from a workload to a schedule. It is called with workloads that differ in layer times.
        workload: Training job of one rank.
        machine: Machine with the median and the quartiles of each bandwidth and compute speed.
    """
    compiled = compile_schedule(build(workload))

    def seconds(turned_machine: Machine, moved: Workload) -> float:
        on = compiled if moved is workload else compile_schedule(build(moved))
        return simulate_fast(on, turned_machine).iteration_s

    centre = seconds(machine, workload)
    factor = Spread.of(seconds, workload, machine, compiled.schedule.strategy).factor
    return centre / factor, centre * factor


def plan_interval_s(sweep: PlanSweep, plan: Plan) -> tuple[float, float]:
    """Return the interval (low, high), in seconds, that is expected to hold the iteration times of nine in ten runs
    under a plan.
    """
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
    """Return the error of a predicted iteration time that would remain if the machine's bandwidths and compute speeds
    were known exactly, as a standard deviation in log units.
    """
    return math.hypot(own_spread(machine, strategy), shared_spread(machine))


def rates_sigma(seconds: Callable[[Machine], float], machine: Machine) -> float:
    """Return how much a predicted time varies because the machine's bandwidths and compute speeds are uncertain."""

    def part(cause: Cause) -> float:
        return _secant(lambda turn: seconds(cause.on(machine, turn)))

    return math.hypot(*map(part, causes(machine)))


def _secant(of: Callable[[float], float]) -> float:
    return math.log(of(STEP) / of(-STEP)) / (2 * STEP)
