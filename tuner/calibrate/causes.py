"""Causes of wrong predictions: the uncertain rates of a machine, each with its spread and its source.

A cause belongs to the rates of one activity, such as copies or matrix products. `Cause.moved` returns the machine and
the workload with these rates moved, so that one simulation shows the effect of the cause on any strategy. Two
predictions for the same machine depend on the same rates. The ratio of two times is therefore less uncertain than the
times themselves::

    variance = 0.0
    for cause in causes(machine, workload):
        ends = [cause.moved(machine, workload, turn) for turn in (-0.5, 0.5)]
        low, high = (math.log(stock_s(*one) / plan_s(*one)) for one in ends)
        variance += (high - low) ** 2

To this variance, add the square of `own_spread` for each of the two strategies: errors that no rate explains, which are
independent in two strategies. `shared_spread` multiplies all times on a machine alike, so that it cancels in a ratio.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from ebbtide.simulator.estimates.estimate import retimed
from ebbtide.simulator.estimates.rank import OF_EXPERTS
from ebbtide.simulator.machine import PRESET, Machine
from ebbtide.simulator.quantity import Quantity
from ebbtide.simulator.schedules.strategies import STOCK_OFFLOADS
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.calibrate.calibration import MODEL_SPREAD
from ebbtide.tuner.calibrate.knobs import Knob, knobs_of, turned

# Rates with independent errors. The widths are for calibration only.
APART = (
    Knob("matrix products", ("device_flops_per_s", "attention_flops_per_s"), 0.2),
    Knob("products of experts", ("expert_flops_per_s",), 0.5),
    Knob("issuing a layer", ("layer_issue_s",), 0.3),
    Knob("collectives in a node", ("gather_bytes_per_s", "reduce_bytes_per_s"), 0.5),
    Knob("pinned copies", ("h2d_bytes_per_s", "d2h_bytes_per_s"), 0.1),
    Knob("unpinned copies", ("pageable_h2d_bytes_per_s", "pageable_d2h_bytes_per_s"), 0.2),
    Knob("host updates", ("stock_host_adam_params_per_s", "host_adam_params_per_s"), 0.25),
    Knob("host updates on one thread", ("stock_host_adam_thread_params_per_s",), 0.3),
    Knob("network", ("network_bytes_per_s",), 0.5),
    Knob("DRAM", ("dram_bytes_per_s",), 0.1),
    Knob("device updates", ("device_adam_params_per_s",), 0.1),
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
# 10, and none gives all settings (`studies.published_runs`). A factor of 2.5 either way in nine of ten.
LAYERS_OF_EXPERTS = Knob("layers of experts", (), 0.56)
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

    knob: Knob
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
    found = tuple(_causes(machine))
    if workload is not None and OF_EXPERTS in workload.provenance:
        found += (Cause(LAYERS_OF_EXPERTS, EXPERTS_SPREAD, OF_EXPERTS),)
    return found


def _causes(machine: Machine) -> Iterator[Cause]:
    for knob in knobs_of(machine, APART):
        value = getattr(machine, knob.fields[0])
        quantity: Quantity = value[knob.ranks]["dram"] if knob.ranks else value
        if quantity.log_sigma:
            yield Cause(knob, quantity.log_sigma, f"{quantity.source}: {quantity.detail}")


def own_spread(machine: Machine, strategy: str = "") -> float:
    """Return the error of a predicted iteration time that no rate explains and that another strategy does not share.

    The result is a standard deviation in log units.

    Args:
        strategy: Name of the simulated strategy, such as stock DeepSpeed's offload.
    """
    if machine.unexplained_spread is not None:
        return machine.unexplained_spread
    offload = OFFLOAD_SPREAD if strategy in STOCK_OFFLOADS and _unseen_host(machine) else 0.0
    return math.hypot(MODEL_SPREAD, offload)


def shared_spread(machine: Machine) -> float:
    """Return the error, as a standard deviation in log units, that multiplies all predicted times on a machine alike.

    A preset describes a kind of node, and the user's node has other software and another training loop.
    """
    return CAMPAIGN_SPREAD if machine.unexplained_spread is None and machine.measured_with == PRESET else 0.0


def _unseen_host(machine: Machine) -> bool:
    shown = any("dram" in parts and parts["dram"].source == "published" for parts in machine.rank_shares.values())
    return machine.measured_with == PRESET and not shown
