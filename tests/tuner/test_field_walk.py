"""Tests that every field of a machine, a workload, a plan and of the configs changes a result or is
refused. A new field fails the tests until it has a line in this file.
"""

import io

import pytest
from ebbtide.simulator import (
    CheckpointPlan,
    Layer,
    Machine,
    MemoryPoint,
    ModelError,
    Plan,
    Prediction,
    Quantity,
    Way,
    Workload,
    architecture,
    build_schedule,
    build_strategy,
    simulate,
    workload_from_model,
)
from ebbtide.simulator.analysis.goodput import CheckpointPrice
from ebbtide.simulator.analysis.many_plans import expected
from ebbtide.simulator.engines.compiled import simulate_fast
from ebbtide.simulator.limits import Limits
from ebbtide.simulator.schedule import Lane, OpKind
from ebbtide.simulator.schedules.footprint import footprint_by_kind
from ebbtide.simulator.update.order import UpdateOrder
from ebbtide.tuner.answer.report import show_machine, show_plan, show_workload
from ebbtide.tuner.calibrate.interval import workload_interval_s
from ebbtide.tuner.placements.candidate import Candidate
from pydantic import ValidationError
from rich.console import Console

from tests.machines import node, workload

GPT = {"layers": 2, "hidden": 256, "heads": 4, "vocabulary": 500}
SIZES = (4_000_000, 4_000_000, 4_000_000, 4_000_000)
MIX = ("host", "device", "resident", "host")


PREDICTION = Prediction(
    iteration_s=3, iteration_low_s=1, iteration_high_s=4, forward_s=1, backward_s=1, step_s=1, update_s=1
)


def q(value, **fields):
    return Quantity.exact(value, **fields)


def base_machine(**changes):
    fields = {
        "network_bytes_per_s": q(10e9),
        "device_flops_per_s": q(1e14),
        "gpus_per_node": 4,
        "storage_read_bytes_per_s": q(3e9),
        "host_adam_by_threads": {3: q(2e9)},
        "cpu_cores": 4,
    }
    return node(**{**fields, **changes})


def base_workload(**changes):
    fields = {"subgroup_size": 4_000_000, "ranks_per_node": 2, "clip": True, "parameters": (SIZES,)}
    return workload(SIZES, 0.002, 0.004, **{**fields, **changes})


def base_plan(**changes):
    fields = {
        "subgroup_size": 4_000_000,
        "placement": Plan.runs(MIX),
        "staging_slots": 1,
        "threads": 3,
        "prediction": PREDICTION,
    }
    return Plan(**{**fields, **changes})


def shown(show, thing):
    console = Console(file=io.StringIO(), width=200)
    show(thing, console)
    return console.file.getvalue()


def timed(work, on, plan, strategies):
    for name, options in strategies:
        timeline = simulate(build_strategy(name, work, **options), on)
        yield timeline.iteration_s, timeline.device_peak_bytes, timeline.host_peak_bytes
    if work.zero_stage == 3:
        yield expected_s(work, on, plan.with_bits(early=True))
        stored = plan.placed(["stored"] * len(MIX))
        yield simulate(build_schedule(work, stored), on).iteration_s
        for alone in (on, on.model_copy(update={"device_shares_host_cores": True})):
            simulation = CheckpointPrice(work, plan, alone)
            yield simulation.cost(CheckpointPlan(copy_budget_bytes=8 * 2**20))


def expected_s(work, on, plan):
    """Return two predicted iteration times of a plan in seconds: the mean over steps that clip and steps that do not,
    and the time of a step that does not clip.
    """

    def run(plan):
        return simulate_fast(build_schedule(work, plan), on)

    return expected(work, on, plan, run).iteration_s, run(plan).iteration_s


def comes_in(work, plan):
    """Return the bytes of parameters that a plan's simulated schedule copies to the GPU for its forwards and
    backwards, the seconds of what it computes, and a dict of the plan's bytes of GPU memory by kind.
    """
    ops = build_schedule(work, plan).ops
    fetched = sum(op.work for op in ops if op.kind is OpKind.PARAMETER_FETCH)
    computed_s = sum(op.work for op in ops if op.lane is Lane.COMPUTE)
    return fetched, computed_s, footprint_by_kind(work, plan)["device"]


def outcomes(work, on, plan=None):
    """Return a tuple of every result that a field of a workload, machine or plan may change.

    These are predicted times, memory and limits, the fingerprints (hashes) of workload and machine, and the
    output of `tune show`.
    """
    plan = plan or base_plan(overlap_forward=work.overlaps_forward)
    strategies = [("ebbtide", {"plan": plan}), ("no_offload", {})]
    if work.zero_stage == 3:
        strategies += [
            ("zero3_offload", {}),
            ("zero3_offload_unpinned", {}),
            ("twin_flow", {"ratio": 0.5}),
            ("superoffload", {}),
            ("zero_infinity", {}),
        ]
    sharing = Workload.model_validate(
        {
            **work.model_dump(),
            "zero_stage": 2,
            "step_gather_s": work.step_gather_s,
            "layers": [{**layer.model_dump(), "network_gather_bytes": 0} for layer in work.layers],
        }
    )
    away = plan.with_ways([Way(p, "host") for p in MIX])
    return (
        list(timed(work, on, plan, strategies)),
        work.zero_stage == 3 and comes_in(work, away),
        simulate(build_strategy("zero_offload", sharing), on).iteration_s,
        simulate(build_strategy("zero3_offload", estimated(on)), on).iteration_s,
        simulate(build_strategy("zero3_offload", estimated(on, omp_threads=1)), on).iteration_s,
        estimated(on, {**GPT, "experts": 8, "experts_per_token": 2}).forward_s,
        workload_interval_s(lambda w: build_strategy("ebbtide", w, plan=plan), work, on),
        Limits.of(work, on),
        work.fingerprint,
        on.fingerprint,
        shown(show_machine, on),
        shown(show_workload, work),
    )


def estimated(on, model=GPT, ds_config=None, **fields):
    return workload_from_model(model, on, ds_config, **{"sequence": 64, "data_parallel": 8, **fields})


MACHINE = {
    "schema_version": 99,
    "name": "other",
    "device_kind": "emulated",
    "device_name": "GPU",
    "unified_memory": True,
    "device_shares_host_cores": True,
    "gpus_per_node": 1,
    "cpu_cores": 2,
    "numa_nodes": 2,
    "host_memory_bytes": 2**36,
    "device_memory_bytes": 2**33,
    "h2d_bytes_per_s": q(3e9),
    "d2h_bytes_per_s": q(3e9),
    "duplex_factor": q(0.5),
    "pageable_h2d_bytes_per_s": q(1e9),
    "pageable_d2h_bytes_per_s": q(1e9),
    "copy_latency_s": 1e-3,
    "launch_latency_s": 1e-3,
    "dram_bytes_per_s": q(30e9),
    "host_copy_bytes_per_s": q(1e9),
    "host_adam_params_per_s": q(1e9),
    "host_adam_out_of_place": q(0.5),
    "stock_host_adam_params_per_s": q(1e9),
    "stock_host_adam_thread_params_per_s": q(1e8),
    "device_adam_params_per_s": q(1e9),
    "host_adam_by_threads": {3: q(5e8)},
    "device_flops_per_s": q(1e12),
    "attention_flops_per_s": q(1e11),
    "device_memory_bytes_per_s": q(1e10),
    "expert_flops_per_s": q(1e11),
    "gather_bytes_per_s": q(1e9),
    "reduce_bytes_per_s": q(1e9),
    "device_reserved_bytes": 2**30,
    "layer_issue_s": q(0.01),
    "loop_s": q(0.01),
    "unexplained_spread": 0.3,
    "storage_write_bytes_per_s": q(1e8),
    "storage_read_bytes_per_s": q(1e8),
    "storage_duplex_factor": q(0.5),
    "drives": {"/nvme": {"write_bytes_per_s": q(1e9), "read_bytes_per_s": q(2e9)}},
    "storage_fsync_s": 1.0,
    "writer_s_per_byte": q(1e-7),
    "save_s_per_tensor": q(1e-2),
    "network_bytes_per_s": q(1e8),
    "contention": {"host_adam_while_h2d": q(0.5)},
    "rank_shares": {2: {"dram": q(0.3)}},
    "other_rates": {"nvlink_bytes_per_s": q(1e11)},
    "facts": {"link": "gen 5"},
    "versions": {"torch": "1"},
    "measured_with": "a stopwatch",
    "warnings": ("hot",),
}
LAYERS = tuple({"params": n, "forward_s": 0.002, "backward_s": 0.004, "activation_bytes": 7} for n in SIZES)
WORKLOAD = {
    "schema_version": 99,
    "name": "other",
    "layers": tuple({**layer, "forward_s": 0.01} for layer in LAYERS),
    "subgroups": (8_000_000, 4_000_000, 2_000_000, 2_000_000),
    "subgroup_size": 8_000_000,
    "deepspeed_subgroup_size": 9_000_000,
    "parameters": (tuple(n // 2 for n in SIZES for _ in range(2)),),
    "wire_dtype": "fp32",
    "grad_bytes_per_param": 4,
    "optimizer": "lion",
    "clip": False,
    "clip_rate": 0.05,
    "gradient_accumulation_steps": 2,
    "micro_batch": 3,
    "sequence": 77,
    "recompute": True,
    "ranks_per_node": 4,
    "nodes": 2,
    "stock_threads": 1,
    "tokens_per_iteration": 9,
    "samples_per_iteration": 9,
    "pipeline_idle_s": 0.1,
    "zero_stage": 2,
    "reduced_beside": 0.0,
    "reduce_bucket_params": 10_000_000,
    "planned_bucket_params": 10_000_000,
    "step_gather_s": 0.1,
    "network_step_gather_bytes": 10**9,
    "device_base_bytes": 2**30,
    "device_base_parts": {"gradients": 2**20},
    "module_issue_s": 0.05,
    "step_issue_s": 0.05,
    "planned_step_issue_s": 0.05,
    "fetched_step_issue_s": 0.05,
    "live_params": 0,
    "state_stays": True,
    "stock_backward_extra_s": 0.5,
    "memory_curve": (MemoryPoint(t_s=0, phase="forward", device_bytes=5),),
    "model_checkpoint_bytes": 2**30,
    "provenance": "a dream",
    "phase_times": {"forward": q(0.1)},
    "memory_peaks": {"device": Quantity(median=1e9, q1=9e8, q3=1e9, n=5)},
    "warnings": ("noisy",),
}
BESIDE = {  # field -> other fields that it needs to be allowed, or to have an effect
    "step_gather_s": {"zero_stage": 2},
    "network_step_gather_bytes": {"zero_stage": 2},
    "samples_per_iteration": {},
    "persistent_params": {"gradient_accumulation_steps": 2},
    "device_base_parts": {"device_base_bytes": 2**30},
    "live_params": {"device_base_bytes": 2**30},
    "reduced_beside": {
        "layers": tuple({**layer, "network_reduce_bytes": 10**8} for layer in base_workload().model_dump()["layers"])
    },
}
LAYER = {
    "name": "block",
    "params": 3_000_000,
    "forward_s": 0.1,
    "backward_s": 0.1,
    "activation_bytes": 2**30,
    "network_gather_bytes": 10**9,
    "network_reduce_bytes": 10**9,
    "persistent_params": 1_000_000,
    "regathered_params": 0,
    "params_of_others": 1_000_000,
    "unhidden_s": 0.1,
    "planned_forward_s": 0.1,
    "planned_backward_s": 0.1,
    "fetched_forward_s": 0.1,
    "fetched_backward_s": 0.1,
}
PLAN = {
    "schema_version": 99,
    "subgroup_size": 5_000_000,
    "deepspeed_subgroup_size": 9_000_000,
    "ways": (Way("host"),) * 4,
    "order": UpdateOrder(host="arrival"),
    "staging_slots": 2,
    "prefetch": 1,
    "host_slots": 1,
    "storage_dir": "/local",
    "storage_shares": {"/a": 1.0, "/b": 2.0},
    "threads": 0,
    "overlap_forward": False,
    "checkpoint": CheckpointPlan(interval_steps=7),
    "subgroups": (1,),
    "prediction": Prediction(
        iteration_s=1, iteration_low_s=1, iteration_high_s=1, forward_s=1, backward_s=1, step_s=1, update_s=1
    ),
    "alternatives": (
        Prediction(
            strategy="stock",
            iteration_s=2,
            iteration_low_s=1,
            iteration_high_s=1,
            forward_s=1,
            backward_s=1,
            step_s=1,
            update_s=1,
        ),
    ),
    "reasons": ("why not",),
    "versions": {"torch": "1"},
    "machine_fingerprint": "m",
    "workload_fingerprint": "w",
    "trained_as": {"precision": "bf16", "micro_batch": 3},
    "about": "a model on a machine",
}
# Fields that only training or the service's pages read.
IN_TRAINING = {
    "machine_fingerprint",
    "workload_fingerprint",
    "subgroup_size",
    "deepspeed_subgroup_size",
    "versions",
    "host_slots",
    "storage_dir",
    "storage_shares",
}


@pytest.fixture(scope="module")
def plain():
    return outcomes(base_workload(), base_machine())


@pytest.mark.parametrize("name", sorted(Machine.model_fields))
def test_every_field_of_a_machine(name, plain):
    fields = {**base_machine().model_dump(), name: MACHINE[name]}
    changed = allowed(lambda: Machine.model_validate(fields), name)
    if changed is None:
        return
    assert outcomes(base_workload(), changed) != plain


@pytest.mark.parametrize("name", sorted(Workload.model_fields))
def test_every_field_of_a_workload(name, plain):
    beside = BESIDE.get(name, {})
    fields = {**base_workload().model_dump(), **beside}
    before = outcomes(Workload.model_validate(fields), base_machine()) if beside else plain
    changed = allowed(lambda: Workload.model_validate({**fields, name: WORKLOAD[name]}), name)
    if changed is None:
        return
    if name in ("micro_batch", "sequence", "recompute"):  # what a plan says about the training that it was made for
        both = [{"micro_batch": 2, **more} for more in ({}, {name: WORKLOAD[name]})]
        without, told = (base_workload().model_copy(update=one).trained_as for one in both)
        assert told != without
        return
    if name in ("parameters", "subgroup_size"):  # the start of a search for subgroup sizes
        assert how_it_is_cut(changed) != how_it_is_cut(base_workload())
        return
    if name == "deepspeed_subgroup_size":  # what a plan says about the training that it is for
        made = [Candidate.of(MIX).plan(work) for work in (changed, base_workload())]
        assert [plan.config_subgroup_size for plan in made] == [9_000_000, 4_000_000]
        return
    assert outcomes(changed, base_machine()) != before


def allowed(build, *names):
    """Call ``build`` and return its result, or None if ``build`` refuses a field with an error.

    The error must contain one of the field names ``names``.
    """
    try:
        return build()
    except (ValidationError, ModelError) as error:
        told = str(error)
    if not any(name in told for name in names):
        pytest.fail(f"refused without naming {names}: {told}")
    return None


def how_it_is_cut(work):
    try:
        return work.recut(1_000_000).subgroups, work.subgroup_size
    except ValueError as error:
        return str(error), work.subgroup_size


@pytest.mark.parametrize("name", sorted(Layer.model_fields))
def test_every_field_of_a_layer(name, plain):
    layers = [*LAYERS[:-1], {**LAYERS[-1], name: LAYER[name]}]
    beside = BESIDE.get(name, {})
    fields = {**base_workload().model_dump(), **beside, "layers": layers}
    if beside:
        plain = outcomes(Workload.model_validate({**fields, "layers": LAYERS}), base_machine())
    changed = allowed(lambda: Workload.model_validate(fields), name)
    if changed is None:
        return
    assert outcomes(changed, base_machine()) != plain


@pytest.mark.parametrize("name", sorted(Plan.model_fields))
def test_every_field_of_a_plan(name):
    changed = allowed(lambda: Plan.model_validate({**base_plan().model_dump(), name: PLAN[name]}), name, "ways")
    if changed is None:
        return
    work, on = base_workload(), base_machine()
    before, after = ((outcomes(work, on, plan)[0], shown(show_plan, plan)) for plan in (base_plan(), changed))
    assert (before == after) == (name in IN_TRAINING)


@pytest.mark.parametrize("kind", [Machine, Workload, Plan])
def test_numbers_that_are_none_are_refused(kind):
    made = {Machine: base_machine, Workload: base_workload, Plan: base_plan}[kind]()
    field = {Machine: "copy_latency_s", Workload: "pipeline_idle_s", Plan: "prediction"}[kind]
    for value in (float("inf"), float("nan")):
        given = value
        if kind is Plan:
            given = {**PLAN["prediction"].model_dump(), "iteration_s": value}
        with pytest.raises(ValidationError, match="finite"):
            kind.model_validate({**made.model_dump(), field: given})


MODEL = {
    "fused": True,
    "layers": 3,
    "hidden": 512,
    "heads": 8,
    "kv_heads": 2,
    "head_size": 32,
    "ffn": 99,
    "vocabulary": 501,
    "experts": 4,
    "experts_per_token": 2,
    "gated": False,
    "bias": True,
    "norm_params": 2,
    "positions": 64,
    "tied": True,
    "name": "other",
    "norms": 3,
    "layout": "q k v o up down norm",
    "shared_ffn": 40,
    "embedding": ["tokens"],
    "head": ["head"],
}
ONLY_BESIDE = {"experts_per_token": {"experts": 8}, "heads": {"kv_heads": 2}}


@pytest.mark.parametrize("name", sorted(MODEL))
def test_every_field_of_a_model(name):
    fields = architecture(GPT).__dataclass_fields__.keys() - {"other_elements"}  # no description may give it
    assert MODEL.keys() >= fields
    base = {**GPT, **ONLY_BESIDE.get(name, {})}
    changed = allowed(lambda: estimated(base_machine(), {**base, name: MODEL[name]}), name)
    if changed is None:
        return
    assert changed != estimated(base_machine(), base)


DS = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 3,
    "gradient_accumulation_steps": 3,
    "gradient_clipping": 0.0,
    "bf16": {"enabled": False},
    "fp16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "optimizer": {"type": "Lion"},
    "zero_optimization": {"stage": 2},
    "zero_optimization.sub_group_size": 1000,
    "zero_optimization.reduce_bucket_size": 1000,
    "zero_optimization.stage3_prefetch_bucket_size": 1000,
    "zero_optimization.overlap_comm": False,
    "zero_optimization.stage3_max_live_parameters": 0,
    "zero_optimization.stage3_max_reuse_distance": 0,
    "zero_optimization.stage3_param_persistence_threshold": 0,
    "zero_optimization.round_robin_gradients": True,
    "zero_optimization.parameter_alignment": True,
    "activation_checkpointing": {"cpu_checkpointing": True},
    "zero_optimization.offload_param": {"device": "cpu"},
    "zero_optimization.offload_optimizer": {"device": "nvme"},
    "steps_per_print": 1,
    "communication_data_type": "fp32",
    "zero_optimization.zero_hpz_partition_size": 4,
    "colour": "red",
}


DS_BESIDE = {  # if the bucket holds all gradients of a small model, all of them stay
    "zero_optimization.stage3_max_reuse_distance": {"stage3_prefetch_bucket_size": 0}
}


def with_key(key, value):
    if not key.startswith("zero_optimization."):
        return {"bf16": {"enabled": True}, key: value}
    stage = 2 if key.endswith(("round_robin_gradients", "parameter_alignment")) else 3
    zero = {"stage": stage, **DS_BESIDE.get(key, {}), key.partition(".")[2]: value}
    return {"bf16": {"enabled": True}, "zero_optimization": zero}


@pytest.mark.parametrize("key", sorted(DS))
def test_every_key_of_a_deepspeed_config_counts_or_is_told(key):
    given, on = with_key(key, DS[key]), base_machine()
    stage = given.get("zero_optimization", {}).get("stage", 3)
    zero = {"stage": stage, **DS_BESIDE.get(key, {})}
    before = {"bf16": {"enabled": True}, "zero_optimization": zero}
    if key == "zero_optimization":
        before = {"bf16": {"enabled": True}}
    # The parameters do not end at a boundary.
    shape = {"sequence": 1024, "model": {**GPT, "hidden": 260, "vocabulary": 501}}
    changed = allowed(lambda: estimated(on, ds_config=given, **shape), key.rpartition(".")[2])
    if changed is None:
        return
    plain = estimated(on, ds_config=before, **shape)
    same = {"provenance": "", "name": ""}
    told = f"not simulated: {key}" in changed.provenance
    offload = "offload" in key or key == "activation_checkpointing"
    assert told or offload or changed.model_copy(update=same) != plain.model_copy(update=same)


def test_what_is_offloaded_reaches_the_strategy():
    from ebbtide.simulator.estimates.offloading import offloading

    for key in ("activation_checkpointing", "zero_optimization.offload_param", "zero_optimization.offload_optimizer"):
        assert offloading(with_key(key, DS[key])).beyond_state
