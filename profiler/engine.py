"""Profilers of a live DeepSpeed engine, driven by ebbtide or by the user's own training loop."""

from collections.abc import Callable
from typing import Any

from ebbtide.profiler.watcher import Trace, Watcher
from ebbtide.profiler.workload import WARMUP_STEPS, check_engine, check_iterations, workload_of
from ebbtide.simulator.workload import Workload


def profile_engine(
    engine: Any, train_step: Callable[[Any], object], iterations: int = 3, name: str | None = None
) -> Workload:
    """Run ``train_step(engine)`` a few times, and return the measured workload.

    Forward times of layers come from module hooks. Backward time is split over the layers in the same
    proportions. The time of stock DeepSpeed's gradient path in backward is measured separately
    (``stock_backward_extra_s``), so that ``backward_s`` is the time that remains under a plan. On CUDA every
    hook synchronizes, so the sum of the phases is slightly longer than an undisturbed step.

    Args:
        engine: DeepSpeed engine.
        train_step: Function that runs forward, backward and step of one whole optimizer step.
        iterations: Number of measured steps, after `WARMUP_STEPS` of warm-up.
        name: Name of the workload. If None, the model's class name.

    Raises:
        ValueError: iterations < 1, the configuration cannot be profiled, or ``train_step`` takes no optimizer
            step.
    """
    profile = PassiveProfile(engine, iterations)
    try:
        # fp16's loss scaler skips some of the first steps: those are not counted.
        for _ in range(2 * profile.needed + 20):
            train_step(engine)
            if profile.problem is not None:
                raise profile.problem
            if profile.workload is not None:
                break
    finally:
        profile.stop()
    if profile.workload is None:
        raise ValueError(
            "train_step must take an optimizer step (forward, backward and step at a gradient "
            f"accumulation boundary), but {profile.steps} of {profile.needed} were taken"
        )
    return profile.workload.model_copy(update={"name": name or profile.workload.name})


class SampledProfile:
    """A profile from single steps of a live DeepSpeed engine. The steps between them run unobserved.

    It is for comparing a prediction with measurements on a machine with drifting speed: profiled steps and
    timed steps alternate.

    Raises:
        ValueError: The engine's configuration cannot be profiled.
    """

    def __init__(self, engine: Any) -> None:
        check_engine(engine)
        self._engine = engine
        self._traces: list[Trace] = []

    def step(self, *batch: Any) -> Any:
        """Run one profiled training step of a model that returns its loss, and return the loss."""
        watcher = Watcher(self._engine, first=not self._traces)
        try:
            watcher.begin()
            loss = self._engine(*batch)
            self._engine.backward(loss)
            watcher.timed("step", self._engine.step)
            self._traces.append(watcher.end())
        finally:
            watcher.remove()
        return loss

    def workload(self) -> Workload:
        """Return the workload from all profiled steps. The first few steps of an engine should not be profiled.

        Raises:
            ValueError: No step was profiled.
        """
        check_iterations(len(self._traces))
        return workload_of(self._engine, self._traces, type(self._engine.module).__name__)


class PassiveProfile:
    """A profile of a DeepSpeed engine that the user trains. ``engine.step`` is wrapped until `stop`.

    The first `WARMUP_STEPS` optimizer steps are only counted. Micro-steps of gradient accumulation belong to
    the step that they end in. Steps that fp16's loss scaler skipped are left out, because they update nothing.

    Attributes:
        steps: Number of optimizer steps so far.
        needed: Number of optimizer steps required.
        workload: Result, available after enough steps.
        problem: Reason that there will be no result. The engine is then unwrapped again.

    Args:
        engine: DeepSpeed engine.
        iterations: Number of measured steps.
        after_step: Called after each optimizer step, outside the timed part. Its exceptions reach the training
            loop.

    Raises:
        ValueError: iterations < 1, or the engine's configuration cannot be profiled.
    """

    def __init__(
        self, engine: Any, iterations: int, after_step: "Callable[[PassiveProfile], None] | None" = None
    ) -> None:
        check_iterations(iterations)
        check_engine(engine)
        self.steps, self.needed = 0, WARMUP_STEPS + iterations
        self.workload: Workload | None = None
        self.problem: ValueError | None = None
        self._engine, self._iterations, self._after_step = engine, iterations, after_step
        self._seen = (engine.global_steps, engine.skipped_steps)
        self._kind = type(engine.optimizer)
        self._traces: list[Trace] = []
        self._watcher: Watcher | None = None
        self._stopped = False
        self._own_step = vars(engine).get("step")
        self._step = engine.step
        engine.step = self._stepped

    def stop(self) -> None:
        """Remove all wrappers from the profiled engine."""
        if self._stopped:
            return
        self._stopped = True
        if self._watcher is not None:
            self._watcher.remove()
            self._watcher = None
        if self._own_step is not None:
            self._engine.step = self._own_step
        else:
            vars(self._engine).pop("step", None)

    def _stepped(self, *args: Any, **kwargs: Any) -> Any:
        if self._watcher is None:
            result = self._step(*args, **kwargs)
        else:
            result = self._watcher.timed("step", self._step, *args, **kwargs)
        if self._engine.global_steps != self._seen[0] and not self._stopped:
            try:
                self._advance()
            except ValueError as error:
                self.problem = error
                self.stop()
            if self._after_step is not None:
                self._after_step(self)
        return result

    def _advance(self) -> None:
        seen = (self._engine.global_steps, self._engine.skipped_steps)
        skipped, self._seen = seen[1] != self._seen[1], seen
        if self._watcher is None:
            self.steps += 1
            if self.steps == WARMUP_STEPS:
                self._watch()
            return
        trace = self._watcher.end()
        if not skipped:
            self.steps += 1
            self._traces.append(trace)
        if len(self._traces) < self._iterations:
            self._watcher.begin()
            return
        self.stop()
        self.workload = workload_of(self._engine, self._traces, type(self._engine.module).__name__)

    def _watch(self) -> None:
        if type(self._engine.optimizer) is not self._kind:
            raise ValueError(
                f"the script must train with DeepSpeed alone while it is profiled, but its "
                f"optimizer became {type(self._engine.optimizer).__name__}: build the engine with "
                "deepspeed.initialize, not with ebbtide.initialize"
            )
        self._watcher = Watcher(self._engine)
        self._watcher.begin()
