"""Calibration of a machine: bandwidths and compute speeds in its description are corrected with the times of training
runs that were measured on the machine.

Each correction factor is called a knob. A knob multiplies one speed, or several speeds of the same kind of work. The
most probable factors are found by Gauss-Newton on logarithms. A factor is the less probable, the further it is from 1.
So a factor stays 1 unless the measured times depend on it, and a few runs correct only those speeds that affect their
times.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from ebbtide.simulator.engines.compiled import simulate_fast
from ebbtide.simulator.estimates.presets import FUSED_UPDATE_BYTES, STOCK_UPDATE_BYTES, sheet_limits
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.quantity import QUARTILE, Quantity
from ebbtide.simulator.schedule import Schedule
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Correction:
    """A correction in a machine's calibration: one factor for several speeds of the machine, such as bandwidths.

    Attributes:
        width: Prior standard deviation of the factor in log units: how wrong the machine's given speeds may be.
        ranks: If above 0, the factor is for a rank's share of DRAM bandwidth while that many ranks use it.
        varies: Standard deviation of the speeds between different days or nodes, in log units. A calibration on more
            runs does not reduce it.
    """

    name: str
    fields: tuple[str, ...]
    width: float
    ranks: int = 0
    varies: float = 0.0


# One knob for each kind of work. With seven finer knobs and wider priors, predictions of left-out published runs were
# no better on A100, and worse on H100.
KNOBS = (
    Correction("matrix products", ("device_flops_per_s", "attention_flops_per_s", "expert_flops_per_s"), 0.15),
    Correction(
        "copies", ("h2d_bytes_per_s", "d2h_bytes_per_s", "pageable_h2d_bytes_per_s", "pageable_d2h_bytes_per_s"), 0.15
    ),
    Correction(
        "host updates",
        ("stock_host_adam_params_per_s", "host_adam_params_per_s", "stock_host_adam_thread_params_per_s"),
        0.15,
    ),
    Correction("network", ("network_bytes_per_s",), 0.5),
)
# Width and variation of the DRAM bandwidth that each rank gets. It depends on how the ranks were bound, which may
# differ between runs. One node has two published rates, 0.475 and 0.75 G params/s per rank. If they are the ends of an
# interval of 80%, sigma is 0.18, and the difference of two days has 1.41 times this sigma. The prior is narrower, so
# that runs of one day do not spoil predictions for the next day. It was chosen on the fitted rows, like NOISE.
SHARE_WIDTH, SHARE_VARIES = 0.08, 0.25


def knobs_of(machine: Machine, knobs: Sequence[Correction] = KNOBS) -> list[Correction]:
    """Return descriptions of the correction factors that calibration may fit for a machine.

    One factor corrects a group of similar rates, such as all bandwidths of copies. Rates that the machine does not
    have are left out. Further factors correct the DRAM bandwidth per rank: one factor for each number of concurrent
    ranks in the machine's data.
    """
    known = [
        replace(knob, fields=fields)
        for knob in knobs
        if (fields := tuple(name for name in knob.fields if getattr(machine, name)))
    ]
    shared = sorted(n for n, parts in machine.rank_shares.items() if "dram" in parts)
    return known + [
        Correction(f"DRAM shared by {ranks} ranks", ("rank_shares",), SHARE_WIDTH, ranks, SHARE_VARIES)
        for ranks in shared
    ]


def turned(
    machine: Machine, knobs: Sequence[Correction], x: Floats, spread: Mapping[int, tuple[float, str]] | None = None
) -> Machine:
    """Return a copy of a machine with corrected bandwidths and compute speeds.

    Correction ``i`` multiplies each speed of the group ``knobs[i]`` by ``exp(x[i])``. A correction does not raise a
    speed above its physical limit.

    Args:
        x: Logarithm of the factor for each correction.
        spread: Dict from the index of a correction to two values for the speeds of its group: their new standard
            deviation in log units, and a text about the calibration, which is stored with them. The speeds of all other
            groups keep their spread and source.
    """
    update: dict[str, Any] = {}
    limits = rate_limits(machine)
    for i, (knob, turn) in enumerate(zip(knobs, x, strict=True)):
        deviation = (spread or {}).get(i)
        if deviation is None and not turn:
            continue
        for name in knob.fields:
            value = update.get(name, getattr(machine, name))
            update[name] = (
                _shares(value, knob.ranks, float(turn), deviation)
                if knob.ranks
                else _scaled(value, float(turn), deviation, limits.get(name, math.inf))
            )
    return machine.model_copy(update=update)


def _scaled(quantity: Quantity, turn: float, spread: tuple[float, str] | None, limit: float) -> Quantity:
    turn = min(turn, max(0.0, math.log(limit / quantity.median)))
    scaled = quantity.scaled(math.exp(turn))
    if spread is None:
        return scaled
    sigma, detail = spread
    half = math.exp(QUARTILE * sigma)
    return Quantity(
        median=scaled.median,
        q1=scaled.median / half,
        q3=scaled.median * half,
        source="fitted",
        detail=f"{detail}; before: {quantity.median:.4g} ({quantity.source})",
    )


def _shares(
    shares: Mapping[int, Mapping[str, Quantity]], ranks: int, turn: float, spread: tuple[float, str] | None
) -> dict[int, dict[str, Quantity]]:
    share = shares[ranks]["dram"]
    scaled = _scaled(share, turn, spread, 1.0 / ranks)
    return {**{n: dict(parts) for n, parts in shares.items()}, ranks: {**shares[ranks], "dram": scaled}}


def rate_limits(machine: Machine) -> dict[str, float]:
    """Return the physical upper limits of bandwidths and compute speeds of a machine, as a dict by field name of
    `Machine`. Fields without a known limit are left out.

    The limits of matrix products and of copies between GPU and pinned host memory come from the GPU's data sheet, if
    ebbtide has a preset with this GPU. The limits for pageable host memory equal those for pinned host memory. The
    limits of CPU updates are computed from the machine's DRAM bandwidth.
    """
    limits = sheet_limits(machine.device_name)
    for direction in ("h2d", "d2h"):
        if f"{direction}_bytes_per_s" in limits:
            limits[f"pageable_{direction}_bytes_per_s"] = limits[f"{direction}_bytes_per_s"]
    dram = machine.dram_bytes_per_s.median
    return {
        **limits,
        "stock_host_adam_params_per_s": dram / STOCK_UPDATE_BYTES,
        "stock_host_adam_thread_params_per_s": dram / STOCK_UPDATE_BYTES,
        "host_adam_params_per_s": dram / FUSED_UPDATE_BYTES,
    }


PHASES = ("forward", "backward", "step", "iteration")
# Standard deviation of one measured phase, in log units: variation between repeats, and effects that the model leaves
# out. Chosen on the published runs in the repository by how well random triples of runs predict the other runs
# (`studies.published_runs.left_out`): 0.08 is better for the campaign of the triple, 0.12 for other campaigns.
NOISE = 0.1
# Root mean square of the phases' errors, in log units, above which rates are fitted. The errors of published H100 runs
# are smaller, and fitting one or three of these runs raised the p90 error of the others from 7% to 10%.
WITHIN = 0.075
CONTRADICTION = 0.3  # difference between two runs' errors of a phase that no single set of rates can explain
# A knob counts as identified if its standard deviation is below this fraction of its prior width. A smaller fraction
# would be worse: all knobs are fitted together, and resetting a knob leaves its share of the errors unexplained.
IDENTIFIED = 0.97
# Median error of a phase over all runs, in log units, above which the phase is reported as unexplained. Runs of one
# node on different days lie up to 0.23 from their mean (SHARE_WIDTH), and NOISE is added to that.
UNEXPLAINED = 0.35
# Median error of a phase, in log units, above which wider corrections are tried. Below it, wider corrections make
# predictions worse: with published A100 runs, each calibrated on one other run of its campaign, the p90 error was 24%
# instead of 20%.
FAR = 0.5
WIDER = (2.0, 4.0, 8.0)  # factors on the knobs' prior widths, for a machine with an error above FAR
WORTH = 0.05  # a wider prior must lower this error by so much
FURTHEST = 2.0  # largest correction of a rate in log units: a factor of about seven
# Standard deviation of errors that no rate explains, in log units. See `ebbtide.tuner.calibrate.interval`.
MODEL_SPREAD = 0.05
LEAST_LOOP_S = 1e-4


class CalibrationError(ValueError):
    """An error: a machine cannot be calibrated with the given runs. The message names the run and the reason."""


@dataclass(frozen=True)
class Observation:
    """A measured training run that is used to calibrate a machine's rates.

    Attributes:
        build: Function from a machine to the schedule of one iteration, as layers' times depend on the machine.
        measured_s: Measured seconds by phase, for at least one of PHASES.
        notes: Warnings about the run, found when its file was read.
    """

    name: str
    build: Callable[[Machine], Schedule]
    measured_s: Mapping[str, float]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Change:
    """The change of one bandwidth or compute speed of a machine by calibration. The speed has a median and quartiles,
    because it is uncertain.

    Attributes:
        knob: Name of the correction factor that multiplied the speed.
        field: Name of the speed: a field of `Machine`, such as ``h2d_bytes_per_s``.
        before: Median of the speed before calibration, in the unit of the field.
        after: Median of the speed after calibration.
        low: Lower quartile of the speed after calibration.
        high: Upper quartile of the speed after calibration.
    """

    knob: str
    field: str
    before: float
    after: float
    low: float
    high: float


@dataclass(frozen=True)
class Calibrated:
    """A machine with rates that calibration corrected, and the list of corrections.

    Attributes:
        contradictions: Sentences about runs that no single set of rates explains.
        unexplained: Sentences about phases that deviate in the same way in all runs, which no tried correction of a
            rate explains.
        before_pct: Mean error of the predicted time of a phase, over all phases of all runs, before calibration, in
            percent. 100 means a factor of two in either direction.
        left_pct: The same error after calibration, in percent.
    """

    machine: Machine
    changes: tuple[Change, ...]
    contradictions: tuple[str, ...]
    unexplained: tuple[str, ...]
    before_pct: float
    left_pct: float


def predicted_s(schedule: Schedule, machine: Machine) -> dict[str, float]:
    """Return a dict from phase (``forward``, ``backward``, ``step`` or ``iteration``) to the simulated seconds
    of one training iteration.

    The time between two iterations counts only for the phase ``iteration``.
    """
    result = simulate_fast(schedule, machine)
    return {
        "forward": result.forward_s,
        "backward": result.backward_s,
        "step": result.step_s,
        "iteration": result.iteration_s,
    }


def calibrate(machine: Machine, observations: Sequence[Observation]) -> Calibrated:
    """Correct a machine's bandwidths and compute speeds with measured training runs. Return the corrected machine and
    the list of corrections.

    A speed that does not affect the times of the runs stays as it is. A corrected speed has the source ``fitted``, and
    quartiles that tell how uncertain the speed still is. No speed is corrected if the corrections would increase the
    mean error of the predicted phase times, or if the machine already predicts the phases of the runs to `WITHIN`.

    Raises:
        CalibrationError: There is no run, or a run has no measured phase.
    """
    _check(observations)
    start = with_loop(machine, observations)
    fitted, changes = start, tuple[Change, ...]()
    before = after = _mean_error(start, observations)
    missed = math.sqrt(float(np.mean(np.square(_phase_errors(start, observations)))))
    if missed >= WITHIN:
        corrected, made = _corrected(start, observations)
        error = _mean_error(corrected, observations)
        if error <= before:
            fitted, changes, after = corrected, made, error
    fitted = fitted.model_copy(update={"unexplained_spread": _left(fitted, observations)})
    contradictions = _contradictions(fitted, observations)
    return Calibrated(
        fitted,
        changes,
        tuple(contradictions.values()),
        tuple(_unexplained(fitted, observations, contradictions)),
        100 * math.expm1(before),
        100 * math.expm1(after),
    )


def _corrected(start: Machine, observations: Sequence[Observation]) -> tuple[Machine, tuple[Change, ...]]:
    knobs = knobs_of(start)
    fit = _fit(start, knobs, observations)
    identified = np.flatnonzero(fit.identified).tolist()
    sigma = np.hypot(fit.sigma, [knob.varies for knob in knobs])
    detail = f"calibrated on {len(observations)} run{'s' * (len(observations) > 1)}"
    fitted = turned(start, knobs, fit.x, {i: (float(sigma[i]), detail) for i in identified})
    return fitted, tuple(change for i in identified for change in _changes(start, fitted, knobs[i], sigma[i]))


@dataclass(frozen=True)
class _Fit:
    x: Floats
    sigma: Floats
    identified: NDArray[np.bool_]
    worst: float


def _fit(start: Machine, knobs: Sequence[Correction], observations: Sequence[Observation]) -> _Fit:
    usual = _fit_within(start, knobs, 1.0, observations)
    if _worst(start, observations) < FAR:
        return usual
    fits = [usual, *(_fit_within(start, knobs, wider, observations) for wider in WIDER)]
    least = min(fit.worst for fit in fits)
    return next(fit for fit in fits if fit.worst < least + WORTH)


def _fit_within(start: Machine, knobs: Sequence[Correction], wider: float, observations: Sequence[Observation]) -> _Fit:
    from scipy.optimize import least_squares  # the import takes 0.6 s, and most processes calibrate nothing

    own = np.array([knob.width for knob in knobs])
    width = wider * own

    def residuals(x: Floats) -> Floats:
        errors = np.array(_phase_errors(turned(start, knobs, x), observations))
        return np.concatenate((_robust(errors / NOISE), x / width))

    result = least_squares(
        residuals,
        np.zeros(len(knobs)),
        # Central differences, because one-sided ones can be zero: if two rates limit a phase, raising one of them does
        # not shorten it, and neither does raising a rate that is at its physical limit.
        "3-point",
        x_scale=0.2,
        diff_step=np.full(len(knobs), 1e-3),
        max_nfev=12,
        ftol=1e-4,
        bounds=(-FURTHEST, FURTHEST),
    )
    x = np.asarray(result.x)
    phases = len(result.fun) - len(knobs)
    sigma = _sigma(np.asarray(result.jac)[:phases], np.asarray(result.fun)[:phases], width)
    identified = sigma < IDENTIFIED * width
    if wider > 1.0:  # corrections beyond the usual width explain why the machine is far from its data sheet
        identified |= np.abs(x) > own
    x = np.where(identified, x, 0.0)
    return _Fit(x, sigma, identified, _worst(turned(start, knobs, x), observations))


def _missed(machine: Machine, observations: Sequence[Observation]) -> dict[str, float]:
    errors = [_run_errors(machine, seen) for seen in observations]
    return {
        phase: float(np.median([error[phase] for error in errors if phase in error]))
        for phase in PHASES
        if any(phase in error for error in errors)
    }


def _worst(machine: Machine, observations: Sequence[Observation]) -> float:
    return max(abs(error) for error in _missed(machine, observations).values())


def _check(observations: Sequence[Observation]) -> None:
    if not observations:
        raise CalibrationError("at least one measured run is needed (--runs), but got none")
    for seen in observations:
        usable = [s for p, s in seen.measured_s.items() if p in PHASES and s > 0]
        if not usable or len(usable) < len(seen.measured_s):
            raise CalibrationError(
                f"a run must give the seconds (> 0) of at least one of {', '.join(PHASES)}, but "
                f"{seen.name} gives {dict(seen.measured_s)}"
            )


def with_loop(machine: Machine, observations: Sequence[Observation]) -> Machine:
    """Return a copy of a machine with the measured time that training spends between two iterations.

    This time is the seconds of a whole iteration minus those of its phases: forward, backward and step. Only runs that
    measured all three phases and the whole iteration are used. Without such a run, the machine itself is returned.
    """
    between = [
        max(LEAST_LOOP_S, 2 * seen.measured_s["iteration"] - sum(seen.measured_s.values()))
        for seen in observations
        if set(PHASES) == set(seen.measured_s)
    ]
    if not between:
        return machine
    detail = f"iterations less their phases, {len(between)} runs"
    loop = Quantity.from_samples(between, "measured", detail)
    return machine.model_copy(update={"loop_s": loop})


def _mean_error(machine: Machine, observations: Sequence[Observation]) -> float:
    return float(np.mean(np.abs(_phase_errors(machine, observations))))


def _phase_errors(machine: Machine, observations: Sequence[Observation]) -> list[float]:
    # The whole iteration of a run is left out if the run's phases are known. Otherwise they would count twice.
    return [
        error
        for seen in observations
        for phase, error in _run_errors(machine, seen).items()
        if phase != "iteration" or len(seen.measured_s) < len(PHASES)
    ]


def _run_errors(machine: Machine, seen: Observation) -> dict[str, float]:
    predicted = predicted_s(seen.build(machine), machine)
    return {phase: math.log(max(1e-9, predicted[phase]) / measured) for phase, measured in seen.measured_s.items()}


def _robust(scaled: Floats) -> Floats:
    return np.asarray(np.sign(scaled) * np.sqrt(8 * (np.sqrt(1 + (scaled / 2) ** 2) - 1)))


def _sigma(jacobian: Floats, missed: Floats, width: Floats) -> Floats:
    # If the measured runs scatter more around the corrected predictions than was assumed, they count less. A standard
    # deviation is never above that of a factor before any run (``width``).
    scatter = max(1.0, float(np.mean(np.square(missed))))
    return np.asarray(np.sqrt(np.diag(np.linalg.inv(jacobian.T @ jacobian / scatter + np.diag(width**-2.0)))))


def _changes(before: Machine, after: Machine, knob: Correction, sigma: float) -> list[Change]:
    half = math.exp(QUARTILE * sigma)
    changes = []
    for name in knob.fields:
        old, new, label = getattr(before, name), getattr(after, name), name
        if knob.ranks:
            old, new = old[knob.ranks]["dram"], new[knob.ranks]["dram"]
            label = f"rank_shares.{knob.ranks}.dram"
        changes.append(Change(knob.name, label, old.median, new.median, new.median / half, new.median * half))
    return changes


def _left(machine: Machine, observations: Sequence[Observation]) -> float:
    left: list[float] = []
    for seen in observations:
        errors = _run_errors(machine, seen)
        left += [errors["iteration"]] if "iteration" in errors else errors.values()
    beyond = max(0.0, float(np.mean(np.square(left))) - NOISE**2)
    return math.sqrt(MODEL_SPREAD**2 + beyond)


def _contradictions(machine: Machine, observations: Sequence[Observation]) -> dict[str, str]:
    errors = [(seen.name, _run_errors(machine, seen)) for seen in observations]
    result = {}
    for phase in PHASES:
        known = [(error[phase], name) for name, error in errors if phase in error]
        if not known:
            continue
        (least, slow), (most, fast) = min(known), max(known)
        if most - least > CONTRADICTION:
            result[phase] = (
                f"runs contradict each other: {phase} took {math.exp(-least):.2f} times what the "
                f"calibrated rates give in {slow}, but {math.exp(-most):.2f} times in {fast}. Was "
                "one bound to other cores, or were its buffers pinned? Calibrate a machine file "
                "for each."
            )
    return result


def _unexplained(machine: Machine, observations: Sequence[Observation], contradictions: Mapping[str, str]) -> list[str]:
    return [
        f"{phase} took {math.exp(-error):.2f} times what the calibrated rates give (median of the "
        "runs), and no likely change of the rates explains it: check that --strategy, the "
        "model and the DeepSpeed config are those of the runs"
        for phase, error in _missed(machine, observations).items()
        if abs(error) > UNEXPLAINED and phase not in contradictions
    ]
