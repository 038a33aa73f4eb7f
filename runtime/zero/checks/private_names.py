"""The table of DeepSpeed's private members that ebbtide uses, and a check, without an engine, that the installed
DeepSpeed has them.
"""

import inspect
import re
import sys
from dataclasses import dataclass
from typing import Any

# First version with results identical to stock DeepSpeed's, and first version that was not tested.
TESTED = ("0.18.6", "0.20")


@dataclass(frozen=True, slots=True)
class Member:
    """A private member of DeepSpeed's ZeRO optimizers that ebbtide uses, and the first version that has it."""

    name: str
    since: str = TESTED[0]


_MANGLED = "_DeepSpeedZeroOptimizer_Stage3__"
STAGE3 = (
    *map(
        Member,
        (
            "fp16_groups",
            "fp16_partitioned_groups",
            "fp16_partitioned_groups_flat",
            "fp16_partitioned_groups_flat_numel",
            "fp32_partitioned_groups_flat",
            "sub_group_size",
            "reduce_bucket_size",
            "sub_group_to_group_id",
            "grad_partitions_flat_buffer",
            "grad_position",
            "norm_for_param_grads",
            "param_dict",
            "persistent_parameters",
            "micro_step_id",
            "subgroup_to_device",
            "offload_param",
            "ipg_buckets",
            "parameter_offload",
            "partition_count",
            f"{_MANGLED}param_id_to_grad_partition",
            f"{_MANGLED}avg_scatter_grads",
            "postscale_gradients",
            "gradient_predivide_factor",
            "get_param_id",
            "is_gradient_accumulation_boundary",
            "_overflow_check_and_loss_scale_update",
            "_get_norm_groups",
            "_model_parallel_all_reduce",
            "_pre_step",
            "_partition_all_parameters",
            "reset_cpu_buffers",
            "invalidate_secondary_tensor",
            "_get_fp32_opt_state_partition",
            "_fp32_state_allgather",
            "_rigid_load_state_dict",
            "_load_universal_checkpoint",
            "_restore_from_bit16_weights",
            "_restore_from_fp32_weights",
            "checkpoint_event_prologue",
            "checkpoint_event_epilogue",
            "_global_grad_norm",
            "_partitioned_params_swap_out",
        ),
    ),
    Member("_offload_boundary_param_ids", "0.19.5"),
    Member("_offload_grad_partition_at_boundary", "0.19.5"),
    Member("_get_param_partition_rank", "0.19.3"),
    Member("_loss_scale_update_and_overflow_cleanup", "0.19.8"),
)

STAGE12 = (
    *map(
        Member,
        (
            "bit16_groups",
            "bit16_groups_flat",
            "reduce_bucket_size",
            "parallel_partitioned_bit16_groups",
            "single_partition_of_fp32_groups",
            "params_in_partition",
            "real_dp_process_group",
            "grad_position",
            "norm_for_param_grads",
            "micro_step_id",
            "accumulated_grads_in_cpu",
            "param_buffer_of_bit16_for_cpu_offload_groups",
            "averaged_gradients",
            "local_overflow",
            "nccl_start_alignment_factor",
            "offload_gradient_dict",
            "check_grad_overflow",
            "async_accumulate_grad_in_cpu_via_gpu",
            "get_param_gradient_attribute",
            "update_offload_overflow_tracker",
            "clear_grad_attribute",
            "scaled_global_norm",
            "_update_scale",
            "_global_grad_norm",
            "_update_model_bit16_weights",
            "_link_all_hp_params",
            "_lazy_init_hp_params_optimizer_state",
            "_hp_optimizer_states_linked",
            "_get_offload_gradient_dict",
            "_has_inf_or_nan",
            "get_data_parallel_partitions",
            "ipg_buckets",
            "get_param_comm_dtype",
            "is_param_in_current_partition",
            "average_tensor",
            "reduce_scatter",
            "sequence_parallel_size",
            "_gradient_reduction_buffer_dtype",
            "_record_gradient_stream",
            "_record_bucket_producer",
        ),
    ),
    Member("low_precision_master_weights_and_grads", "0.19.8"),
    Member("_offload_accumulated_param_ids", "0.19.5"),
    Member("_finalize_cpu_offload_gradient_accumulation", "0.19.5"),
    Member("_get_param_group_idx", "0.19.8"),
    Member("_get_compact_grad_partition_slice", "0.19.8"),
    Member("_use_compact_grad_partition_buffer", "0.19.8"),
    Member("_wait_for_offload_copies", "0.19.8"),
)


def missing_names() -> list[str]:
    """Return the private names of DeepSpeed that ebbtide uses and that the installed DeepSpeed lacks.

    A name counts as missing if DeepSpeed's source code does not contain it. An optimizer object would not show all
    names, because optimizers set some attributes only while they run. Names that exist only in versions newer than the
    installed one are not reported.
    """
    import deepspeed
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
    from packaging.version import Version

    installed = Version(deepspeed.__version__)
    missing = []
    for owner, table in ((DeepSpeedZeroOptimizer_Stage3, STAGE3), (DeepSpeedZeroOptimizer, STAGE12)):
        words = _words(owner)
        for member in table:
            name = member.name.removeprefix(f"_{owner.__name__}")
            if Version(member.since) <= installed and name not in words:
                missing.append(member.name)
    return missing


def _words(owner: type[Any]) -> set[str]:
    modules = {cls.__module__ for cls in owner.__mro__ if cls.__module__.startswith("deepspeed")}
    return {word for name in modules for word in re.findall(r"\w+", inspect.getsource(sys.modules[name]))}
