"""The content of the key ``"ebbtide"`` of a DeepSpeed config."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ebbtide.runtime.frontdoor.hook import KEY
from ebbtide.simulator.plan import CheckpointPlan, Plan, PlanError
from ebbtide.simulator.rules import explain, suggestion
from pydantic import ValidationError

KEYS = ("plan", "checkpoint", "device")
DEVICES = ("auto", "emulated")


class RequestError(PlanError):
    """A value under the key that cannot be used; the message says which, and what it may be."""


@dataclass(frozen=True)
class Request:
    """The user's request to the runtime for one engine.

    Attributes:
        plan: ``"auto"`` measures, plans and switches while training. None: DeepSpeed's own
            optimizer stays, and only checkpoints are ebbtide's.
        checkpoint: replaces the plan's checkpoint settings. None: the plan's own.
        device: ``emulated`` runs real copies to a device that does not exist, for trials.
    """

    plan: Plan | Literal["auto"] | None
    checkpoint: CheckpointPlan | None
    device: str = "auto"


def read_request(value: Any, base: Path | None = None) -> Request:
    """Check what stands under the key.

    Args:
        value: as the JSON has it.
        base: the folder of DeepSpeed's config file, where a plan's file is looked for too.

    Raises:
        RequestError: the rule, the value received and the key to change.
    """
    if not isinstance(value, dict):
        raise RequestError(
            f'"{KEY}" in DeepSpeed\'s config must be an object such as {{"plan": "plan.json"}} or '
            f'{{"plan": "auto"}}, but got {value!r}'
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
    return Request(_plan(value.get("plan"), base), _checkpoint(value.get("checkpoint")), _device(value))


def _plan(value: Any, base: Path | None) -> Plan | Literal["auto"] | None:
    if value is None:
        return None
    if value == "auto":
        return "auto"
    try:
        if isinstance(value, dict):
            return Plan.from_fields(value)
        if isinstance(value, str):
            return Plan.load(_file(value, base))
    except PlanError as error:
        meant = suggestion(value, ["auto"]) if isinstance(value, str) else ""
        raise RequestError(f'"{KEY}.plan" in DeepSpeed\'s config: {error}{meant}') from None
    raise RequestError(
        f'"{KEY}.plan" in DeepSpeed\'s config must be "auto", the path of a plan or its fields, but got {value!r}'
    )


def _file(value: str, base: Path | None) -> Path:
    """Return the path relative to the working directory, or to DeepSpeed's config file if it is not there."""
    path = Path(value)
    if base is not None and not path.exists() and (base / path).exists():
        return base / path
    return path


def _checkpoint(value: Any) -> CheckpointPlan | None:
    if value is None:
        return None
    try:
        return CheckpointPlan.model_validate(value)
    except ValidationError as error:
        raise RequestError(
            f'"{KEY}.checkpoint" in DeepSpeed\'s config: {explain(error, model=CheckpointPlan)}'
        ) from None


def _device(value: dict[str, Any]) -> str:
    device = value.get("device", "auto")
    if device not in DEVICES:
        raise RequestError(
            f'"{KEY}.device" in DeepSpeed\'s config must be one of {", ".join(DEVICES)}, but got {device!r}'
        )
    return str(device)
