"""The access to private members of DeepSpeed (`private_names` has their table).

`check_version` and `check_members` are called before an engine is taken over. They refuse a DeepSpeed outside the
tested range, and a DeepSpeed that lacks a member that its version should have.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, Protocol

import torch
from ebbtide.runtime.zero.checks.private_names import STAGE3, STAGE12, TESTED
from ebbtide.simulator.plan import ParameterLocation
from ebbtide.simulator.schedules.gathers import Gathered, GatherRules, gathered
from packaging.version import Version

BELOW_STAGE_3 = "0.19.8"  # earlier versions add up micro-batches in another way under ZeRO-1 and 2
# Before these versions, Lion's vector loop computed wrong signs, and Adagrad's scalar loop left weight decay out of the
# update.
MENDED = {"lion": "0.19.8", "adagrad": "0.19.8"}


class UnsupportedDeepSpeedError(RuntimeError):
    """An error: the installed DeepSpeed has not been tested with ebbtide, or lacks a member that ebbtide needs."""


def check_version() -> None:
    """Raise an error if the installed version of DeepSpeed was not tested with ebbtide.

    Raises:
        UnsupportedDeepSpeedError: The version is outside the tested range. The message names the version and the range.
    """
    installed, (first, limit) = _installed(), TESTED
    if not Version(first) <= installed < Version(limit):
        raise UnsupportedDeepSpeedError(
            f"deepspeed must be >= {first} and < {limit}, but got {installed}: install a version "
            f"in that range (pip install 'deepspeed>={first},<{limit}')"
        )


def _installed() -> Version:
    import deepspeed

    return Version(deepspeed.__version__)


def mended_since(optimizer: str) -> str:
    """Return a sentence for an error about a DeepSpeed optimizer: the first DeepSpeed version with a fix.

    The sentence is empty if no version fixes the error, or if the installed version has the fix.
    """
    first = MENDED.get(optimizer)
    if first is None or _installed() >= Version(first):
        return ""
    return (
        f". DeepSpeed {_installed()}'s own {optimizer} is at fault, whatever it was built with: "
        f"pip install 'deepspeed>={first},<{TESTED[1]}'"
    )


def check_members(optimizer: Any) -> None:
    """Raise an error if a DeepSpeed optimizer lacks a private member that ebbtide uses.

    Raises:
        UnsupportedDeepSpeedError: Members are missing, or ZeRO-1 or 2 needs a newer DeepSpeed. The message has
            the names or the version.
    """
    installed = _installed()
    partitioned = hasattr(optimizer, "fp16_partitioned_groups_flat")
    if not partitioned and installed < Version(BELOW_STAGE_3):
        raise UnsupportedDeepSpeedError(
            f"a plan for ZeRO-1 or 2 needs deepspeed >= {BELOW_STAGE_3}, but got {installed}: "
            f"install it (pip install 'deepspeed>={BELOW_STAGE_3},<{TESTED[1]}') or set "
            "zero_optimization.stage to 3"
        )
    members = STAGE3 if partitioned else STAGE12
    missing = [
        member.name for member in members if Version(member.since) <= installed and not hasattr(optimizer, member.name)
    ]
    if missing:
        raise UnsupportedDeepSpeedError(
            f"DeepSpeed {installed} does not fit ebbtide: its {type(optimizer).__name__} lacks {missing}. Install a "
            f"version that ebbtide was tested with: pip install 'deepspeed>={TESTED[0]},<{TESTED[1]}'"
        )


def has_experts(model: Any) -> bool:
    """Return whether a model has DeepSpeed's mixture-of-experts layers."""
    from deepspeed.moe.layer import MoE

    return any(isinstance(module, MoE) for module in model.modules())


def pipeline_stages(engine: Any) -> int:
    """Return the number of stages of a DeepSpeed pipeline engine, or 1 for another engine."""
    from ebbtide.runtime.checkpoint.deepspeed.installation import is_pipeline

    return int(engine.num_stages) if is_pipeline(engine) else 1


def _accelerator() -> Any:
    from deepspeed.accelerator import get_accelerator

    return get_accelerator()


def on_cuda() -> bool:
    """Return whether DeepSpeed trains on CUDA in this process."""
    return bool(_accelerator()._name == "cuda")


def training_device() -> torch.device:
    """Return the device on which DeepSpeed computes the model."""
    return torch.device(_accelerator().current_device_name())


def largest_of_ranks(values: Sequence[int], group: Any = None) -> torch.Tensor:
    """Return for each value the largest of ``group`` or of all ranks, on DeepSpeed's device. All must call this."""
    import deepspeed.comm as dist

    largest = torch.tensor(values, dtype=torch.int64, device=training_device())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest


# -- ZeRO-3: what differs between versions -------------------------------------------------------


def at_boundary(optimizer: Any) -> bool:
    """Return whether the current backward is the last one before an optimizer step."""
    # DeepSpeed has an attribute that tells this, and a method since 0.19.5.
    boundary = optimizer.is_gradient_accumulation_boundary
    return bool(boundary() if callable(boundary) else boundary)


def note_active(optimizer: Any, param: Any) -> None:
    """Tell DeepSpeed that a parameter has received a gradient in the current optimizer step."""
    # If the script decides when accumulation ends, DeepSpeed learns of the end only at step(). DeepSpeed then copies
    # summed gradients to the fp32 gradients that the update reads. It does so only for parameters that were reported in
    # this way. Older versions of DeepSpeed do not use such reports.
    active = getattr(optimizer, "_offload_boundary_param_ids", None)
    if active is not None:
        active.add(param.ds_id)


def partition_rank(optimizer: Any, param: Any) -> int:
    """Return this rank's index among the ranks that a parameter is partitioned over."""
    if hasattr(optimizer, "_get_param_partition_rank"):
        return int(optimizer._get_param_partition_rank(param))
    import deepspeed.comm as dist

    return int(dist.get_rank(optimizer.dp_process_group))


def checked_norm(optimizer: Any) -> torch.Tensor | None:
    """Return the global gradient norm times the loss scale. None if the step is skipped because of an overflow.

    Set ``overflow`` and the loss scale of DeepSpeed's optimizer as the installed DeepSpeed's own step does.
    Since DeepSpeed 0.19.8 an invalid norm counts as an overflow too.
    """
    if not hasattr(optimizer, "_loss_scale_update_and_overflow_cleanup"):
        if optimizer._overflow_check_and_loss_scale_update():
            return None
        return torch.linalg.vector_norm(torch.stack(optimizer._get_norm_groups()))
    from deepspeed.runtime.utils import combine_grad_norm_groups, is_invalid_grad_norm

    optimizer._overflow_check_and_loss_scale_update(update_scale=False)
    norm = None
    if not optimizer.overflow:
        norm = combine_grad_norm_groups(optimizer._get_norm_groups())
        if is_invalid_grad_norm(norm):
            optimizer.overflow = True
    return None if optimizer._loss_scale_update_and_overflow_cleanup() else norm


def only_rank(optimizer: Any) -> bool:
    """Return whether the job has a single process, so that every sum over ranks is that of this rank."""
    return optimizer.partition_count == 1 and _world_size() == 1


def _world_size() -> int:
    import deepspeed.comm as dist

    return int(dist.get_world_size())


def own_sums(optimizer: Any, params: list[Any], dtype: torch.dtype) -> list[torch.Tensor] | None:
    """Return what DeepSpeed's ``__avg_scatter_grads`` returns in a job with a single process, without a collective.

    None if DeepSpeed multiplies gradients by factors.

    Args:
        dtype: The dtype in which DeepSpeed adds gradients of ranks up.
    """
    if optimizer.postscale_gradients and optimizer.gradient_predivide_factor != 1.0:
        return None
    gradients = [param.grad.view(-1) for param in params]
    if dtype != optimizer.dtype:
        gradients = [gradient.to(dtype) for gradient in gradients]
    if len(gradients) > 1:  # in one piece, and no more in the bucket
        gradients = list(torch.cat(gradients).split([gradient.numel() for gradient in gradients]))
    return gradients


def group_norm(optimizer: Any, group: Iterable[Any], norms: Mapping[int, float]) -> torch.Tensor:
    """Return the gradient norm of one of DeepSpeed's subgroups, in a job with a single process.

    The sum is that of ``complete_grad_norm_calculation_for_cpu_offload``: in float64, in the order of the parameters.
    Only its root is computed in fp32. DeepSpeed marks an infinite or invalid norm by -1.
    """
    total = 0.0
    for param in group:
        norm = norms.get(optimizer.get_param_id(param))
        if norm is not None:
            total += norm * norm
    root: torch.Tensor = torch.tensor([total], dtype=torch.float32)[0] ** 0.5
    return root if bool(torch.isfinite(root)) else torch.tensor(-1.0)


# -- ZeRO-1 and 2: buckets -----------------------------------------------------------------------


def reduces_nothing(optimizer: Any) -> bool:
    """Return whether DeepSpeed's reductions over ranks leave all gradients as they are.

    That is so in a job with a single process, unless DeepSpeed adds gradients up in other tensors or multiplies them by
    factors.
    """
    made: torch.dtype = optimizer._gradient_reduction_buffer_dtype()
    return (
        _world_size() == 1
        and optimizer.contiguous_gradients
        and not optimizer.use_grad_accum_attribute
        and optimizer.reduce_scatter
        and optimizer.sequence_parallel_size == 1
        and all(torch.promote_types(made, dtype) == dtype for dtype in optimizer.ipg_buckets)
        and not any(map(optimizer._use_compact_grad_partition_buffer, range(len(optimizer.bit16_groups))))
    )


@contextmanager
def without_buffers(optimizer: Any) -> Iterator[None]:
    """Let ``setup_buckets`` allocate no GPU memory inside the block. Nothing may be written to the buckets' buffers."""
    optimizer.contiguous_gradients = False
    try:
        yield
    finally:
        optimizer.contiguous_gradients = True
    dtype = optimizer._gradient_reduction_buffer_dtype()
    none = torch.empty(1, dtype=dtype, device=_accelerator().current_device_name())
    for bucket in optimizer.ipg_buckets.values():
        bucket.buffer[:], bucket.index = [none.expand(int(optimizer.reduce_bucket_size))], 0


def add_to_bucket(optimizer: Any, param: Any, group: int) -> None:
    """Do what ``reduce_independent_p_g_buckets_and_remove_grads`` does, but copy no gradient to the bucket's buffer,
    and leave out what only a reduction needs.
    """
    gradient, dtype = optimizer.get_gradient_for_reduction(param), optimizer.get_param_comm_dtype(param)
    bucket, elements, key = optimizer.ipg_buckets[dtype], param.numel(), optimizer.get_param_id(param)
    if bucket.elements + elements > optimizer.reduce_bucket_size:
        optimizer.reduce_ipg_grads(comm_dtype=dtype)
    if not getattr(param, "ds_grad_is_ready", True):
        return
    if optimizer.params_already_reduced[key]:
        raise AssertionError(
            f"a parameter's gradient must be computed once in a backward, but parameter {key} of group {group} got "
            "another one after the first was reduced: DeepSpeed does not support this"
        )
    if gradient.dtype != bucket.buffer[0].dtype:
        gradient.data = gradient.data.to(bucket.buffer[0].dtype)
    if elements > optimizer.reduce_bucket_size:
        optimizer.extra_large_param_to_reduce[dtype] = param
    device = _accelerator()
    if not device.resolves_data_dependency():
        optimizer._record_gradient_stream(gradient, device.current_stream())
        bucket.copy_streams.add(device.current_stream())
        optimizer._record_bucket_producer(bucket)
    bucket.elements += elements
    bucket.params.append((group, param.param_idx_in_group, key))


# -- ZeRO-3: gradients and gathers ---------------------------------------------------------------


def gradient_partitions(optimizer: Any) -> dict[int, torch.Tensor]:
    """Return each parameter's part of DeepSpeed's flat gradient buffer, as a dict by the parameter's ``ds_id``."""
    return optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition


def in_bucket(optimizer: Any, partitions: Iterable[torch.Tensor]) -> bool:
    """Return whether any of the given reduced gradients lies in DeepSpeed's reduction bucket."""
    # Later gradients overwrite such a gradient. This happens if the bucket has a single parameter, because DeepSpeed
    # then reduces the bucket in place. Otherwise the reduced gradients are in new memory.
    buffers = (bucket.buffer for bucket in optimizer.ipg_buckets.values())
    taken = {b.untyped_storage().data_ptr() for b in buffers if b is not None}
    return any(p.untyped_storage().data_ptr() in taken for p in partitions)


def partition_count(optimizer: Any) -> int:
    """Return the number of ranks that ZeRO-3 divides the parameters among."""
    return int(optimizer.partition_count)


@cache
def _status() -> Any:
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    return ZeroParamStatus


def is_partitioned(param: Any) -> bool:
    """Return whether a parameter is partitioned, so that it has no values until it is gathered."""
    return param.ds_status is _status().NOT_AVAILABLE


def stands_in(param: Any) -> bool:
    """Return whether a partitioned parameter has its full shape, because stock DeepSpeed would have it gathered."""
    return is_partitioned(param) and bool(param.data.numel() == param.ds_numel)


def forget_read(param: Any) -> None:
    """Remove a parameter from DeepSpeed's list of the running module's reads from other modules."""
    # DeepSpeed adds a parameter to this list if it is not gathered when it is read. If DeepSpeed has already recorded
    # the order of modules, backward then fails with a "tracing error".
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    if FWD_MODULE_STACK:
        vars(FWD_MODULE_STACK[-1]).get("_external_params", {}).pop(id(param), None)


@contextmanager
def tensors_for_training() -> Iterator[None]:
    """Make tensors that backward can use, also inside ``torch.inference_mode()``."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def parameter_location(optimizer: Any) -> ParameterLocation:
    """Return the memory (host or device) that holds DeepSpeed's parameter partitions between their uses."""
    return "host" if getattr(optimizer, "offload_param", False) else "device"


class Handle(Protocol):
    """The object that DeepSpeed returns for parameters that are being gathered, to wait for their values."""

    def wait(self, **_: Any) -> None:
        """Wait until DeepSpeed has gathered the parameters, so that they can be used."""
        ...


def wait_one_by_one(module: Any) -> Callable[[], None]:
    """Make DeepSpeed wait separately for each parameter of a common gather. Return a function that undoes this.

    DeepSpeed stores one handle for all parameters of a gather, so that code that uses one parameter waits for all of
    them. A handle of ebbtide contains one handle per parameter. DeepSpeed is made to store, for each parameter, the
    handle of this parameter.
    """
    from deepspeed.runtime.zero.partitioned_param_coordinator import InflightParamRegistry

    class OneByOne(InflightParamRegistry):
        def __setitem__(self, param: Any, handle: Any) -> None:
            super().__setitem__(param, handle.of(param) if hasattr(handle, "of") else handle)

    registry = module.ds_inflight_param_registry
    registry.__class__ = OneByOne

    def restore() -> None:
        registry.__class__ = InflightParamRegistry

    return restore


def around_fetches(
    optimizer: Any, begins: Callable[[list[Any]], None], begun: Callable[[], None]
) -> Callable[[], None]:
    """Arrange that ``begins`` is called with a module's parameters before its forward or backward gathers them.

    ``begun`` is called after DeepSpeed has gathered them and requested those of later modules. Return a function that
    undoes this.
    """
    from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params
    from deepspeed.utils import z3_leaf_module

    coordinator = optimizer.parameter_offload.get_param_coordinator()
    fetch = coordinator.fetch_sub_module

    def fetch_sub_module(module: Any, *args: Any, **kwargs: Any) -> None:
        begins(list(iter_params(module, recurse=z3_leaf_module(module))))
        fetch(module, *args, **kwargs)
        begun()

    coordinator.fetch_sub_module = torch.compiler.disable(fetch_sub_module)

    def restore() -> None:
        del coordinator.fetch_sub_module

    return restore


_COORDINATOR = "_PartitionedParameterCoordinator__"


@torch.no_grad()
def release_all(optimizer: Any, params: Iterable[Any]) -> None:
    """Partition all parameters again that are gathered, as ``release_and_reset_all`` does, in one pass.

    Args:
        params: All ZeRO-3 parameters of the model.
    """
    coordinator, arriving = optimizer.parameter_offload.get_param_coordinator(), _arriving(optimizer)
    partitioned, available = _status().NOT_AVAILABLE, f"{_COORDINATOR}n_available_params"
    released, quick = 0, frees_only(optimizer)
    for param in params:
        if arriving and param in arriving:
            arriving.pop(param).wait()
        param.ds_active_sub_modules.clear()
        if param.ds_status is not partitioned:
            if quick and is_plain(param) and param.ds_status is _status().AVAILABLE:
                free(param)
            else:
                hide_partitions([param])
            released += param.ds_numel
    setattr(coordinator, available, getattr(coordinator, available) - released)


def frees_only(optimizer: Any) -> bool:
    """Return whether DeepSpeed only frees a gathered parameter's memory when it partitions the parameter again."""
    return int(getattr(optimizer, "zero_hpz_partition_size", 1)) == 1


def free(param: Any) -> None:
    """Free the memory of a gathered parameter, as DeepSpeed's ``free_param`` does."""
    data, device = param.data, _accelerator()
    if device.on_accelerator(data) and not device.is_synchronized_device():
        data.record_stream(device.current_stream())
    param.data = data.new_empty(0)
    param.ds_status = _status().NOT_AVAILABLE


def lies_in_partition(param: Any) -> bool:
    """Return whether a gathered parameter shows the memory of its partition, and is not a copy."""
    own: int = param.ds_tensor.untyped_storage().data_ptr()
    return own != 0 and own == param.data.untyped_storage().data_ptr()


def show_partitions(optimizer: Any, params: Iterable[Any]) -> bool:
    """Make each partitioned parameter a view of its partition, which this rank holds whole on the GPU.

    Return whether any of them was partitioned. No update may write the partitions any more.
    """
    if torch.is_inference_mode_enabled():  # the views may serve the next training step too
        with torch.inference_mode(False):
            return show_partitions(optimizer, params)
    status, shown = _status(), False
    for param in params:
        if param.ds_status is status.AVAILABLE:
            continue
        if param.ds_status is status.INFLIGHT:  # DeepSpeed has asked for it before its hooks were taken off
            _arriving(optimizer).pop(param).wait()
        else:
            param.data = param.ds_tensor.data.view(param.ds_shape)
            param.ds_status = status.AVAILABLE
        shown = True
    return shown


def _arriving(optimizer: Any) -> Any:
    return getattr(optimizer.parameter_offload.get_param_coordinator(), f"{_COORDINATOR}inflight_param_registry")


def hide_partitions(params: Iterable[Any]) -> None:
    """Partition parameters again that are gathered."""
    if torch.is_inference_mode_enabled():  # an empty tensor made there would be of no use in training
        with torch.inference_mode(False):
            return hide_partitions(params)
    status = _status()
    for param in params:
        if param.ds_status is status.AVAILABLE:
            if is_plain(param) and lies_in_partition(param):  # nothing is freed
                param.data = param.data.new_empty(0)
                param.ds_status = status.NOT_AVAILABLE
            else:
                with torch.no_grad():
                    param.partition()
    return None


def gather(params: Iterable[Any]) -> None:
    """Gather those of the given parameters that are partitioned. All ranks must call this function."""
    partitioned = [param for param in params if is_partitioned(param)]
    if partitioned:
        partitioned[0].all_gather(partitioned)


def module_trace(optimizer: Any, modules: list[Any] | None = None) -> list[list[tuple[int, int]]] | None:
    """Return the modules that forward and backward ran, in order, as DeepSpeed has recorded them.

    Each module is a list of its parameters. A parameter is given as its `get_param_id` and its total number
    of elements. None if DeepSpeed has not recorded the modules yet.

    Args:
        modules: The modules, if they ran without DeepSpeed's hooks.
    """
    from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params
    from deepspeed.utils import z3_leaf_module

    coordinator = optimizer.parameter_offload.get_param_coordinator()
    if modules is None:
        if not coordinator.is_complete_trace():
            return None
        modules = getattr(coordinator, f"{_COORDINATOR}submodule_order")
    return [
        [
            (optimizer.get_param_id(param), param.ds_numel)
            for param in sorted(set(iter_params(module, recurse=z3_leaf_module(module))), key=lambda p: p.ds_id)
        ]
        for module in modules
    ]


def gather_rules(optimizer: Any) -> GatherRules:
    """Return DeepSpeed's limits on how many parameters may stay gathered after forward or backward has used them."""
    coordinator = optimizer.parameter_offload.get_param_coordinator()
    small = [p.ds_numel for p in optimizer.persistent_parameters]
    return GatherRules(
        reuse=getattr(coordinator, f"{_COORDINATOR}max_reuse_dist_in_numel"),
        ahead=getattr(coordinator, f"{_COORDINATOR}prefetch_bucket_sz"),
        live=getattr(coordinator, f"{_COORDINATOR}max_n_available_params"),
        persistent=max(small, default=0),
    )


def gathers(optimizer: Any, modules: list[Any] | None = None) -> Gathered | None:
    """Return the parameter gathers of one forward and backward, or None if DeepSpeed has not recorded them yet.

    ``modules`` are those of forward and backward, in order, if they ran without DeepSpeed's hooks.
    """
    trace = module_trace(optimizer, modules)
    if trace is None:
        return None
    found = gathered(trace, gather_rules(optimizer))
    return found if optimizer.partition_count == 1 else replace(found, live=None)


def is_swapped(param: Any) -> bool:
    """Return whether a ZeRO-3 parameter's partition is on a drive (NVMe) between its uses in training."""
    return bool(param.ds_tensor.final_location == "nvme")


def is_plain(param: Any) -> bool:
    """Return True if a gather of a parameter uses the parameter's partition as it is."""
    held = param.ds_tensor
    quantized = hasattr(held, "ds_quant_scale")
    return param.ds_secondary_tensor is None and not quantized and not is_swapped(param)


def is_whole(param: Any) -> bool:
    """Return whether this rank's partition is the whole parameter, so that its gather is at most a copy."""
    return is_plain(param) and bool(param.ds_tensor.numel() == param.ds_numel)


@contextmanager
def partitions_at(tensors: Mapping[Any, torch.Tensor]) -> Iterator[None]:
    """Make parameter gathers inside the ``with`` block read partitions from the given tensors, not from DeepSpeed's."""
    partitions = {param: param.ds_tensor for param in tensors}
    for param, tensor in tensors.items():
        vars(tensor).update(vars(param.ds_tensor))
        param.ds_tensor = tensor
    try:
        yield
    finally:
        for param, partition in partitions.items():
            param.ds_tensor = partition


@contextmanager
def in_own_precision(params: Iterable[Any]) -> Iterator[None]:
    """Make DeepSpeed gather parameters in the precision of their partitions inside the ``with`` block.

    With ``torch_autocast`` and several ranks, DeepSpeed would otherwise gather them in the precision in
    which forward computes.
    """
    named = {p: p.comm_dtype for p in params if hasattr(p, "comm_dtype")}
    for param in named:
        del param.comm_dtype
    try:
        yield
    finally:
        for param, dtype in named.items():
            param.comm_dtype = dtype


def empty_cache() -> None:
    """Return PyTorch's unused GPU memory to the driver."""
    _accelerator().empty_cache()


def current_stream() -> Any:
    """Return the stream that is current on the device on which DeepSpeed trains."""
    return _accelerator().current_stream()


def on_stream(stream: Any) -> AbstractContextManager[None]:
    return _accelerator().stream(stream)


def mark_in_flight(params: Iterable[Any]) -> None:
    """Mark partitioned parameters as being gathered, as DeepSpeed does at the start of a gather.

    Raises:
        RuntimeError: One of the parameters is already gathered or being gathered.
    """
    status = _status()
    for param in params:
        if param.ds_status is not status.NOT_AVAILABLE:
            raise RuntimeError(f"the parameter must be partitioned (ZeRO-3), but got {param.ds_summary()}")
        param.ds_status = status.INFLIGHT


def mark_partitioned(params: Iterable[Any]) -> None:
    """Set DeepSpeed's status (``ds_status``) of parameters to partitioned. This undoes `mark_in_flight`."""
    for param in params:
        param.ds_status = _status().NOT_AVAILABLE


def mark_available(param: Any) -> None:
    param.ds_status = _status().AVAILABLE
