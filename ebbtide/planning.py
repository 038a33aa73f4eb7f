"""The Python functions that search for plans, simulate what-if questions and read plan files."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebbtide.simulator.analysis.what_if import WORKLOAD_FIELDS
from ebbtide.simulator.machine import CHANGEABLE, Machine
from ebbtide.simulator.plan import Plan
from ebbtide.simulator.rules import RuleError, checked
from ebbtide.simulator.workload import Workload

if TYPE_CHECKING:
    import pandas as pd
    from ebbtide.simulator.analysis.what_if import Strategy


def plan(
    workload: Workload,
    machine: Machine,
    *,
    gpu_memory_bytes: float | None = None,
    host_memory_bytes: float | None = None,
    memory_margin: float | None = None,
    offload_parameters: bool = True,
    storage: "Mapping[str, int] | None" = None,
    endurance_bytes: float | None = None,
    subgroup_sizes: Sequence[int] | None = None,
    pieces: bool = False,
    robust: bool = False,
    mtbf_s: float | None = None,
    restart_s: float = 60.0,
    checkpoint_dir: str | None = None,
    seed: int = 0,
    effort: float | None = None,
    progress: "Callable[[float, str], None] | None" = None,
    device_memory_bytes: float | None = None,
) -> Plan:
    """Search for the fastest plan that fits into memory, for a workload on a machine.

    The result is deterministic. The search takes a few seconds to a minute.

    >>> machine = Machine.preset("RTX 4090")
    >>> workload = workload_from_model("Llama 3 8B", machine, sequence=1024)
    >>> plan(workload, machine).save("plan.json")

    Args:
        workload: Result of `workload_from_model`, `Workload.load` or `ebbtide.profiler.profile_engine`.
        machine: Result of `Machine.load` or `Machine.preset`.
        gpu_memory_bytes: Memory of each GPU that training may use. None: the machine's. ``device_memory_bytes`` is an
            older name of this argument.
        host_memory_bytes: Host memory of the machine, which its ranks share. None: the machine's own.
        memory_margin: Fraction of both memories to leave free. None: by how much the profiled peaks vary, or 5%.
        offload_parameters: True to let 16-bit parameters live in host memory between their uses if that is faster.
        storage: Folders for state that memory cannot hold, with the bytes that the ranks of a node may use in each.
        endurance_bytes: Bytes that may be written to these drives during their life.
        subgroup_sizes: Subgroup sizes to try, in elements. None: the usual ones. Empty: the workload's own only.
        pieces: True if the plan may divide DeepSpeed's subgroups into smaller ones (ZeRO-3).
        robust: True to minimize the upper end of the interval around the predicted time.
        mtbf_s: Mean seconds between failures of the job, for the best interval of checkpoints.
        restart_s: Seconds from a failure until training runs again.
        checkpoint_dir: Folder for checkpoints.
        seed: Random seed of the search.
        effort: Fraction of a full search's evaluations, above 0 and at most 1. None: 1.
        progress: Called with the finished fraction and the name of the current phase.

    Raises:
        ImpossibleError: No plan fits into memory. The message names changes of the training with which a plan
            fits. If the workload was made from a model, ``error.ways`` holds these changes with their plans.
    """
    import ebbtide.tuner
    from ebbtide.simulator.limits import within

    if None not in (gpu_memory_bytes, device_memory_bytes):
        raise RuleError("gpu_memory_bytes and device_memory_bytes are two names of one size: leave one out")
    asked: dict[str, Any] = {
        "offload_parameters": offload_parameters,
        "storage": storage,
        "subgroup_sizes": subgroup_sizes,
        "pieces": pieces,
        "memory_margin": memory_margin,
    }
    notes: tuple[str, ...] = ()
    device_bytes = device_memory_bytes if gpu_memory_bytes is None else gpu_memory_bytes
    if isinstance(machine, Machine):
        machine, memory, notes = within(machine, device_bytes, host_memory_bytes)
        asked |= memory
    reporting: dict[str, Any] = {} if progress is None else {"progress": progress}
    try:
        made = ebbtide.tuner.plan(
            workload,
            machine,
            **asked,
            **reporting,
            endurance_bytes=endurance_bytes,
            robust=robust,
            mtbf_s=mtbf_s,
            restart_s=restart_s,
            checkpoint_dir=checkpoint_dir,
            seed=seed,
            effort=effort,
        )
    except ebbtide.tuner.ImpossibleError as error:
        raise _with_ways(error, workload, machine, asked) from None
    return made.model_copy(update={"reasons": (*made.reasons, *notes)}) if notes else made


def _with_ways(error: Any, workload: Workload, machine: Machine, options: dict[str, Any]) -> Any:
    from ebbtide.tuner import ImpossibleError
    from ebbtide.tuner.advice.tried import asked_of
    from ebbtide.tuner.advice.ways_out import ways_out

    if workload.job is None:
        return error
    asked = asked_of(options)
    ways = ways_out(workload.job, machine, asked["freedom"], **asked["asked"])
    lines = [f"{way.label}: {way.iteration_s:.3g} s per iteration" for way in ways]
    impossible = ImpossibleError(error.fact, f"These fit: {'; '.join(lines)}" if lines else error.advice, error.missing)
    impossible.ways = tuple(ways)
    return impossible


Values = Sequence[float] | float | None


def what_if(
    workload: Workload,
    machine: Machine,
    strategies: "Sequence[Strategy] | None" = None,
    gpu_memory_bytes: Values = None,
    *,
    n_jobs: int | None = None,
    progress: bool | None = None,
    cpu_cores: Values = None,
    host_memory_bytes: Values = None,
    h2d_bytes_per_s: Values = None,
    d2h_bytes_per_s: Values = None,
    pageable_h2d_bytes_per_s: Values = None,
    pageable_d2h_bytes_per_s: Values = None,
    dram_bytes_per_s: Values = None,
    host_copy_bytes_per_s: Values = None,
    host_adam_params_per_s: Values = None,
    stock_host_adam_params_per_s: Values = None,
    stock_host_adam_thread_params_per_s: Values = None,
    device_adam_params_per_s: Values = None,
    attention_flops_per_s: Values = None,
    device_memory_bytes_per_s: Values = None,
    storage_write_bytes_per_s: Values = None,
    storage_read_bytes_per_s: Values = None,
    network_bytes_per_s: Values = None,
    expert_flops_per_s: Values = None,
    gather_bytes_per_s: Values = None,
    reduce_bytes_per_s: Values = None,
    duplex_factor: Values = None,
    ranks_per_node: Values = None,
    gradient_accumulation_steps: Values = None,
    clip: Values = None,
    clip_rate: Values = None,
    **others: Values,
) -> "pd.DataFrame":
    """Simulate training for every combination of given strategies, GPU memory sizes and values of other fields. Return
    a table with one row for each combination.

    For the strategy "ebbtide", a short search finds the plan that is simulated. The search follows the rules of the
    function `plan` for subgroup sizes, early updates and memory that stays free.

    >>> table = what_if(workload, machine, gpu_memory_bytes=[24e9, 80e9], h2d_bytes_per_s=[25e9, 50e9])
    >>> len(table)
    8

    Args:
        workload: Training job to simulate.
        machine: Machine on which the job is simulated.
        strategies: Names of the offloading strategies to compare. "stock" is DeepSpeed's optimizer offload at the
            workload's ZeRO stage. None compares it with "ebbtide".
        gpu_memory_bytes: Sizes of GPU memory to try, in bytes. None tries the machine's own size.
        n_jobs: Number of worker processes, as in joblib.
        progress: True to show a progress bar. None: only if there are 50 simulations or more.
        others: Each further argument is a field of the machine or of the workload, with the values to try. The function
            of the same name in `ebbtide.simulator.analysis.what_if` describes these fields and the columns of the
            table. Other names are refused.

    Raises:
        ValueError: A strategy, an option or a field is unknown, or there is nothing to simulate.
    """
    varied: dict[str, Any] = {
        name: value for name, value in locals().items() if name in FIELDS and value is not None
    } | others
    sizes: Any = gpu_memory_bytes
    from ebbtide.simulator.analysis.what_if import what_if as simulated
    from ebbtide.tuner.placements.planning import quick_or_roomiest

    return simulated(
        workload, machine, strategies, sizes, planner=quick_or_roomiest, n_jobs=n_jobs, progress=progress, **varied
    )


FIELDS = (*CHANGEABLE, *WORKLOAD_FIELDS)


@checked
def load_plan(path: str | Path) -> Plan:
    """Read a plan from its JSON file.

    >>> load_plan("plan.json").prediction.iteration_s

    Raises:
        PlanError: The file is not a plan that this version of ebbtide can use. The message names the field.
    """
    return Plan.load(path)
