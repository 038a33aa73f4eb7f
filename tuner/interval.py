"""An interval around a prediction that holds as often as it says.

Three things make a prediction uncertain: the spread of each rate (a preset's are wide, a profile's
or a calibrated machine's narrow), what the model leaves out, and what an iteration's own noise is.
The first is propagated rate by rate; the others are `MODEL_SPREAD`. It was chosen on the published
runs in the repository, which are therefore no proof of it: with nothing fitted, and after a
calibration on three random ones, intervals of those left out hold seven to nine times in ten
(`studies.published_runs --triples`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np

from simulator.machine import Machine
from simulator.quantity import Quantity
from simulator.schedule import Schedule
from tuner.calibration import MODEL_SPREAD, Knob, knobs_of, predicted_s, turned

Phase = Literal["forward", "backward", "step", "iteration"]
EIGHTY_PERCENT = 1.2816  # of a normal distribution's sigma, each way
IQR_OVER_SIGMA = 1.349
STEP = 0.5  # of a rate's sigma: sensitivities are secants, as rates bind or do not


def interval_s(
    build: Callable[[Machine], Schedule], machine: Machine, phase: Phase = "iteration"
) -> tuple[float, float]:
    """(low, high) seconds that hold eight measurements in ten, around the simulator's prediction.

    Args:
        build: one iteration on a machine, whose rates may change layers' times too.
    """
    centre = predicted_s(build(machine), machine)[phase]
    sigma = math.hypot(model_spread(machine), rates_sigma(build, machine, phase))
    factor = math.exp(EIGHTY_PERCENT * sigma)
    return centre / factor, centre * factor


def model_spread(machine: Machine) -> float:
    """Standard deviation of what no rate explains, in log units."""
    return machine.unexplained_spread or MODEL_SPREAD


def rates_sigma(
    build: Callable[[Machine], Schedule], machine: Machine, phase: Phase = "iteration"
) -> float:
    """Standard deviation of a phase's logarithm that the rates' spreads make."""
    variance = 0.0
    for knob in knobs_of(machine):
        width = knob_sigma(machine, knob)
        if width:
            ends = []
            for turn in (-STEP * width, STEP * width):
                moved = turned(machine, [knob], np.array([turn]))
                ends.append(predicted_s(build(moved), moved)[phase])
            variance += (math.log(ends[1] / ends[0]) / (2 * STEP)) ** 2
    return math.sqrt(variance)


def knob_sigma(machine: Machine, knob: Knob) -> float:
    """Of a knob's first rate; the others move with it."""
    value = getattr(machine, knob.fields[0])
    quantity: Quantity = value[knob.ranks]["dram"] if knob.ranks else value
    return math.log(quantity.q3 / quantity.q1) / IQR_OVER_SIGMA
