"""Readers for measured training runs in a DeepSpeed log, a workload profile, or a CSV file."""

import csv
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ebbtide.simulator.estimates.estimate import estimated
from ebbtide.simulator.estimates.job import LAUNCHERS, Job, started
from ebbtide.simulator.estimates.offloading import WITHOUT_CONFIG
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.schedule import Schedule
from ebbtide.simulator.schedules.strategies import build_strategy
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.calibrate.calibration import PHASES, CalibrationError, Observation
from ebbtide.tuner.calibrate.deepspeed_log import WARM_UP, DeepSpeedLog, level_notes, read_log
from ebbtide.tuner.calibrate.run_checks import batch_notes, check_whole, loop_notes, phases_of, too_short

FEWEST_ITERATIONS = 3
_MEASURED = {f"{phase}_{unit}": (phase, factor) for phase in PHASES for unit, factor in (("s", 1.0), ("ms", 1e-3))}
_INTEGERS = ("sequence", "micro_batch", "data_parallel", "accumulation", "tensor_parallel", "omp_threads")
_OPTIONS: dict[str, Callable[[str], Any]] = {"ratio": float, "stride": int}
_OTHER = ("model", "strategy", "sub_group_size", "name", "launcher")
_STARTED = ("launcher", "omp_threads")


@dataclass(frozen=True)
class Described:
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


def read_observations(path: str | Path, described: Described) -> list[Observation]:
    """Read the measured training runs in a file.

    The file is a CSV file, a workload from `tune profile` (``.json``), or a DeepSpeed log.

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
        return [_from_profile(file.name, text, described)]
    return [_from_log(file.name, text, described)]


def _from_log(name: str, text: str, described: Described) -> Observation:
    log = read_log(text)
    if log.iterations < WARM_UP + FEWEST_ITERATIONS:
        raise CalibrationError(
            f"a log must hold at least {WARM_UP + FEWEST_ITERATIONS} lines 'time (ms) | fwd: ... | "
            f"bwd: ... | step: ...' (wall_clock_breakdown in DeepSpeed's config), but {name} holds "
            f"{log.iterations}"
        )
    described, told = _started_as(name, log, described)
    measured = {phase: statistics.median(seconds) for phase, seconds in log.phases_s.items()}
    whole_s, notes = _whole_of(name, log, measured)
    if whole_s is not None:
        measured["iteration"] = whole_s
    samples = described.samples()
    if log.samples_per_s and samples:
        notes += batch_notes(name, samples, statistics.median(log.samples_per_s), measured)
    notes += told + level_notes(name, log) + loop_notes(name, measured)
    return Observation(name, described.build, measured, tuple(notes))


def _started_as(name: str, log: DeepSpeedLog, described: Described) -> tuple[Described, list[str]]:
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


def _from_profile(name: str, text: str, described: Described) -> Observation:
    try:
        work = Workload.model_validate_json(text)
    except ValueError as error:
        raise CalibrationError(
            f"a JSON file of --runs must be a workload of `tune profile`, but {name} is not: "
            f"{str(error).splitlines()[0]}"
        ) from None
    measured = {phase: work.phase_times[phase].median for phase in PHASES if phase in work.phase_times}
    if not measured:
        raise CalibrationError(
            f"a workload of --runs must have phase_times (`tune profile` measures them), but {name} has none"
        )
    kept = Described(workload=work, strategy=described.strategy, options=described.options)
    return Observation(name, kept.build, measured, tuple(loop_notes(name, measured)))


def _from_csv(name: str, text: str, described: Described) -> list[Observation]:
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


def _row(where: str, row: Mapping[str | None, Any], described: Described) -> Observation:
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
    ran = Described(
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
