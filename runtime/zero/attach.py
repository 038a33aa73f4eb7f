"""The functions that apply a plan to a DeepSpeed engine."""

import inspect
import itertools
import json
import logging
import weakref
from pathlib import Path
from typing import Any

import torch
from ebbtide.runtime import log
from ebbtide.runtime.devices.base import Device
from ebbtide.runtime.devices.choice import choose_device
from ebbtide.runtime.execution.session import Recorder, Session, check_plan, fitted
from ebbtide.runtime.hardware.builds import own_ninja_first, tell_builds
from ebbtide.runtime.hardware.launcher import one_node, rank, world_size
from ebbtide.runtime.kernels import host
from ebbtide.runtime.kernels.rule import UpdateRule
from ebbtide.runtime.replan.measuring import masks_of_this_host
from ebbtide.runtime.zero.checks import private
from ebbtide.runtime.zero.checks.fingerprints import warn_of_mismatch
from ebbtide.runtime.zero.checks.guard import (
    ConfigError,
    check_config,
    check_engine,
    check_model,
    for_a_plan,
    leave_to_stock,
    stored_at,
)
from ebbtide.runtime.zero.checks.other_steps import warn_of_late_gradients, warn_of_other_steps
from ebbtide.runtime.zero.described import DescribedEngine
from ebbtide.runtime.zero.flat_partitions import subgroups_of
from ebbtide.runtime.zero.host_memory import check_host_memory, on_the_host
from ebbtide.runtime.zero.storing import storing_plan
from ebbtide.runtime.zero.subgroup_size import (
    DEEPSPEEDS_SUBGROUP,
    automatic_size,
    check_own_size,
    partitions,
    planned_size,
)
from ebbtide.simulator.estimates.deepspeed_keys import read_file
from ebbtide.simulator.estimates.models.blocks import ModelError
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import AUTOMATIC, FASTER, CheckpointPlan, Plan, PlanError
from ebbtide.simulator.schedules.buckets import planned_bucket

logger = logging.getLogger("ebbtide")

MONITOR_PERIOD_STEPS = 10
TOLD_STEPS = (10, 100, 1000)

PlanLike = Plan | str | Path | dict[str, Any]


def initialize(
    *args: Any,
    plan: PlanLike,
    config: Any = None,
    device: str | Device = "auto",
    checkpoint: CheckpointPlan | None = None,
    **kwargs: Any,
) -> tuple[Any, Any, Any, Any]:
    """Call ``deepspeed.initialize`` and put the engine under a plan.

    Arguments and results are DeepSpeed's. The plan determines ``zero_optimization.sub_group_size``, and the value in
    the config is ignored. The exception is a plan with the field ``deepspeed_subgroup_size``, which divides DeepSpeed's
    subgroups into smaller ones: the config must then have the size that this field names.

    Args:
        plan: A `Plan`, its JSON file, or a dict of its fields. ``"auto"`` measures the machine (once, the result is
            cached) and the first steps, then makes a plan and switches to it. If the config offloads nothing,
            ``"auto"`` leaves the engine to DeepSpeed.
        config: DeepSpeed's config, a dict or a JSON file. It may also be given as ``config_params``.
        device: ``auto`` selects the device that training uses. ``emulated`` makes real copies to an emulated GPU.
        checkpoint: Checkpoint settings that replace the plan's.

    Raises:
        ConfigError, PlanError: The config or the plan cannot be used. Raised before the model is touched. The message
            says what to change.
    """
    import deepspeed
    from torch.utils import cpp_extension

    log.show(rank())
    _check_dir(checkpoint)
    automatic = isinstance(plan, str) and plan in AUTOMATIC
    named = None if automatic else load_plan(plan)
    private.check_version()
    host.load()  # reports a missing compiler before an engine is built
    if config is None:
        config = kwargs.pop("config_params", None)
    config = _load_config(config)
    # Without the wrapper of `ebbtide.runtime.frontdoor`, which would say that the config has no key "ebbtide".
    build = getattr(deepspeed.initialize, "_ebbtide_original", deepspeed.initialize)
    if automatic and leave_to_stock(config):
        return build(*args, config=config, **kwargs)
    check_config(config)
    given = inspect.signature(deepspeed.initialize).bind_partial(*args, **kwargs).arguments
    check_model(given.get("model"), config)
    storage = stored_at(config)
    config, named = _for_engine(config, named, storage, given.get("optimizer"), given.get("model"))
    own_ninja_first()
    tell_builds(cpp_extension, rank)
    result = build(*args, config=config, **kwargs)
    if named is None:
        _attach_automatically(result[0], device, None, checkpoint, True, storage)
    else:
        attach(result[0], named, device=device, checkpoint=checkpoint)
    return result


def _for_engine(
    config: dict[str, Any], plan: Plan | None, storage: Path | None, optimizer: Any, model: Any
) -> tuple[dict[str, Any], Plan | None]:
    config = for_a_plan(config)
    zero = config["zero_optimization"]
    # PyTorch's allocator of pinned memory rounds up to powers of two, and never releases memory. `attach` page-locks
    # exactly the memory that the plan copies.
    zero["offload_optimizer"]["pin_memory"] = False
    # DeepSpeed's default of 5e8 elements would delay the copies of gradients to the host.
    if bucket := planned_bucket(world_size()):
        zero.setdefault("reduce_bucket_size", bucket)
    if plan is not None:
        if storage is not None and not plan.drives:
            plan = plan.model_copy(update={"storage_dir": str(storage)})
        if plan.deepspeed_subgroup_size:
            check_own_size(plan, zero.get("sub_group_size", DEEPSPEEDS_SUBGROUP))
        zero["sub_group_size"] = plan.config_subgroup_size
        check_host_memory(plan, config, client=optimizer, model=model)
    return config, plan


def load_plan(plan: PlanLike) -> Plan:
    """Return a `Plan`, given a `Plan`, the path of its JSON file, or a dict of its fields.

    Raises:
        PlanError: This version of ebbtide cannot use the plan.
    """
    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, (str, Path)):
        return Plan.load(plan)
    if isinstance(plan, dict):
        return Plan.from_fields(plan)
    raise PlanError(f"plan must be a Plan, a path or a dict, but got {type(plan).__name__}")


def _load_config(config: Any) -> dict[str, Any]:
    if isinstance(config, (str, Path)):
        try:
            config = read_file(config)
        except ModelError as error:
            raise ConfigError(f"config must be a dict or a JSON file: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"config must be a dict or a JSON file, but got {type(config).__name__}")
    return json.loads(json.dumps(config))


def _check_dir(checkpoint: CheckpointPlan | None) -> None:
    if checkpoint is not None and checkpoint.lacks_dir:
        raise ConfigError(
            f"the checkpoint settings have interval_steps {checkpoint.interval_steps}, but no dir, so no checkpoint "
            "would be written. They replace the plan's settings. Add dir, the folder of checkpoints, or remove "
            "interval_steps"
        )


def attach(
    engine: Any,
    plan: PlanLike,
    *,
    device: str | Device = "auto",
    machine: Machine | None = None,
    checkpoint: CheckpointPlan | None = None,
    overlap_forward: bool = True,
) -> Any:
    """Run the optimizer of an existing DeepSpeed ZeRO engine under a plan, and return the engine.

    From then on ``engine.optimizer`` is an `EbbtideStage3`. For ZeRO-1 and 2 it is an `EbbtideStage2`, whose steps wait
    for their updates on several ranks. The optimizer's use of host memory falls to 14 bytes per parameter (12 of state,
    2 of gradient) plus buffers, which are logged. During the change the use is at most 16 bytes per parameter, since
    state moves one subgroup at a time.

    Args:
        machine: The machine that the plan was made for. If another machine runs the plan, a warning names the
            difference. With ``"auto"``, a plan is made for the given machine, and nothing is measured before training.
        checkpoint: Checkpoint settings that replace the plan's.
        overlap_forward: If False, steps wait for their updates, whatever the plan says. Use this for code that cannot
            be made to wait: under ZeRO-3 code that reads ``p.data`` or ``p.ds_tensor`` directly after a step, under
            ZeRO-1 and 2 code that keeps ``p.data`` over a step.

    Raises:
        ConfigError: A plan cannot be applied to the engine.
        PlanError: The plan is for another model or sub_group_size.
    """
    _check_dir(checkpoint)
    if not hasattr(engine, "optimizer"):
        raise ConfigError(
            f"engine must be an engine that deepspeed.initialize has made, but got {type(engine).__name__}: give the "
            "first of the values that it returns"
        )
    log.show(rank())
    if isinstance(plan, str) and plan in AUTOMATIC:
        return _attach_automatically(engine, device, machine, checkpoint, overlap_forward)
    plan = load_plan(plan)
    if checkpoint is not None:
        plan = plan.model_copy(update={"checkpoint": checkpoint})
    private.check_version()
    rule = check_engine(engine)
    plan, size = _checked_plan(plan, engine, rule)
    host.load()
    session = _take_over(engine, plan, _chosen(device), rule, overlap_forward, size)
    _checkpointing(engine, session, plan.checkpoint)
    _stepping(engine, session)
    warn_of_other_steps(plan, session.engine.wire_dtype(), engine)
    warn_of_late_gradients(plan, engine)
    warn_of_mismatch(session, engine.optimizer.gradient_accumulation_dtype.itemsize, machine)
    _monitor_steps(engine, session)
    _tell_steps(session)
    return engine


def _checked_plan(plan: Plan, engine: Any, rule: UpdateRule) -> tuple[Plan, int]:
    optimizer = engine.optimizer
    private.check_members(optimizer)
    size = planned_size(plan, optimizer, rule)
    whole = getattr(optimizer, "sub_group_size", size)  # DeepSpeed ignores it under ZeRO-1 and 2
    sizes, stage = subgroups_of(optimizer, size), engine.zero_optimization_stage()
    plan = fitted(plan, sizes, whole, stage)
    check_plan(plan, sizes, whole, stage)
    return _on_the_host(plan, optimizer) if rule.own_step else plan, size


def _chosen(device: str | Device) -> Device:
    if isinstance(device, Device):
        return device
    on_cuda = private.on_cuda()
    return choose_device(device, on_cuda=on_cuda, masks=masks_of_this_host() if on_cuda else ())


def _attach_automatically(
    engine: Any,
    device: str | Device,
    machine: Machine | None,
    checkpoint: CheckpointPlan | None,
    overlap_forward: bool,
    storage: Path | None = None,
) -> Any:
    from ebbtide.runtime.replan.auto import host_plan, plan_later

    rule = check_engine(engine)
    own_step, size = rule.own_step, automatic_size(engine, rule, stores=storage is not None)
    sizes = subgroups_of(engine.optimizer, size)
    location = private.parameter_location(engine.optimizer)
    plan = host_plan(size, len(sizes) or 1, location, overlap_forward=own_step)
    if storage is not None and not own_step:
        plan = storing_plan(engine, rule, sizes, storage)
    attach(engine, plan, device=device, checkpoint=checkpoint, overlap_forward=overlap_forward)
    if own_step:
        return engine  # there is no other placement to choose
    stages = private.pipeline_stages(engine)
    if stages == 1:
        plan_later(session_of(engine), machine, DescribedEngine(engine).fields)
    elif rank() == 0:  # the stages have different subgroups, but one rank plans for all ranks
        logger.warning(
            "ebbtide makes no plan of its own for a model of %d pipeline stages: the CPU updates every subgroup. "
            'Checkpoints are written as usual. Remove "plan" to train with DeepSpeed alone',
            stages,
        )
    return engine


def _on_the_host(plan: Plan, optimizer: Any) -> Plan:
    largest = max(partitions(optimizer), default=0)
    name = type(optimizer.optimizer).__name__
    if plan.subgroup_size < largest:
        raise ConfigError(
            f"plan.subgroup_size must be at least {largest} for {name}, which updates a whole "
            f'partition at a time under ZeRO-1 and 2, but got {plan.subgroup_size}: use "plan": "automatic"'
        )
    if plan.count("host") < plan.subgroup_count:
        logger.warning(
            "%s runs its own step(), for which ebbtide has no GPU kernel: the CPU updates every subgroup, "
            "whatever the plan says",
            name,
        )
    return on_the_host(plan)


def session_of(engine: Any) -> Session:
    """Return the session of a DeepSpeed engine to which a plan was attached: the object that runs the plan.

    Raises:
        RuntimeError: The engine trains without a plan.
    """
    session: Session | None = getattr(engine.optimizer, "_ebbtide", None)
    if session is None:
        raise RuntimeError("the engine must train under a plan, but none is attached: call ebbtide.runtime.attach")
    return session


def switch_plan(engine: Any, plan: Plan) -> None:
    """Switch a DeepSpeed engine that runs under a plan to another plan (see `Session.switch`)."""
    session_of(engine).switch(plan)


def _monitor_steps(engine: Any, session: Session) -> None:
    if not engine.monitor.enabled:
        return
    held, steps = weakref.proxy(engine), itertools.count(1)

    def on_step() -> None:
        if session.set_aside is not None or next(steps) % MONITOR_PERIOD_STEPS:
            return
        # Without the latest step: waiting for its updates would end their overlap with the next forward.
        times = {"Train/ebbtide/iteration_s": session.timeline(wait=False).iteration_s}
        if session.expected_s is not None:
            times["Train/ebbtide/predicted_iteration_s"] = session.expected_s
        held.monitor.write_events([(name, value, held.global_samples) for name, value in times.items()])

    # First, so that it runs before a checkpoint begins, which it would have to wait for.
    session.after_step.insert(0, on_step)


def _tell_steps(session: Session) -> None:
    seen, steps = session.plan, 0

    def on_step() -> None:
        nonlocal seen, steps
        if session.set_aside is not None:
            return
        seen, steps = session.plan, steps + 1 if session.plan is seen else 1
        if steps not in TOLD_STEPS:
            return
        expected = "" if session.expected_s is None else f", {session.expected_s:.3f} s expected"
        measured_s = session.timeline(wait=False).iteration_s
        logger.info("after %d steps under this plan: %.3f s per iteration measured%s", steps, measured_s, expected)

    session.after_step.insert(0, on_step)


def _take_over(engine: Any, plan: Plan, device: Device, rule: UpdateRule, overlap_forward: bool, size: int) -> Session:
    optimizer = engine.optimizer
    optimizer._module_of = weakref.ref(engine.module)
    if engine.zero_optimization_stage() == 3:
        from ebbtide.runtime.zero import stage3

        stage3.take_over(
            optimizer, engine.module, plan, device, rule, overlap_forward=overlap_forward, subgroup_size=size
        )
    else:  # imported only here, because older DeepSpeeds lack what the module imports
        from ebbtide.runtime.zero import stage12

        stage12.take_over(optimizer, plan, device, rule, overlap_forward=overlap_forward)
    session: Session = optimizer._ebbtide
    _keep_flowing(engine)
    optimizer._hooks += _record_forward(engine.module, session.recorder)
    _report(session)
    return session


def _keep_flowing(engine: Any) -> None:
    # The timer synchronizes twice per step, which prevents all overlap of updates with forward. Without
    # synchronization, the timer's samples per second come from the host's clock, and are wrong for the first steps
    # only. ZeRO still waits for the end of backward and for the gradient norm, but updates need both anyway.
    timer = getattr(engine, "tput_timer", None)
    if timer is None or not getattr(timer.config, "synchronized", False):
        return
    timer.config.synchronized = False
    destroy = engine.destroy

    def destroy_and_restore(*args: Any, **kwargs: Any) -> None:
        try:
            destroy(*args, **kwargs)
        finally:
            timer.config.synchronized = True

    engine.destroy = destroy_and_restore


def _record_forward(module: torch.nn.Module, recorder: Recorder) -> list[Any]:
    # Not to be traced by torch.compile: a clock is no part of the model's graph.
    begins = torch.compiler.disable(lambda *_: recorder.forward_begins())
    ends = torch.compiler.disable(lambda *_: recorder.forward_ends())
    return [module.register_forward_pre_hook(begins, prepend=True), module.register_forward_hook(ends)]


def _report(session: Session) -> None:
    plan = session.plan
    elements = sum(state.elements for state in session.executor.states)
    logger.info(
        "ebbtide: %d subgroups on %s: %d updated by the CPU, %d staged to the GPU, %d resident on the GPU, "
        "%d stored on a drive. %.1f bytes of host memory per parameter",
        plan.subgroup_count,
        session.device.name,
        plan.count("host"),
        plan.count("device"),
        plan.count("resident"),
        plan.count("stored"),
        session.host_bytes() / max(1, elements),
    )
    if session.expected_s is not None:
        about = f" for {plan.about}" if plan.about else ""
        logger.info("the plan was made%s: %.3f s per iteration expected", about, session.expected_s)
    for reason in [reason for reason in plan.reasons if reason.startswith(FASTER)][-1:]:
        logger.info("`tune plan` says: %s", reason)


def _checkpointing(engine: Any, session: Session, checkpoint: CheckpointPlan) -> None:
    from ebbtide.runtime.checkpoint import install
    from ebbtide.runtime.checkpoint.live_state import LiveState

    asked = checkpoint.dir is not None or checkpoint.interval_steps > 0
    if engine.use_node_local_storage() and not one_node() and not asked:
        logger.warning(
            "checkpoint.use_node_local_storage is true and ranks are on several nodes, so DeepSpeed alone "
            "saves and loads checkpoints, and training waits for each save"
        )
        return
    live = LiveState()
    register = lambda: live.register_all({i: session.engine.saved_state(i) for i in session.plan.issue_order})
    register()
    live.stored = session.stored
    session.executor.bodies.gate = live
    lazy = install(engine, checkpoint, live, after_step=session.after_step, plan_digest=lambda: session.plan.digest)
    session.before_switch.append(lazy.wait_for_reading)
    if session.engine.update_rule().own_step:  # the moments exist only after the first step
        lazy._before_save = register


def _stepping(engine: Any, session: Session) -> None:
    from ebbtide.runtime.checkpoint.deepspeed.installation import call_after_step

    def stepped() -> None:
        if not session.closed:
            session.stepped()

    call_after_step(engine, stepped)
