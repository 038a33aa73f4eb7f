"""The answers of the service, as OpenAPI tells them. Workers send JSON; a test holds it to these models."""

from typing import Any, Literal

from ebbtide.simulator.plan import Plan
from pydantic import BaseModel, ConfigDict, Field


class Answered(BaseModel):
    """Base of all answers: a field that is not told here is not sent."""

    model_config = ConfigDict(extra="forbid")


class Figures(Answered):
    """The numbers of one simulated iteration. Times in seconds, peaks in bytes of one rank."""

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
    """Bytes that one rank may take, margins taken off; `notes` says how large they are and why."""

    device_bytes: int
    host_bytes: int
    storage_bytes: int | None
    unified: bool = Field(description="device and host memory are one, and both peaks must fit into it")
    notes: list[str]


class Simulated(Figures):
    """The answer of `/simulate`. `reason`: what is missing; empty: it fits."""

    strategy: str
    fits: bool
    reason: str
    limits: LimitsTold
    spans: list[dict[str, Any]] | None = Field(None, description="with `timeline`: every op")
    memory: list[dict[str, Any]] | None = Field(None, description="with `timeline`: samples of both memories")


class RowTold(Figures):
    """One way to train. `speedup`: against stock; null where stock does not fit."""

    role: Literal["plan", "stock", "no offload", "variant", "peer"]
    label: str
    strategy: str
    setting: str
    fits: bool
    reason: str
    speedup: float | None


class LaneTold(Answered):
    """A lane of a timeline; spans are `[start_s, end_s, group, label]`."""

    name: str
    idle: float
    spans: list[tuple[float, float, str, str]]


class SamplesTold(Answered):
    """Memory over time, as equally long lists."""

    t_s: list[float]
    device_bytes: list[int]
    host_bytes: list[int]


class TimelineTold(Answered):
    """One iteration as the page draws it; `critical` is `[start_s, end_s, group, lane]` without gaps."""

    strategy: str
    source: str
    duration_s: float
    lanes: list[LaneTold]
    critical: list[tuple[float, float, str, str]]
    memory: SamplesTold


class GoodputRow(Answered):
    """The share of useful time, at the best checkpoint interval."""

    interval_steps: int
    stall_s: float
    goodput: float
    useful_iteration_s: float | None


class GoodputByRole(Answered):
    """What failures leave of the time, for each role."""

    mtbf_s: float
    restart_s: float
    by_role: dict[str, GoodputRow]


class UseTold(Answered):
    """How to train under the plan: DeepSpeed's config, the command, the Trainer's arguments."""

    deepspeed: dict[str, Any]
    command: str
    trainer: str


class MachineTold(Answered):
    """The machine that was asked about."""

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
    """What is trained."""

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
    """The answer of `/answer`: what to do, and the table that says why."""

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
    """Changes of the scenario under which a plan fits."""

    label: str
    changes: dict[str, Any]
    iteration_s: float
    tokens_per_s: float | None


class WaysTold(Answered):
    """The nearest changes that fit, the cheapest first; `another_way` is one sentence or two."""

    ways: list[Way]
    another_way: str


class Grid(Answered):
    """A row for each point, with a column for each change; as CSV with `format: csv`."""

    rows: list[dict[str, Any]]


class GoodputTold(Answered):
    """The share of useful time at an interval and at the best one, with rules of thumb."""

    interval_steps: int
    goodput: float
    best_interval_steps: int
    best_goodput: float
    young_interval_s: float
    daly_interval_s: float


class Trace(BaseModel):
    """A trace for ui.perfetto.dev."""

    model_config = ConfigDict(extra="allow")
    traceEvents: list[dict[str, Any]]  # noqa: N815 - the format's name


class PlanResult(Answered):
    """The result of a plan job."""

    plan: Plan
    quick_iteration_s: float


class Configured(Answered):
    """One configuration that a search has simulated."""

    configuration: dict[str, Any]
    deepspeed: dict[str, Any]
    fits: bool
    why_not: str | None
    iteration_s: float | None
    tokens_per_s: float
    device_peak_bytes: int
    host_peak_bytes: int


class SearchResult(Answered):
    """The result of a search job."""

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
    """The facts of a machine that a picker shows."""

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
    """A stored machine that this ebbtide cannot read. `DELETE /machines/{name}` removes it."""

    name: str
    reason: str


class Machines(Answered):
    """Presets, uploaded machines and the one that the server was started with."""

    machines: list[Pickable]
    unreadable: list[Unreadable]


class Profiled(Answered):
    """The workload that the server was started with."""

    name: str
    params: int
    machine: str
    label: str


class Models(Answered):
    """Known models, the profiled workload and all strategies."""

    models: list[str]
    workloads: list[Profiled]
    strategies: list[str]


class RunSummary(Answered):
    """A row of the list of runs."""

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
    """Runs, newest first."""

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
    """The name of what was stored or removed."""

    name: str


class Identified(Answered):
    """The id of what was removed."""

    id: str


class Health(Answered):
    """The state of the server: its store answers, and so many jobs wait."""

    status: Literal["ok"]
    version: str
    jobs_waiting: int
