"""Reading of plan files that an older ebbtide wrote."""

import warnings
from collections.abc import Mapping
from typing import Any

from ebbtide.simulator.rules import RuleError

SCHEMA_VERSION = 2
_NEVER_RUN = ("prefetch_after_layer", "split_master")  # of schema 1
_NO_LONGER = ("growing_slots", "speculate_stored")  # of schemas 1 and 2


def read(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plan's fields in the present schema.

    Raises:
        RuleError: The plan asks for what no runtime ever did.
    """
    version = fields.get("schema_version", SCHEMA_VERSION)
    read = dict(fields)
    if version == 1:
        read = _from_schema_1(read)
    gone = [name for name in _NO_LONGER if read.pop(name, None)]
    if gone:
        _tell(gone)
        _fit_slots(read)
    return read


def _from_schema_1(fields: dict[str, Any]) -> dict[str, Any]:
    if fields.get("split_master"):
        raise RuleError(
            "plan.split_master must be false, but got true: split masters are not lossless and "
            "no longer part of a plan; plan again with `tune plan`",
            key="split_master",
        )
    return {key: value for key, value in fields.items() if key not in _NEVER_RUN} | {"schema_version": 2}


def _tell(gone: list[str]) -> None:
    names = " and ".join(f"plan.{name}" for name in gone)
    warnings.warn(
        f"{names}: ignored. ebbtide no longer has this. Training has the same bits. Run `tune plan` again for a "
        "plan that makes use of the memory.",
        UserWarning,
        stacklevel=2,
    )


def _fit_slots(fields: dict[str, Any]) -> None:
    """Give visits a slot, and prefetch no more of them than there are slots."""
    visits = any(isinstance(run, dict) and run.get("placement") == "device" for run in fields.get("placement", ()))
    slots = fields.get("staging_slots", 2)
    if visits and slots == 0:
        slots = fields["staging_slots"] = 1
    if isinstance(slots, int) and isinstance(fields.get("prefetch"), int):
        fields["prefetch"] = min(fields["prefetch"], slots)
