"""Readers of DeepSpeed configs, which check that keys exist in DeepSpeed and that values are allowed."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache, lru_cache
from importlib import metadata
from pathlib import Path
from reprlib import repr as shortened
from typing import Annotated, Any, Literal

import hjson
from ebbtide.simulator.estimates.models.blocks import ModelError
from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

AUTO = "auto"
ZERO, OPTIMIZER, PARAM = "zero_optimization", "offload_optimizer", "offload_param"
DEVICES = ("none", "cpu", "nvme")
WHOLE_BATCH = "train_batch_size"
BATCH_KEYS = {  # keyed by the names of `Job`'s fields
    "micro_batch": "train_micro_batch_size_per_gpu",
    "accumulation": "gradient_accumulation_steps",
}
BATCHES = (WHOLE_BATCH, *BATCH_KEYS.values())
PRECISIONS = ("bf16", "bfloat16", "fp16")
# Keys of `zero_optimization` that the simulation reads: numbers of elements, and switches.
SIZES = (
    "sub_group_size",
    "reduce_bucket_size",
    "stage3_max_live_parameters",
    "max_live_parameters",
    "stage3_prefetch_bucket_size",
    "prefetch_bucket_size",
    "stage3_max_reuse_distance",
    "max_reuse_distance",
    "stage3_param_persistence_threshold",
    "param_persistence_threshold",
)
SWITCHES = ("overlap_comm", "cpu_offload", "cpu_offload_param", "round_robin_gradients", "parameter_alignment")
STATE, HELD = f"{ZERO}.{OPTIMIZER}", f"{ZERO}.{PARAM}"
PROCESSES = "num_processes"  # of Accelerate's config: its number of ranks
AUTOTP = "tensor_parallel.autotp_size"
_SECTIONS = (
    ZERO,
    STATE,
    HELD,
    f"{ZERO}.zenflow",
    *PRECISIONS,
    "data_types",
    "optimizer",
    "optimizer.params",
    "activation_checkpointing",
    "tensor_parallel",
    "compile",
    "hybrid_engine",
)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Keys that all DeepSpeed versions from 0.18.6 to 0.19.8 know, apart from those in `REMOVED`. Any other key is looked up
# in the installed DeepSpeed, whose import takes seconds.
_KNOWN: Mapping[str, frozenset[str]] = {
    ZERO: _names(
        """allgather_bucket_size allgather_partitions compute_grad_norm contiguous_gradients
        cpu_offload cpu_offload_param cpu_offload_use_pin_memory elastic_checkpoint
        enable_sanity_checks ignore_unused_parameters leaf_module legacy_stage1
        load_from_fp32_weights log_trace_cache_warnings memory_efficient_linear
        mics_hierarchical_params_gather mics_shard_size offload_optimizer offload_param
        overlap_comm override_module_apply parameter_alignment pipeline_loading_checkpoint
        reduce_bucket_size reduce_scatter round_robin_gradients
        save_muon_momentum_buffer_in_memory stage stage3_gather_fp16_weights_on_model_save
        sub_group_size use_multi_rank_bucket_allreduce zenflow zero_hpz_partition_size
        zero_quantized_gradients zero_quantized_nontrainable_weights zero_quantized_weights
        zeropp_loco_param"""
    )
    | {
        prefix + name
        for prefix in ("", "stage3_")
        for name in _names(
            """allgather_sequential gather_16bit_weights_on_model_save max_live_parameters
        max_reuse_distance model_persistence_threshold module_granularity_threshold
        param_persistence_threshold prefetch_bucket_size use_all_reduce_for_fetch_params"""
        )
    },
    STATE: _names(
        """buffer_count cpuadam_cores_perc device fast_init nvme_path pin_memory pipeline_read
        pipeline_write ratio super_offload"""
    ),
    HELD: _names("buffer_count buffer_size device max_in_cpu nvme_path pin_memory"),
    "fp16": _names(
        """auto_cast consecutive_hysteresis enabled fp16_master_weights_and_grads hysteresis initial_scale_power
        loss_scale loss_scale_window min_loss_scale"""
    ),
    **dict.fromkeys(("bf16", "bfloat16"), _names("bf16_master_weights_and_grads enabled immediate_grad_update")),
    "compile": _names("deepcompile"),
    "hybrid_engine": _names("enabled"),
}
# Keys of the top level. DeepSpeed silently ignores any other.
_KNOWN_TOP = _names(
    """activation_checkpointing aio amp autotuning bf16 bfloat16 checkpoint comet comms_logger communication_data_type
    compile compression_training csv_monitor curriculum_learning data_efficiency data_types dataloader_drop_last
    datastates_ckpt disable_allgather disable_python_gc dump_state ebbtide eigenvalue elasticity expert_parallel
    flops_profiler fp16 gradient_accumulation_steps gradient_allreduce_op gradient_clipping gradient_predivide_factor
    graph_harvesting hybrid_engine log_level managed_gradient_accumulation memory_breakdown monitor_config optimizer
    pipeline prescale_gradients progressive_layer_drop quantize_training scheduler seq_parallel_communication_data_type
    sequence_parallel_size sparse_attention sparse_gradients steps_per_print tensor_parallel tensorboard timers
    torch_autocast train_batch_size train_micro_batch_size_per_gpu use_data_before_expert_parallelism
    wall_clock_breakdown wandb weight_quantization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    zero_optimization"""
)
# Keys that DeepSpeed refuses, whatever their value, since the version that no longer has what they set.
REMOVED: Mapping[tuple[int, ...], frozenset[str]] = {
    (0, 19, 7): _names(
        f"""compression_training nebula quantize_training sparse_attention {ZERO}.mics_hierarchical_params_gather
        {ZERO}.mics_shard_size"""
    ),
    (0, 19, 8): _names(
        f"""amp curriculum_learning eigenvalue elasticity graph_harvesting progressive_layer_drop sparse_gradients
        {ZERO}.zeropp_loco_param"""
    ),
}
# At the top level, DeepSpeed silently accepts any key. A key that nearly equals one of these is reported as misspelled.
_TOP = (ZERO, *BATCHES, "gradient_clipping", "activation_checkpointing", "data_types", "optimizer", "ebbtide")
_NEARLY = 0.9


def loaded(config: Mapping[str, Any] | str | Path | None) -> Mapping[str, Any]:
    """Return the contents of a DeepSpeed config, with keys and values checked. Empty if there is no config.

    Values are converted as DeepSpeed converts them: numbers and booleans may be given as strings, and
    ``"auto"`` stands for a default.

    Raises:
        ModelError: The file cannot be read, DeepSpeed does not know a key, or a value is not allowed for its key.
    """
    if isinstance(config, (str, Path)):
        config = read_file(config)
    if config is not None and not isinstance(config, Mapping):
        raise ModelError(f"a DeepSpeed config must be an object, but got {type(config).__name__}", key="ds_config")
    config = as_deepspeed_reads(of_accelerate(config or {}))
    check_sections(config)
    _check_names(config)
    for key, kind in _KINDS.items():
        value = at(config, key)
        if value is not None:
            kind.check(key, value)
    return config


def read_file(path: str | Path) -> dict[str, Any]:
    """Read a DeepSpeed config from a file, which may have comments and trailing commas (Hjson), as a dict.

    Accelerate's YAML config is read too, and translated into the DeepSpeed config that Accelerate makes of it.

    Raises:
        ModelError: The file cannot be read, does not contain an object, or has a key twice. The message names the file.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        config = _parsed(text)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"a DeepSpeed config must be a JSON file (--ds-config), but reading {path} failed: {error}", key="ds_config"
        ) from None
    if not isinstance(config, dict):
        raise ModelError(
            f"the DeepSpeed config (--ds-config) must be a file that holds a JSON object, but {path} holds a "
            f"{type(config).__name__}",
            key="ds_config",
        )
    return dict(of_accelerate(config, Path(path).parent))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=without_duplicates)  # Hjson would turn 1e400 into a string
    except json.JSONDecodeError:
        if not re.search(r"^(deepspeed_config|distributed_type|compute_environment)\s*:", text, re.MULTILINE):
            return hjson.loads(text, object_pairs_hook=without_duplicates)
    try:
        import yaml
    except ImportError:
        raise ValueError("it is Accelerate's config in YAML, which needs PyYAML (pip install pyyaml)") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def of_accelerate(config: Mapping[str, Any], folder: Path | None = None) -> Mapping[str, Any]:
    """Return the DeepSpeed config that Accelerate makes of its own config. Return any other config unchanged.

    Args:
        folder: Folder of the config's file. None: it may not name another file, as in a request.

    Raises:
        ModelError: The config is for another way of distributed training, such as FSDP, or its
            ``deepspeed_config_file`` cannot be read.
    """
    if "deepspeed_config" not in config and "distributed_type" not in config:
        return config
    if (kind := config.get("distributed_type", "DEEPSPEED")) != "DEEPSPEED":
        raise ModelError(
            f"Accelerate's config must have distributed_type DEEPSPEED, but got {kind!r}: ebbtide answers for training "
            "with DeepSpeed",
            key="ds_config.distributed_type",
        )
    given: Mapping[str, Any] = config.get("deepspeed_config") or {}
    if file := given.get("deepspeed_config_file"):
        found = next((path for path in (Path(file), (folder or Path()) / file) if folder and path.is_file()), None)
        if found is None:
            raise ModelError(
                f"the DeepSpeed config that Accelerate's config names must be given itself, but got "
                f"deepspeed_config_file {file!r}",
                key="ds_config.deepspeed_config.deepspeed_config_file",
            )
        return read_file(found)
    zero: dict[str, Any] = {"stage": given.get("zero_stage", 2)}
    for key in (OPTIMIZER, PARAM):
        path = given.get(f"{key}_nvme_path")
        zero[key] = {
            "device": given.get(f"{key}_device") or "none",
            **({"nvme_path": path} if path not in (None, "none") else {}),
        }
    if given.get("zero3_save_16bit_model") is not None:
        zero["stage3_gather_16bit_weights_on_model_save"] = given["zero3_save_16bit_model"]
    precision, ranks = config.get("mixed_precision") or "no", config.get(PROCESSES)
    clipping = given.get("gradient_clipping")
    return {
        WHOLE_BATCH: AUTO,
        "train_micro_batch_size_per_gpu": AUTO,
        "gradient_accumulation_steps": given.get("gradient_accumulation_steps", AUTO),
        **({} if clipping in (None, "none") else {"gradient_clipping": clipping}),
        **({precision: {"enabled": True}} if precision in ("bf16", "fp16") else {}),
        **({} if ranks in (None, 1) else {PROCESSES: ranks}),  # told if the answer is for another number of ranks
        ZERO: zero,
    }


def without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the dict of a JSON object's keys and values, for ``object_pairs_hook`` of a JSON reader.

    Raises:
        ValueError: A key occurs twice. DeepSpeed refuses such configs too. The message names the keys.
    """
    made = dict(pairs)
    if len(made) != len(pairs):
        twice = [key for key, times in Counter(key for key, _ in pairs).items() if times > 1]
        raise ValueError(f"duplicate keys {twice}: keep each key once")
    return made


def as_deepspeed_reads(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a copy of a DeepSpeed config with its values converted as DeepSpeed's own schemas convert them.

    The string "1" becomes a number, "true" a boolean, and the old ``zero_optimization: true`` becomes ZeRO-1. Keys with
    the value ``"auto"`` are removed. Only sizes that transformers fills in keep ``"auto"``.
    """
    made = dict(config)
    if isinstance(made.get(ZERO), bool):
        made[ZERO] = {"stage": int(made[ZERO])}
    if isinstance(made.get(ZERO), Mapping):
        made[ZERO] = _lax(made[ZERO], f"{ZERO}.")
        for key in (OPTIMIZER, PARAM):
            if isinstance(made[ZERO].get(key), Mapping):
                made[ZERO][key] = _lax(made[ZERO][key], f"{ZERO}.{key}.")
    for key in PRECISIONS:
        if isinstance(made.get(key), Mapping):
            made[key] = _lax(made[key], f"{key}.")
    return made


def _lax(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    made = {}
    for key, value in values.items():
        kind = _KINDS.get(where + key)
        if value != AUTO:
            made[key] = value if kind is None else kind.taken_for(value)
        elif kind is not None and kind.auto:
            made[key] = value
    return made


def at(config: Mapping[str, Any], key: str) -> Any:
    """Return the value at a key such as ``zero_optimization.stage``, or None if it is absent or null."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the JSON object at a key of a DeepSpeed config, or an empty one if the key is absent."""
    result: Mapping[str, Any] = at(config, key) or {}
    return result


def at_least(version: tuple[int, ...], installed: str | None = None) -> bool:
    """Return True if DeepSpeed has at least this version. ``installed`` None: the installed or newest one."""
    installed = installed or _installed_version()
    if installed is None:
        return True
    return [int(part) for part in re.findall(r"\d+", installed)[:3]] >= [*version]


@cache
def _installed_version() -> str | None:
    # The result is cached, because finding it reads package files.
    try:
        return metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        return None


def check_sections(config: Mapping[str, Any]) -> None:
    """Check that each section is a JSON object, and raise a ModelError with its key if one is not."""
    for key in _SECTIONS:
        value = at(config, key)
        if value is not None and not isinstance(value, Mapping):
            raise ModelError(f"{key} must be an object, but got {shortened(value)}", key=f"ds_config.{key}")


def _check_names(config: Mapping[str, Any]) -> None:
    if config and _KNOWN_TOP.isdisjoint(config) and not any(_nearly(str(key)) for key in config):
        raise ModelError(
            f"a DeepSpeed config must have a key that DeepSpeed knows, such as {ZERO}, but has only "
            f"{shortened([*config])}. With these keys, DeepSpeed would train by its defaults: ZeRO-0 in fp32",
            key="ds_config",
        )
    for key in config:
        meant = key if key in _TOP else _nearly(str(key))
        if meant != key and meant:
            raise ModelError(
                f"a DeepSpeed config must spell its keys as DeepSpeed does, but got {key}. "
                f"DeepSpeed ignores unknown keys. Did you mean {meant}?",
                key=f"ds_config.{key}",
            )
    for where, known in _KNOWN.items():
        unknown = sorted(set(section(config, where)) - known)
        if unknown and (unknown := sorted(set(unknown) - _of_installed(where))):
            near = get_close_matches(unknown[0], known, 1)
            raise ModelError(
                f"{where}.{unknown[0]} must be a key that DeepSpeed knows, but DeepSpeed refuses this "
                f"one: {'write ' + near[0] if near else 'remove it'}",
                key=f"ds_config.{where}.{unknown[0]}",
            )


@lru_cache(maxsize=256)
def _nearly(key: str) -> str:
    # Cached.
    return next(iter(get_close_matches(key, _TOP, 1, _NEARLY)), "")


def _of_installed(where: str) -> set[str]:
    # The result is empty if DeepSpeed is not installed.
    try:
        from deepspeed.compile.config import CompileConfig
        from deepspeed.runtime import precision_config
        from deepspeed.runtime.config import HybridEngineConfig
        from deepspeed.runtime.zero import config, offload_config
    except ImportError:
        return set()
    schema: Any = {
        ZERO: config.DeepSpeedZeroConfig,
        STATE: offload_config.DeepSpeedZeroOffloadOptimizerConfig,
        HELD: offload_config.DeepSpeedZeroOffloadParamConfig,
        "fp16": precision_config.DeepSpeedFP16Config,
        **dict.fromkeys(("bf16", "bfloat16"), precision_config.DeepSpeedBF16Config),
        "compile": CompileConfig,
        "hybrid_engine": HybridEngineConfig,
    }[where]
    fields = schema.model_fields
    return {*fields, *(field.alias for field in fields.values() if field.alias)}


def check_removed(config: Mapping[str, Any]) -> None:
    """Refuse a DeepSpeed config with a key that the installed DeepSpeed refuses, since it no longer has what it sets.

    Raises:
        ModelError: There is such a key, or Apex's mixed precision, which no DeepSpeed has with ZeRO.
    """
    for version, removed in REMOVED.items():
        for key in sorted(removed) if at_least(version) else ():
            where, _, name = key.rpartition(".")
            if name in (section(config, where) if where else config):
                raise ModelError(
                    f"{key} must be absent, because DeepSpeed refuses it since version {'.'.join(map(str, version))}: "
                    "remove the key",
                    key=f"ds_config.{key}",
                )
    if at(config, "amp.enabled") is True and at(config, f"{ZERO}.stage"):
        raise ModelError(
            "amp.enabled must be absent or false with ZeRO, because DeepSpeed refuses Apex's mixed precision with "
            "ZeRO: enable bf16 or fp16 instead",
            key="ds_config.amp.enabled",
        )


def check_counted(config: Mapping[str, Any], ranks: int = 1, tensor_parallel: int = 1) -> None:
    """Refuse a DeepSpeed config with a key that decides whether training fits, and that no estimate counts.

    Raises:
        ModelError: There is such a key. The message says what to do instead.
    """
    for key, (harmless, among, instead) in _UNCOUNTED.items():
        value = at(config, key)
        divides = among is None or (ranks if among == "ranks" else tensor_parallel) > 1
        if value not in (None, AUTO, harmless) and divides:
            raise ModelError(
                f"{key} must be absent or {json.dumps(harmless)} to estimate memory and time, because its effect "
                f"is not simulated, but got {shortened(value)}. {instead}",
                key=f"ds_config.{key}",
            )


_HALVED = (
    "With it the optimizer's state is in 16 bits, and updates run in DeepSpeed's own step, so there is nothing to "
    'search. Leave the key out to estimate training with state in fp32, or train with "ebbtide": {"plan": "automatic"}'
)
# Key -> its value without effect, the ranks among which it divides something (None: it always has an effect), and what
# to do instead.
_UNCOUNTED: Mapping[str, tuple[Any, Literal["ranks", "tensor ranks"] | None, str]] = {
    **dict.fromkeys(
        ("bf16.bf16_master_weights_and_grads", "fp16.fp16_master_weights_and_grads", "bf16.bf16_optimizer_states"),
        (False, None, _HALVED),
    ),
    "sequence_parallel_size": (
        1,
        None,
        "Each rank then holds only a part of each sequence. Leave the key out, and give the tokens of one rank as the "
        "sequence length: that estimates memory, but too little time for attention",
    ),
    f"{ZERO}.zero_hpz_partition_size": (
        1,
        "ranks",
        "Each node then holds a second copy of the parameters in GPU memory. Leave the key out to estimate without it",
    ),
    "expert_parallel.enabled": (
        False,
        "ranks",
        "Each rank then holds only a part of the experts. Leave the key out to estimate ZeRO-3 with all experts",
    ),
    "elasticity.enabled": (
        False,
        None,
        "The batch then depends on the number of GPUs. Leave the key out, and give the batch sizes",
    ),
    "activation_checkpointing.partition_activations": (
        False,
        "tensor ranks",
        "The inputs of layers are then divided among tensor-parallel ranks. Leave the key out to estimate without it",
    ),
}


# -- kinds of values ----------------------------------------------------------------------------


class _Kind:
    """The values that a key of a DeepSpeed config may have: a rule in words, and a pydantic type that checks it.

    The attribute ``auto`` tells that "auto" is allowed too. ``flag`` is the command-line option of `tune` with
    the same meaning.
    """

    def __init__(self, rule: str, type_: Any, *, auto: bool = False, flag: str = "") -> None:
        self._rule, self._type = f"{rule} or 'auto'" if auto else rule, TypeAdapter(type_)
        self.auto, self._flag = auto, flag

    def taken_for(self, value: Any) -> Any:
        try:
            return self._type.validate_python(value)
        except ValidationError:
            return value

    def check(self, key: str, value: Any) -> None:
        if self.auto and value == AUTO:
            return
        try:
            self._type.validate_python(value, strict=True)
        except ValidationError:
            raise ModelError(
                f"{key}{self._flag} must be {self._rule}, but got {shortened(value)}", f"ds_config.{key}"
            ) from None


def _no_switch(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError  # noqa: TRY004 - which pydantic hears
    return value


_Number = BeforeValidator(_no_switch)
_COUNT = _Kind("a whole number >= 1", Annotated[int, Field(ge=1, lt=10**9)], auto=True)
_NUMBER = _Kind("a number >= 0", Annotated[float, Field(ge=0, lt=10**18)], auto=True)
_ELEMENTS = _Kind("a whole number >= 0", Annotated[int, _Number, Field(ge=0, lt=10**18)], auto=True)
_DEGREE = _Kind("a whole number >= 0", Annotated[int, _Number, Field(ge=0)])
_WHOLE = _Kind("a whole number", Annotated[int, _Number])
_PLAIN_NUMBER = _Kind("a number >= 0", Annotated[float, _Number, Field(ge=0, allow_inf_nan=False)])
_WIRE = _Kind("fp16, bf16 or fp32", Annotated[str, Field(pattern="(?i)^(fp16|bf16|fp32)$")])
_SHARDS = _Kind("a whole number >= -1", Annotated[int, _Number, Field(ge=-1)])
_SHARE = _Kind("a number between 0 and 1", Annotated[float, _Number, Field(ge=0, le=1)])
_FLAG = _Kind("true or false", bool)
_SWITCH = _Kind("true, false", bool, auto=True)
_STAGE = _Kind("1, 2 or 3", Annotated[int, _Number, Field(ge=0, le=3)], flag=" (--zero-stage)")


def _one_of(*names: str) -> _Kind:
    return _Kind(f"one of {', '.join(names)}", Literal[names])


_KINDS: Mapping[str, _Kind] = {
    **dict.fromkeys(BATCHES, _COUNT),
    "gradient_clipping": _NUMBER,
    f"{ZERO}.stage": _STAGE,
    **dict.fromkeys((f"{ZERO}.{name}" for name in SIZES), _ELEMENTS),
    **dict.fromkeys((f"{ZERO}.{name}" for name in SWITCHES), _FLAG),
    f"{ZERO}.mics_shard_size": _SHARDS,
    f"{STATE}.device": _one_of(*DEVICES),
    f"{HELD}.device": _one_of(*DEVICES),
    f"{STATE}.ratio": _SHARE,
    AUTOTP: _DEGREE,
    "data_types.grad_accum_dtype": _one_of("fp32", "fp16", "bf16"),
    **dict.fromkeys(
        (f"{STATE}.{name}" for name in ("pin_memory", "pipeline_read", "pipeline_write", "super_offload")), _FLAG
    ),
    f"{HELD}.pin_memory": _FLAG,
    **dict.fromkeys((f"{name}.enabled" for name in PRECISIONS), _SWITCH),
    "activation_checkpointing.cpu_checkpointing": _FLAG,
    **dict.fromkeys((f"{name}.{name}_master_weights_and_grads" for name in ("bf16", "fp16")), _FLAG),
    "bf16.bf16_optimizer_states": _FLAG,
    "fp16.loss_scale": _PLAIN_NUMBER,
    **dict.fromkeys(
        (f"fp16.{name}" for name in ("initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")),
        _WHOLE,
    ),
    "communication_data_type": _WIRE,
}
