"""Fits a testbed's rates to its published runs: robust least squares on logarithms of times.

Weak log-normal priors (`testbed.STEP_PRIORS`, `PASS_PRIORS`) hold what a file of few rows cannot
identify; a rate whose interval is as wide as its prior was not identified by the rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from studies.bench.offload_runs import Run, RunError
from studies.published.testbed import PASS_PRIORS, STEP_PRIORS, Testbed
from studies.run_memory import MemoryModel

Floats = NDArray[np.float64]
ROW_SPREAD = 0.04  # repeats of one published configuration differ by a few percent
FAMILY_SPREAD = 0.25  # how far campaigns' DRAM rates lie apart, in log units
FEWEST_ROWS = 3


@dataclass(frozen=True)
class Calibration:
    """What was fitted on a file: testbeds by name, one memory model, and 95% intervals."""

    testbeds: Mapping[str, Testbed]
    memory: MemoryModel
    intervals: Mapping[str, Mapping[str, tuple[float, float]]]
    fitted_on: Sequence[Run] = ()

    def predict(self, run: Run) -> dict[str, float]:
        """Milliseconds by column, and ``memory_gb``: the peak over all phases.

        A run with blanks gets the geometric mean over what may have stood in them (`completed`).

        Raises:
            RunError: nothing was fitted for the run's testbed.
        """
        if run.testbed not in self.testbeds:
            raise _uncalibrated(run.testbed, self.testbeds)
        if not run.unknown:
            return self._predict_known(run)
        cases = completed(run, self.fitted_on)
        found = [self._predict_known(case) for case, _ in cases]
        weights = [weight for _, weight in cases]
        return {
            name: math.exp(float(np.average([math.log(f[name]) for f in found], weights=weights)))
            for name in found[0]
        }

    def _predict_known(self, run: Run) -> dict[str, float]:
        return {**self.testbeds[run.testbed].predict(run), "memory_gb": self.memory.peak_gb(run)}


def _uncalibrated(name: str, known: Collection[str]) -> RunError:
    return RunError(
        f"every testbed of --predict must have rows in --calibrate, but {name!r} "
        f"has none (calibrated: {', '.join(sorted(known))})"
    )


def completed(run: Run, fitted: Sequence[Run]) -> list[tuple[Run, int]]:
    """A run with blanks as the runs it may have been, each with its weight.

    Blanks are filled together from the testbed's fitted runs, from those of the nearest model where
    the model's shape is blank (grown to its size), and from interleaved ones for a blank stride.
    """
    alike = [other for other in fitted if other.testbed == run.testbed]
    if "stride" in run.unknown and "prefetch" not in run.unknown:
        alike = [other for other in alike if other.stride] or alike
    growth = 1.0
    if {"layers", "hidden"} & set(run.unknown):
        size = min((r.params_b for r in alike), key=lambda b: abs(math.log(b / run.params_b)))
        alike = [other for other in alike if other.params_b == size]
        growth = (run.params_b / size) ** (1 / 3)
    cases: dict[Run, int] = {}
    for other in alike:
        values = {name: getattr(other, name) for name in run.unknown}
        for name in {"layers", "hidden"} & set(values):
            values[name] = round(values[name] * growth)
        if values.get("prefetch") and "stride" not in values:
            values["stride"] = run.stride or other.stride
        case = replace(run, **values, unknown=())
        cases[case] = cases.get(case, 0) + 1
    return list(cases.items())


def calibrate(runs: Sequence[Run], only: Collection[str] | None = None) -> Calibration:
    """Fits memory on all runs (the software is the same) and rates testbed by testbed.

    Args:
        only: the testbeds to fit; by default every one that has runs.

    Raises:
        RunError: a testbed has fewer than three runs with all phases measured.
    """
    memory = MemoryModel.fit(runs)
    testbeds: dict[str, Testbed] = {}
    intervals: dict[str, Mapping[str, tuple[float, float]]] = {}
    for name in sorted({run.testbed for run in runs} if only is None else only):
        own = [run for run in runs if run.testbed == name]
        if not own:
            raise _uncalibrated(name, {run.testbed for run in runs})
        measured = [run for run in own if fully_measured(run)]
        if len(measured) < FEWEST_ROWS:
            raise RunError(
                f"--calibrate must hold at least {FEWEST_ROWS} measured runs of each testbed, "
                f"but has {len(measured)} of {name!r}"
            )
        testbeds[name], intervals[name] = fit_testbed(name, measured, memory.trust)
    return Calibration(testbeds, memory, intervals, tuple(runs))


def fully_measured(run: Run) -> bool:
    """Rates are fitted on runs with all their phases."""
    return all(f"{phase}_ms" in run.measured for phase in ("fwd", "bwd", "step", "iter"))


def fit_testbed(
    name: str, runs: Sequence[Run], trust: float
) -> tuple[Testbed, dict[str, tuple[float, float]]]:
    """The step's rates first, then forward's and backward's, which lean on the DRAM's."""
    rates = {key: prior[0] for key, prior in (STEP_PRIORS | PASS_PRIORS).items()}
    testbed = Testbed(name, rates, trust=trust)
    testbed, step_interval = _fit_step(testbed, runs)
    unsaid = frozenset(run.family for run in runs if run.async_grads is None)
    testbed = replace(testbed, unsaid_families=unsaid)
    testbed = replace(testbed, async_families=_async_families(testbed, runs))
    testbed, interval = _fit_passes(testbed, runs)
    again = _async_families(testbed, runs)
    if again != testbed.async_families:
        testbed, interval = _fit_passes(replace(testbed, async_families=again), runs)
    return testbed, {**step_interval, **interval}


def _fit_step(
    start: Testbed, runs: Sequence[Run]
) -> tuple[Testbed, dict[str, tuple[float, float]]]:
    """Campaigns whose ranks share nodes get a DRAM rate around the testbed's."""
    families = sorted({run.family for run in runs if run.ranks_per_node > 1})
    names = list(STEP_PRIORS)
    centre = np.log([STEP_PRIORS[name][0] for name in names])
    width = np.array([STEP_PRIORS[name][1] for name in names])
    distinct: dict[tuple[object, ...], list[Run]] = {}
    for run in runs:
        distinct.setdefault(_step_key(run), []).append(run)

    def testbed(x: Floats) -> Testbed:
        factors = dict(zip(families, np.exp(x[len(names) :]).tolist(), strict=True))
        rates = dict(zip(names, np.exp(x[: len(names)]).tolist(), strict=True))
        return replace(start, rates={**start.rates, **rates}, dram_of_family=factors)

    def residuals(x: Floats) -> Floats:
        bed = testbed(x)
        errors: list[float] = []
        for alike in distinct.values():
            predicted = bed.step_s(alike[0]) * 1e3
            errors += [math.log(predicted / run.measured["step_ms"]) for run in alike]
        spread = x[len(names) :] / FAMILY_SPREAD
        prior = (x[: len(names)] - centre) / width
        return np.concatenate((_robust(np.array(errors) / ROW_SPREAD), prior, spread))

    fit = _solve(residuals, np.concatenate((centre, np.zeros(len(families)))))
    bed = testbed(fit.x)
    by_micro_batch = _by_micro_batch(bed, runs)
    return replace(bed, dram_of_micro_batch=by_micro_batch), _intervals(names, fit)


def _step_key(run: Run) -> tuple[object, ...]:
    """Runs that differ in the gradient path alone have the same step."""
    return (run.params_b, run.layers, run.hidden, run.tp, run.dp, run.offload_ratio, run.subgroup,
            run.prefetch, run.stride, run.family)  # fmt: skip


def _by_micro_batch(bed: Testbed, runs: Sequence[Run]) -> list[tuple[float, int]]:
    pairs = sorted({(r.family, r.micro_batch) for r in runs if r.ranks_per_node > 1})
    return [(math.log(bed.dram_of_family[family]), size) for family, size in pairs]


def _async_families(bed: Testbed, runs: Sequence[Run]) -> frozenset[str]:
    """Of the campaigns that do not say it, those whose backward fits asynchronous copies better."""
    return frozenset(
        family for family in bed.unsaid_families
        if _misfit(bed, runs, family, frozenset({family})) < _misfit(bed, runs, family, frozenset())
    )  # fmt: skip


def _misfit(bed: Testbed, runs: Sequence[Run], family: str, known: frozenset[str]) -> float:
    assumed = replace(bed, async_families=known)
    return sum(
        abs(math.log(assumed.backward_s(run) * 1e3 / run.measured["bwd_ms"]))
        for run in runs if run.family == family and run.async_grads is None
    )  # fmt: skip


def _fit_passes(
    start: Testbed, runs: Sequence[Run]
) -> tuple[Testbed, dict[str, tuple[float, float]]]:
    names = list(PASS_PRIORS)
    centre = np.log([PASS_PRIORS[name][0] for name in names])
    width = np.array([PASS_PRIORS[name][1] for name in names])

    def testbed(x: Floats) -> Testbed:
        return replace(start, rates={**start.rates, **dict(zip(names, np.exp(x), strict=True))})

    def residuals(x: Floats) -> Floats:
        bed = testbed(x)
        errors = [error for run in runs for error in _pass_errors(bed, run)]
        return np.concatenate((_robust(np.array(errors) / ROW_SPREAD), (x - centre) / width))

    fit = _solve(residuals, centre)
    bed = replace(start, rates={**start.rates, **dict(zip(names, np.exp(fit.x).tolist(),
                                                          strict=True))})  # fmt: skip
    return bed, _intervals(names, fit)


def _pass_errors(bed: Testbed, run: Run) -> list[float]:
    """Relative errors; an error of the time in between counts by its part of the iteration."""
    m = run.measured
    between = m["iter_ms"] - m["fwd_ms"] - m["bwd_ms"] - m["step_ms"]
    return [
        math.log(bed.forward_s(run) * 1e3 / m["fwd_ms"]),
        math.log(bed.backward_s(run) * 1e3 / m["bwd_ms"]),
        4 * (bed.between_s(run) * 1e3 - between) / m["iter_ms"],
    ]


def _robust(scaled: Floats) -> Floats:
    """Pseudo-Huber residuals: beyond two spreads an error counts linearly, not squared."""
    return np.sign(scaled) * np.sqrt(8 * (np.sqrt(1 + (scaled / 2) ** 2) - 1))


@dataclass(frozen=True)
class _Fit:
    x: Floats
    standard_error: Floats


def _solve(residuals: Callable[[Floats], Floats], start: Floats) -> _Fit:
    found = least_squares(
        residuals, start, x_scale=0.3, diff_step=np.full(len(start), 1e-4), max_nfev=40, ftol=1e-6
    )
    jacobian = np.asarray(found.jac, dtype=np.float64)
    information = jacobian.T @ jacobian
    covariance = np.linalg.pinv(information)
    # Errors beyond ROW_SPREAD widen the intervals; the priors keep their own width.
    variance = max(1.0, 2 * found.cost / max(1, len(found.fun) - len(start)))
    return _Fit(np.asarray(found.x), np.sqrt(np.diag(covariance) * variance))


def _intervals(names: Sequence[str], fit: _Fit) -> dict[str, tuple[float, float]]:
    """95% intervals from the Jacobian, symmetric in the logarithm."""
    half = 1.96 * fit.standard_error[: len(names)]
    low, high = np.exp(fit.x[: len(names)] - half), np.exp(fit.x[: len(names)] + half)
    return {n: (float(a), float(b)) for n, a, b in zip(names, low, high, strict=True)}
