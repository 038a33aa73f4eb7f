"""Helpers that train the same steps with stock DeepSpeed and with ebbtide, for tests that both have
bit-identical results.
"""

from __future__ import annotations

import atexit
import copy
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from typing import Any

import ebbtide.runtime
import pytest
import torch
from ebbtide.runtime import session_of
from ebbtide.runtime.devices.base import Device
from ebbtide.runtime.devices.choice import EmulatedDevice
from ebbtide.runtime.zero.checks.private import BELOW_STAGE_3
from ebbtide.runtime.zero.flat_partitions import subgroups_of
from ebbtide.simulator import Plan
from ebbtide.simulator.update.order import order_of

from studies.bench.bits import differences, state_of
from studies.bench.byte_gpt import SIZES, Batches, ds_config, train_step
from studies.trials.paced_device import EmulatedRates, PacedDevice
from tests.runtime.contract.small_model import SmallModel

SUBGROUP = 10_000
DEVICES = {"unified": Device, "emulated": EmulatedDevice}
if torch.cuda.is_available():
    from ebbtide.runtime.devices.cuda import CudaDevice

    DEVICES = {"cuda": CudaDevice}


EMULATED = "cuda" not in DEVICES


def device_of(name: str) -> Device:
    return DEVICES[name]()


def slowed(*rates: float) -> Device:
    """Return an emulated GPU that is slowed down to the given speeds of copies and updates."""
    return PacedDevice(EmulatedRates(*rates)) if EMULATED else DEVICES["cuda"]()


def plan_for(engine: Any, pattern: list[str], subgroup: int = SUBGROUP, pieces: bool = False, **fields: Any) -> Plan:
    """Return a plan that repeats a pattern of placements over the engine's subgroups.

    Args:
        pattern: Placements of subgroups. Under ZeRO-1 and ZeRO-2, ``stored`` (on a drive) is left out.
        subgroup: Number of elements per subgroup, if DeepSpeed has no subgroups of its own or ``pieces`` is True.
        pieces: True if the plan may divide DeepSpeed's subgroups.
        fields: Further fields of the plan. With ``order_seed``, updates have a random order. ``locations`` is a
            pattern of parameter locations. Without it, parameters stay where the config puts them.
    """
    own = subgroup if pieces else getattr(engine.optimizer, "sub_group_size", subgroup)
    count = len(subgroups_of(engine.optimizer, own))
    if engine.zero_optimization_stage() < 3:
        pattern = [placement for placement in pattern if placement != "stored"]
    placements = [pattern[i % len(pattern)] for i in range(count)]
    values = {"staging_slots": 2, "prefetch": 1} | fields
    if "stored" in placements and "storage_dir" not in values:
        folder = tempfile.mkdtemp(prefix="ebbtide-stored-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        values["storage_dir"] = folder
    if "device" not in placements:
        values |= {"staging_slots": 0, "prefetch": 0}
    there = ["host" if getattr(engine.optimizer, "offload_param", False) else "device"]
    locations = values.pop("locations", None) or there
    values["parameter_home"] = Plan.runs([locations[i % len(locations)] for i in range(count)], "home")
    shuffled = values.pop("order_seed", None)
    if shuffled is not None:
        issue = random.Random(shuffled).sample(range(count), count)
        values["order"] = order_of(issue, placements)
    return Plan(subgroup_size=subgroup, placement=Plan.runs(placements), **values)


def start(model: torch.nn.Module | None = None, parameters: Any = None, **config: Any) -> Any:
    """Return a DeepSpeed engine on a model, by default a `SmallModel`, which always has the same initial weights."""
    import deepspeed
    from packaging.version import Version

    if config.get("stage", 3) < 3 and Version(deepspeed.__version__) < Version(BELOW_STAGE_3):
        pytest.skip(f"plans for ZeRO-1 and 2 need DeepSpeed >= {BELOW_STAGE_3}")
    torch.manual_seed(0)
    model = model if model is not None else SmallModel()
    settings = {"micro_batch": 2, "subgroup_size": SUBGROUP, "learning_rate": 1e-3}
    extra = copy.deepcopy(config.pop("extra", {}))  # a copy, because DeepSpeed 0.18.6 removes keys from it
    made = {**ds_config(**{**settings, **config}), **extra}
    parameters = parameters(model) if parameters is not None else model.parameters()
    return deepspeed.initialize(model=model, model_parameters=parameters, config=made)[0]


def delays(seed: int, longest_s: float = 0.004) -> Callable[[Any], None]:
    """Return a function that the runtime calls before every op, and that pauses for a random time, so that
    concurrent ops vary in order.
    """
    rng = random.Random(seed)
    return lambda op: time.sleep(rng.random() * longest_s)


def train(
    engine: Any,
    steps: int | None = None,
    first: int = 0,
    each: Callable[[Any, int], None] | None = None,
    batches: Any = None,
) -> tuple[list[torch.Tensor], list[float]]:
    """Train some micro-batches on an engine, and return the losses and gradient norms.

    Args:
        steps: Number of micro-batches. By default 4, or those of two steps if these are more: DeepSpeed records the
            order of the modules in the first two, and buffers of early updates change places with each step.
    """
    steps = max(4, 2 * engine.gradient_accumulation_steps()) if steps is None else steps
    batches = batches or Batches(2, SIZES["tiny"].sequence)
    losses, norms = [], []
    for number in range(first, first + steps):
        losses.append(train_step(engine, batches.at(number, engine.device)))
        norms.append(float(engine.get_global_grad_norm() or 0.0))
        if each is not None:
            each(engine, number)
    return losses, norms


def all_state(engine: Any) -> dict[str, torch.Tensor]:
    """Return the complete training state of an engine, stock DeepSpeed's or under a plan, for comparison.

    Under ZeRO-1 and 2, this function first links moments to parameters. Stock DeepSpeed does so only once, after
    the first group's first step. The moments of other groups, or of an engine that has just loaded a checkpoint,
    would otherwise be missing.
    """
    optimizer = engine.optimizer
    if type(optimizer).__name__ == "DeepSpeedZeroOptimizer":
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    return state_of(engine)


def outcome(engine: Any, *args: Any, **kwargs: Any) -> tuple[dict[str, torch.Tensor], Any, Any]:
    """Train some micro-batches, destroy the engine, and return its state, the losses and the gradient norms."""
    losses, norms = train(engine, *args, **kwargs)
    state = all_state(engine)
    engine.destroy()
    return state, torch.stack(losses), norms


def assert_same(ours: Any, stock: Any) -> None:
    assert differences(ours[0], stock[0]) == ()
    assert torch.equal(ours[1], stock[1])
    assert ours[2] == stock[2]


def same(ours: Any, stock: Any) -> bool:
    return not differences(ours[0], stock[0]) and torch.equal(ours[1], stock[1])


def attached(engine: Any, pattern: list[str], device: str, seed: int | None = 1, **fields: Any) -> Any:
    """Attach a plan to an engine, with random delays before its ops, and return the engine."""
    ebbtide.runtime.attach(engine, plan_for(engine, pattern, **fields), device=device_of(device))
    if seed is not None:
        session_of(engine).executor.gradients.before_op = delays(seed)
    return engine


def steps(engine, change, count=4, behind=lambda engine, number: None, state=state_of):
    """Train some steps, and return the engine's state and the losses.

    Args:
        change: Function that is called after each backward, before the step.
        behind: Function that is called after each step.
    """
    batches, losses = Batches(2, SIZES["tiny"].sequence), []
    for number in range(count):
        loss = engine(*batches.at(number, engine.device))
        engine.backward(loss)
        change(engine, number)
        engine.step()
        behind(engine, number)
        losses.append(loss.detach())
    reached = state(engine)
    engine.destroy()
    return reached, torch.stack(losses), None
