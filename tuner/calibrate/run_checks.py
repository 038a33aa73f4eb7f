"""Checks of measured training runs, and warnings about the runs, before they calibrate a machine's rates."""

from collections.abc import Mapping, Sequence

from ebbtide.simulator.machine import Machine
from ebbtide.tuner.calibrate.calibration import CalibrationError, Observation, predicted_s

# The total may be smaller than the sum of its phases by this share, because the sum of medians is not the median of the
# sum.
SHORTFALL = 0.05
# Time between the phases, as a multiple of the phases, above which a note is shown.
LONG_LOOP = 1.0
# Without times of day in a log, samples per second may include waiting for data. The total time is at most this
# multiple of the phases.
LONG_WAIT = 2.0
# Factor between measured and predicted times that suggests a wrong unit. Presets are wrong by a tenth of it at most,
# and a mistake of milliseconds for seconds is a factor of a thousand.
WRONG_UNIT = 100.0
FLAGS_OF_THE_BATCH = "--micro-batch, --accumulation, --data-parallel or the batch in --ds-config"


def phases_of(measured_s: Mapping[str, float]) -> float:
    """Return the sum of the measured seconds of a run's phases: forward, backward and step."""
    return sum(seconds for phase, seconds in measured_s.items() if phase != "iteration")


def too_short(whole_s: float, measured_s: Mapping[str, float]) -> bool:
    """Return True if the measured seconds of a run's whole iteration are clearly fewer than the sum of its
    phases, which is impossible.
    """
    return whole_s < (1 - SHORTFALL) * phases_of(measured_s)


def check_whole(name: str, measured_s: Mapping[str, float]) -> None:
    """Check that a run's measured iteration is at least as long as its phases together.

    Raises:
        CalibrationError: The iteration is shorter.
    """
    whole_s = measured_s.get("iteration")
    if whole_s is not None and too_short(whole_s, measured_s):
        raise CalibrationError(
            f"{name}: an iteration must take at least as long as its phases together, but takes "
            f"{whole_s:.6g} s and its phases {phases_of(measured_s):.6g} s: check the columns' units "
            "(_ms or _s), and leave out what was measured in another run"
        )


def loop_notes(name: str, measured_s: Mapping[str, float]) -> list[str]:
    """Return a list with one warning if a measured training run spends much more time between its phases
    (forward, backward, step) than in them, otherwise an empty list.
    """
    phases_s = phases_of(measured_s)
    between_s = measured_s.get("iteration", 0.0) - phases_s
    if len(measured_s) < 4 or between_s <= LONG_LOOP * phases_s:
        return []
    return [
        f"{name}: {between_s:.3g} s of an iteration are outside its phases, "
        f"{between_s / phases_s:.1f} times the phases themselves ({phases_s:.3g} s), and are taken as "
        "loop_s. If the training loop does not wait so long (for data, evaluation, checkpoints), "
        "check the iteration times in --runs and their unit"
    ]


def batch_notes(name: str, samples: int, samples_per_s: float, measured_s: Mapping[str, float]) -> list[str]:
    """Return a list with one warning if the samples per second in DeepSpeed's log contradict the batch size that the
    flags of ``tune calibrate`` give, otherwise an empty list.

    The batch size divided by the samples per second is the time that DeepSpeed's timer measured in an iteration. This
    time must be at least the sum of forward, backward and step, and at most the whole iteration.
    """
    timed_s, phases_s = samples / samples_per_s, phases_of(measured_s)
    most_s = (1 + SHORTFALL) * measured_s.get("iteration", LONG_WAIT * phases_s)
    if (1 - SHORTFALL) * phases_s <= timed_s <= most_s:
        return []
    return [
        f"{name}: at {samples_per_s:.4g} samples per second, the {samples} samples of an iteration take "
        f"{timed_s:.3g} s, but forward, backward and step took {phases_s:.3g} s, enough for "
        f"about {samples_per_s * phases_s:.3g} samples: check {FLAGS_OF_THE_BATCH}"
    ]


def check_scale(machine: Machine, observations: Sequence[Observation]) -> None:
    """Refuse a measured run with a phase a hundred times longer or shorter than predicted.

    No calibration explains such a run. Most likely its unit is wrong, or other training was measured.

    Raises:
        CalibrationError: There is such a run.
    """
    for seen in observations:
        predicted = predicted_s(seen.build(machine), machine)
        for phase, measured in seen.measured_s.items():
            ratio = measured / max(predicted[phase], 1e-9)
            if not 1 / WRONG_UNIT < ratio < WRONG_UNIT:
                raise CalibrationError(
                    f"{seen.name}: {phase} must lie within a factor of {WRONG_UNIT:.0f} of what "
                    f"the machine predicts ({predicted[phase]:.4g} s), but took {measured:.4g} s: "
                    "check its unit (columns end in _ms or _s), and the model and flags that "
                    "describe the run"
                )
