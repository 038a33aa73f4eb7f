"""Applies a plan to a DeepSpeed engine."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import torch

from runtime.devices.base import Device
from runtime.devices.choice import choose_device
from runtime.execution.fit import check_host_memory
from runtime.execution.gradients import GradientHomes, ParameterSlice
from runtime.execution.recorder import Recorder
from runtime.kernels import host
from runtime.kernels.rule import UpdateRule
from runtime.zero import private
from runtime.zero.adopt_stage3 import build_executor, rebuild, subgroups_of
from runtime.zero.guard import ConfigError, check_config, check_engine, check_plan
from runtime.zero.steady import keep_flowing
from simulator.machine import Machine
from simulator.plan import CheckpointPlan, Plan, PlanError
from simulator.workload import Workload

logger = logging.getLogger("ebbtide")

REDUCE_BUCKET = 50_000_000  # elements

PlanLike = Plan | str | Path | dict[str, Any]


def initialize(
    *args: Any,
    plan: PlanLike,
    config: Any = None,
    device: str | Device = "auto",
    checkpoint: CheckpointPlan | None = None,
    **kwargs: Any,
) -> tuple[Any, Any, Any, Any]:
    """``deepspeed.initialize`` under a plan: same arguments, same return.

    ``zero_optimization.sub_group_size`` is taken from the plan.

    Args:
        plan: a `Plan`, its JSON file, or its fields. ``"auto"`` measures the machine (once, the
            result is cached), watches the first steps, plans and applies.
        config: DeepSpeed's config, a dict or a JSON file (also as ``config_params``).
        device: ``auto``; ``emulated`` runs real copies to a device that is not there.
        checkpoint: in the place of the plan's own.

    Raises:
        ConfigError, PlanError: before the model is touched, naming what to change.
    """
    import deepspeed

    automatic = isinstance(plan, str) and plan == "auto"
    if not automatic:
        plan = load_plan(plan)
    private.check_version()
    host.load()  # a missing compiler is told before anything is built
    if config is None:
        config = kwargs.pop("config_params", None)
    config = _load_config(config)
    check_config(config)
    if isinstance(plan, Plan):
        zero = config.setdefault("zero_optimization", {})
        zero["sub_group_size"] = plan.subgroup_size
        if zero.pop("cpu_offload", None):  # the key of old
            zero.setdefault("offload_optimizer", {"device": "cpu"})
        # PyTorch's pinned allocator rounds up to powers of two; `attach` page-locks exactly.
        zero["offload_optimizer"]["pin_memory"] = False
        if int(os.environ.get("WORLD_SIZE") or 1) <= 2:
            # DeepSpeed's own is 5e8: gradients would set out for home late. How ranks' gradients
            # are bucketed cannot be seen in a sum of two; in one of more it can.
            zero.setdefault("reduce_bucket_size", REDUCE_BUCKET)
        check_host_memory(plan, config)
    result = deepspeed.initialize(*args, config=config, **kwargs)
    attach(result[0], plan, device=device, checkpoint=checkpoint)
    return result  # type: ignore[no-any-return]


def load_plan(plan: PlanLike) -> Plan:
    """A `Plan` from whatever a user may hand in.

    Raises:
        PlanError: not a plan this ebbtide can use.
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
            config = json.loads(Path(config).read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise ConfigError(
                f"config must be a dict or a JSON file, but got {config}: {error}"
            ) from None
    if not isinstance(config, dict):
        raise ConfigError(f"config must be a dict or a JSON file, but got {type(config).__name__}")
    return json.loads(json.dumps(config))  # type: ignore[no-any-return]


def attach(
    engine: Any,
    plan: PlanLike,
    *,
    device: str | Device = "auto",
    replan: bool = False,
    machine: Machine | None = None,
    workload: Workload | None = None,
    checkpoint: CheckpointPlan | None = None,
) -> Any:
    """Takes over the optimizer of a live ZeRO engine; returns the engine.

    From then on ``engine.optimizer`` is an `EbbtideStage3` (or, for ZeRO-1 and 2, whose steps wait
    for their updates, an `EbbtideStage2`). Host memory goes down to 14 bytes per parameter (12 of
    state, 2 of gradient) plus staging, which is logged.

    Args:
        replan: re-fit the machine's rates to what the steps take and switch to a better plan at a
            step boundary, on all ranks at once; needs ``machine`` and ``workload``.
        machine, workload: what the plan was made from; with them, predicted and measured times go
            to DeepSpeed's monitor.
        checkpoint: in the place of the plan's own.

    Raises:
        ConfigError: the engine is not one a plan can be applied to.
        PlanError: the plan is for another model or sub_group_size.
    """
    if replan and (machine is None or workload is None):
        raise ConfigError(
            "replan=True needs machine= and workload= (the files that the plan was made from), "
            f"but got machine={machine and machine.name}, workload={workload and workload.name}"
        )
    if isinstance(plan, str) and plan == "auto":
        from runtime.replan.auto import host_plan, plan_later

        attach(engine, host_plan(engine), device=device, checkpoint=checkpoint)
        plan_later(engine, machine)
        return engine
    plan = load_plan(plan)
    private.check_version()
    rule = check_engine(engine)
    optimizer = engine.optimizer
    private.check_members(optimizer)
    size = getattr(optimizer, "sub_group_size", plan.subgroup_size)
    check_plan(plan, subgroups_of(optimizer, size), size)
    host.load()
    device = device if isinstance(device, Device) else choose_device(device)
    _take_over(engine, plan, device, rule)
    _checkpointing(engine, checkpoint or plan.checkpoint)
    if machine is not None and workload is not None:
        from runtime.replan.watch import watch

        watch(engine, machine, workload, replan=replan)
    return engine


def _take_over(engine: Any, plan: Plan, device: Device, rule: UpdateRule) -> None:
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        _take_over_stage3(engine, plan, device, rule)
    else:
        from runtime.zero.adopt_stage12 import take_over

        take_over(optimizer, plan, device, rule)
    keep_flowing(engine)
    _record_forward(engine.module, optimizer._ebbtide.recorder)
    _report(optimizer, device)


def _take_over_stage3(engine: Any, plan: Plan, device: Device, rule: UpdateRule) -> None:
    from runtime.zero.stage3 import Attachment, EbbtideStage3

    optimizer = engine.optimizer
    masters, moments, gradients = _stock_buffers(optimizer, rule)
    plan, executor = build_executor(optimizer, plan, device, masters, moments, gradients, rule)
    optimizer._ebbtide = Attachment(
        plan=plan,
        executor=executor,
        homes=GradientHomes(device, executor.states, _slices(optimizer)),
        rule=rule,
        recorder=Recorder(),
        rebuild=rebuild,
        subgroup_of={
            param.ds_id: index
            for index, group in enumerate(optimizer.fp16_groups)
            for param in group
        },
    )
    optimizer.__class__ = EbbtideStage3
    optimizer.resume_rule()
    optimizer._ebbtide.undo_gates = private.gate_gathers(
        engine.module.parameters(), optimizer.await_parameters
    )


def _stock_buffers(
    optimizer: Any, rule: UpdateRule
) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, ...]], list[torch.Tensor]]:
    """DeepSpeed's buffers; its fp32 gradients (4 bytes per parameter) are given back."""
    inner = optimizer.optimizer
    masters, moments, gradients, offset = [], [], [], 0
    for master in optimizer.fp32_partitioned_groups_flat:
        master.grad = None
        state = inner.state[master]
        state.setdefault("step", 0)
        for key in (*rule.moments, *rule.unused):
            state.setdefault(key, torch.zeros_like(master.data))
        masters.append(master.data)
        moments.append(tuple(state[key] for key in rule.moments))
        gradients.append(optimizer.grad_partitions_flat_buffer.narrow(0, offset, master.numel()))
        offset += master.numel()
    return masters, moments, gradients


def _slices(optimizer: Any) -> dict[int, ParameterSlice]:
    slices = {}
    for group in optimizer.fp16_groups:
        for param in group:
            key = optimizer.get_param_id(param)
            subgroup, offset, elements = optimizer.grad_position[key]
            rank = optimizer._get_param_partition_rank(param)
            real = param.partition_numel() * rank < param.ds_numel
            slices[key] = ParameterSlice(subgroup, offset, elements, real)
    return slices


def _record_forward(module: torch.nn.Module, recorder: Recorder) -> None:
    module.register_forward_pre_hook(lambda *_: recorder.forward_begins(), prepend=True)
    module.register_forward_hook(lambda *_: recorder.forward_ends())


def _report(optimizer: Any, device: Device) -> None:
    counts = optimizer._ebbtide.plan
    logger.info(
        "ebbtide: %d subgroups on %s: %d host, %d device, %d resident; %.1f bytes of host memory "
        "per parameter",
        counts.subgroup_count, device.name, counts.count("host"), counts.count("device"),
        counts.count("resident"), host_bytes(optimizer) / max(1, _elements(optimizer)),
    )  # fmt: skip


def _elements(optimizer: Any) -> int:
    return sum(state.elements for state in optimizer._ebbtide.executor.states)


def host_bytes(optimizer: Any) -> int:
    """Host memory that the optimizer holds under its plan, in bytes: state, gradients, staging."""
    executor = optimizer._ebbtide.executor
    unified = executor.device.unified
    total = 0
    for state in executor.states:
        if state.placement != "resident" or unified:
            total += sum(t.nbytes for t in state.state)
        if state.placement == "host" or unified:
            total += state.gradient.nbytes
    shadows = getattr(optimizer._ebbtide, "shadows", {})
    total += sum(t.nbytes for shadow in shadows.values() for t in shadow)
    total += sum(t.nbytes for t in executor.parameter_slots)
    return int(total)


def _checkpointing(engine: Any, checkpoint: CheckpointPlan) -> None:
    """Installs the checkpoint engine and its copy on update."""
    from runtime.checkpoint import install
    from runtime.checkpoint.live_state import LiveState

    own = engine.optimizer._ebbtide
    live = LiveState()
    live.register_all({i: own.saved_state(i) for i in own.plan.issue_order})
    own.executor.gate = live
    install(engine, checkpoint, live)
