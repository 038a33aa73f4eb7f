"""The requests that the planning service accepts, with limits for every field, and their conversion into a machine and
a training workload, the inputs of the planner.

Unknown fields and paths of files are refused.
"""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

from ebbtide.simulator.estimates.deepspeed_keys import BATCH_KEYS, WHOLE_BATCH, of_accelerate
from ebbtide.simulator.estimates.estimate import default_ranks, estimated
from ebbtide.simulator.estimates.job import Job, Setting, settings, started
from ebbtide.simulator.estimates.models.architecture import KEYS, is_multimodal, known_config, quantized
from ebbtide.simulator.estimates.models.families import FAMILIES, changed_key, missing_size
from ebbtide.simulator.estimates.models.families import MODELS as MODELS
from ebbtide.simulator.estimates.models.modules import DESCRIBE
from ebbtide.simulator.estimates.offloading import Offloading, offloading, plan_refusal
from ebbtide.simulator.estimates.presets import preset
from ebbtide.simulator.limits import Within, within
from ebbtide.simulator.machine import ANY_BYTES, Machine
from ebbtide.simulator.page import DEEPSPEED_CONFIG, MODEL_CONFIG, kind_of
from ebbtide.simulator.plan import Plan
from ebbtide.simulator.rules import RuleError, broken, explain, shortened, worded
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
        return bool(getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True))

    def _needs(self, needed: str, present: bool, *names: str) -> None:
        """Refuse named fields without effect. ``needed`` is the condition in words, such as ``with mtbf_s``."""
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
        kind = one.kind
        if kind is not bool and (one.asked.limits or not get_args(kind)):  # a Literal limits itself
            kind = Annotated[float if kind is float else int, _limits(one)]
        kind = Annotated[kind if kind is bool or not one.asked.null else kind | None, Field(description=_about(one))]
        fields[one.http] = (kind, None if one.kind is not bool and one.asked.null else usual)
    return fields


def _limits(setting: Setting) -> Any:
    return setting.asked.limits or Field(ge=1, le=65_536)


def _about(setting: Setting) -> str:
    contrary = setting.kind is bool and setting.flag not in (setting.name, setting.http)
    return worded(f"If false, {setting.asked.help}" if contrary else setting.asked.help)


def controls_of_a_job(job: type[Job] = Job) -> list[dict[str, Any]]:
    """Return the controls of the page's form that follow from the settings of a job.

    Each is a dict for `controls.js`: a slider with ``steps``, or a choice with pairs ``values`` of a value and a text.
    A None among them leaves the value to the DeepSpeed config, the machine or a default.
    """
    by_flag = {one.flag: one for one in settings(job)}
    controls: list[dict[str, Any]] = []
    for one in settings(job):
        if one.http is None:
            continue
        asked, control = one.asked, one.asked.control
        usual = one.value(job.model_fields[one.name].default, one.http)
        part = "machine" if control.of_machine else "model"
        shown: dict[str, Any] = {
            "key": one.http,
            "where": part if control.first else f"more-{part}",
            "label": control.label or one.http.replace("_", " ").capitalize(),
            "about": _about(one),
            "standard": usual,
            "profiled": asked.profiled,
        }
        if asked.unless:
            other = by_flag[asked.unless]
            shown["unless"] = {"key": other.http, "value": other.flag == other.http}
        known = get_args(one.kind)
        if one.kind is bool or known:
            texts = control.choices or {value: str(value) for value in known} or {False: "no", True: "yes"}
            shown["values"] = [[None, control.unset]] if usual is None else []
            shown["values"] += [[value, text] for value, text in texts.items()]
        else:
            share = one.kind is float
            rules = _limits(one).metadata
            least, most = (
                next((v for rule in rules if (v := getattr(rule, at, None)) is not None), None) for at in ("ge", "le")
            )
            stops = control.stops or ((0.25, 0.5, 0.75, 1) if share else tuple(2**n for n in range(7)))
            shown |= {
                "steps": [None, *stops] if usual is None else list(stops),
                "unit": control.unit,
                "each": 0.01 if share else 1,
                "unset": control.unset,
                "least": least,
                "most": most,
                "batch": control.first,
            }
        controls.append(shown)
    return controls


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

    @cached_property
    def job(self) -> Job:
        """Return the training job that a request to the planning service describes. A request makes it once.

        Raises:
            ValueError: The model or the DeepSpeed config cannot be used.
        """
        config = self.ds_config
        if config is not None and (kind := kind_of(config)) not in ("", DEEPSPEED_CONFIG):
            raise RuleError(
                f"ds_config must be a DeepSpeed config, but is {kind}. Send a DeepSpeed config", "ds_config"
            )
        if isinstance(self, SearchJob) and config is not None:  # a search may vary the batch sizes
            varied = {WHOLE_BATCH, *(key for knob, key in BATCH_KEYS.items() if knob in self.free)}
            config = {key: value for key, value in config.items() if key not in varied}
        model = model_of(self)
        with _as_asked(), _as_sent(model):
            shape = shape_of(self)
            ranks = shape.get("data_parallel") or default_ranks(machine_of(self), shape)
            job = Job.of_deepspeed(model, config, **{**shape, "data_parallel": ranks})
        _check_cut(params_of(job), job.sub_group_size)
        return job

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy of the request. Its job is made anew, because `update` may change a setting."""
        copied = super().model_copy(update=update, deep=deep)
        copied.__dict__.pop("job", None)
        return copied


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


ITERATIONS = 3  # iterations that a prediction simulates


def machine_of(scenario: Scenario) -> Machine:
    """Return the machine that a request to the planning service names, with the memory and the link
    bandwidth that the request sets.

    Raises:
        ValueError: There is no machine of that name, or a value is out of range.
    """
    machine, limits, _ = _within(scenario)
    changes: dict[str, float] = dict(limits)
    if scenario.link_bytes_per_s is not None:
        changes |= dict.fromkeys(("h2d_bytes_per_s", "d2h_bytes_per_s"), scenario.link_bytes_per_s)
    with _as_asked():
        return machine.with_rates(**changes) if changes else machine


def notes_of(scenario: Scenario, workload: Workload) -> tuple[str, ...]:
    """Return sentences for the user: what was assumed, what is not simulated, and sizes that are not taken as given."""
    return (*_within(scenario).notes, *workload.notes)


def _within(scenario: Scenario) -> Within:
    named = scenario.machine
    machine = _preset(named) if isinstance(named, str) else named
    return within(machine, scenario.device_memory_bytes, scenario.host_memory_bytes)


@contextmanager
def _as_sent(model: Mapping[str, Any]) -> Iterator[None]:
    try:
        yield
    except RuleError as error:
        names = KEYS.get(error.key.removeprefix("model."), ())
        sent = next((f"model.{name}" for name in names if name in model), error.key)
        raise RuleError(str(error), sent) from None


_ASKED_AS = {
    "h2d_bytes_per_s": "link_bytes_per_s",
    "d2h_bytes_per_s": "link_bytes_per_s",
    "data_parallel": "gpus",
    "recompute": "keep_activations",
}


@contextmanager
def _as_asked() -> Iterator[None]:
    try:
        yield
    except (RuleError, ValidationError) as error:
        rule, key = str(error), getattr(error, "key", "")
        if isinstance(error, ValidationError):
            first = broken(error)[0]
            rule, key = first.sentence, first.key
        word = _ASKED_AS.get(key, key)
        raise RuleError(rule.replace(key, word), word) from None


@lru_cache(maxsize=32)
def _preset(name: str) -> Machine:
    return preset(name)


def workload_of(scenario: Scenario, machine: Machine) -> Workload:
    """Return the training workload of one rank that a request to the planning service describes.

    Raises:
        ValueError: There is no model of that name, or the model cannot be used.
    """
    workload = scenario.workload
    if isinstance(workload, str):
        raise RuleError(f"workload must be a name that GET /api/v1/models lists, but got {workload!r}", key="workload")
    if workload is None:
        workload = estimated(scenario.job, machine)
    else:
        workload = started(workload, scenario.launcher, scenario.omp_threads, scenario.clip_rate)
    if scenario.subgroup_size is not None:
        _check_cut(workload.params, scenario.subgroup_size)
        workload = workload.recut(scenario.subgroup_size)
    return workload


def _check_cut(params: int, subgroup_size: int) -> None:
    if params > MOST_SUBGROUPS * subgroup_size:
        raise RuleError(
            f"subgroup_size must divide {params} parameters into at most {MOST_SUBGROUPS} subgroups on this server, "
            f"but got {subgroup_size}",
            key="subgroup_size",
        )


def model_of(scenario: Scenario) -> dict[str, Any]:
    """Return the config of the model that a request to the planning service names.

    Raises:
        ValueError: There is no model of that name, or the model is too large.
    """
    model = scenario.model
    if isinstance(model, str):
        model = known_config(model)
    assert model is not None
    check_model(model)
    return model


def check_model(config: dict[str, Any]) -> None:
    """Refuse the config of a model that the planning service cannot process.

    The service does not build models with the transformers library, since any client may send a config.

    Raises:
        ValueError: The model has too many layers or experts, or its family is unknown.
    """
    if (kind := kind_of(config)) not in ("", MODEL_CONFIG):
        raise RuleError(f"model must be a model's config, but is {kind}. Send a model's config", key="model")
    if refusal := quantized(config):
        raise RuleError(refusal, key="model.quantization_config")
    if is_multimodal(config):
        raise RuleError(
            "on this server, model must be a language model without other parts, such as for images, but the config "
            f"has a text_config. {_INSTEAD}",
            key="model.text_config",
        )
    if "model_type" in config:
        _check_family(config)
    layers, experts = (_largest(config, *KEYS[name]) for name in ("layers", "experts"))
    matrices = layers * (10 + 3 * experts)
    if layers > MOST_LAYERS or matrices > MOST_BLOCKS:
        raise RuleError(
            f"the model must have at most {MOST_LAYERS} layers and {MOST_BLOCKS} weight matrices on this server, but "
            f"has {layers} layers and about {matrices} matrices",
            key="model",
        )


_INSTEAD = f"Run `tune plan --model config.json` instead, or {DESCRIBE}"


def _check_family(config: Mapping[str, Any]) -> None:
    family = str(config["model_type"])
    if family not in FAMILIES:
        key, rule = "model_type", f"on this server, model_type must be one of {', '.join(FAMILIES)}"
    elif changed := changed_key(config):
        key, rule = changed[0], f"on this server, {changed[0]} must be {changed[1]!r} for model_type {family!r}"
    elif missing := missing_size(config):
        key, rule = missing, f"on this server, {missing} must be given for model_type {family!r}"
    else:
        return
    raise RuleError(f"{rule}, but got {shortened(config.get(key))}. {_INSTEAD}", key=f"model.{key}")


def _largest(config: Mapping[str, Any], *names: str) -> int:
    return max([n for name in names if isinstance(n := config.get(name), int)], default=0)


def offload_of(scenario: Scenario) -> Offloading:
    """Return the offload settings in the DeepSpeed config of a request to the planning service."""
    return offloading(None) if scenario.ds_config is None else scenario.job.offload


def storage_of(scenario: Scenario) -> dict[str, int]:
    """Return the bytes of storage that a request allows, by directory. Empty: the folder where training starts."""
    named = offload_of(scenario).storage
    if scenario.storage_bytes is None:
        return {named: ANY_BYTES} if named else {}
    return {named or "": int(scenario.storage_bytes)}


def shape_of(scenario: Scenario) -> dict[str, Any]:
    """Return the `Job` fields that a request to the planning service sets."""
    given = {one: getattr(scenario, one.http) for one in settings() if one.http}
    return {one.name: one.value(value, one.http or "") for one, value in given.items() if value is not None}


def params_of(job: Job) -> int:
    """Return the number of elements of one rank's partition of a training job's model."""
    params = sum(sum(block.params) for block in job.architecture.blocks())
    return params // (job.data_parallel * job.tensor_parallel)


def check_plannable(scenario: Scenario) -> None:
    """Raise ValueError, with the key to change, if no plan can be applied to the DeepSpeed config."""
    job = None if scenario.ds_config is None else scenario.job
    if job is not None and (refusal := plan_refusal(job.config, job.offload)):
        raise RuleError(refusal, "ds_config")


def resolve(scenario: Scenario) -> tuple[Machine, Workload]:
    """Return the machine and the workload. Raise ValueError if one of them is unknown or cannot be used."""
    machine = machine_of(scenario)
    return machine, workload_of(scenario, machine)


def space_of(request: SearchJob, machine: Machine) -> Any:
    """Return the set of training configurations that a background job of the planning service searches.

    Raises:
        ValueError: No possible configuration has the requested global batch (samples per optimizer step).
    """
    from ebbtide.tuner.configurations.fixed_settings import fixed_knobs
    from ebbtide.tuner.configurations.space import Configuration, Space

    fixed = fixed_knobs({}, request.ds_config or {}, request.global_batch)
    asked = {
        "micro_batch": request.micro_batch,
        "accumulation": request.accumulation,
        "zero_stage": request.zero_stage,
        "sub_group_size": request.subgroup_size,
        "recompute_share": request.recompute_share,
        "kernels": request.kernels,
        "fused_loss": request.fused_loss,
        "flash_attention": request.flash_attention,
        "offload": None if request.offload else "none",
        "gpus": request.gpus,
    }
    # As in `tune search`: a DeepSpeed config without offload keys does not offload.
    offloads = request.offload if "offload" in request.model_fields_set else request.ds_config is None
    usual = Configuration(
        gpus=max(1, machine.gpus_per_node // request.tensor_parallel), offload="optimizer" if offloads else "none"
    )
    set_by_request = {knob: value for knob, value in asked.items() if value is not None}
    base = usual.changed(**{**fixed.values, **set_by_request, "recompute": not request.keep_activations})
    held = {*fixed.values, *(knob for knob in set_by_request if knob not in request.free)}
    return Space.of(base, request.free, fixed.global_batch, fixed=held)


def fields_of(changes: Mapping[str, Any], job: Job, config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return changes to a training job as fields of a request. If the request's DeepSpeed config has other values for
    them, the fields include the config with the new values.
    """
    from ebbtide.tuner.advice.flags import config_values, with_values  # the server's own process does not load it

    words: dict[str, Any] = {**changes}
    if new := config_values(changes, job):
        words["ds_config"] = with_values(config or {}, new)
    if "data_parallel" in words:
        words["gpus"] = words.pop("data_parallel")
    if "recompute" in words:
        words["keep_activations"] = not words.pop("recompute")
    words.pop("offload", None)  # every answer tells whether to offload
    return words
