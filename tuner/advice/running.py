"""The change with which the same samples of a training run would train fastest, asked by the run itself.

A run under an automatic plan has measured its forward and backward, and its model has a config. The times of other
settings are estimated from the config, for a GPU that computes as fast as was measured. ebbtide asks in a process of
its own, so that no step waits.
"""

import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ebbtide.simulator.estimates.estimate import estimated
from ebbtide.simulator.estimates.job import Job
from ebbtide.simulator.estimates.models.blocks import ModelError
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.page import Page
from ebbtide.simulator.rules import RuleError
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.advice.tried import Changing, faster
from ebbtide.tuner.placements.decision import QUICK
from ebbtide.tuner.quantities import seconds_text

AGREES = 0.1  # relative difference up to which the described job counts as the run that was watched
SAME_TIME = 0.005  # the same for forward and backward together, whose speed is fitted
MOST_FITS = 40
ARGUMENTS = 1  # of `Knob.needs`. Whether a script has fused kernels is unknown, so that such changes are not named
_SPEEDS = ("device_flops_per_s", "attention_flops_per_s", "expert_flops_per_s", "device_memory_bytes_per_s")


class UnknownRunError(ValueError):
    """An error: the changes of a training run cannot be estimated. The message says what is missing."""


class RunningJob(Page):
    """A training run as its first steps and its model's config describe it. Memory is that of one rank.

    Attributes:
        model, config: The model's Hugging Face config and the DeepSpeed config.
        shape: Further fields of the `Job`, as observed.
        elements: Number of elements of the model's parameters.
        computed_s: Measured time of forward and backward of a step.
        expected_s: Predicted time of an iteration under the plan in force.
        device_bytes, host_bytes: Memory that training may use. None: that of the machine.
        activation_bytes: Measured GPU memory in use beside parameters, gradients and optimizer state. None: unknown.
    """

    model: dict[str, Any]
    config: dict[str, Any]
    shape: dict[str, Any]
    elements: int
    machine: Machine
    computed_s: float
    expected_s: float
    device_bytes: int | None = None
    host_bytes: int | None = None
    activation_bytes: int | None = None


@dataclass(frozen=True)
class Hint:
    """A change with which the same samples train faster. The seconds are those of an iteration, predicted."""

    label: str
    seconds: float
    factor: float


def hint(run: RunningJob) -> Hint | None:
    """Return the change of the DeepSpeed config or of the trainer's arguments with which a run's samples train fastest.
    None if nothing is clearly faster.

    Raises:
        UnknownRunError: The run's config does not describe what was watched.
    """
    try:
        job = Job.of_deepspeed(run.model, run.config, **run.shape)
        described = sum(block.elements for block in job.architecture.blocks())
        if described != run.elements:
            counts = f"{run.elements:,} parameters, and its config describes {described:,}"
            raise UnknownRunError(f"the model has {counts}")
        machine, work = _as_watched(job, run)
        asked = {"device_memory_bytes": run.device_bytes, "host_memory_bytes": run.host_bytes}
        freedom = {"offload_parameters": not job.offload.keeps_parameters}
        as_is = Changing(job, machine, asked, freedom).tried({})
        if isinstance(as_is, str):
            raise UnknownRunError(as_is)
        now = as_is.outcome(QUICK)
    except (ModelError, RuleError) as error:
        raise UnknownRunError(str(error)) from None
    if not now.fits:
        raise UnknownRunError(f"by its config the run does not fit into this machine's memory: it {now.why_not}")
    if abs(now.iteration_s / run.expected_s - 1) > AGREES:
        times = f"{seconds_text(now.iteration_s)} per iteration, and the measured steps {seconds_text(run.expected_s)}"
        raise UnknownRunError(f"the model's config gives {times}")
    more = _more_activations(run, work)
    found = faster(job, machine, now.iteration_s, freedom=freedom, asked=asked, most=ARGUMENTS)
    for one in reversed(found):
        needed = one.outcome.device_peak_bytes + more * one.workload.activation_bytes
        if run.device_bytes is None or needed <= run.device_bytes:
            return Hint(one.label, run.expected_s / one.factor, one.factor)
    return None


def _as_watched(job: Job, run: RunningJob) -> tuple[Machine, Workload]:
    """Return the machine with the GPU's speeds with which the job computes as long as was measured."""
    machine = run.machine
    for _ in range(MOST_FITS):
        work = estimated(job, machine)
        computed_s = work.planned.forward_s + work.planned.backward_s
        slower = run.computed_s / computed_s if computed_s else 0.0
        if abs(slower - 1) <= SAME_TIME:
            return machine, work
        if not slower:
            break
        with suppress(RuleError):  # no GPU is so fast or so slow
            machine = machine.with_rates(**{name: machine.rate(name) / slower for name in _SPEEDS})  # type: ignore[arg-type]
            continue
        break
    raise UnknownRunError("no speed of the GPU explains the measured times of forward and backward")


def _more_activations(run: RunningJob, work: Workload) -> float:
    if run.activation_bytes is None or not work.activation_bytes:
        return 0.0
    return max(0.0, run.activation_bytes / work.activation_bytes - 1)


def unknown(error: UnknownRunError) -> str:
    """Return the line of the log about a run whose changes cannot be estimated."""
    why = f"no setting can be named with which the same samples train faster: {error}"
    return f"{why}. `tune plan --model` may know one"


def log_line(run: RunningJob) -> str:
    """Return the line of the log about a run's fastest change. Empty if nothing is clearly faster."""
    try:
        best = hint(run)
    except UnknownRunError as error:
        return unknown(error)
    if best is None:
        return ""
    return (
        f"the same samples would train {best.factor:.2f} times as fast with {best.label}: {seconds_text(best.seconds)} "
        f"per iteration expected instead of {seconds_text(run.expected_s)}. Nothing is changed"
    )


def main() -> None:
    """Print the line about the run whose JSON is on stdin. Training goes on at the same time and has priority."""
    os.nice(19)
    sys.stdout.write(log_line(RunningJob.model_validate_json(sys.stdin.read())))
