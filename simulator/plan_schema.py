"""The conversion of plan files that older versions of ebbtide wrote.

Files of schema 1 and 2 list placements and parameter locations with a number of neighboring subgroups. For
early updates and gradient accumulation on the GPU they give only numbers of subgroups. In schema 3 a row has
all of these settings for some neighboring subgroups.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from ebbtide.simulator.page import Page
from ebbtide.simulator.rules import RuleError, explain
from ebbtide.simulator.update.recipes import Placement
from ebbtide.simulator.update.way import ParameterLocation, Way
from pydantic import Field, ValidationError

SCHEMA_VERSION = 3
_NEVER_RUN = ("prefetch_after_layer", "split_master")  # of schema 1
_NO_LONGER = ("growing_slots", "speculate_stored")  # of schemas 1 and 2


class _PlacementRun(Page):
    placement: Placement
    count: int = Field(ge=1)


class _HomeRun(Page):
    home: ParameterLocation
    count: int = Field(ge=1)


class _Counts(Page):
    """The fields of a plan file of schema 2 that are numbers of subgroups. Schema 3 has settings for each subgroup.

    Attributes:
        speculate: Number of subgroups that the CPU updates before the gradient norm is known. They are the last
            ones with placement ``host``. If ``speculate_among`` is larger, they are evenly spread among that
            number of last subgroups for which an early update is possible.
        speculate_visits: Number of subgroups with placement ``device`` that are updated before the gradient
            norm is known. They are the last ones.
        device_sums: Number of subgroups whose gradients are accumulated on the GPU: the first ones that can.
    """

    placement: tuple[_PlacementRun, ...] = Field(min_length=1)
    parameter_home: tuple[_HomeRun, ...] = ()
    speculate: int = Field(0, ge=0)
    speculate_visits: int = Field(0, ge=0)
    speculate_among: int = Field(0, ge=0)
    device_sums: int = Field(0, ge=0)

    def ways(self) -> tuple[Way, ...]:
        placements = [run.placement for run in self.placement for _ in range(run.count)]
        locations: list[ParameterLocation] = [run.home for run in self.parameter_home for _ in range(run.count)]
        if locations and len(locations) != len(placements):
            raise RuleError(
                "plan.parameter_home must be absent or cover every subgroup once, but got "
                f"{len(locations)} locations for {len(placements)} subgroups",
                key="parameter_home",
            )
        locations = locations or ["device"] * len(placements)
        ways = [Way(placement, home) for placement, home in zip(placements, locations, strict=True)]
        early = _spread([i for i, way in enumerate(ways) if way == Way("host")], self.speculate, self.speculate_among)
        early |= _spread([i for i, way in enumerate(ways) if way == Way("device")], self.speculate_visits)
        sums = {*[i for i, way in enumerate(ways) if way.can_sum_on_device][: self.device_sums]}
        return tuple(way._replace(early=i in early, sum_on_device=i in sums) for i, way in enumerate(ways))


def read(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a plan file, converted to the newest schema (version of the file format).

    If the file has no schema version, the version is derived from the names of the fields.

    Raises:
        RuleError: The plan was written by a newer ebbtide, has a setting that no version knows, or breaks a
            rule of its schema.
    """
    version = fields.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise RuleError(
            f"plan.schema_version must be at most {SCHEMA_VERSION}, but got {version}: the plan was written by a "
            "newer ebbtide. Upgrade ebbtide, or plan again with `tune plan`",
            key="schema_version",
        )
    if version not in (None, 1, 2):
        return fields
    if version is None and ("ways" in fields or "placement" not in fields):
        return fields
    if fields.get("split_master"):
        raise RuleError(
            "plan.split_master must be false, but got true: split masters are not lossless and "
            "no longer part of a plan. Plan again with `tune plan`",
            key="split_master",
        )
    some = {key: value for key, value in fields.items() if version == 2 or key not in _NEVER_RUN}
    gone = [name for name in _NO_LONGER if some.pop(name, None)]
    counts = {name: some.pop(name) for name in _Counts.model_fields if name in some}
    try:
        ways = _Counts.model_validate(counts).ways()
    except ValidationError as error:
        raise RuleError(explain(error, model=_Counts)) from None
    if gone:
        _tell(gone)
        _fit_slots(some, ways)
    return {**some, "ways": ways, "schema_version": SCHEMA_VERSION}


def _spread(able: Sequence[int], count: int, among: int = 0) -> set[int]:
    count = min(len(able), count)
    among = min(len(able), max(count, among))
    return {able[len(able) - 1 - i * among // count] for i in range(count)}


def _tell(gone: Sequence[str]) -> None:
    names = " and ".join(f"plan.{name}" for name in gone)
    warnings.warn(
        f"The plan file sets {names}, which this version of ebbtide ignores. Training results are the same. Run "
        "`tune plan` again for a plan that uses all memory.",
        UserWarning,
        stacklevel=2,
    )


def _fit_slots(fields: dict[str, Any], ways: Sequence[Way]) -> None:
    slots = fields.get("staging_slots", 2)
    if slots == 0 and any(way.placement == "device" for way in ways):
        slots = fields["staging_slots"] = 1
    if isinstance(slots, int) and isinstance(fields.get("prefetch"), int):
        fields["prefetch"] = min(fields["prefetch"], slots)
