"""The plan file: where and when each subgroup's state is updated, and how often checkpoints are written."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from ebbtide.simulator import plan_schema
from ebbtide.simulator.limits import lacks, missing
from ebbtide.simulator.page import Page
from ebbtide.simulator.plan_schema import SCHEMA_VERSION as SCHEMA_VERSION
from ebbtide.simulator.rules import RuleError, explain
from ebbtide.simulator.schedule import Kind
from ebbtide.simulator.shown import Shown
from ebbtide.simulator.update.order import UpdateOrder, issue_order, order_of
from ebbtide.simulator.update.pausing import StepTimes
from ebbtide.simulator.update.recipes import HOST_SLOTS, RECIPES, Slot
from ebbtide.simulator.update.recipes import Placement as Placement  # public here, defined there
from ebbtide.simulator.update.tiers import Memory
from ebbtide.simulator.update.way import ParameterLocation as ParameterLocation
from ebbtide.simulator.update.way import Way as Way
from ebbtide.simulator.workload import TrainedAs
from pydantic import (
    Field,
    GetCoreSchemaHandler,
    NonNegativeInt,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

# Of a checkpoint, beside those that are being written: gathered and hashed meanwhile, so that the
# disk has as many writes to do at every moment as there are writers.
READY_BLOCKS = 1
BLOCK_BYTES = 4 * 2**20  # of checkpoint files: what is copied, hashed and written at once


class PlanError(RuleError):
    """An error for a plan that cannot be read or does not fit. Its message says what to change."""


class WayRun(Page):
    """A row of a plan file: a run of neighboring subgroups, in forward order, that are updated in the same way.

    Attributes:
        count: Number of subgroups in the run.
        placement: Memory that holds the subgroups' optimizer state, and processor that updates it.
        parameters: Memory that holds the subgroups' 16-bit parameters between their uses. Parameters on the
            host are copied to the GPU for each forward and backward (DeepSpeed's ``offload_param``, ZeRO-3
            only).
        early: True if the update starts before the gradient norm is known, assuming that the step neither
            clips nor overflows. If the step does, the update is dropped and redone. An early update needs
            extra host memory for new state and new parameters. Only for ``host`` and ``device`` with
            parameters on the device, and only under ZeRO-3.
        sum_on_device: True if, with gradient accumulation, the sum of the micro-batches' gradients stays on
            the GPU until the last micro-batch is added. It takes GPU memory for one gradient. Only for
            ``host`` and ``stored``.
    """

    count: int = Field(ge=1)
    placement: Placement
    parameters: ParameterLocation = "device"
    early: bool = False
    sum_on_device: bool = False

    @property
    def way(self) -> Way:
        """Return the `Way` (placement, parameter location and flags) of each subgroup in this row of a plan file."""
        return Way(self.placement, self.parameters, self.early, self.sum_on_device)

    @model_validator(mode="after")
    def _check_bits(self) -> Self:
        fitted = self.way.fitted()
        for bit in ("early", "sum_on_device"):
            if getattr(self.way, bit) != getattr(fitted, bit):
                raise RuleError(
                    f"plan.ways: {bit} must be false for placement {self.placement!r} with parameters on the "
                    f"{self.parameters}, but got true. Leave it out, or plan again with `tune plan`",
                    key=bit,
                )
        return self


class _Ways:
    """A pydantic type for a plan's ways: one `Way` per subgroup in Python, run-length encoded rows in a file."""

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
    """Return the run-length encoded rows of a plan file for the ways of all subgroups, without default values."""
    rows = []
    for way, group in groupby(ways):
        bits = {name: value for name, value in way._asdict().items() if value != Way._field_defaults.get(name)}
        rows.append({"count": sum(1 for _ in group), **bits})
    return rows


class CheckpointPlan(Page):
    """The checkpoint settings of a plan: how often checkpoints are written, and how.

    Attributes:
        interval_steps: Optimizer steps between two checkpoints. 0: only when the user saves.
        mode: When a save returns. ``lazy``: immediately. Files are written from the live buffers, and a
            subgroup is copied if its update comes first. ``in_place``: when the files have their final names,
            so that a killed process loses nothing. They become durable afterwards. ``sync``: when the files
            are durable. ``auto``: ``in_place`` if a trainer saves that looks for the files itself (Trainer,
            Accelerate, Lightning), otherwise ``lazy``. With such a trainer ``lazy`` means ``in_place`` too,
            unless `tune run` or ``ebbtide.enable()`` cleans up after a killed save.
        busy: What happens to a new checkpoint while another one is being written.
        copy_budget_bytes: Host memory reserved for copies of subgroups that are updated before they are
            written.
        write_bytes_per_s: Limit for storage traffic. None: no limit.
        keep: Number of committed checkpoints kept in ``dir``, newest first. 0: all. Also the number of
            checkpoints with stored state on the drives. There 0 means the Trainer's ``save_total_limit``,
            otherwise the newest checkpoint, or two for ``load_best_model_at_end``. The log says so at the
            start, and older checkpoints cannot be loaded.
        deadline_s: Time without progress of storage, or of waiting for other ranks, before a checkpoint is
            given up with an error. At most 300 for drives with stored state.
        restore_random: True if ``load_checkpoint`` also restores the random states that every checkpoint
            holds (of Python, numpy, torch and each CUDA device). DeepSpeed restores none.
        verify_reads: True if every read of stored state is compared with the hash taken when it was written.
            False: only the first read after a resume. For drives that are not trusted.
    """

    interval_steps: int = Field(0, ge=0)
    mode: Literal["auto", "lazy", "in_place", "sync"] = "auto"
    busy: Literal["wait", "skip", "replace"] = "wait"
    copy_budget_bytes: int = Field(256 * 2**20, ge=0)
    write_bytes_per_s: float | None = Field(None, gt=0)
    writers: int = Field(2, ge=1)
    keep: int = Field(0, ge=0)
    deadline_s: float = Field(600.0, gt=0)
    dir: str | None = None
    restore_random: bool = False
    verify_reads: bool = False

    @property
    def writer_threads(self) -> int:
        """Return the number of threads that prepare or write checkpoint blocks: ``writers``, and one that is ready."""
        return self.writers + READY_BLOCKS

    @model_validator(mode="before")
    @classmethod
    def _without_drain(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        if fields.get("drain_dir") is not None:
            raise RuleError(
                "checkpoint.drain_dir is no longer supported. Remove it, and copy committed checkpoints "
                "from checkpoint.dir with a tool such as rclone",
                key="drain_dir",
            )
        return {name: value for name, value in fields.items() if name not in ("drain_dir", "drain_keep")}


_PHASES = ("forward_s", "backward_s", "step_s", "loop_s")


class Prediction(Page):
    """The simulator's prediction of one rank's training iteration under a plan, with times in seconds.

    Attributes:
        memory: Bytes by memory and kind at that memory's peak. The kinds add up to the peak. Empty if
            unknown, as for other systems.
        limits: Bytes of each memory that may be used. A memory without a limit is absent. If device and host
            memory are the same memory, the limit is the host's.
        clip_rate: Fraction of steps that ``iteration_s`` assumes to clip or overflow. None if no update of
            the plan is early.
        unclipped_s, waiting_s, clipped_s: Times of an iteration with right early updates, of one without
            early updates, and of one with redone early updates. 0 if ``clip_rate`` is None.
    """

    strategy: str = "ebbtide"
    iteration_s: float = Field(gt=0)
    iteration_low_s: float = Field(gt=0)
    iteration_high_s: float = Field(gt=0)
    forward_s: float = Field(ge=0)
    backward_s: float = Field(ge=0)
    step_s: float = Field(ge=0, description="what optimizer.step() blocks the training loop")
    update_s: float = Field(ge=0, description="from the norm barrier to the last new parameter")
    loop_s: float = Field(0.0, ge=0, description="outside forward, backward and step")
    device_peak_bytes: int = Field(0, ge=0)
    host_peak_bytes: int = Field(0, ge=0)
    storage_bytes: int = Field(0, ge=0, description="of stored state, both extents")
    memory: dict[Memory, dict[Kind, NonNegativeInt]] = Field(default_factory=dict)
    limits: dict[Memory, NonNegativeInt] = Field(default_factory=dict)
    stall_s: float = Field(0.0, ge=0, description="per checkpoint")
    lower_bound_s: float = Field(0.0, ge=0)
    clip_rate: float | None = Field(None, ge=0, le=1)
    unclipped_s: float = Field(0.0, ge=0)
    waiting_s: float = Field(0.0, ge=0)
    clipped_s: float = Field(0.0, ge=0)
    note: str = ""

    @property
    def missing(self) -> dict[str, int]:
        """Return the bytes missing in each memory according to a prediction. Empty if no limits are known."""
        return missing(self.limits, self.device_peak_bytes, self.host_peak_bytes, self.storage_bytes)

    @property
    def step_times(self) -> StepTimes | None:
        """Return the predicted times of steps that clip and of steps that do not. None if no update is early."""
        if self.clip_rate is None or not self.waiting_s:
            return None
        return StepTimes(self.unclipped_s, self.waiting_s, self.clipped_s)

    @property
    def fits(self) -> bool:
        """Return whether a plan's predicted memory peaks stay within the memory limits.

        Files of older versions have no limits. Their peaks fit if ``note`` is empty.
        """
        return not self.missing if self.limits else not self.note


class Plan(Shown, Page):
    """Everything the runtime needs, one human-readable JSON page.

    Attributes:
        subgroup_size: elements of a subgroup: DeepSpeed's ``zero_optimization.sub_group_size``, unless
            ``deepspeed_subgroup_size`` names that.
        deepspeed_subgroup_size: DeepSpeed's ``zero_optimization.sub_group_size`` if the plan's subgroups are
            pieces of DeepSpeed's own (`tune plan --subgroup-size pieces`; ZeRO-3 only). Training needs this
            size in its DeepSpeed config, and has the bits of stock with it. 0: the subgroups are
            DeepSpeed's own.
        ways: How each subgroup is updated, in forward order (`Way`); run-length encoded in the file.
        order: in which the subgroups of each queue are updated; see `UpdateOrder`.
        staging_slots: device buffers for visiting (``device``) subgroups.
        prefetch: how many visiting subgroups may come in during backward, before the norm is
            known: from the first gradient of the last micro-batch on, as far as slots are free. At
            most as many as there are slots; 0 starts at the norm barrier.
        host_slots: host buffers for the state of ``stored`` subgroups on its way from storage and
            back; that many are read before the norm is known.
        storage_dir: the folder on whose storage ``stored`` state lives; each rank has a file there.
        storage_shares: several such folders in the place of ``storage_dir``, and how much of each
            subgroup's state lies in each, in any unit: their bandwidths.
        threads: of the host update; 0 lets the runtime choose (all cores but one on CUDA).
        overlap_forward: `step()` returns while updates still run.
        trained_as: the settings of a step that the plan was made for. Training that differs is told in the
            log before its first step.
        about: the model and the machine that the plan was made for, in words for a report's reader.
    """

    schema_version: int = SCHEMA_VERSION
    versions: dict[str, str] = Field(default_factory=dict)
    machine_fingerprint: str = ""
    workload_fingerprint: str = ""
    subgroup_size: int = Field(ge=1)
    deepspeed_subgroup_size: int = Field(0, ge=0)
    subgroups: tuple[int, ...] = Field((), description="elements of each, for the fit check")
    ways: Annotated[tuple[Way, ...], _Ways]
    order: UpdateOrder = UpdateOrder()
    staging_slots: int = Field(2, ge=0)
    prefetch: int = Field(0, ge=0)
    host_slots: int = Field(HOST_SLOTS, ge=0)
    storage_dir: str | None = None
    storage_shares: dict[str, float] = Field(default_factory=dict)
    threads: int = Field(0, ge=0)
    overlap_forward: bool = True
    checkpoint: CheckpointPlan = CheckpointPlan()
    trained_as: TrainedAs | None = None
    about: str = ""
    prediction: Prediction | None = None
    alternatives: tuple[Prediction, ...] = ()
    reasons: tuple[str, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _read_older(cls, fields: Any) -> Any:
        return plan_schema.read(fields) if isinstance(fields, dict) else fields

    @model_validator(mode="after")
    def _check(self) -> Self:
        taken = frozenset().union(*(RECIPES[placement].slots for placement in set(self.placements)))
        if Slot.STATE in taken and self.host_slots < 1:
            raise RuleError(
                "plan.host_slots must be >= 1 if a subgroup has placement 'stored', but got "
                f"host_slots={self.host_slots}",
                key="host_slots",
            )
        if Slot.STAGING in taken and not self.staging_slots:
            raise RuleError(
                "plan.staging_slots must be >= 1 if a subgroup has placement 'device', but "
                f"got staging_slots={self.staging_slots}",
                key="staging_slots",
            )
        if self.prefetch > self.staging_slots:
            raise RuleError(
                "plan.prefetch must be at most plan.staging_slots, but got "
                f"prefetch={self.prefetch}, staging_slots={self.staging_slots}",
                key="prefetch",
            )
        if self.subgroups and len(self.subgroups) != self.subgroup_count:
            raise RuleError(
                "plan.ways must cover every subgroup of plan.subgroups once, but got "
                f"{self.subgroup_count} ways for {len(self.subgroups)} subgroups",
                key="ways",
            )
        if self.deepspeed_subgroup_size and self.deepspeed_subgroup_size < self.subgroup_size:
            raise RuleError(
                "plan.deepspeed_subgroup_size must be at least plan.subgroup_size, whose pieces are parts of "
                f"DeepSpeed's subgroups, but got {self.deepspeed_subgroup_size} and {self.subgroup_size}",
                key="deepspeed_subgroup_size",
            )
        self._check_folders()
        self._check_fits()
        issue_order(self.placements, self.order)
        return self

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy of the plan with other values for some fields.

        Raises:
            PlanError: the new prediction exceeds its limits, or a field does not exist.
        """
        if unknown := set(update or ()) - set(type(self).model_fields):
            raise PlanError(f"plan must only get fields that plans have, but got {', '.join(sorted(unknown))}")
        copied = super().model_copy(update=update, deep=deep)
        copied._check_fits()
        return copied

    def _check_fits(self) -> None:
        if self.prediction is not None and (missing_bytes := self.prediction.missing):
            raise PlanError(
                f"this plan does not fit: by its own prediction it {lacks(missing_bytes)}. Plan again with `tune plan`",
                key="prediction",
            )

    def _check_folders(self) -> None:
        if self.storage_dir is not None and self.storage_shares:
            raise RuleError(
                "plan.storage_dir must be absent if plan.storage_shares names the folders, but "
                f"got {self.storage_dir!r} and {list(self.storage_shares)}",
                key="storage_dir",
            )
        if any(share <= 0 for share in self.storage_shares.values()):
            raise RuleError(
                f"plan.storage_shares must be greater than 0, but got {self.storage_shares}", key="storage_shares"
            )

    @model_serializer(mode="wrap")
    def _leave_out_default(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        if self.trained_as is None:
            fields.pop("trained_as", None)
        if not self.about:
            fields.pop("about", None)
        if not self.deepspeed_subgroup_size:
            fields.pop("deepspeed_subgroup_size", None)
        if not self.stores:
            fields.pop("host_slots", None)
            fields.pop("storage_dir", None)
        if not self.stores or not self.storage_shares:
            fields.pop("storage_shares", None)
        return fields

    def in_short(self) -> str:
        placed = ", ".join(f"{self.count(p)} {p}" for p in get_args(Placement) if self.count(p))
        seconds = "" if self.prediction is None else f", {self.prediction.iteration_s:.3g} s per iteration"
        return f"{self.subgroup_count} subgroups ({placed}){seconds}"

    def records(self) -> list[dict[str, Any]]:
        """Return a table row for a plan's prediction and for each alternative: times in seconds, memory in GiB."""
        rows = [] if self.prediction is None else [self.prediction, *self.alternatives]
        return [
            {
                "strategy": row.strategy,
                "iteration_s": row.iteration_s,
                **{name: getattr(row, name) for name in _PHASES},
                "device_GiB": row.device_peak_bytes / 2**30,
                "host_GiB": row.host_peak_bytes / 2**30,
                "fits": not row.note,
                "note": row.note,
            }
            for row in rows
        ]

    def drawn(self) -> tuple[str, ...]:
        return _PHASES

    @property
    def config_subgroup_size(self) -> int:
        """Return the ``zero_optimization.sub_group_size`` that training under the plan needs."""
        return self.deepspeed_subgroup_size or self.subgroup_size

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Return the placement of each subgroup of a plan, in forward order."""
        return tuple(way.placement for way in self.ways)

    @property
    def parameter_locations(self) -> tuple[ParameterLocation, ...]:
        """Return the memory that holds each subgroup's parameters between their uses, in forward order."""
        return tuple(way.parameters for way in self.ways)

    @property
    def updated_early(self) -> tuple[bool, ...]:
        """Return, for each subgroup of a plan, whether its update starts before the gradient norm is known."""
        return tuple(way.early for way in self.ways)

    @property
    def summed_on_device(self) -> tuple[bool, ...]:
        """Return, for each subgroup of a plan, whether its gradients are accumulated on the GPU."""
        return tuple(way.sum_on_device for way in self.ways)

    @property
    def issue_order(self) -> tuple[int, ...]:
        """Return a plan's subgroups in the order of their updates. The order of each queue is a part of it."""
        return issue_order(self.placements, self.order)

    def placed(self, placements: Sequence[Placement], **changes: Any) -> "Plan":
        """Return the plan with other placements for its subgroups.

        The order of the updates and the parameter locations stay. So do the flags that the new placements allow.

        Raises:
            ValidationError: a change breaks a rule of the plan.
        """
        if len(placements) != self.subgroup_count:
            return self.with_ways([Way(placement) for placement in placements], **changes)
        pairs = zip(self.ways, placements, strict=True)
        return self.with_ways([way._replace(placement=placement).fitted() for way, placement in pairs], **changes)

    def with_ways(self, ways: Sequence[Way], **changes: Any) -> "Plan":
        """Return the plan with other ways of updating its subgroups. The order of the updates stays.

        Raises:
            ValidationError: a change breaks a rule of the plan.
        """
        same, placements = len(ways) == self.subgroup_count, [way.placement for way in ways]
        order = order_of(self.issue_order, placements) if same else UpdateOrder()
        return Plan.model_validate({**self.model_dump(), "ways": tuple(ways), "order": order, **changes})

    def with_bits(self, *, early: bool | None = None, sum_on_device: bool | None = None) -> "Plan":
        """Return the plan with changed flags of `Way` for every subgroup with a placement that allows them.

        Args:
            early: Whether to update early, before the gradient norm is known. None: unchanged.
            sum_on_device: Whether to accumulate gradients on the GPU. None: unchanged.
        """
        ways = (
            way._replace(
                early=way.early if early is None else early,
                sum_on_device=way.sum_on_device if sum_on_device is None else sum_on_device,
            )
            for way in self.ways
        )
        return self.model_copy(update={"ways": tuple(way.fitted() for way in ways)})

    @property
    def stores(self) -> bool:
        """Return whether a plan keeps the optimizer state of any subgroup on a drive."""
        return any(RECIPES[placement].state == "storage" for placement in set(self.placements))

    @property
    def drives(self) -> dict[str, float]:
        """Return a plan's folders for stored state, with each folder's part of the state. Empty if it names none."""
        return self.storage_shares or ({self.storage_dir: 1.0} if self.storage_dir else {})

    @property
    def subgroup_count(self) -> int:
        return len(self.ways)

    def count(self, placement: Placement) -> int:
        """Return the number of a plan's subgroups that have the given placement."""
        return self.placements.count(placement)

    @staticmethod
    def runs(placements: Sequence[Placement]) -> list[dict[str, Any]]:
        """Return placements of subgroups run-length encoded, as plan files of schema 2 contain them."""
        return [{"placement": key, "count": sum(1 for _ in group)} for key, group in groupby(placements)]

    @staticmethod
    def location_runs(locations: Sequence[ParameterLocation]) -> list[dict[str, Any]]:
        """Return parameter locations of subgroups run-length encoded, as plan files of schema 2 contain them."""
        return [{"home": key, "count": sum(1 for _ in group)} for key, group in groupby(locations)]

    @property
    def digest(self) -> str:
        """Return a hash of a plan's settings, without its prediction. Checkpoints record it."""
        body = self.model_dump(mode="json", exclude={"prediction", "alternatives", "reasons", "versions", "about"})
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a plan from a JSON file.

        Raises:
            PlanError: not a file, not JSON, an unknown field, a newer schema, or a broken rule.
        """
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
        except OSError as error:
            raise PlanError(f"plan must be a readable JSON file, but got {path}: {error}") from None
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise PlanError(f"{path} is not a plan this ebbtide can use: {explain(error, model=cls)}") from None

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> "Plan":
        """Return a plan from the fields of its JSON file.

        Raises:
            PlanError: an unknown field, a newer schema, or a broken rule.
        """
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise PlanError(f"not a plan this ebbtide can use: {explain(error, model=cls)}") from None


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of the plan file."""
    return Plan.model_json_schema()
