"""Attaching of ebbtide's plans to the engines that DeepSpeed's own tests build.

Every engine that can take a plan gets one. If ebbtide refuses such an engine, the test fails with ebbtide's message.
"""

import copy
import inspect
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import deepspeed
import ebbtide.runtime
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from ebbtide.runtime.zero.attach import session_of
from ebbtide.runtime.zero.checks.guard import check_engine, stored_at
from ebbtide.runtime.zero.flat_partitions import subgroups_of
from ebbtide.simulator.plan import CheckpointPlan, Placement, Plan, Way

from studies.deepspeed_tests import UNDER_A_PLAN

MIX: tuple[Placement, ...] = ("resident", "host", "device")
SUBGROUP = 2000  # elements. With DeepSpeed's default, each of these models would have one subgroup
# Tests that read a checkpoint's files immediately after `save_checkpoint`. These tests need ``checkpoint.mode: sync``,
# because otherwise `save_checkpoint` returns earlier.
READ_AT_ONCE = (
    "test_convert_checkpoint.py",
    "test_shared_weights.py",
    "test_universal_checkpoint.py",
    "test_save_exclude",
)
DEEPSPEED = deepspeed.initialize


@dataclass(frozen=True, slots=True)
class RunningTest:
    """A running test of DeepSpeed's own test suite, in one variant of the study.

    A test passes this object to its child processes. When a process unpickles the object, `deepspeed.initialize` is
    replaced there. So the process builds its engines as the variant requires, such as with a plan.
    """

    name: str
    arm: str
    notes: Path

    def __reduce__(self) -> "tuple[Callable[..., RunningTest], tuple[str, str, str]]":
        return begin, (self.name, self.arm, str(self.notes))

    def note(self, **what: Any) -> None:
        """Append a line with an event of this DeepSpeed test to the study's notes file, the source of the
        study's results.

        Each line is written in one piece, so that concurrent ranks do not mix their lines.
        """
        rank, at_s = os.environ.get("RANK"), time.time()
        line = {"case": self.name, "arm": self.arm, "rank": rank, "at_s": at_s, **what}
        with self.notes.open("a") as file:
            file.write(json.dumps(line) + "\n")


def begin(name: str, arm: str, notes: str) -> RunningTest:
    """Replace `deepspeed.initialize` in this process, so that engines are built as the variant ``arm`` requires."""
    # A variant is for example stock DeepSpeed, or ebbtide with the plan ``auto``.
    case = RunningTest(name, arm, Path(notes))
    deepspeed.initialize = DEEPSPEED if arm == "plain" else _initialize_of(case)
    return case


def _initialize_of(case: RunningTest) -> Callable[..., Any]:
    @wraps(DEEPSPEED)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(DEEPSPEED).bind_partial(*args, **kwargs).arguments
        config = _config_of(given)
        if config is None:
            return DEEPSPEED(**given)
        config = offloaded(config, client=given.get("optimizer") is not None)
        if case.arm not in UNDER_A_PLAN:
            return DEEPSPEED(**given, config=config)
        if stored_at(config) is not None:  # DeepSpeed's swapper must not hold the state
            return _stored(case, given, config)
        if case.arm == "mix":
            config["zero_optimization"].setdefault("sub_group_size", SUBGROUP)
        result = DEEPSPEED(**given, config=config)
        put_plan(case, result[0])
        return result

    return initialize


def _stored(case: RunningTest, given: dict[str, Any], config: dict[str, Any]) -> Any:
    wrapped, deepspeed.initialize = deepspeed.initialize, DEEPSPEED
    try:
        result = ebbtide.runtime.initialize(**given, plan="auto", config=config)
    finally:
        deepspeed.initialize = wrapped
    note_plan(case, result[0])
    return result


def _config_of(given: dict[str, Any]) -> dict[str, Any] | None:
    known = given.get("config") or given.get("config_params")
    known = known or getattr(given.get("args"), "deepspeed_config", None)
    if isinstance(known, (str, Path)):
        known = json.loads(Path(known).read_text())
    zero = known.get("zero_optimization") if isinstance(known, dict) else None
    if not isinstance(zero, dict) or zero.get("stage", 0) not in (1, 2, 3):
        return None
    given.pop("config", None)
    given.pop("config_params", None)
    if getattr(given.get("args"), "deepspeed_config", None) is not None:
        given["args"] = copy.copy(given["args"])
        given["args"].deepspeed_config = None
    return copy.deepcopy(known)


def offloaded(config: dict[str, Any], *, client: bool) -> dict[str, Any]:
    """Return the DeepSpeed config of one of DeepSpeed's tests, changed so that it offloads the optimizer to the CPU.

    An existing offload setting is kept.

    Args:
        client: True if the test passes its own optimizer to DeepSpeed, which DeepSpeed must not replace.
    """
    zero = config["zero_optimization"]
    asked = (zero.get("offload_optimizer") or {}).get("device")
    if getattr(asked, "value", asked) in (None, "none") and not zero.get("cpu_offload"):
        zero.pop("cpu_offload", None)
        zero["offload_optimizer"] = {"device": "cpu"}
        if client:
            config.setdefault("zero_force_ds_cpu_optimizer", False)
            config.setdefault("zero_allow_untested_optimizer", True)
    return config


def put_plan(case: RunningTest, engine: Any) -> None:
    """Attach a plan to an engine of a DeepSpeed test, or note why the engine cannot take a plan.

    Raises:
        Exception: If ebbtide refuses an engine that could take a plan, or fails.
    """
    why = without_a_plan(engine)
    if why is not None:
        case.note(event="left", why=why)
        return
    checkpoint = CheckpointPlan(mode="sync") if reads_at_once(case.name) else None
    if case.arm == "auto":
        ebbtide.runtime.attach(engine, "auto", checkpoint=checkpoint)
    else:
        ebbtide.runtime.attach(engine, mixed_plan(engine), device="emulated", checkpoint=checkpoint)
    note_plan(case, engine)


def reads_at_once(name: str) -> bool:
    return any(part in name for part in READ_AT_ONCE)


def without_a_plan(engine: Any) -> str | None:
    """Return the reason why a DeepSpeed engine cannot have a plan of ebbtide, or None if the engine can."""
    if engine.zero_optimization_stage() == 0:
        return "ZeRO stage 0"
    if not isinstance(engine.optimizer, (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)):
        return f"no optimizer ({type(engine.optimizer).__name__})"
    return None


def mixed_plan(engine: Any) -> Plan:
    """Return a plan for a test's engine, with several placements of optimizer state: subgroup after subgroup gets the
    next one.

    A placement tells where a subgroup's state is kept and updated.
    An optimizer that must run its own step gets a plan that leaves all its state in host memory.
    """
    size = SUBGROUP
    if engine.zero_optimization_stage() == 3:
        size = max(1, int(engine.zero_sub_group_size()))
    pattern = MIX
    if check_engine(engine).own_step:
        pattern = ("host",)
        partitions = getattr(engine.optimizer, "single_partition_of_fp32_groups", [])
        size = max([size, *(p.numel() for p in partitions)])
    count = len(subgroups_of(engine.optimizer, size)) or 1
    placements = [pattern[i % len(pattern)] for i in range(count)]
    slots = min(2, placements.count("device"))
    return Plan(subgroup_size=size, ways=Way.each(placements), staging_slots=slots, prefetch=min(1, slots))


def note_plan(case: RunningTest, engine: Any) -> None:
    """Write to the notes file of this study (DeepSpeed's own tests under ebbtide) that the engine of a test has a plan
    of ebbtide attached.

    A second line is written when the engine has taken its first step under the plan.
    """
    session = session_of(engine)
    plan = session.plan
    held = {name: plan.count(name) for name in ("resident", "device", "host", "stored")}
    case.note(event="attached", stage=engine.zero_optimization_stage(), subgroups=held)

    def stepped() -> None:
        session.after_step.remove(stepped)
        case.note(event="stepped")

    session.after_step.append(stepped)
