"""The conversion of a request to the planning service into a machine and a training workload, the inputs of
the planner.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from ebbtide.simulator.estimates.deepspeed_config import BATCHES
from ebbtide.simulator.estimates.job import Job, plan_refusal
from ebbtide.simulator.estimates.launchers import started
from ebbtide.simulator.estimates.models.architecture import KEYS, is_model, language_model
from ebbtide.simulator.estimates.models.families import MODELS as MODELS
from ebbtide.simulator.estimates.presets import preset
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.rules import RuleError, broken, spelled
from ebbtide.simulator.schedules.strategies import stock_offload
from ebbtide.simulator.storage import ANY_BYTES
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.service.requests import MOST_SUBGROUPS, Scenario, SearchJob, check_model
from pydantic import ValidationError

ITERATIONS = 3  # that a prediction simulates
USUAL_SUBGROUP = 10**9


def machine_of(scenario: Scenario) -> Machine:
    """Return the machine that a request to the planning service names, with the memory and the link
    bandwidth that the request sets.

    Raises:
        ValueError: There is no machine of that name, or a value is out of range.
    """
    machine = scenario.machine
    if isinstance(machine, str):
        machine = _preset(machine)
    changes: dict[str, float] = {}
    if scenario.device_memory_bytes is not None:
        changes["device_memory_bytes"] = scenario.device_memory_bytes
    if scenario.host_memory_bytes is not None:
        changes["host_memory_bytes"] = scenario.host_memory_bytes
    if scenario.link_bytes_per_s is not None:
        changes |= dict.fromkeys(("h2d_bytes_per_s", "d2h_bytes_per_s"), scenario.link_bytes_per_s)
    with _as_asked():
        return machine.with_rates(**changes) if changes else machine


@contextmanager
def _as_sent(model: Mapping[str, Any]) -> Iterator[None]:
    try:
        yield
    except RuleError as error:
        names = KEYS.get(error.key.removeprefix("model."), ())
        text = language_model(model)
        sent = next((f"model.{name}" for name in names if name in text), error.key)
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
            rule, key = first.told, first.key
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
    workload = job_of(scenario).workload(machine) if workload is None else _run_so(workload, scenario)
    if scenario.subgroup_size is not None:
        _check_cut(workload.params, scenario.subgroup_size)
        workload = workload.recut(scenario.subgroup_size)
    return workload


def _run_so(workload: Workload, scenario: Scenario) -> Workload:
    if given := started_by(scenario):
        workload = started(workload, **given)
    if scenario.clip_rate is None:
        return workload
    return workload.model_copy(update={"clip_rate": scenario.clip_rate})


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
        model = spelled(model, MODELS, "known model", key="model")
        model = {**MODELS[model], "_name_or_path": model}
    assert model is not None
    check_model(model)
    return model


def offloads_parameters(scenario: Scenario) -> bool:
    """Return True unless the DeepSpeed config in a request says that 16-bit parameters stay in GPU memory."""
    return scenario.ds_config is None or not job_of(scenario).offload.keeps_parameters


def storage_of(scenario: Scenario) -> dict[str, int]:
    """Return a dict from directory to bytes: the storage that a request to the planning service allows for
    optimizer state.

    An empty name means the folder where training starts.
    """
    named = scenario.ds_config is not None and job_of(scenario).offload.storage
    if scenario.storage_bytes is None:
        return {named: ANY_BYTES} if named else {}
    return {named or "": int(scenario.storage_bytes)}


def started_by(scenario: Scenario) -> dict[str, Any]:
    """Return a dict of the `Job` fields on how the ranks are started, as far as a request to the planning
    service sets them.

    The fields are the launcher, and the value of OMP_NUM_THREADS. Both affect how many threads
    DeepSpeed's own CPU updates have.
    """
    given = {"launcher": scenario.launcher, "omp_threads": scenario.omp_threads}
    return {name: value for name, value in given.items() if value is not None}


def computed_by(scenario: Scenario) -> dict[str, Any]:
    """Return a dict of the `Job` fields on how layers are computed (recomputation, kernels, attention),
    from a request to the planning service.
    """
    given = {name: getattr(scenario, name) for name in ("recompute_share", "kernels", "flash_version")}
    fields: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return {**fields, "fused_loss": scenario.fused_loss, "flash_attention": scenario.flash_attention}


def job_of(scenario: Scenario) -> Job:
    """Return the training job that a request to the planning service describes.

    Raises:
        ValueError: The model or the DeepSpeed config cannot be used.
    """
    config = scenario.ds_config
    if config is not None and is_model(config):
        raise RuleError(
            "ds_config must be a DeepSpeed config, but is the config of a model: send the config of a model as model",
            "ds_config",
        )
    if isinstance(scenario, SearchJob):  # its knobs are batches too
        config = {k: v for k, v in (config or {}).items() if k not in BATCHES}
    model = model_of(scenario)
    with _as_asked(), _as_sent(model):
        job = Job.of_deepspeed(
            model,
            config,
            sequence=scenario.sequence,
            micro_batch=scenario.micro_batch,
            accumulation=scenario.accumulation,
            zero_stage=scenario.zero_stage,
            data_parallel=scenario.gpus,
            tensor_parallel=scenario.tensor_parallel,
            recompute=not scenario.keep_activations,
            clip_rate=scenario.clip_rate,
            **computed_by(scenario),
            **started_by(scenario),
        )
    _check_cut(params_of(job), job.sub_group_size)
    return job


def params_of(job: Job) -> int:
    """Return the number of elements of one rank's partition of a training job's model."""
    params = sum(sum(block.params) for block in job.architecture.blocks())
    return params // (job.data_parallel * job.tensor_parallel)


def strategy_of(scenario: Scenario, workload: Workload) -> tuple[str, dict[str, Any]]:
    """Return the name and options of DeepSpeed's own training strategy that the DeepSpeed config in a
    request selects.

    Raises:
        ValueError: The config has a setting that cannot be simulated.
    """
    if scenario.ds_config is None:
        return stock_offload(workload.zero_stage), {}
    return job_of(scenario).offload.strategy(workload.zero_stage)


def check_plannable(scenario: Scenario) -> None:
    """Refuse a request to the planning service with a DeepSpeed config that no plan can be applied to.

    Raises:
        ValueError: No plan can be applied. The message names the key to change.
    """
    job = None if scenario.ds_config is None else job_of(scenario)
    if job is not None and (refusal := plan_refusal(job.config, job.offload)):
        raise RuleError(refusal, "ds_config")


def resolve(scenario: Scenario) -> tuple[Machine, Workload]:
    """Return the machine and the training workload of one rank that a request to the planning service
    describes.

    Raises:
        ValueError: The machine or the model is unknown or cannot be used.
    """
    machine = machine_of(scenario)
    return machine, workload_of(scenario, machine)
