"""The Python functions that search for plans, simulate what-if questions and read plan files."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import Plan
from ebbtide.simulator.rules import checked
from ebbtide.simulator.workload import Workload

if TYPE_CHECKING:
    import pandas as pd
    from ebbtide.simulator.analysis.what_if import Strategy


def plan(workload: Workload, machine: Machine, **options: Any) -> Plan:
    """Search for the fastest plan that fits into memory, for a workload on a machine.

    The result is deterministic. The search takes a few seconds to a minute.

    >>> machine = Machine.preset("RTX 4090")
    >>> workload = workload_from_model("Llama 3 8B", machine, sequence=1024)
    >>> plan(workload, machine).save("plan.json")

    Args:
        workload: Result of `workload_from_model`, `Workload.load` or `ebbtide.profiler.profile_engine`.
        machine: Result of `Machine.load` or `Machine.preset`.
        options: Options of `ebbtide.tuner.plan`: ``device_memory_bytes``, ``host_memory_bytes``,
            ``memory_margin``, ``mtbf_s``, ``storage``, ``subgroup_sizes``, ``robust``, ``progress`` ...

    Raises:
        ImpossibleError: No plan fits into memory. The message names changes of the training with which a plan
            fits. If the workload was made from a model, ``error.ways`` holds these changes with their plans.
    """
    import ebbtide.tuner

    try:
        return ebbtide.tuner.plan(workload, machine, **options)
    except ebbtide.tuner.ImpossibleError as error:
        raise _with_ways(error, workload, machine, options) from None


def _with_ways(error: Any, workload: Workload, machine: Machine, options: dict[str, Any]) -> Any:
    from ebbtide.tuner import ImpossibleError
    from ebbtide.tuner.advice.ways_out import asked_of, ways_out

    if workload.job is None:
        return error
    ways = ways_out(workload.job, machine, **asked_of(options))
    lines = [f"{way.label}: {way.iteration_s:.3g} s per iteration" for way in ways]
    told = ImpossibleError(error.fact, f"These fit: {'; '.join(lines)}" if lines else error.advice, error.missing)
    told.ways = tuple(ways)
    return told


def what_if(
    workload: Workload,
    machine: Machine,
    strategies: "Sequence[Strategy] | None" = None,
    gpu_memory_bytes: Sequence[float] | None = None,
    **options: Any,
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
        strategies: Names of the offloading strategies to compare. None compares DeepSpeed's optimizer offload at the
            workload's ZeRO stage with ebbtide.
        gpu_memory_bytes: Sizes of GPU memory to try, in bytes. None tries the machine's own size.
        options: Lists of values to try, by field of the machine or of the workload. The function of the same name in
            `ebbtide.simulator.analysis.what_if` describes these fields and the columns of the table.

    Raises:
        ValueError: A strategy, an option or a field is unknown, or there is nothing to simulate.
    """
    from ebbtide.simulator.analysis.what_if import what_if as simulated
    from ebbtide.tuner.advice.even import quick_or_roomiest

    return simulated(workload, machine, strategies, gpu_memory_bytes, planner=quick_or_roomiest, **options)


@checked
def load_plan(path: str | Path) -> Plan:
    """Read a plan from its JSON file.

    >>> load_plan("plan.json").prediction.iteration_s

    Raises:
        PlanError: The file is not a plan that this version of ebbtide can use. The message names the field.
    """
    return Plan.load(path)
