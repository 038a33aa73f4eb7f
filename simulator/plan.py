"""The plan file: where and when the optimizer state of each subgroup is updated, and how checkpoints are written."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from ebbtide.simulator import plan_schema
from ebbtide.simulator.limits import Limits, lacks
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.page import Page, digest_of
from ebbtide.simulator.plan_schema import SCHEMA_VERSION as SCHEMA_VERSION
from ebbtide.simulator.plan_schema import Ways
from ebbtide.simulator.prediction import PHASES, Prediction
from ebbtide.simulator.rules import RuleError, explain
from ebbtide.simulator.shown import Shown
from ebbtide.simulator.update.order import UpdateOrder, issue_order, order_of
from ebbtide.simulator.update.recipes import RECIPES
from ebbtide.simulator.update.steps import HOST_SLOTS, Slot
from ebbtide.simulator.update.steps import Placement as Placement  # public here, defined there
from ebbtide.simulator.update.way import ParameterLocation as ParameterLocation
from ebbtide.simulator.update.way import Way as Way
from ebbtide.simulator.workload import TrainedAs, Workload
from pydantic import Field, SerializerFunctionWrapHandler, ValidationError, model_serializer, model_validator

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
        """Return the bytes of host memory that the runtime reserves for checkpoints with these settings.

        They are for copies of state that is updated before it is written, and for one block per writer thread.
        """
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
        """Return a list of table rows for a plan: one for its prediction, and one for each predicted alternative.

        Times are in seconds, memory in GiB.
        """
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
        """Return one boolean for each subgroup of a plan: True if the GPU accumulates its gradients of several
        micro-batches.
        """
        return tuple(way.sum_on_device for way in self.ways)

    @property
    def issue_order(self) -> tuple[int, ...]:
        """Return the numbers of all subgroups of a plan in the order of their updates.

        Subgroups that the CPU updates and subgroups that the GPU updates are two queues, which are merged here.
        """
        return issue_order(self.placements, self.order)

    def placed(self, placements: Sequence[Placement], **changes: Any) -> "Plan":
        """Return a copy of the plan with other placements for its subgroups.

        The order of the updates and the parameter locations do not change. Flags, such as early updates, stay on if
        the new placement allows them.

        Raises:
            ValidationError: The plan would break a rule.
        """
        if len(placements) != self.subgroup_count:
            return self.with_ways([Way(placement) for placement in placements], **changes)
        pairs = zip(self.ways, placements, strict=True)
        return self.with_ways([way._replace(placement=placement).fitted() for way, placement in pairs], **changes)

    def with_ways(self, ways: Sequence[Way], **changes: Any) -> "Plan":
        """Return a copy of the plan with another `Way` for each subgroup.

        The order of the updates stays.

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
        """Return the weights of the folders for a plan's stored optimizer state, as a dict from folder to weight.

        A weight may be the bandwidth of the folder's drive. Each subgroup's state is split over the folders in
        proportion to their weights. The dict is empty if the plan has no such folder.
        """
        return self.storage_shares or ({self.storage_dir: 1.0} if self.storage_dir else {})

    @property
    def subgroup_count(self) -> int:
        return len(self.ways)

    def count(self, placement: Placement) -> int:
        """Return the number of a plan's subgroups that have the given placement."""
        return self.placements.count(placement)

    @staticmethod
    def runs(values: Sequence[str], key: Literal["placement", "home"] = "placement") -> list[dict[str, Any]]:
        """Return placements, or parameter locations (``home``), of subgroups as plan files of schema 2 store them.

        Each dict stands for consecutive subgroups with the same value, and ``count`` is their number.
        """
        return [{key: value, "count": sum(1 for _ in group)} for value, group in groupby(values)]

    def limits_on(self, workload: Workload, machine: Machine) -> Limits:
        """Return the memory limits that the plan was made with, if it was made for the given workload and machine.

        Otherwise return the limits of a user who gives none.
        """
        usual, told = Limits.of(workload, machine), self.prediction.limits if self.prediction else {}
        made_for = (self.machine_fingerprint, self.workload_fingerprint)
        here = made_for == (machine.fingerprint, workload.cut_as(self).fingerprint)
        if not here or not usual.by_memory.keys() <= told.keys():
            return usual
        kept, most = Limits.from_memories(told), Limits.of(workload, machine, margin=0.0)
        within = kept.host_bytes <= most.host_bytes and kept.device_bytes <= most.device_bytes
        return kept if within else usual

    @property
    def digest(self) -> str:
        """Return a hash of a plan's settings, which checkpoints record. The plan's prediction has no influence on the
        hash.
        """
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
