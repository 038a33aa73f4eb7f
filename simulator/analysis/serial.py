"""A ZeRO-3 workload that is at least as fast as a given workload below ZeRO-3, under any plan."""

from typing import Any

from ebbtide.simulator.workload import Workload


def serial(workload: Workload) -> Workload:
    """Return a ZeRO-3 workload with iterations that take no longer than those of ``workload``, under any plan.

    The result is used to compute lower bounds and to choose the order of updates. Where a step below ZeRO-3 waits for
    its updates (`Workload.overlaps_forward`), nothing may overlap the next forward in the result either. So its forward
    takes no time. Instead, three times are added to the last layer's backward, before any gradient is complete:

    - The time of forward.
    - The idle time of the pipeline.
    - The time in which ranks exchange updated parameters.

    If gradients leave the GPU only once per step, the time of all passes before the last micro-batch's backward is
    added there too, except for the first forward if updates overlap it.

    A ZeRO-3 workload is returned with its times without DeepSpeed's module hooks.
    """
    workload = workload.bare
    if workload.zero_stage == 3:
        return workload
    overlaps = workload.overlaps_forward
    steps = 1 if workload.adds_on_device else workload.gradient_accumulation_steps
    left_s = steps * sum(layer.backward_s + overlaps * layer.forward_s for layer in workload.layers)
    moved_s = workload.forward_s + workload.backward_s - left_s
    fields: dict[str, Any] = {"network_reduce_bytes": 0}
    gone: dict[str, Any] = {"step_gather_s": 0.0, "network_step_gather_bytes": 0}
    gone |= {"reduce_bucket_params": 0, "planned_bucket_params": 0}
    if not overlaps:
        moved_s += workload.pipeline_idle_s + workload.step_gather_s
        fields["forward_s"] = gone["pipeline_idle_s"] = 0.0
    layers = [layer.model_copy(update=fields) for layer in workload.layers]
    layers[-1] = layers[-1].model_copy(update={"backward_s": layers[-1].backward_s + moved_s / steps})
    kept = {"layers": tuple(layers), "zero_stage": 3, "gradient_accumulation_steps": steps}
    return workload.model_copy(update=gone | kept)
