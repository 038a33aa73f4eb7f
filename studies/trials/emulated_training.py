"""Training on an emulated device with given rates, to time a plan's execution on any machine.

Copies, updates, gradients and DeepSpeed are real. The duration of each copy, update and layer is
given: the thread that does the work sleeps until this duration is over. No number of this module is a GPU measurement.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from ebbtide.runtime.execution.gradients import FETCH_SUM, GradientCopy, GradientOps
from ebbtide.simulator import Plan, Way, Workload
from ebbtide.simulator.timeline import Timeline

from studies.trials.paced_device import PacedDevice
from studies.trials.paced_model import ROWS, PacedModel, PacedTraining

WARMUP = 2  # steps: DeepSpeed records its trace in the first one, and after a switch the slots fill in one
ALWAYS_CLIPS, NEVER_CLIPS = 1e-9, 1e9  # limits of the gradient norm


def start(setting: PacedTraining, **zero: Any) -> Any:
    """Return a DeepSpeed engine on a model with layers that take given durations.

    The initial weights are the same at each call. Gradients are reduced layer by layer.

    Args:
        zero: Additional keys of ``zero_optimization``.
    """
    from studies.bench.byte_gpt import ds_config, stock_engine

    torch.manual_seed(0)
    given = {"accumulation": setting.micro_batches, "stage": setting.zero_stage, "reduce_bucket_size": setting.weight}
    config = ds_config(ROWS, setting.subgroup, **{**given, **zero})
    return stock_engine(PacedModel(setting), config)


class Kernels:
    """The kernels of an engine's layers on an emulated device, with durations that are corrected for the time of host
    code.

    While a GPU runs a kernel, the host already prepares the next kernel. On the emulated device, one thread first
    prepares a kernel and then sleeps for the kernel's duration, so the preparation would make the kernel longer.
    Therefore the sleep is shortened by the CPU time that the thread has used since the previous kernel's end. Time in
    which the thread waits does not shorten the sleep, because a GPU would wait too.
    """

    def __init__(self, device: PacedDevice) -> None:
        self._device = device
        self._ended_s: float | None = None  # CPU time of the training thread

    def synchronized(self) -> None:
        """Record that the host has waited for the emulated device."""
        # The next kernel then takes its whole emulated duration. For all other kernels, the time in which the host
        # prepared the kernel is subtracted from the duration, because a GPU would run the previous kernel in that time.
        self._ended_s = None

    @contextmanager
    def compute(self, seconds: float) -> Iterator[None]:
        prepared_s = 0.0 if self._ended_s is None else time.thread_time() - self._ended_s
        with self._device.compute(max(0.0, seconds - prepared_s)):
            yield
        self._ended_s = time.thread_time()


def attach(engine: Any, setting: PacedTraining, plan: Plan) -> Kernels:
    """Attach a plan to a DeepSpeed engine, on an emulated device with the rates of ``setting``.

    Return the `Kernels` object that makes the engine's layers take their emulated durations on this device.
    """
    import ebbtide.runtime

    device = PacedDevice(setting.rates())
    ebbtide.runtime.attach(engine, plan, device=device)
    return kernels_of(engine, device)


class ReducedBeside(GradientOps):
    """Gradient copies that run at the same time as backward, as on the reduction stream of a GPU.

    With several micro-batches, each gradient is added to a sum, which is first fetched from host memory. On a GPU,
    only the reduction stream waits for the fetch. On the emulated device, backward would wait, because there is only
    one training stream. This class therefore separates results and times: the training thread adds up the gradients
    immediately, and emulated copies of dummy data take the time of the real copies.
    """

    def _send(
        self, how: GradientCopy, subgroup: int, offsets: list[int], buffer: torch.Tensor, source: torch.Tensor
    ) -> None:
        buffer.copy_(source)
        super()._send(how, subgroup, offsets, torch.empty_like(buffer), source)

    def fetch_sum(self, subgroup: int, offset: int, base: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        self._leave()
        there, lane = torch.empty_like(base), FETCH_SUM.lane
        stream = self._lanes[lane].stream
        copy = lambda: self._device.copy(there, torch.empty_like(there), lane, stream)
        self._submit(FETCH_SUM, subgroup, [offset], base.nbytes, copy)
        return base + gradient


@contextmanager
def reduced_beside() -> Iterator[None]:
    """Emulate, in a ``with`` block, a GPU that copies gradients on a reduction stream while backward goes on.

    The gradient copies of the block are those of `ReducedBeside`. Without this function, backward on the emulated
    device waits whenever the sum of a gradient over earlier micro-batches is copied from host memory.
    """
    import ebbtide.runtime.execution.executor as executor

    kept = vars(executor)["GradientOps"]
    vars(executor)["GradientOps"] = ReducedBeside
    try:
        yield
    finally:
        vars(executor)["GradientOps"] = kept


def kernels_of(engine: Any, device: PacedDevice) -> Kernels:
    """Make each layer of an engine's model take its emulated seconds of forward and backward on ``device``.

    Each layer was created with these seconds (`PacedLayer`). Until this call, the layers run at full speed. Return the
    `Kernels` object that emulates the durations.
    """
    kernels = Kernels(device)
    for block in engine.module.blocks:
        block.compute = kernels.compute
    return kernels


@dataclass(frozen=True)
class EmulatedTimes:
    """Measured times of a training run on an emulated device, in seconds.

    Times are medians over the steps after the warm-up.

    Attributes:
        iteration_s: Median seconds from the end of one backward to the end of the next.
        mean_s: Mean of the times of which ``iteration_s`` is the median.
    """

    iteration_s: float
    forward_s: float
    backward_s: float
    step_s: float
    timeline: Timeline = field(repr=False)
    mean_s: float = 0.0

    @property
    def seconds(self) -> dict[str, float]:
        """Return the median times of an iteration and of its phases, as a dict for a row of results."""
        return {name: getattr(self, name) for name in ("iteration_s", "forward_s", "backward_s", "step_s")}


class Bench:
    """One engine on an emulated device that trains under several plans in turn.

    It switches to another plan between two steps.
    """

    def __init__(self, setting: PacedTraining, clips: Callable[[int], bool] | None = None, **zero: Any) -> None:
        """Build a DeepSpeed engine that trains on an emulated device.

        Args:
            setting: Sizes, durations and rates of the emulated training.
            clips: Function that takes the number of a step and returns True if the step clips. If None,
                DeepSpeed's config decides.
            zero: Additional keys of ``zero_optimization``.
        """
        self.setting, self.clips = setting, clips
        self.engine = start(setting, **zero)
        self.steps = 0
        self._kernels: Kernels | None = None  # the kernels of a plan's device

    def measure(self, plan: Plan, steps: int, *, settle: bool = False) -> EmulatedTimes:
        """Train ``steps`` steps under a plan on the emulated device after a warm-up, and return the measured times."""
        self.apply(plan)
        return self.measure_on(steps, settle=settle)

    def measure_on(self, steps: int, *, settle: bool = False) -> EmulatedTimes:
        """Train ``steps`` steps after a warm-up, under the engine's plan, and return times as `measure` does."""
        return self._measured([self._step(settle) for _ in range(WARMUP + steps)])

    def _measured(self, marks: list[tuple[float, float, float, float]]) -> EmulatedTimes:
        ends = [mark[2] for mark in marks[WARMUP - 1 :]]
        periods = [b - a for a, b in itertools.pairwise(ends)]
        forward_s, backward_s, step_s = (statistics.median(m[i + 1] - m[i] for m in marks[WARMUP:]) for i in range(3))
        own = getattr(self.engine.optimizer, "timeline", None)  # DeepSpeed's optimizer has no timeline
        timeline = own() if own else Timeline((), "measured")
        mean_s = statistics.fmean(periods)
        return EmulatedTimes(statistics.median(periods), forward_s, backward_s, step_s, timeline, mean_s)

    def apply(self, plan: Plan) -> None:
        """Switch the engine to another plan, or attach the plan if the engine has none yet."""
        from ebbtide.runtime.zero.attach import switch_plan

        if self._kernels is not None:
            switch_plan(self.engine, plan)
        else:
            self._kernels = attach(self.engine, self.setting, plan)

    def _step(self, settle: bool) -> tuple[float, float, float, float]:
        if self._kernels is not None:
            self._kernels.synchronized()  # so that the norm of the previous step is known
        # Reset the limit of the previous step, which would show backward that this step is clipped too.
        set_clipping(self.engine, self.clips and (lambda _: False), self.steps)
        forward_s = backward_s = backward = 0.0
        for inputs, targets in batches(self.setting, self.steps):
            if backward:
                self.engine.step()  # for a micro-batch that is not the last one
            begun = time.perf_counter()
            loss = self.engine(inputs, targets)
            forward = time.perf_counter()
            self.engine.backward(loss)
            backward = time.perf_counter()
            forward_s, backward_s = forward_s + forward - begun, backward_s + backward - forward
        self.steps += 1
        set_clipping(self.engine, self.clips, self.steps - 1)
        self.engine.step()
        stepped = time.perf_counter()
        if settle:
            self.engine.optimizer.wait()
        return backward - backward_s - forward_s, backward - backward_s, backward, stepped

    def workload(self, steps: int) -> Workload:
        """Measure forward and backward on the emulated device while no update runs.

        Return the workload with these times.
        """
        plan = Plan(
            subgroup_size=self.setting.subgroup, ways=Way.each(["host"] * self.setting.subgroups), overlap_forward=False
        )
        result = self.measure(plan, steps, settle=True)
        return self.setting.workload(result.forward_s, result.backward_s)

    def close(self) -> dict[str, torch.Tensor]:
        """Destroy the engine, and return the final parameters and optimizer state as a dict of tensors by name."""
        from studies.bench.bits import state_of

        self.engine.optimizer.wait()
        state = state_of(self.engine)
        self.engine.destroy()
        return state


def batches(setting: PacedTraining, number: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the inputs and targets of each micro-batch of training step ``number``."""
    for micro_batch in range(setting.micro_batches):
        generator = torch.Generator().manual_seed(number * setting.micro_batches + micro_batch)
        inputs, targets = torch.randn(2, ROWS, setting.hidden, generator=generator).bfloat16()
        yield inputs, targets


def set_clipping(engine: Any, clips: Callable[[int], bool] | None, number: int) -> None:
    """Set an engine's clipping limit so that the training step ``number`` clips or not, as ``clips`` tells."""
    # The call must come between backward and the optimizer step. Then early updates, which begin during backward,
    # cannot know that the step clips.
    if clips is not None:
        engine.optimizer.clip_grad = ALWAYS_CLIPS if clips(number) else NEVER_CLIPS


def stock_state(
    setting: PacedTraining, steps: int, clips: Callable[[int], bool] | None = None, **zero: Any
) -> dict[str, torch.Tensor]:
    """Train the model of ``setting`` with stock DeepSpeed, and return the parameters and optimizer state after
    ``steps`` steps.

    The layers run at full speed, not with the durations of ``setting``, because only the bits of the result matter.
    """
    from studies.bench.bits import state_of

    engine = start(setting, **zero)
    for number in range(steps):
        for inputs, targets in batches(setting, number):
            engine.backward(engine(inputs, targets))
            set_clipping(engine, clips, number)
            engine.step()
    state = state_of(engine)
    engine.destroy()
    return state
