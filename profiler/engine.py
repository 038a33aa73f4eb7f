"""Profilers of a live DeepSpeed engine, for training steps that ebbtide runs and for the user's own training loop."""

from collections.abc import Callable
from typing import Any

from ebbtide.profiler.watcher import (
    PhaseHooks,
    PlainTimer,
    ProfiledStep,
    Watcher,
    hooks_lengthen_steps,
    partitions_parameters,
)
from ebbtide.profiler.workload import WARMUP_STEPS, check_engine, check_iterations, workload_of
from ebbtide.runtime.hardware.launcher import world_size
from ebbtide.simulator.schedules.gathers import Gathered
from ebbtide.simulator.workload import Workload


def profile_engine(
    engine: Any, train_step: Callable[[Any], object], iterations: int = 3, name: str | None = None
) -> Workload:
    """Run ``train_step(engine)`` a few times, and return the measured workload for the planner.

    Forward times of layers come from module hooks. Backward time is divided among the layers in proportion to
    their forward times. The time that DeepSpeed without ebbtide spends in backward on moving gradients is
    measured separately (``stock_backward_extra_s``), so ``backward_s`` is the time that remains under a plan. On
    CUDA the hooks lengthen a step, because they wait for the GPU. The times of the phases therefore come from further
    steps without these hooks, and the number of measured steps doubles. A single rank then trains without DeepSpeed's
    own hooks on modules for as many steps, as it would under a plan (`Workload.planned`).

    Args:
        engine: DeepSpeed engine.
        train_step: Function that runs the forward, backward and step calls of one optimizer step.
        iterations: Number of measured steps of each kind, after `WARMUP_STEPS` steps of warm-up.
        name: Name of the workload. If None, the name of the model's class.

    Raises:
        ValueError: iterations < 1, the engine's configuration cannot be profiled, or ``train_step`` takes no
            optimizer step.
    """
    profile = PassiveProfile(engine, iterations)
    # The loss scaler of fp16 skips some of the first steps, which are not counted.
    calls = 2 * profile.needed + 20
    try:
        for _ in range(calls):
            train_step(engine)
            if profile.problem is not None:
                raise profile.problem
            if profile.workload is not None:
                break
    finally:
        profile.stop()
    if profile.workload is None:
        raise ValueError(
            "each call of train_step must take one optimizer step: forward, backward and step, at a gradient "
            f"accumulation boundary. The profile needs {profile.needed} steps, but {calls} calls took {profile.steps}"
        )
    return profile.workload.model_copy(update={"name": name or profile.workload.name})


def steps_needed(iterations: int) -> int:
    """Return the optimizer steps of a profile. A single rank adds steps without DeepSpeed's hooks on modules."""
    return _steps_with_hooks(iterations) + (1 + iterations if world_size() == 1 else 0)


def _steps_with_hooks(iterations: int) -> int:
    return WARMUP_STEPS + (1 + hooks_lengthen_steps()) * iterations


class SampledProfile:
    """A profile of a live DeepSpeed engine from training steps that the caller chooses. Other steps are not measured.

    Profiled steps can alternate with undisturbed timed steps. So a prediction from the profile can be compared
    with measured times on a machine that becomes faster or slower over time.

    Raises:
        ValueError: The engine's configuration cannot be profiled.
    """

    def __init__(self, engine: Any) -> None:
        check_engine(engine)
        self._engine = engine
        self._traces: list[ProfiledStep] = []
        self._without = _WithoutHooks(engine)

    def step(self, *batch: Any, bare: bool = False) -> Any:
        """Run one training step of a DeepSpeed engine on a batch while the profile measures it, and return the model's
        loss.

        The model itself must return its loss. On CUDA every second step is measured without hooks in the model, so
        that its time is not lengthened.

        Args:
            bare: True to measure the step without DeepSpeed's hooks on modules, if a plan would take them off. The next
                step with these hooks takes longer, because DeepSpeed records the order of modules anew.
        """
        bare = bare and self._without.begin()
        hooks = _hooks_for(self._engine, self._traces, bare=bare)
        try:
            hooks.begin()
            loss = self._engine(*batch)
            self._engine.backward(loss)
            hooks.timed("step", self._engine.step)
            self._traces.append(_ended(hooks, bare=bare))
        finally:
            hooks.remove()
            self._without.end()
        return loss

    def workload(self) -> Workload:
        """Return the workload measured from all profiled steps. An engine's first few steps are slower.

        Raises:
            ValueError: No step was profiled.
        """
        check_iterations(sum(not trace.bare for trace in self._traces))
        return workload_of(self._engine, self._traces, type(self._engine.module).__name__, self._without.gathers)


class PassiveProfile:
    """A profile of a DeepSpeed engine in the user's own training loop. It wraps ``engine.step`` until `stop`.

    The first `WARMUP_STEPS` optimizer steps are counted but not measured. With gradient accumulation, all
    micro-batches of an optimizer step are measured together. Steps that fp16's loss scaler skips are left out,
    because they update nothing.

    Attributes:
        steps: Number of optimizer steps so far.
        needed: Number of optimizer steps until the profile is complete.
        workload: Measured workload, available after ``needed`` steps.
        problem: Reason that no workload can be measured. The engine is then unwrapped.

    Args:
        engine: DeepSpeed engine.
        iterations: Number of measured steps. See `steps_needed` for further ones.
        after_step: Function called after each optimizer step, outside the timed part. Its exceptions reach the
            training loop.

    Raises:
        ValueError: iterations < 1, or the engine's configuration cannot be profiled.
    """

    def __init__(
        self, engine: Any, iterations: int, after_step: "Callable[[PassiveProfile], None] | None" = None
    ) -> None:
        check_iterations(iterations)
        check_engine(engine)
        self.steps, self.needed = 0, steps_needed(iterations)
        self.workload: Workload | None = None
        self.problem: ValueError | None = None
        self._engine, self._after_step = engine, after_step
        self._iterations, self._without = iterations, _WithoutHooks(engine)
        self._seen = (engine.global_steps, engine.skipped_steps)
        self._kind = type(engine.optimizer)
        self._traces: list[ProfiledStep] = []
        self._watcher: PhaseHooks | None = None
        self._stopped = False
        self._own_step = vars(engine).get("step")
        self._step = engine.step
        engine.step = self._stepped

    def stop(self) -> None:
        """Remove all wrappers that this profile has put around the DeepSpeed engine's functions, to end measuring."""
        if self._stopped:
            return
        self._stopped = True
        if self._watcher is not None:
            self._watcher.remove()
            self._watcher = None
        self._without.end()
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
                self._check_kind()
            if self.steps == WARMUP_STEPS or self._without.on:
                self._watch()
            return
        trace = _ended(self._watcher, bare=self._without.on)
        if not skipped:
            self.steps += 1
            self._traces.append(trace)
        if self.steps == _steps_with_hooks(self._iterations) and self.steps < self.needed and self._without.begin():
            self._watcher.remove()
            self._watcher = None  # the first step without DeepSpeed's hooks is not measured
        elif self.steps < self.needed and (self._without.on or self.steps < _steps_with_hooks(self._iterations)):
            if hooks_lengthen_steps():
                self._watcher.remove()
                self._watcher = _hooks_for(self._engine, self._traces, bare=self._without.on)
            self._watcher.begin()
        else:
            self.stop()
            self.workload = workload_of(
                self._engine, self._traces, type(self._engine.module).__name__, self._without.gathers
            )

    def _check_kind(self) -> None:
        if type(self._engine.optimizer) is not self._kind:
            raise ValueError(
                f"the script must train with DeepSpeed alone while it is profiled, but its "
                f"optimizer became {type(self._engine.optimizer).__name__}: build the engine with "
                "deepspeed.initialize, not with ebbtide.initialize"
            )

    def _watch(self) -> None:
        self._watcher = _hooks_for(self._engine, self._traces, bare=self._without.on)
        self._watcher.begin()


class _WithoutHooks:
    """A switch that takes DeepSpeed's hooks on modules off an engine, where a plan would do so.

    Attributes:
        on: True while the hooks are off.
        gathers: The engine's gathers of parameters, as read from DeepSpeed before the hooks were off.
    """

    def __init__(self, engine: Any) -> None:
        self._engine, self.on = engine, False
        self.gathers: Gathered | None = None

    def begin(self) -> bool:
        from ebbtide.runtime.zero.checks import private
        from ebbtide.runtime.zero.one_rank.alone import take_hooks_off

        if partitions_parameters(self._engine.optimizer):
            self.gathers = private.gathers(self._engine.optimizer) or self.gathers
        self.on = take_hooks_off(self._engine)
        return self.on

    def end(self) -> None:
        from ebbtide.runtime.zero.one_rank.alone import put_hooks_back

        if self.on:
            put_hooks_back(self._engine)
            self.on = False


def _ended(hooks: PhaseHooks, *, bare: bool) -> ProfiledStep:
    trace = hooks.end()
    trace.bare = bare
    return trace


def _hooks_for(engine: Any, traces: list[ProfiledStep], *, bare: bool) -> PhaseHooks:
    """Return a `Watcher`, or a `PlainTimer` for every second step if a `Watcher` lengthens the step."""
    if bare and hooks_lengthen_steps():
        return PlainTimer(engine)
    if hooks_lengthen_steps() and traces and not traces[-1].plain:
        return PlainTimer(engine)
    return Watcher(engine, first=not traces)
