"""Readers for measured training runs in a DeepSpeed log, a workload profile, or a CSV file, and checks of these runs.

With ``wall_clock_breakdown``, DeepSpeed prints the phases of each iteration. With ``steps_per_print`` and log level
info, its throughput timer also prints lines with the time of day and the step number. The time between two such lines
is the time of whole iterations, including the training loop.

The samples per second in these lines do not give the time of an iteration. DeepSpeed's timer (``utils/timer.py``,
ThroughputTimer) starts at each forward (``runtime/engine.py``), or at each fetch of a batch if DeepSpeed was given
``training_data`` (``runtime/dataloader.py``). It ends with ``step()``. A log does not show which of the two was timed,
and the loop's time after a step is never included. So samples per second are used only to find the number of samples
per iteration. This holds for DeepSpeed 0.18.6 to 0.19.8.
"""

import csv
import json
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from ebbtide.simulator.estimates.estimate import estimated
from ebbtide.simulator.estimates.job import LAUNCHERS, Job, started
from ebbtide.simulator.estimates.offloading import WITHOUT_CONFIG
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import Plan
from ebbtide.simulator.schedule import Schedule
from ebbtide.simulator.schedules.strategies import build_strategy
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.calibrate.calibration import PHASES, CalibrationError, Observation, predicted_s

WARM_UP = 2  # iterations that compile, allocate and trace
# Iteration times lie on two levels if a gap of at least this factor separates them, and each level has at least the
# given number and share of the iterations.
LEVEL_FACTOR = 1.25
LEAST_OF_A_LEVEL, LEAST_SHARE_OF_A_LEVEL = 2, 0.2
# DeepSpeed's timers at an accumulation boundary, which cover all micro-batches of the step. A number that is cut off,
# or mixed with another process's output, does not match.
_TIMER = re.compile(r" \| (\w+): (\d+(?:\.\d+)?)(?![\w.])")
_GLOBAL = re.compile(rf"time \(ms\)((?:{_TIMER.pattern})+)")
# DeepSpeed before 0.9 did not abbreviate the names of phases.
_NAMES = ({"fwd": "forward", "bwd": "backward", "step": "step"}, {n: n for n in ("forward", "backward", "step")})
# The message of torchrun when it sets the variable, and other ways to print an environment variable.
_THREADS = re.compile(r"OMP_NUM_THREADS(?: environment variable for each process to be |\W{1,5})(\d+)\b")
_STEP = re.compile(
    r"(?:\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3})\][^\n]*)?"
    r"global_step=(\d+), RunningAvgSamplesPerSec=\S+ CurrSamplesPerSec=([\d.]+(?:e[+-]?\d+)?)"
)


@dataclass(frozen=True)
class DeepSpeedLog:
    """Measured times from a DeepSpeed log, without the first iterations (warm-up).

    Attributes:
        phases_s: Seconds of each iteration by phase.
        wholes_s: Seconds per whole iteration, from the times of day in the log.
        samples_per_s: Samples per second as DeepSpeed prints them.
        iterations: Number of logged iterations, including warm-up.
        omp_threads: OMP_NUM_THREADS of each rank. None if the log does not show it.
    """

    phases_s: Mapping[str, Sequence[float]]
    wholes_s: Sequence[float]
    samples_per_s: Sequence[float]
    iterations: int
    omp_threads: int | None = None

    @property
    def sums_s(self) -> list[float]:
        """Return a list with the seconds of each iteration in a DeepSpeed log: the sum over the iteration's phases."""
        return [sum(seconds) for seconds in zip(*self.phases_s.values(), strict=True)]


def read_log(text: str) -> DeepSpeedLog:
    """Parse the text of a DeepSpeed log into measured times. For a log without timing lines, the result has
    empty lists.
    """
    phases: dict[str, list[float]] = {phase: [] for phase in _NAMES[0].values()}
    for line in _GLOBAL.finditer(text):
        timers = {key: float(ms) for key, ms in _TIMER.findall(line[1])}
        # Timers of single micro-batches have other names.
        for key, phase in next((names for names in _NAMES if names.keys() <= timers.keys()), {}).items():
            phases[phase].append(timers[key] / 1e3)
    count = len(phases["step"])
    threads = _THREADS.search(text)
    steps = [match.groups() for match in _STEP.finditer(text)]
    return DeepSpeedLog(
        {phase: seconds[WARM_UP:] for phase, seconds in phases.items()},
        _wholes_s([(datetime.fromisoformat(at), int(n)) for at, n, _ in steps if at]),
        [float(rate) for _, _, rate in steps if float(rate) > 0],
        count,
        int(threads[1]) if threads else None,
    )


def _wholes_s(steps: Sequence[tuple[datetime, int]]) -> list[float]:
    # A smaller step number than before means that another run begins. DeepSpeed prints no such line before its third
    # step, so warm-up is not included.
    return [
        (later - at).total_seconds() / (number - before)
        for (at, before), (later, number) in pairwise(steps)
        if number > before and later > at
    ]


def levels_s(seconds: Sequence[float]) -> tuple[list[float], list[float]] | None:
    """Split measured iteration times in seconds into a list of short and a list of long ones, at the widest
    gap. Return None if no gap is wide enough.
    """
    ordered = sorted(seconds)
    least = max(LEAST_OF_A_LEVEL, LEAST_SHARE_OF_A_LEVEL * len(ordered))
    gaps = [
        (ordered[i] / max(ordered[i - 1], 1e-9), i)
        for i in range(1, len(ordered))
        if least <= i <= len(ordered) - least
    ]
    if not gaps or max(gaps)[0] < LEVEL_FACTOR:
        return None
    at = max(gaps)[1]
    return ordered[:at], ordered[at:]


def level_notes(name: str, log: DeepSpeedLog) -> list[str]:
    """Return a list with one warning if the iterations in a DeepSpeed log have two clearly different lengths,
    otherwise an empty list.
    """
    levels = levels_s(log.sums_s)
    if levels is None:
        return []
    short, long = levels
    return [
        f"{name}: {len(short)} of its iterations take about {statistics.median(short):.3g} s "
        f"(forward, backward and step), {len(long)} about {statistics.median(long):.3g} s, and the "
        "medians of all were taken. Does it hold two runs? Give --runs a log of one."
    ]


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
    """Return True if a run's whole iteration is clearly shorter than the sum of its phases, which is impossible."""
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


FEWEST_ITERATIONS = 3
_MEASURED = {f"{phase}_{unit}": (phase, factor) for phase in PHASES for unit, factor in (("s", 1.0), ("ms", 1e-3))}
_INTEGERS = ("sequence", "micro_batch", "data_parallel", "accumulation", "tensor_parallel", "omp_threads")
_OPTIONS: dict[str, Callable[[str], Any]] = {"ratio": float, "stride": int}
_OTHER = ("model", "strategy", "sub_group_size", "name", "launcher")
_STARTED = ("launcher", "omp_threads")


@dataclass(frozen=True)
class FactsFromFlags:
    """The facts about measured training runs that the file of the runs lacks, taken from the flags of ``tune
    calibrate``.

    Attributes:
        model: Model's config, a description, or a path.
        workload: Measured workload, used instead of ``model``.
        shape: Further fields of a `Job` by name.
        strategy: Name of the strategy that ran. None: DeepSpeed alone, with the offload settings of ``ds_config``.
    """

    model: str | None = None
    ds_config: str | Mapping[str, Any] | None = None
    workload: Workload | None = None
    shape: Mapping[str, Any] = field(default_factory=dict)
    strategy: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def build(self, machine: Machine) -> Schedule:
        """Return the schedule of one iteration of a training job that was measured to calibrate a machine.

        The schedule has all operations and waits, so that the iteration can be simulated.

        Args:
            machine: Machine for which layer times are estimated, if the job is described by a model's config.
        """
        work = self.workload
        if work is None:
            if self.model is None:
                raise CalibrationError(
                    "--model, --workload or the column 'model' of a CSV must describe what ran, but got none"
                )
            work = estimated(self.job, machine)
        else:
            work = started(work, **{name: self.shape.get(name) for name in _STARTED})
        if "sub_group_size" in self.options:
            work = work.recut(int(self.options["sub_group_size"]))
        if "plan" in self.options:
            work = work.cut_as(self.options["plan"])
        options = {k: v for k, v in self.options.items() if k != "sub_group_size"}
        name = self.strategy
        if name is None:
            moved = WITHOUT_CONFIG if self.workload else self.job.offload
            name, own = moved.strategy(work.zero_stage)
            options = own | options
        return build_strategy(name, work, iterations=1, **options)

    @cached_property
    def job(self) -> Job:
        """Return the training job that the flags of ``tune calibrate`` and the DeepSpeed config describe."""
        assert self.model is not None
        return Job.of_deepspeed(self.model, self.ds_config, **self.shape)

    def samples(self) -> int | None:
        """Return the number of samples per iteration of a measured training run over all ranks, or None if unknown.

        Raises:
            ModelError: The DeepSpeed config contradicts the command's flags.
        """
        from ebbtide.simulator.estimates.deepspeed_config import deepspeed_fields

        if self.workload is not None:
            return self.workload.samples_per_iteration
        ranks = self.shape.get("data_parallel") or 1
        said = deepspeed_fields(
            self.ds_config,
            hidden=1,
            ranks=ranks,
            zero_stage=self.shape.get("zero_stage"),
            micro_batch=self.shape.get("micro_batch"),
            accumulation=self.shape.get("accumulation"),
        )
        return int(said["micro_batch"] * said["accumulation"] * ranks)


def read_observations(path: str | Path, described: FactsFromFlags) -> list[Observation]:
    """Read the measured training runs in a file.

    The file is a CSV file, a workload from `tune profile` or what `tune search --measure` wrote (``.json``), or a
    DeepSpeed log.

    Raises:
        CalibrationError: The file cannot be read, or it has no usable run. The message says what is missing.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"--runs must be a readable file, but got {path}: {error}") from None
    if file.suffix == ".csv":
        return _from_csv(file.name, text, described)
    if file.suffix == ".json":
        if (found := _searched(text)) is not None:
            return _from_search(file.name, found)
        return [_from_profile(file.name, text, described)]
    return [_from_log(file.name, text, described)]


def _from_log(name: str, text: str, described: FactsFromFlags) -> Observation:
    log = read_log(text)
    if log.iterations < WARM_UP + FEWEST_ITERATIONS:
        raise CalibrationError(
            f"a log must hold at least {WARM_UP + FEWEST_ITERATIONS} lines 'time (ms) | fwd: ... | "
            f"bwd: ... | step: ...' (wall_clock_breakdown in DeepSpeed's config), but {name} holds "
            f"{log.iterations}"
        )
    described, start_notes = _started_as(name, log, described)
    measured = {phase: statistics.median(seconds) for phase, seconds in log.phases_s.items()}
    whole_s, notes = _whole_of(name, log, measured)
    if whole_s is not None:
        measured["iteration"] = whole_s
    samples = described.samples()
    if log.samples_per_s and samples:
        notes += batch_notes(name, samples, statistics.median(log.samples_per_s), measured)
    notes += start_notes + level_notes(name, log) + loop_notes(name, measured)
    return Observation(name, described.build, measured, tuple(notes))


def _started_as(name: str, log: DeepSpeedLog, described: FactsFromFlags) -> tuple[FactsFromFlags, list[str]]:
    if log.omp_threads is None or any(flag in described.shape for flag in _STARTED):
        return described, []
    shape = {**described.shape, "omp_threads": log.omp_threads}
    return replace(described, shape=shape), [
        f"{name}: OMP_NUM_THREADS was {log.omp_threads}, so DeepSpeed's CPU updates are assumed to have run "
        f"on {log.omp_threads} thread{'s' * (log.omp_threads > 1)} of each rank (if not, give "
        "--omp-threads)"
    ]


def _whole_of(name: str, log: DeepSpeedLog, phases_s: Mapping[str, float]) -> tuple[float | None, list[str]]:
    if not log.wholes_s:
        return None, [
            f"{name} does not contain the time between the phases, so loop_s stays unchanged. To log "
            "this time, set steps_per_print 1 and log level info in DeepSpeed's config "
            '("log_level": "info" in newer versions), '
            "or give a CSV with iteration_ms"
        ]
    whole_s = statistics.median(log.wholes_s)
    if too_short(whole_s, phases_s):
        return None, [
            f"{name}: by the times of day in the log an iteration takes {whole_s:.3g} s, but forward, "
            f"backward and step together {phases_of(phases_s):.3g} s, so loop_s stays "
            "unchanged. Check that the log holds one run"
        ]
    return whole_s, []


def _searched(text: str) -> Mapping[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) and {"job", "measured"} <= found.keys() else None


def _from_search(name: str, found: Mapping[str, Any]) -> list[Observation]:
    job, seen = found["job"], []
    for row in found["measured"]:
        if not row["measured_s"]:
            continue
        tokens = round(row["tokens_per_sample"] or job["sequence"])
        shape = {**job["shape"], **row["shape"], "sequence": tokens}
        ran = FactsFromFlags(job["model"], row["deepspeed"], shape=shape)
        if row["plan"] is not None:
            ran = replace(ran, strategy="ebbtide", options={"plan": Plan.from_fields(row["plan"])})
        seen.append(Observation(row["name"], ran.build, {"iteration": row["measured_s"]}))
    if not seen:
        raise CalibrationError(
            f"a file of `tune search --measure` in --runs must hold a measured configuration, but {name} has none"
        )
    return seen


def _from_profile(name: str, text: str, described: FactsFromFlags) -> Observation:
    try:
        work = Workload.model_validate_json(text)
    except ValueError as error:
        raise CalibrationError(
            f"a JSON file of --runs must be of `tune profile` or `tune search --measure`, but {name} is not: "
            f"{str(error).splitlines()[0]}"
        ) from None
    measured = {phase: work.phase_times[phase].median for phase in PHASES if phase in work.phase_times}
    if not measured:
        raise CalibrationError(
            f"a workload of --runs must have phase_times (`tune profile` measures them), but {name} has none"
        )
    kept = FactsFromFlags(workload=work, strategy=described.strategy, options=described.options)
    return Observation(name, kept.build, measured, tuple(loop_notes(name, measured)))


def _from_csv(name: str, text: str, described: FactsFromFlags) -> list[Observation]:
    reader = csv.DictReader(text.splitlines())
    columns = list(reader.fieldnames or [])
    known = (*_MEASURED, *_INTEGERS, *_OPTIONS, *_OTHER)
    unknown = [column for column in columns if column not in known]
    if unknown or not set(columns) & set(_MEASURED):
        raise CalibrationError(
            f"a CSV of --runs must have one of the columns {', '.join(_MEASURED)}, and may have "
            f"{', '.join((*_INTEGERS, *_OPTIONS, *_OTHER))}, but {name} has {columns}"
        )
    if len(set(columns)) < len(columns):
        raise CalibrationError(f"the columns of {name} must have different names, but got {columns}")
    runs = [_row(f"{name}, line {reader.line_num}", row, described) for row in reader]
    if not runs:
        raise CalibrationError(f"a CSV of --runs must hold at least one run, but {name} holds none")
    return runs


def _row(where: str, row: Mapping[str | None, Any], described: FactsFromFlags) -> Observation:
    beyond = row.get(None) or ()  # key under which `csv` puts cells without a column
    if any(cell.strip() for cell in beyond):
        raise CalibrationError(
            f"{where}: a row must have the header's {len(row) - 1} cells at most, but has {len(row) - 1 + len(beyond)}"
        )
    given = {key: value.strip() for key, value in row.items() if key and value and value.strip()}
    shape, options = dict(described.shape), dict(described.options)
    for key in given:
        if key in _INTEGERS:
            shape[key] = _parsed(where, key, given[key], int)
        elif key == "launcher":
            shape[key] = _launcher(where, given[key])
        elif key in _OPTIONS or key == "sub_group_size":
            options[key] = _parsed(where, key, given[key], _OPTIONS.get(key, float))
    ran = FactsFromFlags(
        given.get("model", described.model),
        described.ds_config,
        None if "model" in given else described.workload,
        shape,
        given.get("strategy", described.strategy),
        options,
    )
    measured = _measured_of(where, given)
    check_whole(where, measured)
    return Observation(given.get("name", where), ran.build, measured, tuple(loop_notes(where, measured)))


def _measured_of(where: str, given: Mapping[str, str]) -> dict[str, float]:
    measured: dict[str, float] = {}
    for phase in PHASES:
        columns = [key for key in given if key in _MEASURED and _MEASURED[key][0] == phase]
        if len(columns) > 1:
            raise CalibrationError(
                f"{where}: only one of {' and '.join(columns)} may be given, but got "
                f"{' and '.join(given[key] for key in columns)}"
            )
        for key in columns:
            measured[phase] = _MEASURED[key][1] * _parsed(where, key, given[key], float)
    return measured


def _launcher(where: str, given: str) -> str:
    if given not in LAUNCHERS:
        raise CalibrationError(f"{where}: launcher must be one of {', '.join(LAUNCHERS)}, but got {given!r}")
    return given


def _parsed(where: str, key: str, value: str, kind: Callable[[str], Any]) -> Any:
    try:
        number = kind(value)
    except ValueError:
        number = math.nan
    if key == "ratio" and not 0 <= number <= 1:
        raise CalibrationError(f"{where}: ratio must lie in [0, 1], but got {value!r}")
    least_is_zero = key in _OPTIONS
    if not (0 < number < math.inf or (least_is_zero and number == 0)):
        rule = f"a {'whole ' if kind is int else ''}number {'>=' if least_is_zero else '>'} 0"
        raise CalibrationError(f"{where}: {key} must be {rule}, but got {value!r}")
    return number
