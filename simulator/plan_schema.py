"""The rows of a plan file, and the conversion of plan files that older versions of ebbtide wrote.

A row says how some consecutive subgroups are updated. Files of schema 1 and 2 store placements and parameter locations
as run-length lists: each entry is a value and the number of consecutive subgroups that have it. For early updates and
gradient accumulation on the GPU, these files give only a number of subgroups.
"""

import warnings
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, Self

from ebbtide.simulator.page import Page
from ebbtide.simulator.rules import RuleError, explain
from ebbtide.simulator.update.steps import Placement
from ebbtide.simulator.update.way import ParameterLocation, Way
from pydantic import Field, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic_core import CoreSchema, core_schema

SCHEMA_VERSION = 3
_NEVER_RUN = ("prefetch_after_layer", "split_master")  # fields of schema 1 that no version of the runtime used
_NO_LONGER = ("growing_slots", "speculate_stored")  # fields of schemas 1 and 2 that no longer exist
_FORBIDDEN_BECAUSE = {
    "early": "such subgroups are updated only after the gradient norm is known",
    "sum_on_device": "the gradients of such subgroups stay in GPU memory anyway",
}


class WayRun(Page):
    """A row of a plan file: a number of neighboring subgroups of optimizer state that are updated in the same way.

    Each entry of a plan file's list ``ways`` is one row. The rows describe the subgroups in the order of the model's
    layers.

    Attributes:
        count: Number of subgroups in this row.
        placement: Memory that holds the subgroups' optimizer state, and processor that updates the state.
            ``resident``: in GPU memory, updated by the GPU. ``device``: in host memory, copied to the GPU and updated
            by the GPU. ``host``: in host memory, updated by the CPU. ``stored``: on a drive, updated by the CPU.
        parameters: Memory that holds the subgroups' 16-bit parameters between their uses. Parameters in host memory are
            copied to the GPU for each forward and backward (DeepSpeed's ``offload_param``, ZeRO-3 only).
        early: True if the update starts before the gradient norm is known, assuming that the step neither clips
            nor overflows. If the step clips or overflows, the update is dropped and redone. An early update needs
            extra host memory for new state and new parameters. Early updates are allowed only for ``host`` and
            ``device`` with parameters on the device.
        sum_on_device: True if, with gradient accumulation, the sum of the micro-batches' gradients stays on the
            GPU until the last micro-batch is added. The sum takes GPU memory for one gradient. Sums on the GPU are
            allowed only for ``host`` and ``stored``.
    """

    count: int = Field(ge=1)
    placement: Placement
    parameters: ParameterLocation = "device"
    early: bool = False
    sum_on_device: bool = False

    @property
    def way(self) -> Way:
        """Return the way to update the subgroups in this row of a plan: placement, parameter location and flags."""
        return Way(self.placement, self.parameters, self.early, self.sum_on_device)

    @model_validator(mode="after")
    def _check_bits(self) -> Self:
        fitted = self.way.fitted()
        for bit, why in _FORBIDDEN_BECAUSE.items():
            if getattr(self.way, bit) != getattr(fitted, bit):
                raise RuleError(
                    f"plan.ways: {bit} must be false for placement {self.placement!r} with parameters on the "
                    f"{self.parameters}, because {why}, but got true. Leave {bit} out, or plan again with `tune plan`",
                    key=bit,
                )
        return self


class Ways:
    """The pydantic type of a plan's field ``ways``, which has one form in Python and a shorter one in the plan file.

    In Python there is a `Way` for each subgroup. In the plan file, neighboring subgroups with the same values share one
    list entry with their number.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        rows = handler.generate_schema(Annotated[tuple[WayRun, ...], Field(min_length=1)])
        return core_schema.no_info_before_validator_function(
            _as_rows,
            core_schema.no_info_after_validator_function(
                lambda runs: tuple(run.way for run in runs for _ in range(run.count)), rows
            ),
            serialization=core_schema.plain_serializer_function_ser_schema(rows_of),
        )


def _as_rows(ways: Any) -> Any:
    some = isinstance(ways, Sequence) and not isinstance(ways, str)
    return rows_of(ways) if some and all(isinstance(way, Way) for way in ways) else ways


def rows_of(ways: Sequence[Way]) -> list[dict[str, Any]]:
    """Return the entries of the list ``ways`` in a plan file, as dicts, from the `Way` of each subgroup.

    A `Way` is a placement, a parameter location and flags. Neighboring subgroups with equal values share an entry,
    which gives their number as ``count``. Fields with default values are left out.
    """
    rows = []
    for way, group in groupby(ways):
        bits = {name: value for name, value in way._asdict().items() if value != Way._field_defaults.get(name)}
        rows.append({"count": sum(1 for _ in group), **bits})
    return rows


class _PlacementRun(Page):
    placement: Placement
    count: int = Field(ge=1)


class _HomeRun(Page):
    home: ParameterLocation
    count: int = Field(ge=1)


class _Counts(Page):
    """The fields of a plan file of schema 2 that are numbers of subgroups. (Schema 3 has settings for each subgroup.).

    An early update starts before the gradient norm is known.

    Attributes:
        speculate: Number of subgroups that the CPU updates early. Only subgroups with placement ``host`` and parameters
            in GPU memory can be updated early by the CPU. The last of these subgroups are chosen.
        speculate_among: If larger than ``speculate``, the early updates on the CPU are instead spread evenly over the
            last ``speculate_among`` subgroups that can be updated early by the CPU.
        speculate_visits: Number of subgroups with placement ``device`` (state in host memory, updated by the GPU) that
            are updated early: the last ones.
        device_sums: Number of subgroups that accumulate gradients on the GPU: the first ones whose placement allows it.
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
    if version not in (None, 1, 2) or "placement" not in fields:
        return fields
    if version is None and "ways" in fields:
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
        f"The plan file sets {names}, which this version of ebbtide ignores. Training results stay the same, but "
        "training may be slower than predicted. Run `tune plan` again.",
        UserWarning,
        stacklevel=2,
    )


def _fit_slots(fields: dict[str, Any], ways: Sequence[Way]) -> None:
    slots = fields.get("staging_slots", 2)
    if slots == 0 and any(way.placement == "device" for way in ways):
        slots = fields["staging_slots"] = 1
    if isinstance(slots, int) and isinstance(fields.get("prefetch"), int):
        fields["prefetch"] = min(fields["prefetch"], slots)
