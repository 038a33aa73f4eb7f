"""Measured runs as users have them: DeepSpeed's log, a profile of ours, a CSV."""

from __future__ import annotations

import csv
import re
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simulator.machine import Machine
from simulator.schedule import Schedule
from simulator.schedules.strategies import build_strategy
from simulator.workload import Workload
from tuner.calibration import PHASES, CalibrationError, Observation

WARM_UP = 2  # iterations that compile, allocate and trace
FEWEST_ITERATIONS = 3
# DeepSpeed's timers at every accumulation boundary: all micro-batches together.
_GLOBAL = re.compile(r"time \(ms\)((?: \| \w+: [\d.]+)+)")
_TIMER = re.compile(r"\| (\w+): ([\d.]+)")
_NAMES = {"fwd": "forward", "bwd": "backward", "step": "step"}
_RATE = re.compile(r"CurrSamplesPerSec=([\d.]+)")
_MEASURED = {f"{phase}_{unit}": (phase, factor)
             for phase in PHASES for unit, factor in (("s", 1.0), ("ms", 1e-3))}  # fmt: skip
_INTEGERS = {
    "sequence": "sequence", "micro_batch": "micro_batch", "data_parallel": "data_parallel",
    "accumulation": "gradient_accumulation_steps", "tensor_parallel": "tensor_parallel",
}  # fmt: skip
_OPTIONS: dict[str, Callable[[str], Any]] = {"ratio": float, "stride": int}
_OTHER = ("model", "strategy", "sub_group_size", "name")


@dataclass(frozen=True)
class Described:
    """What ran where the file does not say it: from the command's flags.

    Attributes:
        model: a config, a description or its file; ``workload``: instead, as profiled.
        shape: arguments of `workload_from_model` by name.
        options: of the strategy.
    """

    model: str | None = None
    ds_config: str | None = None
    workload: Workload | None = None
    shape: Mapping[str, Any] = field(default_factory=dict)
    strategy: str = "zero3_offload"
    options: Mapping[str, Any] = field(default_factory=dict)

    def build(self, machine: Machine) -> Schedule:
        """One iteration of what ran."""
        from simulator.estimates.workload import workload_from_model

        work = self.workload
        if work is None:
            if self.model is None:
                raise CalibrationError(
                    "what ran must be told by --model or --workload, or by the column 'model' of a "
                    "CSV, but got none"
                )
            work = workload_from_model(self.model, machine, self.ds_config, **self.shape)
        if "sub_group_size" in self.options:
            work = work.recut(int(self.options["sub_group_size"]))
        options = {k: v for k, v in self.options.items() if k != "sub_group_size"}
        return build_strategy(self.strategy, work, iterations=1, **options)

    def samples(self) -> int | None:
        """Of one iteration, all ranks together; None: not known."""
        if self.workload is not None:
            return self.workload.samples_per_iteration
        micro, ranks = self.shape.get("micro_batch"), self.shape.get("data_parallel") or 1
        steps = self.shape.get("gradient_accumulation_steps") or 1
        return None if micro is None else int(micro * ranks * steps)


def read_observations(path: str | Path, described: Described) -> list[Observation]:
    """The runs of one file: ``.csv``, ``.json`` (a workload of `tune profile`), or a log.

    Raises:
        CalibrationError: the file cannot be read, or holds no usable run; names what is missing.
    """
    file = Path(path)
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"--runs must be a readable file, but got {path}: {error}") from None
    if file.suffix == ".csv":
        return _from_csv(file.name, text, described)
    if file.suffix == ".json":
        return [_from_profile(file.name, text, described)]
    return [_from_log(file.name, text, described)]


def _from_log(name: str, text: str, described: Described) -> Observation:
    """Medians over the iterations after the second; the whole from samples per second."""
    seconds: dict[str, list[float]] = {}
    for line in _GLOBAL.findall(text):
        timers = {key: float(value) for key, value in _TIMER.findall(line)}
        if set(_NAMES) <= set(timers):  # micro timers have other names
            for key, phase in _NAMES.items():
                seconds.setdefault(phase, []).append(timers[key] / 1e3)
    count = len(seconds.get("step", []))
    if count < WARM_UP + FEWEST_ITERATIONS:
        raise CalibrationError(
            f"a log must hold at least {WARM_UP + FEWEST_ITERATIONS} lines 'time (ms) | fwd: ... | "
            f"bwd: ... | step: ...' (wall_clock_breakdown in DeepSpeed's config), but {name} holds "
            f"{count}"
        )
    measured = {phase: statistics.median(values[WARM_UP:]) for phase, values in seconds.items()}
    rates = [float(rate) for rate in _RATE.findall(text)]
    samples = described.samples()
    if len(rates) > WARM_UP and samples:
        whole = samples / statistics.median(rates[WARM_UP:])
        if whole >= sum(measured.values()):
            measured["iteration"] = whole
    return Observation(name, described.build, measured)


def _from_profile(name: str, text: str, described: Described) -> Observation:
    """A workload that `tune profile` measured: its layers' times are kept as they are."""
    try:
        work = Workload.model_validate_json(text)
    except ValueError as error:
        raise CalibrationError(
            f"a JSON file of --runs must be a workload of `tune profile`, but {name} is none: "
            f"{str(error).splitlines()[0]}"
        ) from None
    measured = {phase: work.phase_times[phase].median for phase in PHASES
                if phase in work.phase_times}  # fmt: skip
    if not measured:
        raise CalibrationError(
            "a workload of --runs must have phase_times (`tune profile` measures them), but "
            f"{name} has none"
        )
    kept = Described(workload=work, strategy=described.strategy, options=described.options)
    return Observation(name, kept.build, measured)


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
    return [_row(f"{name}, line {line}", row, described)
            for line, row in enumerate(reader, start=2)]  # fmt: skip


def _row(where: str, row: Mapping[str, str], described: Described) -> Observation:
    given = {key: value.strip() for key, value in row.items() if value and value.strip()}
    shape, options = dict(described.shape), dict(described.options)
    measured: dict[str, float] = {}
    for key, value in given.items():
        if key in _MEASURED:
            phase, factor = _MEASURED[key]
            measured[phase] = factor * _parsed(where, key, value, float)
        elif key in _INTEGERS:
            shape[_INTEGERS[key]] = _parsed(where, key, value, int)
        elif key in _OPTIONS:
            options[key] = _parsed(where, key, value, _OPTIONS[key])
        elif key == "sub_group_size":
            options[key] = _parsed(where, key, value, float)
    ran = Described(
        given.get("model", described.model), described.ds_config,
        None if "model" in given else described.workload, shape,
        given.get("strategy", described.strategy), options,
    )  # fmt: skip
    return Observation(given.get("name", where), ran.build, measured)


def _parsed(where: str, key: str, value: str, kind: Callable[[str], Any]) -> Any:
    try:
        number = kind(value)
    except ValueError:
        number = -1
    if not 0 < number < float("inf"):
        raise CalibrationError(f"{where}: {key} must be a number > 0, but got {value!r}")
    return number
