"""Training of a tiny model under a published DeepSpeed config, with stock DeepSpeed and with ebbtide."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from ebbtide.runtime.replan.auto import WATCHED_STEPS
from ebbtide.runtime.zero.attach import switch_plan
from ebbtide.runtime.zero.checks.private import BELOW_STAGE_3
from ebbtide.simulator.plan import ParameterLocation, Placement, Way

from studies.bench.byte_gpt import Batches, ByteGPT, ByteGPTConfig, train_step
from tests.runtime.zoo.configs import HIDDEN, client_optimizer

MODEL = ByteGPTConfig(layers=1, hidden=HIDDEN, heads=2, sequence=16)
MIX: tuple[Placement, ...] = ("host", "device", "resident")
STEPS = WATCHED_STEPS + 3  # "auto" switches after the steps that it watches


@dataclass
class Outcome:
    """The result of a training run, or the error that ended the run.

    Attributes:
        planned: True if a plan of ebbtide ran the updates, not DeepSpeed's own step.
        error: Type and text of the exception.
    """

    tensors: list[torch.Tensor]
    planned: bool = False
    error: str = ""

    def same(self, other: Outcome) -> bool:
        pairs = zip(self.tensors, other.tensors, strict=True)
        return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def plannable(config: Mapping[str, Any]) -> bool:
    """Return whether plans support the ZeRO stage of a config with the installed DeepSpeed version."""
    import deepspeed
    from packaging.version import Version

    old = Version(deepspeed.__version__) < Version(BELOW_STAGE_3)
    return not old or int(config["zero_optimization"].get("stage", 0)) == 3


def trained(
    config: Mapping[str, Any], key: Any = None, steps: int = STEPS, *, mixed: bool = False, model: ByteGPTConfig = MODEL
) -> Outcome:
    """Train some steps of a tiny model, and return the losses, norms, parameters, masters and moments as an `Outcome`.

    Args:
        config: A DeepSpeed config from `as_trained`, which adapts a published config to the test.
        key: Value of the config key "ebbtide", for which `ebbtide.enable` must have been called. None means stock
            DeepSpeed.
        mixed: If True, switch to a plan with other placements and parameter locations during training. The switch comes
            one step after the steps that plan "auto" measures, whatever ``key`` is. Stock DeepSpeed has no plan and
            does not switch.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    # DeepSpeed refuses fp16 on a CPU, although torch can compute it there.
    get_accelerator().is_fp16_supported = lambda: True
    torch.manual_seed(0)
    made = json.loads(json.dumps({**config, **({} if key is None else {"ebbtide": key})}))
    module = ByteGPT(model)
    client = client_optimizer(config)
    optimizer = client(module.parameters()) if client else None
    engine = None
    try:
        engine = deepspeed.initialize(
            model=module, model_parameters=module.parameters(), optimizer=optimizer, config=made
        )[0]
        seen = _train(engine, steps, mixed)
        return Outcome(seen + _state(engine), hasattr(engine.optimizer, "_ebbtide"))
    except Exception as error:  # any error is a result
        return Outcome([], error=f"{type(error).__name__}: {error}")
    finally:
        if engine is not None and engine.optimizer is not None:
            engine.destroy()


@cache
def stock(config: str) -> Outcome:
    """Return the result of training with stock DeepSpeed under a config, given as JSON text."""
    # Results are cached, because many of the published configs are equal.
    return trained(json.loads(config))


def _train(engine: Any, steps: int, mixed: bool) -> list[torch.Tensor]:
    batches = Batches(2, MODEL.sequence, rank=torch.distributed.get_rank())
    seen, micro_steps = [], engine.gradient_accumulation_steps()
    for number in range(steps * micro_steps):
        if mixed and number == (WATCHED_STEPS + 1) * micro_steps:
            _mix(engine)
        seen.append(train_step(engine, batches.at(number, engine.device)).clone())
        seen.append(torch.tensor(float(engine.get_global_grad_norm() or 0.0)))
    return seen


def _mix(engine: Any) -> None:
    session = getattr(engine.optimizer, "_ebbtide", None)
    if session is None or session.engine.update_rule().own_step:
        return
    first, count = torch.distributed.get_rank(), session.plan.subgroup_count
    away = "host" in session.plan.parameter_locations
    locations: list[ParameterLocation] = ["host" if away and i % 2 else "device" for i in range(count)]
    placements = [MIX[(first + i) % len(MIX)] for i in range(count)]
    slots = {"staging_slots": 2, "prefetch": 1} if "device" in placements else {}
    switch_plan(engine, session.plan.with_ways(list(map(Way, placements, locations)), **slots))


def _state(engine: Any) -> list[torch.Tensor]:
    from deepspeed.runtime.zero import GatheredParameters

    if hasattr(engine.optimizer, "wait"):
        engine.optimizer.wait()
    found = []
    for parameter in engine.module.parameters():
        with GatheredParameters(parameter):
            found.append(parameter.detach().clone())
    optimizer = engine.optimizer
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"):
        for master in getattr(optimizer, name, ()):
            kept = optimizer.optimizer.state[master]
            if int(kept.get("step", 1)) == 0:
                kept = {}  # if all steps so far overflowed, DeepSpeed has no moments yet
            held = [master, *(kept[key] for key in sorted(kept))]
            found += [torch.as_tensor(t).detach().clone() for t in held]
    return found
