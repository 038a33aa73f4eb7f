"""The limits of the planning service, and the checks that a request keeps them."""

import math
from dataclasses import dataclass

from ebbtide.simulator.limits import MIB
from ebbtide.simulator.rules import RuleError
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.service.requests import ITERATIONS, MOST_SUBGROUPS, Scenario, SearchJob, Simulate, WhatIf, params_of


@dataclass(frozen=True)
class Quota:
    """The limits of the service. Times are in seconds and sizes in bytes.

    A light request has few simulated operations and is answered quickly. Heavy requests and jobs run at low priority.

    Attributes:
        body_bytes: Size of a request without a timeline.
        run_bytes: Size of a request with a timeline.
        light_ops: Number of simulated operations up to which a request is light.
        heavy_ops: Number of operations that one simulation may have. All simulations of a request together may have
            40 times as many.
        searched_ops: Number of operations that one simulation may have in a request that searches for a plan, as a
            search needs hundreds of simulations.
        cells: Number of points of a what-if request that is answered directly.
        job_cells: Number of points of a what-if request that runs as a job.
        light_s: Wall time after which the worker process of a light request is stopped.
        heavy_s: Wall time after which the worker process of a heavy request is stopped.
        job_s: Wall time after which a job is stopped.
        worker_bytes: Address space that a worker process may take in addition to its initial size.
        light_waiting: Number of light requests that may wait. More are refused with status 429.
        heavy_waiting: Number of heavy requests that may wait. More are refused with status 429.
        jobs_waiting: Number of jobs that may wait. More are refused with status 429.
        attempts: Largest number of starts of a job. A job is started again if the server ended while the job ran. The
            limit can be high, because a job cannot make the server end: if a job's worker process ends, only the job
            fails.
        keep_s: Age at which finished jobs are deleted.
        run_keep_s: Age at which uploaded training runs are deleted.
        kept_rows: Largest number of finished jobs that are kept, and also the largest number of training runs that
            are kept.
        head_s: Time in which a client must send a request's head.
        body_s: Time in which a client must send a request's body.
        cache_bytes: Size of all cached results together.
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
    # Wall time. The process has low priority, so on a busy machine this is a multiple of its CPU time.
    heavy_s: float = 180.0
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


def estimated_ops(scenario: Scenario) -> int:
    """Return an estimate of the number of operations in one simulation of a request's training job."""
    fixed, each, micro = _ops(scenario)
    return fixed + each * micro


def _ops(scenario: Scenario) -> tuple[int, int, int]:
    if isinstance(scenario.workload, Workload):
        layers, subgroups = len(scenario.workload.layers), len(scenario.workload.subgroups)
        micro, params = scenario.workload.gradient_accumulation_steps, scenario.workload.params
    elif scenario.workload is not None:  # a name that was not replaced by its workload, which is refused later
        return 0, 0, 0
    else:
        job = scenario.job
        layers, micro = job.architecture.layers + 2, job.accumulation
        params = params_of(job)
        subgroups = math.ceil(layers / 4) + 16 + params // job.sub_group_size
    if scenario.subgroup_size is not None:
        subgroups = math.ceil(layers / 4) + 16 + params // scenario.subgroup_size
    return ITERATIONS * min(subgroups, MOST_SUBGROUPS) * 6, ITERATIONS * layers * 5, micro


def _searches(asked: Scenario) -> bool:
    if getattr(asked, "plan", None) is not None:
        return False
    if isinstance(asked, WhatIf):
        return asked.strategies is None or "ebbtide" in asked.strategies
    return not isinstance(asked, Simulate) or asked.strategy == "ebbtide"


def check_search_ops(asked: Scenario, quota: Quota) -> None:
    """Refuse a request to the service for a plan search that would exceed the memory of a worker process.

    Raises:
        RuleError: The step has too many micro-batches. The message says how many are allowed.
    """
    batch = asked.global_batch if isinstance(asked, SearchJob) and "accumulation" in asked.free else None
    if batch is not None:  # if accumulation is free, a step may accumulate the whole batch
        asked = asked.model_copy(update={"accumulation": batch})
    fixed, each, micro = _ops(asked)
    if fixed + each * micro <= quota.searched_ops or not _searches(asked):
        return
    most = (quota.searched_ops - fixed) // each
    if most < 1:
        raise RuleError(
            f"subgroup_size must be larger: a simulation of this model has at least {fixed + each} operations, and a "
            f"search on this server may use at most {quota.searched_ops} per simulation",
            "subgroup_size",
        )
    if batch is not None:
        raise RuleError(
            f"global_batch must be at most {most} for this model on this server if the search varies accumulation, "
            f"but got {batch}. Lower global_batch, or leave accumulation out of free",
            key="global_batch",
        )
    raise RuleError(
        f"accumulation must be at most {most} for this model on this server, but got {micro}. "
        f"Plan with {most}: the plan also serves steps of more micro-batches",
        key="accumulation",
    )


def check_ops(ops: int, simulations: int, quota: Quota) -> bool:
    """Return True if the simulations of a request are few enough for the service's queue of light requests.

    Args:
        ops: Number of operations in one simulation.

    Raises:
        ValueError: The simulations are more than the service allows for one request.
    """
    total = ops * simulations
    for got, most in ((ops, quota.heavy_ops), (total, quota.heavy_ops * 40)):
        if got > most:
            raise RuleError(
                f"accumulation, layers and subgroups must make at most {most} simulated ops, but "
                f"got about {got}: lower accumulation or raise subgroup_size",
                key="accumulation",
            )
    return total <= quota.light_ops
