"""The planning service's background job that searches for the fastest training configuration, as ``tune
search`` does.
"""

from collections.abc import Callable
from typing import Any

from ebbtide.simulator.machine import Machine
from ebbtide.simulator.rules import RuleError
from ebbtide.tuner.service.requests import Quota, SearchJob
from ebbtide.tuner.service.scenario import USUAL_SUBGROUP, estimated_ops, machine_of, model_of, started_by, storage_of


def search_job(request: SearchJob, progress: Callable[[float, str], None]) -> dict[str, Any]:
    """Search for the fastest training configuration. Return every simulated configuration as JSON data, in
    the form of ``tune search -o``.

    Raises:
        ValueError: A name is unknown, or no configuration has the given values.
    """
    from ebbtide.simulator.estimates.deepspeed_keys import loaded
    from ebbtide.tuner.configurations.deciding import explore
    from ebbtide.tuner.configurations.evaluation import Question
    from ebbtide.tuner.configurations.report import as_json

    machine = machine_of(request)
    question = Question(
        model_of(request),
        machine,
        dict(loaded(request.ds_config)),
        request.sequence,
        margin=request.memory_margin,
        started=started_by(request),
        storage=storage_of(request),
    )
    answer = explore(
        question,
        space_of(request, machine),
        trials=request.trials,
        progress=lambda done, all_: progress(done / all_, f"{done} of {all_} configurations"),
    )
    if not answer.fitting:
        raise RuleError(answer.remarks()[0], "device_memory_bytes")
    return as_json(answer)


def space_of(request: SearchJob, machine: Machine) -> Any:
    """Return the set of training configurations that a background job of the planning service searches.

    Raises:
        ValueError: No configuration can have the global batch.
    """
    from ebbtide.tuner.configurations.space import Configuration, Space

    base = Configuration(
        micro_batch=request.micro_batch or 1,
        accumulation=request.accumulation or 1,
        zero_stage=request.zero_stage or 3,
        recompute=not request.keep_activations,
        sub_group_size=request.subgroup_size or USUAL_SUBGROUP,
        gpus=request.gpus if "gpus" in request.model_fields_set else machine.gpus_per_node,
    ).changed(offload="optimizer" if request.offload else "none")
    return Space.of(base, request.free, request.global_batch)


def check_search(request: SearchJob, quota: Quota) -> None:
    """Refuse a request for a configuration search if one simulation would have more operations than the
    planning service allows.

    Raises:
        ValueError: The accumulation or the global batch is too large.
    """
    micro_batches = request.accumulation or 1
    if "accumulation" in request.free and request.global_batch is not None:
        micro_batches = request.global_batch
    asked = {"accumulation": micro_batches, "ds_config": None}
    ops = estimated_ops(request.model_copy(update=asked))
    if ops > quota.searched_ops:
        raise RuleError(
            f"a step must have at most {micro_batches * quota.searched_ops // ops} micro-batches in a search on this "
            f"server, but global_batch or accumulation allows {micro_batches}. Lower this value",
            key="global_batch",
        )
