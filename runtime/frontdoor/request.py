"""The content of the key ``"ebbtide"`` in a DeepSpeed config."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ebbtide.runtime.frontdoor.hook import KEY
from ebbtide.simulator.plan import AUTOMATIC, CheckpointPlan, Plan, PlanError
from ebbtide.simulator.rules import explain, suggestion
from pydantic import ValidationError

logger = logging.getLogger("ebbtide")

KEYS = ("plan", "checkpoint", "device")
DEVICES = ("auto", "emulated")


class RequestError(PlanError):
    """An error for an unusable value under the config's key ``"ebbtide"``.

    The message names the value and the allowed values.
    """


@dataclass(frozen=True)
class EngineRequest:
    """The parsed content of the key ``"ebbtide"`` in the config of one DeepSpeed engine.

    Attributes:
        plan: The plan that the engine runs under. ``"auto"`` (``"automatic"`` in the config) means: measure the first
            steps, then make a plan and switch to it. None keeps DeepSpeed's own optimizer, and ebbtide only saves
            checkpoints.
        checkpoint: Checkpoint settings that replace the plan's. None keeps the plan's settings.
        device: Device that the plan runs on. ``emulated`` makes real copies to an emulated GPU, for trials.
    """

    plan: Plan | Literal["auto"] | None
    checkpoint: CheckpointPlan | None
    device: str = "auto"


def read_request(value: Any, base: Path | None = None) -> EngineRequest:
    """Check and parse the value of the key ``"ebbtide"`` in a DeepSpeed config.

    Args:
        base: The folder of DeepSpeed's config file. A relative path of the plan's file is also looked up there.

    Raises:
        RequestError: The value is invalid. The message has the rule, the wrong value and the key to change.
    """
    if not isinstance(value, dict):
        raise RequestError(
            f'"{KEY}" in DeepSpeed\'s config must be an object such as {{"plan": "plan.json"}} or '
            f'{{"plan": "automatic"}}, but got {value!r}'
        )
    unknown = sorted(map(str, value.keys() - {*KEYS}))
    if unknown:
        raise RequestError(
            f'"{KEY}" in DeepSpeed\'s config may have the keys plan, checkpoint and device, but '
            f"got {', '.join(map(repr, unknown))}{suggestion(unknown[0], KEYS)}"
        )
    if value.get("plan") is None and value.get("checkpoint") is None:
        raise RequestError(
            f'"{KEY}" in DeepSpeed\'s config must have "plan", "checkpoint" or both, but got '
            f"{value!r}: to train with DeepSpeed alone, remove the key"
        )
    return EngineRequest(_plan(value.get("plan"), base), _checkpoint(value.get("checkpoint")), _device(value))


def _plan(value: Any, base: Path | None) -> Plan | Literal["auto"] | None:
    if value is None:
        return None
    if isinstance(value, str) and value in AUTOMATIC:
        return "auto"
    try:
        if isinstance(value, dict):
            return Plan.from_fields(value)
        if isinstance(value, str) and value:
            file = _file(value, base)
            plan = Plan.load(file)
            logger.info("the plan is that of %s", file.resolve())
            return plan
    except PlanError as error:
        meant = suggestion(value, AUTOMATIC) if isinstance(value, str) else ""
        raise RequestError(f'"{KEY}.plan" in DeepSpeed\'s config: {error}{meant}') from None
    raise RequestError(
        f'"{KEY}.plan" in DeepSpeed\'s config must be "automatic", the path of a plan or its fields, but got {value!r}'
    )


def _file(value: str, base: Path | None) -> Path:
    path = Path(value)
    if base is not None and not path.exists() and (base / path).exists():
        return base / path
    return path


def _checkpoint(value: Any) -> CheckpointPlan | None:
    if value is None:
        return None
    try:
        made = CheckpointPlan.model_validate(value)
    except ValidationError as error:
        where = f'"{KEY}.checkpoint" in DeepSpeed\'s config'
        if not isinstance(value, dict):
            raise RequestError(f"{where} must be an object, but got {value!r}") from None
        raise RequestError(f"{where}: {explain(error, model=CheckpointPlan)}") from None
    if made.lacks_dir:
        raise RequestError(
            f'"{KEY}.checkpoint" in DeepSpeed\'s config has interval_steps {made.interval_steps}, but no "dir", so no '
            'checkpoint would be written: add "dir", the folder of automatic checkpoints, or remove "interval_steps"'
        )
    return made


def _device(value: dict[str, Any]) -> str:
    device = value.get("device", "auto")
    if device not in DEVICES:
        raise RequestError(
            f'"{KEY}.device" in DeepSpeed\'s config must be one of {", ".join(DEVICES)}, but got {device!r}'
        )
    return str(device)
