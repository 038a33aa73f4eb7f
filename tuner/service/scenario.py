"""The conversion of a request to the planning service into a machine and a training workload, the inputs of
the planner.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from ebbtide.simulator.estimates.deepspeed_keys import BATCH_KEYS, WHOLE_BATCH
from ebbtide.simulator.estimates.estimate import default_ranks, estimated
from ebbtide.simulator.estimates.job import Job, settings, started
from ebbtide.simulator.estimates.models.architecture import KEYS, is_multimodal, known_config, quantized
from ebbtide.simulator.estimates.models.families import FAMILIES, changed_key, missing_size
from ebbtide.simulator.estimates.models.families import MODELS as MODELS
from ebbtide.simulator.estimates.models.modules import DESCRIBE
from ebbtide.simulator.estimates.offloading import Offloading, offloading, plan_refusal
from ebbtide.simulator.estimates.presets import preset
from ebbtide.simulator.limits import Within, within
from ebbtide.simulator.machine import ANY_BYTES, Machine
from ebbtide.simulator.page import DEEPSPEED_CONFIG, MODEL_CONFIG, kind_of
from ebbtide.simulator.rules import RuleError, broken, shortened
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.service.requests import MOST_BLOCKS, MOST_LAYERS, MOST_SUBGROUPS, Scenario, SearchJob
from pydantic import ValidationError

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
    if workload is None:
        workload = estimated(job_of(scenario), machine)
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
    """Refuse the config of a language model that does not have the usual layers of a known family."""
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
    return offloading(None) if scenario.ds_config is None else job_of(scenario).offload


def storage_of(scenario: Scenario) -> dict[str, int]:
    """Return a dict from directory to bytes: the storage that a request to the planning service allows for
    optimizer state.

    An empty name means the folder where training starts.
    """
    named = offload_of(scenario).storage
    if scenario.storage_bytes is None:
        return {named: ANY_BYTES} if named else {}
    return {named or "": int(scenario.storage_bytes)}


def shape_of(scenario: Scenario) -> dict[str, Any]:
    """Return the `Job` fields that a request to the planning service sets."""
    given = {one: getattr(scenario, one.http) for one in settings() if one.http}
    return {one.name: one.value(value, one.http or "") for one, value in given.items() if value is not None}


def job_of(scenario: Scenario) -> Job:
    """Return the training job that a request to the planning service describes.

    Raises:
        ValueError: The model or the DeepSpeed config cannot be used.
    """
    config = scenario.ds_config
    if config is not None and (kind := kind_of(config)) not in ("", DEEPSPEED_CONFIG):
        raise RuleError(f"ds_config must be a DeepSpeed config, but is {kind}. Send a DeepSpeed config", "ds_config")
    if isinstance(scenario, SearchJob) and config is not None:  # a search may vary the batch sizes
        varied = {WHOLE_BATCH, *(key for knob, key in BATCH_KEYS.items() if knob in scenario.free)}
        config = {key: value for key, value in config.items() if key not in varied}
    model = model_of(scenario)
    with _as_asked(), _as_sent(model):
        shape = shape_of(scenario)
        ranks = shape.get("data_parallel") or default_ranks(machine_of(scenario), shape)
        job = Job.of_deepspeed(model, config, **{**shape, "data_parallel": ranks})
    _check_cut(params_of(job), job.sub_group_size)
    return job


def params_of(job: Job) -> int:
    """Return the number of elements of one rank's partition of a training job's model."""
    params = sum(sum(block.params) for block in job.architecture.blocks())
    return params // (job.data_parallel * job.tensor_parallel)


def check_plannable(scenario: Scenario) -> None:
    """Refuse a request to the planning service with a DeepSpeed config that no plan can be applied to.

    Raises:
        ValueError: No plan can be applied. The message names the key to change.
    """
    job = None if scenario.ds_config is None else job_of(scenario)
    if job is not None and (refusal := plan_refusal(job.config, job.offload)):
        raise RuleError(refusal, "ds_config")


def resolve(scenario: Scenario) -> tuple[Machine, Workload]:
    """Return the machine and the training workload of one rank that a request to the planning service describes.

    Raises:
        ValueError: The machine or the model is unknown or cannot be used.
    """
    machine = machine_of(scenario)
    return machine, workload_of(scenario, machine)


def space_of(request: SearchJob, machine: Machine) -> Any:
    """Return the set of training configurations that a background job of the planning service searches.

    Raises:
        ValueError: No possible configuration has the requested global batch (samples per optimizer step).
    """
    from ebbtide.tuner.configurations.fixed import fixed_knobs
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
