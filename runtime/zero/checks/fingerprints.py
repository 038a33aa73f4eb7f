"""A check that logs a warning if an engine's plan was made for another machine or another workload."""

import logging
from itertools import product
from typing import get_args

from ebbtide.runtime.execution.session import Session
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.optimizer import OPTIMIZERS
from ebbtide.simulator.plan import Plan
from ebbtide.simulator.workload import WireDtype, Workload, ZeroStage

logger = logging.getLogger("ebbtide")

_TRAINING = "ZeRO-{}, {}, {} parameters with {}-byte gradients"
_NAMES = {
    "device_kind": "kind of device",
    "device_name": "device",
    "unified_memory": "unified memory",
    "gpus_per_node": "GPUs",
    "cpu_cores": "CPU cores",
    "host_memory_bytes": "host memory",
    "device_memory_bytes": "device memory",
}


def warn_of_mismatch(session: Session, gradient_bytes: int, machine: Machine | None) -> None:
    """Log a warning if the plan was made for another workload or machine than this training run's.

    Such a plan still gives bit-identical results, but its predicted step times do not apply.

    Args:
        gradient_bytes: Bytes per parameter of an accumulated gradient.
        machine: The machine that the plan was made for, if the caller has it. The message then names the difference.
    """
    plan = session.plan
    different = [
        text
        for text in (
            _workload_difference(plan, session, gradient_bytes),
            _machine_difference(plan, session.device.name == "cuda", machine),
        )
        if text
    ]
    if different:
        logger.warning(
            "the plan was made for %s. Results are the same, but step times may differ from the prediction. "
            "Measure again with `tune profile`, and plan again with `tune plan`",
            "; ".join(different),
        )


def _workload_difference(plan: Plan, session: Session, gradient_bytes: int) -> str:
    if not plan.workload_fingerprint:
        return ""
    engine, sizes = session.engine, session.engine.sizes()
    here = _TRAINING.format(engine.zero_stage(), engine.update_rule().name, engine.wire_dtype(), gradient_bytes)
    for stage, optimizer, wire, width in product(get_args(ZeroStage), OPTIMIZERS, get_args(WireDtype), (2, 4)):
        made = Workload.model_construct(  # without validation, since a fingerprint needs no layers
            name="attached",
            layers=(),
            subgroups=sizes,
            zero_stage=stage,
            optimizer=optimizer,
            wire_dtype=wire,
            grad_bytes_per_param=width,
        )
        if made.fingerprint == plan.workload_fingerprint:
            there = _TRAINING.format(stage, optimizer, wire, width)
            return "" if there == here else f"{there}, but this engine has {here}"
    return f"another model than this one ({len(sizes)} subgroups of {sum(sizes)} elements in all, {here})"


def _machine_difference(plan: Plan, cuda: bool, machine: Machine | None) -> str:
    if not plan.machine_fingerprint:
        return ""
    from ebbtide.profiler.hardware import look  # reads system information and measures nothing

    here = look(cuda).fields
    if Machine.fingerprint_of(here) == plan.machine_fingerprint:
        return ""
    if machine is None or machine.fingerprint != plan.machine_fingerprint:
        known = ", ".join(f"{_NAMES[name]} {_shown(name, value)}" for name, value in here.items())
        return f"another machine than this one ({known})"
    there = {name: getattr(machine, name) for name in here}
    differing = [
        f"{_NAMES[name]} {_shown(name, there[name])}, here {_shown(name, here[name])}"
        for name in here
        if _shown(name, there[name]) != _shown(name, here[name])
    ]
    return f"the machine {machine.name!r} ({'; '.join(differing)})"


def _shown(name: str, value: object) -> str:
    if name.endswith("_bytes") and isinstance(value, int | float):
        return f"{round(value / 2**30)} GiB"
    return str(value)
