"""Device memory of a published run: what is held, phase by phase, as a linear model of bytes.

Each phase's memory is a sum of physical terms (parameter shards, checkpointed activations, logits,
gathered layers, resident and visiting optimizer state) times coefficients near what the software
holds; non-negative least squares over all phases and runs together finds the coefficients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from studies.bench.offload_runs import VOCABULARY, Run, shape
from studies.published.testbed import elements, rank_sizes, residents, visits

GIB = 2**30
DEFAULT_TRUST = 0.75
PHASES = {
    "before": "mem_before_fwd_gb", "forward": "mem_fwd_peak_gb",
    "backward": "mem_bwd_peak_gb", "step": "mem_step_peak_gb",
}  # fmt: skip
# name -> (phases it is held in, prior value of its coefficient)
_ALL = ("before", "forward", "backward", "step")
TERMS: dict[str, tuple[tuple[str, ...], float]] = {
    "parameter shards": (_ALL, 0.9),
    "fixed": (_ALL, 1.0),
    "outputs kept": (_ALL, 15.0),
    "checkpoints": (("forward", "backward"), 1.0),
    "logits, forward": (("forward",), 5.0),
    "gathered, forward": (("forward",), 1.2),
    "gathered layer": (("forward",), 1.0),
    "gathered, backward": (("backward",), 0.6),
    "recomputed layer": (("backward",), 50.0),
    "gradient buckets": (("backward",), 1.4),
    "fixed, backward": (("backward",), 0.5),
    "fixed, step": (("step",), 0.3),
    "resident state": (_ALL, 16.0),
    "staging": (_ALL, 14.0),
    "visitors' gradients, backward": (("backward",), 1.0),
    "visitors' gradients, step": (("step",), 2.0),
}
_PRIOR_WEIGHT = 0.1  # of a prior coefficient against one run's relative error


@dataclass(frozen=True)
class MemoryModel:
    """Coefficients of TERMS, fitted; ``trust``: see `offload_runs.shape`."""

    coefficients: tuple[float, ...]
    trust: float = DEFAULT_TRUST

    @classmethod
    def fit(cls, runs: Sequence[Run]) -> MemoryModel:
        """Also settles how far a label is trusted that contradicts the logged shape."""
        measured = [run for run in runs if all(c in run.measured for c in PHASES.values())]
        if not any(run.contradicted for run in measured):
            return cls(_coefficients(measured, DEFAULT_TRUST)[0], DEFAULT_TRUST)
        grid = np.linspace(0, 1, 21).tolist()
        trust = min(grid, key=lambda t: _coefficients(measured, t)[1])
        return cls(_coefficients(measured, trust)[0], trust)

    def phase_gb(self, run: Run, phase: str) -> float:
        """GiB on rank 0's device at the peak of a phase."""
        return float(np.dot(_terms(run, phase, self.trust), self.coefficients))

    def peak_gb(self, run: Run) -> float:
        """The highest of all phases."""
        return max(self.phase_gb(run, phase) for phase in PHASES)


def _coefficients(runs: Sequence[Run], trust: float) -> tuple[tuple[float, ...], float]:
    """Relative errors weigh alike; weak priors hold coefficients that the runs do not show."""
    rows, targets = [], []
    for run in runs:
        for phase, column in PHASES.items():
            rows.append(_terms(run, phase, trust) / run.measured[column])
            targets.append(1.0)
    priors = np.array([value for _, value in TERMS.values()])
    scale = _PRIOR_WEIGHT / priors
    matrix = np.vstack([*rows, np.diag(scale)])
    found, misfit = nnls(matrix, np.concatenate((targets, scale * priors)))
    return tuple(float(v) for v in found), float(misfit)


def _terms(run: Run, phase: str, trust: float) -> np.ndarray:
    values = _bytes(run, trust)
    return np.array([
        values[name] / GIB if phase in phases else 0.0 for name, (phases, _) in TERMS.items()
    ])  # fmt: skip


def _bytes(run: Run, trust: float) -> dict[str, float]:
    """What each term is at coefficient 1."""
    layers, hidden = shape(run, trust)
    tokens = run.micro_batch * run.seq
    sizes = rank_sizes(run, trust)
    first = residents(run, trust)
    visiting = visits(run, trust)
    gathers = 1.0 if run.dp > 1 else 0.0
    hosted = sizes[first:]
    return {
        "parameter shards": 2 * elements(run, trust) / (run.dp * run.tp),
        "fixed": GIB,
        "outputs kept": tokens * hidden / run.tp,
        "checkpoints": 2 * tokens * hidden * layers,
        "logits, forward": 2 * tokens * VOCABULARY / run.tp,
        "gathered, forward": gathers * 2e9 / run.tp,
        "gathered layer": gathers * 24 * hidden**2 / run.tp,
        "gathered, backward": gathers * 2e9 / run.tp,
        "recomputed layer": tokens * hidden / run.tp,
        "gradient buckets": 2e9 / run.tp,
        "fixed, backward": GIB,
        "fixed, step": gathers * GIB,
        "resident state": sum(sizes[:first]),
        "staging": max(hosted, default=0) if visiting else 0.0,
        "visitors' gradients, backward": sum(hosted) * visiting / max(1, len(hosted)),
        "visitors' gradients, step": sum(hosted) * visiting / max(1, len(hosted)),
    }
