"""The plan file: where and when the optimizer state of each subgroup is updated, and how checkpoints are written.

A row says how some consecutive subgroups are updated. Files of schema 1 and 2 store placements and parameter locations
as run-length lists: each entry is a value and the number of consecutive subgroups that have it. For early updates and
gradient accumulation on the GPU, these files give only a number of subgroups.
"""

import warnings
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from ebbtide.simulator.display import Shown
from ebbtide.simulator.limits import Limits, lacks, missing
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.page import Page, digest_of
from ebbtide.simulator.rules import RuleError, explain
from ebbtide.simulator.schedule import Kind, Memory
from ebbtide.simulator.update.order import UpdateOrder, issue_order, order_of
from ebbtide.simulator.update.pausing import StepTimes
from ebbtide.simulator.update.recipes import RECIPES
from ebbtide.simulator.update.steps import HOST_SLOTS, Slot
from ebbtide.simulator.update.steps import Placement as Placement
from ebbtide.simulator.update.way import ParameterLocation as ParameterLocation
from ebbtide.simulator.update.way import Way as Way
from ebbtide.simulator.workload import TrainedAs, Workload
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

FASTER = "the same samples, faster"  # begins the reasons of a plan that name a change of the job, the best one last
PHASES = ("forward_s", "backward_s", "step_s", "loop_s")


class Prediction(Page):
    """The simulator's prediction of one rank's training iteration under a plan. Times are in seconds.

    Attributes:
        strategy: Name of the predicted strategy: ``ebbtide`` for training under a plan, or another system.
        iteration_s: Time of an iteration: one optimizer step with all its micro-batches.
        iteration_low_s: Lower end of the uncertainty interval of ``iteration_s``.
        iteration_high_s: Upper end of the uncertainty interval of ``iteration_s``.
        tokens_per_s: Tokens that all ranks together train on per second. 0 if unknown.
        forward_s: Time of the forward passes of an iteration.
        backward_s: Time of the backward passes of an iteration.
        device_peak_bytes: Largest number of bytes in use in GPU memory.
        host_peak_bytes: Largest number of bytes in use in host memory.
        memory: Bytes in use at the peak of each memory, by kind (parameters, state ...). The kinds add up to the
            peak. Empty if unknown, as for other systems.
        limits: Bytes of each memory that may be used. A memory without a limit is left out. If device memory is
            host memory, only the host has a limit.
        clip_rate: Fraction of steps that are assumed to clip or overflow in ``iteration_s``. None if the plan has
            no early updates.
        unclipped_s: Time of an iteration that does not clip, so that no early update is redone. 0 if
            ``clip_rate`` is None.
        waiting_s: Time of an iteration whose updates all wait for the gradient norm. 0 if ``clip_rate`` is None.
        clipped_s: Time of an iteration that clips, so that early updates are redone. 0 if ``clip_rate`` is None.
        lower_bound_s: Lower bound of ``iteration_s``, which no plan can beat.
        over_plan_low, over_plan_high: Ends of the uncertainty interval of ``iteration_s`` divided by that of the plan,
            so of the gain of the plan over this way to train. 0 if unknown, and for the plan itself.
        note: Sentence about the memory that is too small. Empty if the strategy fits.
    """

    strategy: str = "ebbtide"
    iteration_s: float = Field(gt=0)
    iteration_low_s: float = Field(gt=0)
    iteration_high_s: float = Field(gt=0)
    tokens_per_s: float = Field(0.0, ge=0)
    forward_s: float = Field(ge=0)
    backward_s: float = Field(ge=0)
    step_s: float = Field(ge=0, description="Seconds for which optimizer.step() blocks the training loop.")
    update_s: float = Field(ge=0, description="Seconds from the gradient norm to the last updated parameter.")
    loop_s: float = Field(
        0.0, ge=0, description="Seconds of the training loop outside forward, backward and optimizer step."
    )
    device_peak_bytes: int = Field(0, ge=0)
    host_peak_bytes: int = Field(0, ge=0)
    storage_bytes: int = Field(
        0,
        ge=0,
        description="Bytes of drive space for optimizer state, for the version being written and all kept versions.",
    )
    memory: dict[Memory, dict[Kind, NonNegativeInt]] = Field(default_factory=dict)
    limits: dict[Memory, NonNegativeInt] = Field(default_factory=dict)
    stall_s: float = Field(0.0, ge=0, description="Seconds for which one checkpoint stops training.")
    lower_bound_s: float = Field(0.0, ge=0)
    clip_rate: float | None = Field(None, ge=0, le=1)
    unclipped_s: float = Field(0.0, ge=0)
    waiting_s: float = Field(0.0, ge=0)
    clipped_s: float = Field(0.0, ge=0)
    over_plan_low: float = Field(0.0, ge=0)
    over_plan_high: float = Field(0.0, ge=0)
    note: str = ""

    @property
    def missing(self) -> dict[str, int]:
        """Return the bytes of each memory that a predicted plan needs beyond the memory's limit."""
        return missing(self.limits, self.device_peak_bytes, self.host_peak_bytes, self.storage_bytes)

    @property
    def step_times(self) -> StepTimes | None:
        """Return the predicted iteration times of a plan with early updates, in steps that clip and other steps."""
        if self.clip_rate is None or not self.waiting_s:
            return None
        return StepTimes(self.unclipped_s, self.waiting_s, self.clipped_s)

    @property
    def fits(self) -> bool:
        """Return True if the memory peaks fit. Without limits (older plan files): if ``note`` is empty."""
        return not self.missing if self.limits else not self.note

    @property
    def record(self) -> dict[str, Any]:
        """Return the row of a table for a prediction. Times are in seconds, memory in GiB."""
        return {
            "strategy": self.strategy,
            "iteration_s": self.iteration_s,
            **{name: getattr(self, name) for name in PHASES},
            "device_GiB": self.device_peak_bytes / 2**30,
            "host_GiB": self.host_peak_bytes / 2**30,
            "fits": not self.note,
            "note": self.note,
        }


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

    Attributes:
        speculate: Number of subgroups that the CPU updates early. Only subgroups with placement ``host`` and parameters
            in GPU memory can be updated early by the CPU. The last of these subgroups are chosen.
        speculate_among: If larger than ``speculate``, the early updates on the CPU are instead spread evenly over the
            last ``speculate_among`` subgroups that can be updated early by the CPU.
        speculate_visits: Number of subgroups with placement ``device`` that are updated early: the last ones.
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


# Blocks per checkpoint that are gathered and hashed while others are being written, so that the disk always has as many
# writes to do as there are writers.
READY_BLOCKS = 1
BLOCK_BYTES = 4 * 2**20  # size of the blocks of checkpoint files that are copied, hashed and written at a time


# Values that stand for a plan made during training. Accelerate and the Trainer fill in every "auto" of DeepSpeed's
# config, and refuse one that they do not know. They leave "automatic" alone.
AUTOMATIC = ("automatic", "auto")


class PlanError(RuleError):
    """An error: a plan cannot be read or does not fit the training. The message says what to change."""


class CheckpointPlan(Page):
    """The checkpoint settings of a plan: how often checkpoints are written, and how.

    Attributes:
        interval_steps: Number of optimizer steps between two automatic checkpoints. 0: checkpoints are written only
            when the script saves.
        mode: Moment at which the save of a checkpoint returns. ``lazy``: immediately. The files are written in the
            background, and state is copied before an update overwrites it. ``in_place``: when the files have their
            final names, so that they survive a killed process. They are synced afterwards, to survive a power failure.
            ``sync``: when the files survive a power failure. ``auto``: ``in_place`` if a trainer library (Trainer,
            Accelerate, Lightning) looks for the files itself, otherwise ``lazy``. With such a library, ``lazy`` is
            treated as ``in_place`` unless `tune run` or ``ebbtide.enable()`` is used, because only these clean up after
            a killed save.
        busy: What a save does while the previous checkpoint is still being written: ``wait`` for it, ``skip`` the save,
            or ``replace`` the unfinished checkpoint.
        copy_budget_bytes: Host memory reserved for copies of state that is updated before it is written.
        write_bytes_per_s: Limit for the rate of checkpoint writes. None: no limit.
        writers: Number of concurrent writes to the disk while a checkpoint is written.
        keep: Number of completed checkpoints to keep in ``dir``: the newest ones. 0: all. If optimizer state is stored
            on drives, the drives keep the state of ``keep`` checkpoints too. If ``keep`` is 0, the drives keep the
            state of as many checkpoints as the Trainer's ``save_total_limit`` says. Without this limit, they keep the
            state of 1 checkpoint, or of 2 with the Trainer's ``load_best_model_at_end``. Other checkpoints cannot be
            loaded any more. The log warns at the start if there may be such checkpoints.
        deadline_s: Seconds without progress of storage or of other ranks after which a checkpoint is given up with an
            error. For drives with stored optimizer state, a value above 300 counts as 300.
        dir: Folder of automatic checkpoints.
        restore_random: True if ``load_checkpoint`` also restores the random states that every checkpoint holds (of
            Python, numpy, torch and each CUDA device). DeepSpeed restores none.
        verify_reads: True if every read of stored state is compared with the hash that was taken when the state was
            written, for drives that are not trusted. False: only the first read after a resume is compared.
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
        """Return the number of threads that write a checkpoint's files (``writers``), plus one that prepares bytes."""
        return self.writers + READY_BLOCKS

    @property
    def reserved_bytes(self) -> int:
        """Return the bytes of host memory for copies of state and for a block per writer thread."""
        return (self.copy_budget_bytes // BLOCK_BYTES + self.writer_threads) * BLOCK_BYTES

    @property
    def automatic_bytes(self) -> int:
        """Return the bytes of host memory that automatic checkpoints reserve: 0 without an interval."""
        return self.reserved_bytes if self.interval_steps else 0

    @property
    def lacks_dir(self) -> bool:
        """Return whether the settings have an interval, but no folder for automatic checkpoints."""
        return self.interval_steps > 0 and not self.dir

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


class Plan(Shown, Page):
    """A plan for training with offloaded optimizer state, as one JSON file.

    Attributes:
        schema_version: Version of the plan file's format.
        versions: Versions of ebbtide, PyTorch and DeepSpeed with which the plan was made.
        machine_fingerprint: Hash of the hardware of the machine that the plan was made for.
        workload_fingerprint: Hash of the subgroups, data types, optimizer and ZeRO stage that the plan was made for.
        subgroup_size: Number of elements of a subgroup. The value is DeepSpeed's
            ``zero_optimization.sub_group_size``, unless ``deepspeed_subgroup_size`` is set.
        deepspeed_subgroup_size: DeepSpeed's ``zero_optimization.sub_group_size``, if the plan's subgroups are
            parts of DeepSpeed's subgroups (`tune plan --subgroup-size pieces`, ZeRO-3 only). The DeepSpeed config
            must then have this size, and results are identical to those of DeepSpeed with this size. 0: the plan's
            subgroups are DeepSpeed's own.
        ways: Way in which each subgroup is updated, in the order of the layers (`Way`). In the file, one row
            stands for all neighboring subgroups that are updated in the same way (`WayRun`).
        order: Order in which subgroups are updated, see `UpdateOrder`.
        staging_slots: Number of staging buffers: GPU memory for one subgroup with placement ``device`` each.
        prefetch: Number of subgroups with placement ``device`` whose state may be copied to the GPU before the
            gradient norm is known: from the first gradient of the last micro-batch on, if staging buffers are
            free. At most ``staging_slots``. 0: copies begin when the gradient norm is known.
        host_slots: Number of buffers in host memory through which the state of ``stored`` subgroups is read and
            written. ``host_slots`` is also the number of subgroups that are read before the gradient norm is known.
        storage_dir: Folder for the state of ``stored`` subgroups. Each rank has a file in this folder.
        storage_shares: Several folders instead of ``storage_dir``, each with a number such as the drive's bandwidth.
            Each folder holds a part of every subgroup's state, in proportion to the folder's number.
        threads: Number of CPU threads for updates. 0: the runtime chooses (all cores but one on CUDA).
        overlap_forward: True if `step()` returns while updates are still running.
        checkpoint: Settings of checkpoints.
        trained_as: Settings of a training step that the plan was made for. If the training has other settings, a
            warning before the first step says so.
        about: Model and machine that the plan was made for, as a sentence for readers of a report.
        prediction: Predicted times and memory use of training under the plan.
        alternatives: Predictions of other plans and other systems, for comparison.
        reasons: Reasons for the plan, as sentences.
    """

    _error: ClassVar[type[RuleError]] = PlanError

    schema_version: int = SCHEMA_VERSION
    versions: dict[str, str] = Field(default_factory=dict)
    machine_fingerprint: str = ""
    workload_fingerprint: str = ""
    subgroup_size: int = Field(ge=1)
    deepspeed_subgroup_size: int = Field(0, ge=0)
    subgroups: tuple[int, ...] = Field(
        (), description="Number of elements of each subgroup, to check that the plan belongs to the model."
    )
    ways: Annotated[tuple[Way, ...], Ways]
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
        return read(fields) if isinstance(fields, dict) else fields

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
                "plan.staging_slots must be >= 1 if a subgroup has placement 'device', because the subgroup's state is "
                f"copied to a staging buffer on the GPU for its update, but got staging_slots={self.staging_slots}",
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
                f"plan.ways must set the placement of all {len(self.subgroups)} subgroups in plan.subgroups, but sets "
                f"the placement of {self.subgroup_count} subgroups",
                key="ways",
            )
        if self.deepspeed_subgroup_size and self.deepspeed_subgroup_size < self.subgroup_size:
            raise RuleError(
                "plan.deepspeed_subgroup_size must be at least plan.subgroup_size, because each subgroup of the plan "
                "must be a part of one of DeepSpeed's subgroups, but got deepspeed_subgroup_size "
                f"{self.deepspeed_subgroup_size} and subgroup_size {self.subgroup_size}",
                key="deepspeed_subgroup_size",
            )
        self._check_folders()
        self._check_fits()
        issue_order(self.placements, self.order)
        return self

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy of the plan with other values for some fields.

        Raises:
            PlanError: The copy does not fit into memory according to its own prediction, or a field does not exist.
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
        """Return a row for the prediction and each predicted alternative, with seconds and GiB."""
        return [] if self.prediction is None else [row.record for row in (self.prediction, *self.alternatives)]

    def drawn(self) -> tuple[str, ...]:
        return PHASES

    @property
    def config_subgroup_size(self) -> int:
        """Return the value of DeepSpeed's ``zero_optimization.sub_group_size`` that training under a plan needs."""
        return self.deepspeed_subgroup_size or self.subgroup_size

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Return the placement (``host``, ``device`` ...) of each subgroup of a plan, in the order of the layers."""
        return tuple(way.placement for way in self.ways)

    @property
    def parameter_locations(self) -> tuple[ParameterLocation, ...]:
        """Return the memory ("device" or "host") of each subgroup's 16-bit parameters, in the order of the layers."""
        return tuple(way.parameters for way in self.ways)

    @property
    def updated_early(self) -> tuple[bool, ...]:
        """Return a boolean for each subgroup of a plan: True if its update starts before the gradient norm is known."""
        return tuple(way.early for way in self.ways)

    @property
    def summed_on_device(self) -> tuple[bool, ...]:
        """Return a boolean for each subgroup: True if the GPU accumulates its gradients."""
        return tuple(way.sum_on_device for way in self.ways)

    @property
    def issue_order(self) -> tuple[int, ...]:
        """Return the numbers of all subgroups in the order of their updates on the CPU and the GPU together."""
        return issue_order(self.placements, self.order)

    def placed(self, placements: Sequence[Placement], **changes: Any) -> "Plan":
        """Return a copy with other placements. Flags stay on if the new placement allows them.

        Raises:
            ValidationError: The plan would break a rule.
        """
        if len(placements) != self.subgroup_count:
            return self.with_ways([Way(placement) for placement in placements], **changes)
        pairs = zip(self.ways, placements, strict=True)
        return self.with_ways([way._replace(placement=placement).fitted() for way, placement in pairs], **changes)

    def with_ways(self, ways: Sequence[Way], **changes: Any) -> "Plan":
        """Return a copy with another `Way` for each subgroup and the same order of updates.

        Raises:
            ValidationError: The plan would break a rule.
        """
        same, placements = len(ways) == self.subgroup_count, [way.placement for way in ways]
        order = order_of(self.issue_order, placements) if same else UpdateOrder()
        return Plan.model_validate({**self.model_dump(), "ways": tuple(ways), "order": order, **changes})

    def with_bits(self, *, early: bool | None = None, sum_on_device: bool | None = None) -> "Plan":
        """Return a copy of the plan with the flags for early updates or sums on the GPU set to given values.

        A flag is changed for all subgroups with a placement that allows the flag.

        Args:
            early: True to start updates before the gradient norm is known. None: unchanged.
            sum_on_device: True to accumulate gradients on the GPU. None: unchanged.
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
        """Return True if a plan keeps the optimizer state of any subgroup on a drive."""
        return any(RECIPES[placement].state == "storage" for placement in set(self.placements))

    @property
    def drives(self) -> dict[str, float]:
        """Return the weights of the folders for stored state. Each subgroup's state is split in proportion."""
        return self.storage_shares or ({self.storage_dir: 1.0} if self.storage_dir else {})

    @property
    def subgroup_count(self) -> int:
        return len(self.ways)

    def count(self, placement: Placement) -> int:
        """Return the number of a plan's subgroups that have the given placement."""
        return self.placements.count(placement)

    @staticmethod
    def runs(values: Sequence[str], key: Literal["placement", "home"] = "placement") -> list[dict[str, Any]]:
        """Return placements or parameter locations (``home``) as plan files of schema 2 store them."""
        return [{key: value, "count": sum(1 for _ in group)} for value, group in groupby(values)]

    def limits_on(self, workload: Workload, machine: Machine) -> Limits:
        """Return the memory limits that the plan was made with, if it was made for the given workload and machine.

        Otherwise return the limits of a user who gives none.
        """
        usual, predicted = Limits.of(workload, machine), self.prediction.limits if self.prediction else {}
        made_for = (self.machine_fingerprint, self.workload_fingerprint)
        here = made_for == (machine.fingerprint, workload.cut_as(self).fingerprint)
        if not here or not usual.by_memory.keys() <= predicted.keys():
            return usual
        kept, most = Limits.from_memories(predicted), Limits.of(workload, machine, margin=0.0)
        within = kept.host_bytes <= most.host_bytes and kept.device_bytes <= most.device_bytes
        return kept if within else usual

    @property
    def digest(self) -> str:
        """Return a hash of the settings, which checkpoints record. The prediction has no influence on it."""
        body = self.model_dump(mode="json", exclude={"prediction", "alternatives", "reasons", "versions", "about"})
        return digest_of(body)

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> "Plan":
        """Return a plan from the fields of its JSON file.

        Raises:
            PlanError: A field is unknown, the fields come from a newer version, or a rule of plans is broken.
        """
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise PlanError(
                f"the given fields are not a plan this ebbtide can use: {explain(error, model=cls)}"
            ) from None


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of the plan file."""
    return Plan.model_json_schema()
