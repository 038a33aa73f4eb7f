"""The responses of the planning service for OpenAPI. A test compares workers' JSON with these models."""

from typing import Any, Literal

from ebbtide.simulator.plan import Plan
from pydantic import BaseModel, ConfigDict, Field


class Answered(BaseModel):
    """The base class of the service's responses. A field that is not declared is not sent."""

    model_config = ConfigDict(extra="forbid")


class Figures(Answered):
    """The figures of one simulated iteration. Times are in seconds, and peaks in bytes of one rank."""

    iteration_s: float
    forward_s: float
    backward_s: float
    step_s: float
    update_s: float
    loop_s: float
    device_peak_bytes: int
    host_peak_bytes: int
    storage_bytes: int
    tokens_per_s: float | None = Field(description="of all ranks; null: the workload's tokens are not known")


class LimitsTold(Answered):
    """The memory that one rank may use in bytes, after margins. `notes` gives the margins and their reasons."""

    device_bytes: int
    host_bytes: int
    storage_bytes: int | None
    unified: bool = Field(description="device and host memory are one, and both peaks must fit into it")
    notes: list[str]


class Simulated(Figures):
    """The response of `/simulate`. `reason` says what does not fit, and is empty if everything fits."""

    strategy: str
    fits: bool
    reason: str
    limits: LimitsTold
    spans: list[dict[str, Any]] | None = Field(None, description="with `timeline`: every op")
    memory: list[dict[str, Any]] | None = Field(None, description="with `timeline`: samples of both memories")


class RowTold(Figures):
    """A simulated way to train. `speedup` is relative to stock, and null if stock does not fit."""

    role: Literal["plan", "stock", "no offload", "variant", "peer"]
    label: str
    strategy: str
    setting: str
    fits: bool
    reason: str
    speedup: float | None


class LaneTold(Answered):
    """A lane of a timeline. Its spans are `[start_s, end_s, group, label]`."""

    name: str
    idle: float
    spans: list[tuple[float, float, str, str]]


class SamplesTold(Answered):
    """Memory use over time, as lists of equal length."""

    t_s: list[float]
    device_bytes: list[int]
    host_bytes: list[int]


class TimelineTold(Answered):
    """A timeline of one iteration. `critical`, the critical path, has `[start_s, end_s, group, lane]`, without
    gaps.
    """

    strategy: str
    source: str
    duration_s: float
    lanes: list[LaneTold]
    critical: list[tuple[float, float, str, str]]
    memory: SamplesTold


class GoodputRow(Answered):
    """The share of useful training time at the best checkpoint interval."""

    interval_steps: int
    stall_s: float
    goodput: float
    useful_iteration_s: float | None


class GoodputByRole(Answered):
    """The share of useful training time with failures, for the plan and each baseline."""

    mtbf_s: float
    restart_s: float
    by_role: dict[str, GoodputRow]


class UseTold(Answered):
    """The DeepSpeed config, the command and the Trainer's arguments for training under a plan."""

    deepspeed: dict[str, Any]
    command: str
    trainer: str


class MachineTold(Answered):
    """The facts of the machine that a request was about."""

    name: str
    device_name: str
    device_kind: str
    gpus_per_node: int
    device_memory_bytes: int
    host_memory_bytes: int
    unified_memory: bool
    measured_with: str
    link_bytes_per_s: float
    link_source: str


class WorkloadTold(Answered):
    """The facts of the training job that a request was about."""

    name: str
    params: int
    ranks_per_node: int
    nodes: int
    tokens_per_iteration: int | None
    provenance: str
    model_params: int | None
    layers: int
    subgroups: int


class AnswerTold(Answered):
    """The response of `/answer`: the advice on offloading, and the table of predictions that supports it."""

    verdict: Literal["offload", "no offload", "impossible"]
    sentence: str
    goodput: GoodputByRole | None
    effort: Literal["quick", "full"]
    bound_s: float | None
    rows: list[RowTold]
    memory: dict[str, dict[str, dict[str, int]]] = Field(description="role, memory, kind: bytes at the peak")
    timelines: dict[str, TimelineTold | None] | None
    plan: Plan | None
    use: UseTold | None
    limits: LimitsTold
    machine: MachineTold
    workload: WorkloadTold


class Way(Answered):
    """A set of changes of a scenario under which a plan fits."""

    label: str
    changes: dict[str, Any]
    iteration_s: float
    tokens_per_s: float | None


class WaysTold(Answered):
    """The smallest changes that make a job fit, the cheapest first. `another_way` has further advice in words."""

    ways: list[Way]
    another_way: str


class Grid(Answered):
    """A grid of predictions: a row for each point and a column for each change. It is sent as CSV on request."""

    rows: list[dict[str, Any]]


class GoodputTold(Answered):
    """The share of useful training time at a checkpoint interval and at the best one, with rules of thumb."""

    interval_steps: int
    goodput: float
    best_interval_steps: int
    best_goodput: float
    young_interval_s: float
    daly_interval_s: float


class Trace(BaseModel):
    """A trace of timelines for ui.perfetto.dev."""

    model_config = ConfigDict(extra="allow")
    traceEvents: list[dict[str, Any]]  # noqa: N815 - the format's name


class PlanResult(Answered):
    """The result of a job that searched the best plan."""

    plan: Plan
    quick_iteration_s: float


class Configured(Answered):
    """A training configuration that a search has simulated."""

    configuration: dict[str, Any]
    deepspeed: dict[str, Any]
    fits: bool
    why_not: str | None
    iteration_s: float | None
    tokens_per_s: float
    device_peak_bytes: int
    host_peak_bytes: int


class SearchResult(Answered):
    """The result of a job that searched training configurations."""

    remarks: list[str]
    complete: bool
    combinations: int
    free: list[str]
    global_batch: int | None
    best: Configured | None
    front: list[Configured]
    costs: dict[str, dict[str, float]]
    verified: list[dict[str, Any]]
    verified_elsewhere: str | None
    outcomes: list[Configured]


class Pickable(Answered):
    """The facts of a machine that a selection list shows."""

    name: str
    device_name: str
    device_kind: str
    gpus_per_node: int
    device_memory_bytes: int
    host_memory_bytes: int
    unified_memory: bool
    preset: bool
    multi_node: bool
    estimates: bool
    link_bytes_per_s: float


class Unreadable(Answered):
    """A stored machine that this version of ebbtide cannot read. `DELETE /machines/{name}` removes it."""

    name: str
    reason: str


class Machines(Answered):
    """Presets, uploaded machines and the machine that the server was started with."""

    machines: list[Pickable]
    unreadable: list[Unreadable]


class Profiled(Answered):
    """The profiled workload that the server was started with."""

    name: str
    params: int
    machine: str
    label: str


class Models(Answered):
    """The names of known models, of the profiled workload and of all strategies."""

    models: list[str]
    workloads: list[Profiled]
    strategies: list[str]


class RunSummary(Answered):
    """A row in the list of uploaded training runs."""

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
    """The list of uploaded training runs, the newest first."""

    runs: list[RunSummary]


class RunTold(Answered):
    """One run with its timeline and the plan that it ran under.

    ``planned``: the plan's predicted timeline. None: the server does not know the workload or the machine.
    """

    name: str
    source: str
    strategy: str
    measured_on: str
    iteration_s: float
    predicted_s: float | None
    spans: int
    phases: dict[str, float]
    view: TimelineTold
    planned: TimelineTold | None
    plan: Plan | None


class Named(Answered):
    """The name of a stored or removed machine."""

    name: str


class Identified(Answered):
    """The id of a removed training run."""

    id: str


class Health(Answered):
    """The state of the server: its database works, and the number of waiting jobs."""

    status: Literal["ok"]
    version: str
    jobs_waiting: int
