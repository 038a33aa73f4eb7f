"""The requests that the planning service accepts, with limits for every field.

Unknown fields and paths of files are refused.
"""

import math
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

from ebbtide.simulator.estimates.deepspeed_keys import of_accelerate
from ebbtide.simulator.estimates.job import Job, settings
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import Plan
from ebbtide.simulator.rules import RuleError, explain, shortened, worded
from ebbtide.simulator.workload import Workload
from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

_NAME = r"^[\w .,:()+/-]+$"


def _named(text: str, info: ValidationInfo) -> str:
    if not re.fullmatch(_NAME, text):
        raise RuleError(
            f"the name in the field {info.field_name} must consist of letters, digits, spaces and . , : ( ) + / - "
            f"only, but got {shortened(text)}"
        )
    return text


def _option(value: Any) -> Any:
    if not isinstance(value, bool | int | float):
        raise RuleError(f"each value in options must be a number, true or false, but got {shortened(value)}")
    return value


Name = Annotated[str, Field(min_length=1, max_length=80, json_schema_extra={"pattern": _NAME}), AfterValidator(_named)]
Option = Annotated[float | int | bool, BeforeValidator(_option)]
_OneOrMore = BeforeValidator(lambda given: [given] if isinstance(given, int | float) else given)
Positive = Annotated[float, Field(gt=0, le=1e18, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=65_536)]
ModelConfig = Annotated[dict[str, JsonValue], Field(max_length=300)]
# Not empty, because an empty config could mean DeepSpeed's default, fp32, or a missing config.
DeepSpeedConfig = Annotated[
    dict[str, JsonValue], Field(min_length=1, max_length=300), AfterValidator(lambda given: dict(of_accelerate(given)))
]
Knob = Literal[
    "micro_batch",
    "accumulation",
    "zero_stage",
    "recompute",
    "recompute_share",
    "offload",
    "sub_group_size",
    "fused_loss",
    "kernels",
    "flash_attention",
    "gpus",
]
KNOBS: tuple[Knob, ...] = get_args(Knob)
MOST_ITERATIONS = 12
MOST_POINTS = 16  # of a sweep
MOST_LAYERS, MOST_SUBGROUPS, MOST_BLOCKS = 1024, 4096, 200_000


class Request(BaseModel):
    """The base class of the requests that the planning service accepts.

    Unknown keys are refused, and so are true and false in place of a number.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields[info.field_name or ""]
        if isinstance(value, bool) and field.annotation is not bool:
            raise RuleError("must be a number")
        return value

    def _has(self, name: str) -> bool:
        """Return whether a field of the request has another value than its default."""
        return bool(getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True))

    def _needs(self, needed: str, present: bool, *names: str) -> None:
        """Refuse fields of the request that have no effect because a condition does not hold.

        Args:
            needed: Condition in words, such as ``with mtbf_s``.
            present: True if the condition holds.
            names: Fields that need the condition. Fields with their default values are ignored.
        """
        without_effect = [] if present else [name for name in names if self._has(name)]
        if without_effect:
            name = without_effect[0]
            raise RuleError(f"{name} has an effect only {needed}. Leave {name} out", key=name)


def _few_subgroups(plan: Any) -> Any:
    if isinstance(plan, dict):
        rows = [_listed(plan, name, dict) for name in ("ways", "placement", "parameter_home")]
        placed = max(sum(_size(row.get("count")) for row in some) for some in rows)
        order = plan.get("order")
        queues = [_listed(order, queue, list) for queue in ("host", "device")]
        walked = [sum(_length(span) for span in spans) for spans in queues]
        if max(placed, *walked) > MOST_SUBGROUPS:
            raise RuleError(
                f"plan.ways and plan.order must name at most {MOST_SUBGROUPS} subgroups on this server, but name more",
                key="ways",
            )
    return plan


def _listed(fields: Any, key: str, kind: type) -> list[Any]:
    value = fields.get(key) if isinstance(fields, dict) else None
    return [item for item in value if isinstance(item, kind)] if isinstance(value, list) else []


def _length(span: list[Any]) -> float:
    return abs(_size(span[0]) - _size(span[1])) + 1 if len(span) == 2 else 0.0


def _size(number: Any) -> float:
    try:
        return float(number)
    except (TypeError, ValueError):
        return 0.0
    except OverflowError:
        return math.inf


PostedPlan = Annotated[Plan, BeforeValidator(_few_subgroups)]


def fields_of_a_job(job: type[Job] = Job) -> dict[str, Any]:
    """Return the fields of a request that follow from the settings of a job, as `pydantic.create_model` takes them."""
    fields: dict[str, Any] = {}
    for one in settings(job):
        if one.http is None:
            continue
        usual = one.value(job.model_fields[one.name].default, one.http)
        contrary = one.kind is bool and one.flag not in (one.name, one.http)
        about = worded(f"If false, {one.asked.help}" if contrary else one.asked.help)
        kind = one.kind
        if kind is not bool and (one.asked.limits or not get_args(kind)):  # a Literal limits itself
            kind = Annotated[float if kind is float else int, one.asked.limits or Field(ge=1, le=65_536)]
        kind = Annotated[kind if kind is bool or not one.asked.null else kind | None, Field(description=about)]
        fields[one.http] = (kind, None if one.kind is not bool and one.asked.null else usual)
    return fields


if TYPE_CHECKING:

    class _OfAJob(Request):
        def __getattr__(self, name: str) -> Any: ...

else:
    _OfAJob = create_model("OfAJob", __base__=Request, **fields_of_a_job())
# Fields of a request that a measured workload contains already.
_OF_A_MODEL = ("ds_config", *(one.http for one in settings() if one.http and one.asked.profiled))


class Scenario(_OfAJob):
    """A part of most requests to the planning service: a machine, and the training job on it.

    The settings of the job are those of `Job`.

    Attributes:
        machine: A name that `GET /machines` lists, or the contents of a machine.json.
        model: A name that `GET /models` lists, or the contents of a model's config.json.
        workload: Measured workload instead of a model: a name that `GET /models` lists as profiled, or the contents of
            a workload.json. It determines the micro-batch, the sequence and the number of GPUs.
        ds_config: Contents of DeepSpeed's config, never a path. Values may be ``"auto"``.
        host_memory_bytes: Host memory of a node.
        storage_bytes: Storage of a node for optimizer state that memory cannot hold. If null, as in ``ds_config``, or
            else none.
        device_memory_bytes: Memory of a GPU. ``gpu_memory_bytes`` is another name of this field.
        link_bytes_per_s: Bandwidth in each direction between host and GPU.
    """

    machine: Name | Machine = "h100-node"
    model: Name | ModelConfig | None = None
    workload: Name | Workload | None = None
    device_memory_bytes: Annotated[
        Positive | None, Field(validation_alias=AliasChoices("device_memory_bytes", "gpu_memory_bytes"))
    ] = None
    host_memory_bytes: Positive | None = None
    storage_bytes: Positive | None = None
    link_bytes_per_s: Positive | None = None
    ds_config: DeepSpeedConfig | None = None
    subgroup_size: Annotated[int, Field(ge=1, le=10**12)] | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.model is None) == (self.workload is None):
            given = "both" if self.model is not None else "none"
            raise RuleError(f"exactly one of model and workload must be given, but got {given}", key="model")
        if isinstance(self.workload, Workload):
            _check_size(self.workload)
        measured = "with model, because a workload was profiled with a setting of its own"
        self._needs(measured, self.workload is None, *_OF_A_MODEL)
        self._needs("without keep_activations", not self.keep_activations, "recompute_share")
        self._needs("with flash_attention", self.flash_attention, "flash_version")
        return self


def _check_size(workload: Workload) -> None:
    if len(workload.layers) > MOST_LAYERS or len(workload.subgroups) > MOST_SUBGROUPS:
        raise RuleError(
            f"workload must have at most {MOST_LAYERS} layers and {MOST_SUBGROUPS} subgroups on this server, but has "
            f"{len(workload.layers)} layers and {len(workload.subgroups)} subgroups",
            key="workload",
        )


class Simulate(Scenario):
    """A request to the planning service to simulate one training iteration under a strategy or a plan.

    Attributes:
        strategy: Name of the strategy. If null, DeepSpeed's own offload as ``ds_config`` sets it.
    """

    strategy: Name | None = None
    options: Annotated[dict[str, Option], Field(max_length=12)] = Field(default_factory=dict)
    plan: PostedPlan | None = None

    timeline: bool = Field(
        False,
        description="If true, the response also has the start and end of every op, and samples of the memory in use.",
    )

    @model_validator(mode="after")
    def _few_iterations(self) -> Self:
        self._needs("without plan", self.plan is None, "strategy")
        self._needs("with plan", self.plan is not None, "clip_rate")
        iterations = self.options.get("iterations", 3)
        if not 2 <= iterations <= MOST_ITERATIONS:
            raise RuleError(
                f"options.iterations must be from 2 to {MOST_ITERATIONS} on this server, but got {iterations}",
                key="options.iterations",
            )
        return self


class Planning(Scenario):
    """A part of the requests to the planning service for a plan.

    Attributes:
        mtbf_s: Mean time between failures of the job. The plan then has the best interval between checkpoints.
        endurance_bytes: Bytes that may be written to a node's drives during their life. A searched plan's reasons then
            tell how long the drives last.
    """

    mtbf_s: Annotated[float, Field(gt=0, le=1e10, allow_inf_nan=False)] | None = None
    endurance_bytes: Positive | None = None

    @model_validator(mode="after")
    def _stores(self) -> Self:
        self._needs("with storage_bytes", self._may_store, "endurance_bytes")
        return self

    @property
    def _may_store(self) -> bool:
        zero = (self.ds_config or {}).get("zero_optimization")
        state = zero.get("offload_optimizer") if isinstance(zero, dict) else None
        return self.storage_bytes is not None or (isinstance(state, dict) and state.get("device") == "nvme")


class Answer(Planning):
    """A request to the planning service for advice: whether to offload optimizer state, with which plan, and what is
    gained.

    Attributes:
        effort: ``quick`` searches for a plan in a moment, and ``full`` as thoroughly as `tune plan` does.
        peers: True to compare the plan also with other offloading systems, each simulated at its best setting, and with
            variants of the plan.
        timelines: True to include simulated timelines of training in the response, such as those of DeepSpeed alone and
            of training under the plan.
        plan: Existing plan, such as the result of an earlier background job of the service. No plan is searched then.
        faster: True to look for changes with which the same samples train faster, which takes about a second. If
            ``effort`` is ``full``, they are looked for anyway.
    """

    effort: Literal["quick", "full"] = "quick"
    peers: bool = True
    timelines: bool = True
    plan: PostedPlan | None = None
    faster: bool = False

    @classmethod
    def brief(cls, asked: Scenario, /, **changes: Any) -> Self:
        """Return a question with other values of some fields, for a response without other systems and timelines."""
        given = {name: getattr(asked, name) for name in asked.model_fields_set & Scenario.model_fields.keys()}
        return cls.model_validate({**given, **changes, "peers": False, "timelines": False})


class Sweep(Scenario):
    """A request to the planning service for quick answers to several variants of one question.

    Attributes:
        changes: Fields of the question with other values, for each variant.
        plans: Known plans, which are tried for each variant too.
        search: False if only the known plans are tried.
    """

    changes: Annotated[list[dict[Name, Any]], Field(min_length=1, max_length=MOST_POINTS)]
    plans: Annotated[list[PostedPlan], Field(max_length=MOST_POINTS + 1)] = Field(default_factory=list)
    search: bool = True

    def points(self) -> list[Answer | str]:
        """Return the question at each point, or the rule that it breaks."""
        return [self._point(change) for change in self.changes]

    def _point(self, change: dict[str, Any]) -> Answer | str:
        try:
            return Answer.brief(self, **change)
        except (RuleError, ValidationError) as error:
            return explain(error, model=Answer) if isinstance(error, ValidationError) else str(error)


class Cards(Scenario):
    """A request to the planning service to compare all machines that it knows for one model.

    Each machine has its own memory and link, and the number of GPUs that its name gives, or else one.

    Attributes:
        machines: Names of the machines. If null, all that the server knows.
    """

    machines: Annotated[list[Name], Field(min_length=1, max_length=64)] | None = None

    @model_validator(mode="after")
    def _any_machine(self) -> Self:
        self._needs("with model", self.workload is None, "workload")
        own = ("machine", "gpus", "device_memory_bytes", "host_memory_bytes", "link_bytes_per_s")
        self._needs("in a question about one machine", False, *own)
        return self


class WhatIf(Scenario):
    """A request to the planning service for a grid of simulations: each strategy at each combination of the
    given values.

    Attributes:
        strategies: Names of the strategies to simulate. If null, DeepSpeed's optimizer offload at the ZeRO stage of
            the training, and ebbtide.
    """

    strategies: Annotated[list[Name], Field(min_length=1, max_length=16)] | None = None
    device_memory_bytes: Positive | None = None
    gpu_memory_bytes: Annotated[list[Positive], _OneOrMore, Field(min_length=1, max_length=256)] | None = None
    changes: Annotated[dict[Name, Annotated[list[float], Field(min_length=1, max_length=256)]], Field(max_length=6)] = (
        Field(
            default_factory=dict,
            description="Values to try for fields of the machine or the workload, by name of the field.",
        )
    )
    format: Literal["json", "csv"] = "json"

    @model_validator(mode="after")
    def _in_memory(self) -> Self:
        self._needs("in other requests, because this table has no plans with state on drives", False, "storage_bytes")
        self._needs("without gpu_memory_bytes", self.gpu_memory_bytes is None, "device_memory_bytes")
        return self

    @property
    def cells(self) -> int:
        return (
            (2 if self.strategies is None else len(self.strategies))
            * len(self.gpu_memory_bytes or [0])
            * math.prod(len(values) for values in self.changes.values())
        )


class PlanJob(Planning):
    """A request to the planning service to search for the best plan in a background job. The fields are the
    input of `tune plan`.

    Attributes:
        name: Title of the job in lists.
    """

    kind: Literal["plan"] = "plan"
    name: Name | None = None
    memory_margin: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] | None = None
    robust: bool = False
    restart_s: Seconds = 60.0
    seed: Annotated[int, Field(ge=0, le=2**31)] = 0

    @model_validator(mode="after")
    def _restarts(self) -> Self:
        self._needs("with mtbf_s", self.mtbf_s is not None, "restart_s")
        return self


class WhatIfJob(WhatIf):
    """A request to the planning service for a large grid of simulations, which runs as a background job."""

    kind: Literal["what-if"] = "what-if"
    name: Name | None = None


class SearchJob(Scenario):
    """A request to the planning service to search for the fastest training configuration in a background job, like
    `tune search`.

    Attributes:
        free: Settings that the search varies. The others have the values of the request. If the setting ``recompute``
            does not vary, activations are recomputed unless the request's ``keep_activations`` is true.
        gpus: Number of GPUs. If the search varies it, the largest number.
        global_batch: Samples per optimizer step. If null, ``train_batch_size`` of ``ds_config``. If that is absent or
            ``"auto"``, the number may vary.
        offload: True if optimizer state lives in host memory. It has no effect if the search varies the offload. If
            left out, as in ``ds_config``, or true without one.
        ds_config: DeepSpeed's config for settings that the search does not vary.
    """

    kind: Literal["search"] = "search"
    name: Name | None = None
    free: Annotated[list[Knob], Field(min_length=1, max_length=len(KNOBS))] = Field(default_factory=lambda: list(KNOBS))
    global_batch: Annotated[int, Field(ge=1, le=4096)] | None = None
    offload: bool = True
    memory_margin: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] | None = None
    trials: Annotated[int, Field(ge=1, le=300)] = 16

    @model_validator(mode="after")
    def _a_model(self) -> Self:
        if self.model is None:
            raise RuleError(
                "model must be given instead of workload: this search tries several micro-batch sizes, and a profiled "
                "workload is valid for one only",
                key="model",
            )
        return self


class Goodput(Request):
    """A request to the planning service for the goodput of training: the useful share of the time under
    failures and with checkpoints.

    See `ebbtide.simulator.analysis.goodput`.
    """

    iteration_s: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
    mtbf_s: Annotated[float, Field(gt=0, le=1e10, allow_inf_nan=False)]
    stall_s: Seconds = 0.0
    interference_s: Seconds = 0.0
    persist_s: Seconds = 0.0
    restart_s: Seconds = 60.0
    interval_steps: Annotated[int, Field(ge=1, le=10**9)] | None = None


class Planned(Request):
    """A request to the service about a plan, with the machine and the training job that the plan was made for."""

    plan: PostedPlan
    scenario: Scenario


class Report(Request):
    """A request to the planning service for a web page about a plan. It may name an uploaded training run
    to compare with the plan.
    """

    plan: PostedPlan
    scenario: Scenario | None = None
    run: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")] | None = None
