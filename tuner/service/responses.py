"""The responses of the planning service, as types for the service's OpenAPI description.

A test compares the JSON that worker processes return with these types.
"""

from typing import Any, Literal

from ebbtide.simulator.plan import Plan
from ebbtide.tuner.answer.verdict import Role
from pydantic import BaseModel, ConfigDict, Field


class Answered(BaseModel):
    """The base class of the planning service's responses. A field that is not declared is not sent."""

    model_config = ConfigDict(extra="forbid")


class Figures(Answered):
    """The times in seconds of one simulated training iteration, and its memory peaks in bytes of one rank."""

    iteration_s: float
    forward_s: float
    backward_s: float
    step_s: float
    update_s: float
    loop_s: float
    device_peak_bytes: int
    host_peak_bytes: int
    storage_bytes: int
    tokens_per_s: float | None = Field(
        description="Tokens that all ranks together process per second. Null: the workload's tokens are not known."
    )


class MemoryLimits(Answered):
    """The memory in bytes that one rank may use after safety margins are subtracted. `notes` gives the
    margins and their reasons.
    """

    device_bytes: int
    host_bytes: int
    storage_bytes: int | None
    unified: bool = Field(description="True if GPU and CPU share one memory, into which both peaks must fit together.")
    notes: list[str]


class Simulated(Figures):
    """The response of `/simulate`. `reason` names the memory that is too small, and is empty if everything fits."""

    strategy: str
    fits: bool
    reason: str
    notes: list[str] = Field(description="What was assumed, and what is not simulated.")
    limits: MemoryLimits
    spans: list[dict[str, Any]] | None = Field(
        None, description="Every op with its start and end, if the request has `timeline`."
    )
    memory: list[dict[str, Any]] | None = Field(
        None, description="Samples of the GPU and host memory in use, if the request has `timeline`."
    )


class AnswerRow(Figures):
    """A row of the response of `/answer`: one simulated way to train, such as a plan.

    `speedup` is relative to DeepSpeed without a plan at the job's ZeRO stage (role `stock`), and null if that does not
    fit. `speedup_low` and `speedup_high` hold it in nine runs of ten, as `iteration_low_s` and `iteration_high_s` hold
    the time. They are null for other systems and variants. `speedup_over_best` is relative to DeepSpeed alone at its
    best (`best_stock` of the answer).
    """

    role: Role
    label: str
    strategy: str
    setting: str
    fits: bool
    reason: str
    iteration_low_s: float | None
    iteration_high_s: float | None
    speedup: float | None
    speedup_low: float | None
    speedup_high: float | None
    speedup_over_best: float | None


class BestStock(Answered):
    """The fastest way of DeepSpeed alone that fits, at any ZeRO stage and with any of its own offload settings.

    `name` is such as `ZeRO-2` or `ZeRO-3, ratio 0.3`. `label` is the label of its row, whose role is `best stock`, or
    `stock` if the setting at the job's own ZeRO stage is the fastest.
    """

    name: str
    label: str
    iteration_s: float


class FasterRow(Answered):
    """A change that leaves the samples of a step as they are, with which they train faster.

    `options` are the options of `tune plan` that make the change, and `changes` the fields of a request that do.
    `factor` is relative to the faster of plan and no offload in this answer. The time is that of a short plan search.
    `deepspeed` is a complete DeepSpeed config for the change, with the plan "automatic" if it offloads.
    """

    label: str
    options: str
    changes: dict[str, Any]
    iteration_s: float
    tokens_per_s: float | None
    factor: float
    device_peak_bytes: int
    host_peak_bytes: int
    offloads: bool
    deepspeed: dict[str, Any]


class LaneSpans(Answered):
    """One lane of a timeline: a resource that runs operations one after the other, such as a copy direction.

    Its spans are `[start_s, end_s, group, label]`. A span is an operation, or several in a row. Its `group` is a
    category such as `forward` or `gradients`. Its `label` is a text to show.
    """

    name: str
    idle: float
    spans: list[tuple[float, float, str, str]]


class MemorySamples(Answered):
    """The memory use of one rank over a timeline: lists of equal length with times, bytes in GPU memory,
    and bytes in host memory.
    """

    t_s: list[float]
    device_bytes: list[int]
    host_bytes: list[int]


class TimelineResponse(Answered):
    """A timeline of one training iteration.

    `critical` is its critical path: spans `[start_s, end_s, group, lane]` without gaps. The `group` of a span is the
    category of its operation, such as `forward` or `gradients`.
    """

    strategy: str
    role: Role
    source: str
    duration_s: float
    lanes: list[LaneSpans]
    critical: list[tuple[float, float, str, str]]
    memory: MemorySamples


class GoodputRow(Answered):
    """The goodput (useful share of training time) of one way to train, with its best checkpoint interval."""

    interval_steps: int
    stall_s: float
    goodput: float
    useful_iteration_s: float | None


class GoodputByRole(Answered):
    """The goodput (useful share of training time) under failures, for training under a plan and for each baseline."""

    mtbf_s: float
    restart_s: float
    by_role: dict[str, GoodputRow]


class UseInstructions(Answered):
    """The instructions for training as advised, under the plan or without offload: DeepSpeed config, command, and
    arguments for the Hugging Face Trainer.
    """

    deepspeed: dict[str, Any]
    command: str
    trainer: str


class MachineFacts(Answered):
    """The facts about a machine that responses of the planning service copy unchanged from the machine's profile."""

    name: str
    device_name: str
    device_kind: str
    gpus_per_node: int
    default_gpus: int
    device_memory_bytes: int
    host_memory_bytes: int
    unified_memory: bool


class MachineSummary(MachineFacts):
    """The machine that a request to the service named: kind of GPU, memory sizes, and bandwidth of the link."""

    measured_with: str
    link_bytes_per_s: float
    link_source: str


class WorkloadSummary(Answered):
    """The training job that a request to the planning service described: sizes of the model, number of
    ranks, and subgroups.
    """

    name: str
    params: int
    ranks_per_node: int
    nodes: int
    tokens_per_iteration: int | None
    provenance: str
    model_params: int | None
    layers: int
    subgroups: int


class AnswerResponse(Answered):
    """The response of `/answer`: advice on offloading, and the table of predictions that supports it."""

    verdict: Literal["offload", "no offload", "impossible"]
    sentence: str
    goodput: GoodputByRole | None
    effort: Literal["quick", "full"]
    bound_s: float | None
    rows: list[AnswerRow]
    best_stock: BestStock | None = Field(description="Null: DeepSpeed alone does not fit at any ZeRO stage.")
    faster: list[FasterRow] | None = Field(
        description="Up to three changes with which the same samples train faster, the dearest last. Null: the request "
        "did not ask for them."
    )
    memory: dict[str, dict[str, dict[str, int]]] = Field(
        description="Bytes in use at the memory peak, by kind of data, for each memory (such as `device`) and for each "
        "way to train (`plan`, `stock`, `no offload`)."
    )
    timelines: dict[str, TimelineResponse | None] | None
    plan: Plan | None
    use: UseInstructions | None
    limits: MemoryLimits
    about: str = Field(description="Model, parameters, machine and source of its rates in one line.")
    notes: list[str] = Field(description="What was assumed, and what is not simulated.")
    machine: MachineSummary
    workload: WorkloadSummary


class SweptPoint(Answered):
    """One point of the response of `/sweep`: the ways to train there, and the plan if one fits. Or the reason why there
    is no answer.
    """

    rows: list[AnswerRow]
    plan: Plan | None
    refused: str


class Swept(Answered):
    """The response of `/sweep`: one point for each change, in the same order.

    A point's plan is the fastest one that fits there of the plans that were found at all points. So more memory and a
    faster link are never slower.
    """

    points: list[SweptPoint]


class CardRow(Answered):
    """A row of the response of `/cards`: the advised way to train on one machine. If none fits, `role` is null."""

    machine: str
    device_name: str
    gpus: int
    measured: bool
    verdict: Literal["offload", "no offload", "impossible"]
    role: Literal["plan", "no offload"] | None
    reason: str
    iteration_s: float | None
    tokens_per_s: float | None
    device_peak_bytes: int | None
    host_peak_bytes: int | None
    device_memory_bytes: int
    host_memory_bytes: int


class CardsResponse(Answered):
    """The response of `/cards`: a row for each machine, with the figures of a quick `/answer` for it."""

    rows: list[CardRow]


class WayRow(Answered):
    """A set of changes to a training job with which a plan for the job fits into memory: an entry of the
    response of `/ways-out`.
    """

    label: str
    changes: dict[str, Any]
    iteration_s: float
    tokens_per_s: float | None


class WaysResponse(Answered):
    """The response of `/ways-out`: the smallest changes with which a training job fits into memory, the cheapest first.

    `another_way` has further advice in words.
    """

    ways: list[WayRow]
    another_way: str


class Grid(Answered):
    """The response of `/what-if`: one row for each strategy at each combination of the varied values.

    The rows are sent as JSON or, on request, as CSV.
    """

    rows: list[dict[str, Any]]


class GoodputResponse(Answered):
    """The response of `/goodput`: the goodput (useful share of training time) with a given checkpoint
    interval and with the best one.

    The intervals by Young's and Daly's rules of thumb are also included.
    """

    interval_steps: int
    goodput: float
    best_interval_steps: int
    best_goodput: float
    young_interval_s: float
    daly_interval_s: float


class Trace(BaseModel):
    """A trace file with timelines of training iterations, which ui.perfetto.dev can show."""

    model_config = ConfigDict(extra="allow")
    traceEvents: list[dict[str, Any]]  # noqa: N815 - the format's name


class PlanResult(Answered):
    """The result of a background job that searched for the best plan: the plan and, for comparison, the
    iteration time under the plan of a quick search: expected, and at the slow end of its interval.
    """

    plan: Plan
    quick_iteration_s: float
    quick_high_s: float
    robust: bool


class Configured(Answered):
    """One training configuration that a search has simulated, with its prediction and its DeepSpeed config."""

    configuration: dict[str, Any]
    deepspeed: dict[str, Any]
    fits: bool
    why_not: str | None
    iteration_s: float | None
    tokens_per_s: float
    device_peak_bytes: int
    host_peak_bytes: int
    quick: bool = Field(description="True if the plan is that of a quick search, and so may be slower than necessary.")


class SearchResult(Answered):
    """The result of the planning service's background job that searched for the fastest training configuration."""

    remarks: list[str]
    complete: bool
    combinations: int
    free: list[str]
    global_batch: int | None
    best: Configured | None
    front: list[Configured]
    costs: dict[str, dict[str, float]]
    untried: dict[str, dict[str, float]] = Field(
        description="For each setting, the values of which no configuration was simulated although some may fit, with "
        "the most that they can reach, relative to the fastest configuration."
    )
    outcomes: list[Configured]


class Pickable(MachineFacts):
    """The facts about a machine that the selection list on the planning service's web page shows."""

    preset: bool
    multi_node: bool
    estimates: bool
    link_bytes_per_s: float


class Unreadable(Answered):
    """A stored machine that this version of ebbtide cannot read. `DELETE /machines/{name}` removes it."""

    name: str
    reason: str


class Machines(Answered):
    """The machines that the planning server knows: presets, uploaded machines, and the machine that the
    server was started with.
    """

    machines: list[Pickable]
    unreadable: list[Unreadable]


class Profiled(Answered):
    """The measured workload that the planning server was started with, as `GET /models` lists it."""

    name: str
    params: int
    machine: str
    label: str
    first: bool = Field(description="True if the page opens with it, as with `tune serve --show FOLDER`.")


class Models(Answered):
    """The names that the planning server accepts in requests: models, measured workloads and strategies."""

    models: list[str]
    workloads: list[Profiled]
    strategies: list[str]


class RunSummary(Answered):
    """One row in the planning server's list of uploaded training runs."""

    id: str
    name: str
    created_s: float
    source: str
    strategy: str
    measured_on: str
    iteration_s: float
    predicted_s: float | None
    spans: int


class Runs(Answered):
    """The planning server's list of uploaded training runs, the newest first."""

    runs: list[RunSummary]


class RunResponse(Answered):
    """An uploaded training run with its timeline and the plan that it trained under.

    `planned` is the plan's predicted timeline. It is null if the server does not know the plan's workload or machine.
    """

    name: str
    source: str
    strategy: str
    measured_on: str
    iteration_s: float
    predicted_s: float | None
    spans: int
    phases: dict[str, float]
    view: TimelineResponse
    planned: TimelineResponse | None
    plan: Plan | None


class Named(Answered):
    """The response after a machine was stored or removed: the machine's name."""

    name: str


class Identified(Answered):
    """The response after a training run was removed: the run's id."""

    id: str


class Health(Answered):
    """The response of a health check of the planning server. It is sent only if the database works, and has
    the number of waiting jobs.
    """

    status: Literal["ok"]
    version: str
    jobs_waiting: int


class Broken(BaseModel):
    """One rule of the planning service that a request broke: an entry of an error response."""

    key: str
    rule: str
    value: str | None = None


class Problem(BaseModel):
    """The body of every error response of the planning service."""

    errors: list[Broken] = Field(min_length=1)


class JobState(BaseModel):
    """The state of a background job of the planning service. ``attempts`` counts starts: more than 1 if the
    server ended while the job ran.
    """

    id: str
    kind: str
    title: str
    state: str
    attempts: int
    share: float
    note: str
    created_s: float
    started_s: float | None
    finished_s: float | None
    history: list[dict[str, Any]] = Field(default_factory=list)
