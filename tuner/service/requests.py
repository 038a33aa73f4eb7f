"""The possible requests and their limits: every field bounded, nothing unknown accepted, no path."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, get_args

from ebbtide.simulator.estimates.architecture import KEYS, is_deepspeed, language_model, quantized
from ebbtide.simulator.estimates.compute import Kernels
from ebbtide.simulator.estimates.families import FAMILIES, family_numbers
from ebbtide.simulator.estimates.launchers import Launcher
from ebbtide.simulator.estimates.modules import DESCRIBE
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import Plan
from ebbtide.simulator.rules import RuleError
from ebbtide.simulator.workload import Workload
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationInfo,
    field_validator,
    model_validator,
)

_NAME = r"^[\w .,:()+/-]+$"


def _named(text: str) -> str:
    if not re.fullmatch(_NAME, text):
        raise RuleError("must be of letters, digits, spaces and . , : ( ) + / - only")
    return text


def _option(value: Any) -> Any:
    if not isinstance(value, bool | int | float):
        raise RuleError("must be a number, or true or false")
    return value


Name = Annotated[str, Field(min_length=1, max_length=80, json_schema_extra={"pattern": _NAME}), AfterValidator(_named)]
Option = Annotated[float | int | bool, BeforeValidator(_option)]
Positive = Annotated[float, Field(gt=0, le=1e18, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=65_536)]
ModelConfig = Annotated[dict[str, JsonValue], Field(max_length=300)]
# An empty one would leave open whether DeepSpeed's own default, fp32, is meant.
DeepSpeedConfig = Annotated[dict[str, JsonValue], Field(min_length=1, max_length=300)]
Knob = Literal["micro_batch", "accumulation", "zero_stage", "recompute", "offload", "sub_group_size", "gpus"]
KNOBS: tuple[Knob, ...] = get_args(Knob)
MIB = 2**20
MOST_ITERATIONS = 12
# What of a machine is told as it is.
MACHINE_FACTS = (
    "name",
    "device_name",
    "device_kind",
    "gpus_per_node",
    "device_memory_bytes",
    "host_memory_bytes",
    "unified_memory",
)
MOST_LAYERS, MOST_SUBGROUPS, MOST_BLOCKS = 1024, 4096, 200_000


@dataclass(frozen=True)
class Quota:
    """Limits of the service. Times in seconds, sizes in bytes.

    Attributes:
        body_bytes: of a request, `run_bytes` where a timeline is posted.
        light_ops: an answer of at most so many simulated ops is given by the workers kept for
            quick answers; a larger one queues with the heavy ones, which run at low priority.
        heavy_ops: of one simulation; an answer beyond that, or of 40 times as many in all its
            simulations, is refused.
        searched_ops: of one simulation in an answer that searches a plan: it makes hundreds.
        cells, job_cells: points of a what-if that is answered at once, or by a job.
        light_s, heavy_s, job_s: wall time after which a worker is stopped.
        worker_bytes: address space that a worker may take beyond what it starts with.
        light_waiting, heavy_waiting, jobs_waiting: beyond that many in line, 429.
        attempts: how often a job is started when the server ends in the middle of it. A worker that
            ends fails its job at once, so a job cannot be what ends servers: the limit is high.
        keep_s, run_keep_s, kept_rows: finished jobs and runs expire, by age and by number.
        streams: open event streams.
        head_s, body_s: how long a client may take to send a request's head, and its body.
    """

    body_bytes: int = 1 * MIB
    run_bytes: int = 4 * MIB
    result_bytes: int = 32 * MIB
    light_ops: int = 60_000
    heavy_ops: int = 1_500_000
    searched_ops: int = 150_000
    cells: int = 64
    job_cells: int = 4096
    light_s: float = 10.0
    heavy_s: float = 180.0  # of wall time, at low priority: on a busy machine many times its CPU time
    job_s: float = 900.0
    worker_bytes: int = 2048 * MIB
    light_waiting: int = 512
    heavy_waiting: int = 32
    jobs_waiting: int = 500
    attempts: int = 100
    keep_s: float = 7 * 86400.0
    run_keep_s: float = 90 * 86400.0
    kept_rows: int = 2000
    streams: int = 64
    connections: int = 512
    head_s: float = 10.0
    body_s: float = 20.0
    cache_bytes: int = 64 * MIB


class Request(BaseModel):
    """Base of all: unknown keys are refused, and true is no number."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields[info.field_name or ""]
        if isinstance(value, bool) and field.annotation is not bool:
            raise RuleError("must be a number")
        return value


def _few_subgroups(plan: Any) -> Any:
    """Check the number of subgroups before a plan's own checks, which expand its runs and spans."""
    if isinstance(plan, dict):
        rows = [_listed(plan, name, dict) for name in ("ways", "placement", "parameter_home")]
        placed = max(sum(_size(row.get("count")) for row in some) for some in rows)
        order = plan.get("order")
        queues = [_listed(order, queue, list) for queue in ("host", "device")]
        walked = [sum(_length(span) for span in spans) for spans in queues]
        if max(placed, *walked) > MOST_SUBGROUPS:
            raise RuleError(
                f"plan.ways and plan.order must name at most {MOST_SUBGROUPS} subgroups here, but name more", key="ways"
            )
    return plan


def _listed(fields: Any, key: str, kind: type) -> list[Any]:
    """Return the items of ``kind`` in a list. Other items are refused later."""
    value = fields.get(key) if isinstance(fields, dict) else None
    return [item for item in value if isinstance(item, kind)] if isinstance(value, list) else []


def _length(span: list[Any]) -> float:
    return abs(_size(span[0]) - _size(span[1])) + 1 if len(span) == 2 else 0.0


def _size(number: Any) -> float:
    """Return the number that a lenient check reads. 0: it will be refused later."""
    try:
        return float(number)
    except (TypeError, ValueError):
        return 0.0
    except OverflowError:
        return math.inf


PostedPlan = Annotated[Plan, BeforeValidator(_few_subgroups)]


class Scenario(Request):
    """A machine, and what is trained on it.

    Attributes:
        machine: a name that `GET /machines` lists, or a whole machine.json.
        model: a name that `GET /models` lists, or the object in a model's config.json.
        workload: instead of a model: a name that `GET /models` lists as profiled, or a whole
            workload.json; then micro-batch, sequence and GPUs are the profile's.
        gpus: ranks that ZeRO divides the model over; ``tensor_parallel``: that share each layer.
        micro_batch, accumulation, zero_stage: what ``ds_config`` leaves open; else 1, 1 and 3.
        ds_config: DeepSpeed's, its contents, never a path; may hold ``"auto"``.
        recompute_share: Share of the layers whose activations are recomputed. None: all.
        kernels: ``fused`` or ``eager``, between the products. None: fused.
        fused_loss: Logits and loss come from one kernel.
        flash_attention: Attention scores are not stored.
        launcher: what starts the ranks; with `omp_threads`, their OMP_NUM_THREADS, it says on how
            many threads stock updates on the host.
        host_memory_bytes, storage_bytes: of a node; ``device_memory_bytes``: of a GPU. State that
            memory cannot hold may go to so much storage; None: none, or as ``ds_config`` says.
        endurance_bytes: that a node's drives may be written with in their life.
        link_bytes_per_s: of each direction between host and device.
        clip_rate: Fraction of steps that clip gradients or overflow. None: 10% is assumed.
    """

    machine: Name | Machine = "h100-node"
    model: Name | ModelConfig | None = None
    workload: Name | Workload | None = None
    gpus: Count = 1
    tensor_parallel: Count = 1
    launcher: Launcher | None = None
    omp_threads: Count | None = None
    device_memory_bytes: Positive | None = None
    host_memory_bytes: Positive | None = None
    storage_bytes: Positive | None = None
    endurance_bytes: Positive | None = None
    link_bytes_per_s: Positive | None = None
    micro_batch: Count | None = None
    sequence: Annotated[int, Field(ge=1, le=2**22)] = 2048
    accumulation: Annotated[int, Field(ge=1, le=4096)] | None = None
    zero_stage: Annotated[int, Field(ge=1, le=3)] | None = None
    ds_config: DeepSpeedConfig | None = None
    keep_activations: bool = False
    recompute_share: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    kernels: Kernels | None = None
    fused_loss: bool = False
    flash_attention: bool = True
    clip_rate: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    subgroup_size: Annotated[int, Field(ge=1, le=10**12)] | None = None
    mtbf_s: Annotated[float, Field(gt=0, le=1e10, allow_inf_nan=False)] | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.model is None) == (self.workload is None):
            given = "both" if self.model is not None else "none"
            raise RuleError(f"exactly one of model and workload must be given, but got {given}", key="model")
        if isinstance(self.workload, Workload):
            _check_size(self.workload)
        if self.workload is not None and self.ds_config is not None:
            raise RuleError(
                "ds_config goes with a model, since a profiled workload has its own, "
                "but got a workload: leave ds_config out",
                "ds_config",
            )
        return self


def _check_size(workload: Workload) -> None:
    if len(workload.layers) > MOST_LAYERS or len(workload.subgroups) > MOST_SUBGROUPS:
        raise RuleError(
            f"workload must have at most {MOST_LAYERS} layers and {MOST_SUBGROUPS} subgroups here, "
            f"but got {len(workload.layers)} and {len(workload.subgroups)}",
            key="workload",
        )


class Simulate(Scenario):
    """One iteration under a strategy or a plan.

    ``strategy``: None: DeepSpeed's own, as ``ds_config`` asks for it.
    """

    strategy: Name | None = None
    options: Annotated[dict[str, Option], Field(max_length=12)] = Field(default_factory=dict)
    plan: PostedPlan | None = None

    timeline: bool = Field(False, description="also every op's start and end, and the memory")

    @model_validator(mode="after")
    def _few_iterations(self) -> Self:
        iterations = self.options.get("iterations", 3)
        if not 2 <= iterations <= MOST_ITERATIONS:
            raise RuleError(
                f"options.iterations must lie in [2, {MOST_ITERATIONS}] here, but got {iterations}",
                key="options.iterations",
            )
        return self


class Answer(Scenario):
    """Should this be offloaded, how, and what does it bring?

    ``effort``: ``quick`` compares evenly spread plans, ``full`` searches as `tune plan` does.
    ``peers``: also other systems' strategies, each at its best setting. ``timelines``: also
    what runs when. ``plan``: one that is there already, such as a job's, in the place of a search.
    """

    effort: Literal["quick", "full"] = "quick"
    peers: bool = True
    timelines: bool = True
    plan: PostedPlan | None = None


class WhatIf(Scenario):
    """A grid: every strategy at every combination of the values."""

    strategies: Annotated[list[Name], Field(min_length=1, max_length=16)] = Field(
        default_factory=lambda: ["zero3_offload", "ebbtide"]
    )
    gpu_memory_bytes: Annotated[list[Positive], Field(min_length=1, max_length=256)] | None = None
    changes: Annotated[dict[Name, Annotated[list[float], Field(min_length=1, max_length=256)]], Field(max_length=6)] = (
        Field(default_factory=dict, description="field of the machine or the workload -> values")
    )
    format: Literal["json", "csv"] = "json"

    @property
    def cells(self) -> int:
        return (
            len(self.strategies)
            * len(self.gpu_memory_bytes or [0])
            * math.prod(len(values) for values in self.changes.values())
        )


class PlanJob(Scenario):
    """The input of `tune plan`. ``name``: the title of the job in lists."""

    kind: Literal["plan"] = "plan"
    name: Name | None = None
    memory_margin: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] | None = None
    robust: bool = False
    restart_s: Seconds = 60.0
    seed: Annotated[int, Field(ge=0, le=2**31)] = 0


class WhatIfJob(WhatIf):
    """A grid that is too large to wait for."""

    kind: Literal["what-if"] = "what-if"
    name: Name | None = None


class SearchJob(Scenario):
    """The input of `tune search`: which configuration would train fastest.

    Attributes:
        free: the knobs that may change. The others are the scenario's, and ``recompute`` is off
            with ``keep_activations``.
        gpus: the most to use if ``gpus`` is free.
        global_batch: samples per optimizer step. Without it the batch may change.
        offload: whether optimizer state lives in host memory, if ``offload`` is not free.
        ds_config: for everything that no knob decides.
    """

    kind: Literal["search"] = "search"
    name: Name | None = None
    free: Annotated[list[Knob], Field(min_length=1, max_length=len(KNOBS))] = Field(default_factory=lambda: list(KNOBS))
    global_batch: Annotated[int, Field(ge=1, le=4096)] | None = None
    offload: bool = True
    memory_margin: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] | None = None
    trials: Annotated[int, Field(ge=1, le=300)] = 150
    seed: Annotated[int, Field(ge=0, le=2**31)] = 0

    @model_validator(mode="after")
    def _a_model(self) -> Self:
        if self.model is None:
            raise RuleError(
                "model must be given, because a profiled workload holds for one micro-batch size only, "
                "but got a workload",
                key="model",
            )
        return self


class Goodput(Request):
    """A question about the useful share of the time when the job fails; see `ebbtide.simulator.analysis.goodput`."""

    iteration_s: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
    mtbf_s: Annotated[float, Field(gt=0, le=1e10, allow_inf_nan=False)]
    stall_s: Seconds = 0.0
    interference_s: Seconds = 0.0
    persist_s: Seconds = 0.0
    restart_s: Seconds = 60.0
    interval_steps: Annotated[int, Field(ge=1, le=10**9)] | None = None


class PostedSpan(Request):
    """`ebbtide.simulator.timeline.Span`."""

    kind: Annotated[str, Field(max_length=40)]
    lane: Annotated[str, Field(max_length=40)]
    start_s: Seconds
    end_s: Seconds
    subgroup: int = -1
    layer: int = -1
    iteration: int = 0


class PostedSample(Request):
    """`ebbtide.simulator.timeline.MemorySample`."""

    t_s: Seconds
    device_bytes: Annotated[int, Field(ge=0, le=2**60)]
    host_bytes: Annotated[int, Field(ge=0, le=2**60)]


class Run(Request):
    """A measured training run: its timeline, and the plan that it ran under."""

    name: Name
    spans: Annotated[list[PostedSpan], Field(min_length=1, max_length=20_000)]
    memory: Annotated[list[PostedSample], Field(max_length=20_000)] = Field(default_factory=list)
    source: Literal["predicted", "measured"] = "measured"
    strategy: Name = "ebbtide"
    plan: PostedPlan | None = None
    measured_on: Annotated[str, Field(max_length=200)] = ""


class Planned(Request):
    """A plan and what it was made for; ``scenario`` gives stock's and the plan's timelines."""

    plan: PostedPlan
    scenario: Scenario


class Report(Request):
    """A page about a plan, what it was made for, and a run that was posted (by its id)."""

    plan: PostedPlan
    scenario: Scenario | None = None
    run: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")] | None = None


def check_model(config: dict[str, Any]) -> None:
    """Refuse what would take long to write out, and what only transformers could build: not here,
    where anybody may ask.

    Raises:
        ValueError: so many layers or experts that nobody has built it; an unknown family.
    """
    if is_deepspeed(config):
        raise RuleError("model must be a model's config, but this is DeepSpeed's: send it as ds_config", key="model")
    if refusal := quantized(config):
        raise RuleError(refusal, key="model.quantization_config")
    text = language_model(config)
    if "model_type" in text and family_numbers(text) is None:
        raise RuleError(
            f"model_type must be one of {', '.join(FAMILIES)} here, built as usual, but got "
            f"{text['model_type']!r}: ask `tune plan --model config.json`, or {DESCRIBE}",
            key="model.model_type",
        )
    layers, experts = (_largest(text, *KEYS[name]) for name in ("layers", "experts"))
    if layers > MOST_LAYERS or layers * (10 + 3 * experts) > MOST_BLOCKS:
        raise RuleError(
            f"model must have at most {MOST_LAYERS} layers and {MOST_BLOCKS} matrices here, but "
            f"got {layers} layers of {experts or 1} experts",
            key="model",
        )


def _largest(config: Mapping[str, Any], *names: str) -> int:
    return max([n for name in names if isinstance(n := config.get(name), int)], default=0)
