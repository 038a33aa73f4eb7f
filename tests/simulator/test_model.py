"""Tests of workloads estimated from model configs: exact parameter counts, DeepSpeed's subgroups, `"auto"`
values, parallelism, and errors for bad input.
"""

import json

import pytest
import torch
from ebbtide.simulator import ModelError, Plan, Quantity, architecture, build_schedule, preset, workload_from_model
from ebbtide.simulator.analysis.many_plans import PlanSweep
from ebbtide.simulator.engines.compiled import simulate_fast
from ebbtide.simulator.estimates.compute import GpuSpeed
from ebbtide.simulator.estimates.estimate import estimated
from ebbtide.simulator.estimates.job import Job
from ebbtide.simulator.estimates.rank import (
    FLAT,
    FLAT_SEVERAL,
    FLAT_STEP,
    GRADIENT_HOOK,
    ISSUED_BACKWARD,
    MODULES_OF_A_LAYER,
    ONE_RANK,
    SEVERAL_RANKS,
)
from ebbtide.simulator.schedule import OpKind
from ebbtide.simulator.update.way import Way
from ebbtide.simulator.workload import PASSES, cut
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
}


def config(family, hidden, layers, heads, vocabulary, **more):
    return {
        "model_type": family,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocabulary,
        **more,
    }


# Numbers of parameters as published by the authors and on the hub.
PUBLISHED = {
    "Llama 2 7B": (LLAMA, 6_738_415_616),
    "Llama 3 8B": (
        config("llama", 4096, 32, 32, 128256, num_key_value_heads=8, intermediate_size=14336),
        8_030_261_248,
    ),
    "Mistral 7B": (
        config("mistral", 4096, 32, 32, 32000, num_key_value_heads=8, intermediate_size=14336, head_dim=None),
        7_241_732_096,
    ),
    "Qwen2 7B": (config("qwen2", 3584, 28, 28, 152064, num_key_value_heads=4, intermediate_size=18944), 7_615_616_512),
    "Qwen2.5 0.5B": (
        config("qwen2", 896, 24, 14, 151936, num_key_value_heads=2, intermediate_size=4864, tie_word_embeddings=True),
        494_032_768,
    ),
    "Qwen3 0.6B": (
        config(
            "qwen3",
            1024,
            28,
            16,
            151936,
            num_key_value_heads=8,
            head_dim=128,
            intermediate_size=3072,
            tie_word_embeddings=True,
        ),
        596_049_920,
    ),
    "GPT-2": (
        {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257},
        124_439_808,
    ),
    "GPT-2 XL": (
        {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25, "n_positions": 1024, "vocab_size": 50257},
        1_557_611_200,
    ),
    "Pythia 6.9B": (config("gpt_neox", 4096, 32, 32, 50432, intermediate_size=16384), 6_857_302_016),
    "OPT 1.3B": (config("opt", 2048, 24, 32, 50272, ffn_dim=8192, max_position_embeddings=2048), 1_315_758_080),
    "Gemma 2B": (
        config("gemma", 2048, 18, 8, 256000, num_key_value_heads=1, head_dim=256, intermediate_size=16384),
        2_506_172_416,
    ),
    "Gemma 2 2B": (
        config("gemma2", 2304, 26, 8, 256000, num_key_value_heads=4, head_dim=256, intermediate_size=9216),
        2_614_341_888,
    ),
    "Phi-2": (config("phi", 2560, 32, 32, 51200, intermediate_size=10240), 2_779_683_840),
    "Phi-3 mini": (config("phi3", 3072, 32, 32, 32064, intermediate_size=8192), 3_821_079_552),
    "Mixtral 8x7B": (
        config(
            "mixtral",
            4096,
            32,
            32,
            32000,
            num_key_value_heads=8,
            intermediate_size=14336,
            num_local_experts=8,
            num_experts_per_tok=2,
        ),
        46_702_792_704,
    ),
}


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_parameters_are_counted_as_published(name):
    given_config, total = PUBLISHED[name]
    assert architecture(given_config).elements == total


def test_a_plain_description_is_the_same_model_as_its_config():
    plain = {"layers": 32, "hidden": 4096, "heads": 32, "vocabulary": 32000, "ffn": 11008}
    assert architecture(plain).elements == architecture(LLAMA).elements


def test_a_file_and_its_folder_are_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert architecture(tmp_path) == architecture(tmp_path / "config.json")


def test_the_byte_gpt_of_the_studies_is_counted_as_torch_counts_it():
    from studies.bench.byte_gpt import SIZES, ByteGPT

    shape = SIZES["tiny"]
    model = ByteGPT(shape)
    held = sum(p.numel() for p in model.parameters())
    found = architecture(
        {
            "layers": shape.layers,
            "hidden": shape.hidden,
            "heads": shape.heads,
            "vocabulary": 256,
            "gated": False,
            "bias": True,
            "norm_params": 2,
            "positions": shape.sequence,
            "tied": False,
        }
    )
    assert found.elements == held
    blocks = found.blocks()
    own = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
    assert [block.elements for block in blocks[1:-1]] == own


def unlimited(name, **changes):
    """Return a machine preset on which only matrix products take time."""
    # Its GPU memory bandwidth is nearly unlimited, and the host launches a layer in almost no time.
    far = {"device_memory_bytes_per_s": 1e15, "layer_issue_s": 1e-12}
    fields = {key: Quantity.exact(value) for key, value in {**far, **changes}.items()}
    return preset(name).model_copy(update=fields)


# Korthikanti et al., equation 2 without scores: 34 s b h bytes per layer whose matrices are 12 times as wide as the
# hidden size. Llama's are a sixteenth wider.
LLAMA_STORES = 34 + 2 * (4 + 3 * 11008 / 4096 - 12)


def stored_bytes(config, layers, tokens):
    """Return the bytes that the forward of a transformers model stores for backward, without its parameters."""
    config = type(config)(**{**config.to_dict(), "num_hidden_layers": layers, "use_cache": False})
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).model
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    stored = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: stored.setdefault(t.data_ptr(), t), lambda t: t):
        model(torch.arange(tokens)[None] % 100)
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in stored.values()}
    return sum(size for storage, size in held.items() if storage not in own)


@pytest.mark.parametrize(
    ("family", "width", "fields"),
    [
        ("llama", 1376, {"num_key_value_heads": 8}),
        ("llama", 2784, {"num_key_value_heads": 2}),
        ("gemma", 4096, {"num_key_value_heads": 1, "head_dim": 64}),
        ("mixtral", 1792, {"num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2}),
    ],
)
def test_kept_activations_are_those_that_transformers_stores(family, width, fields):
    sizes = {"hidden_size": 512, "intermediate_size": width, "num_attention_heads": 8, "vocab_size": 128, **fields}
    config = AutoConfig.for_model(family, **sizes)
    stored = stored_bytes(config, 3, 256) - stored_bytes(config, 2, 256)
    shape = {"sequence": 256, "activation_checkpointing": "none", "kernels": "eager"}
    work = workload_from_model({**config.to_dict(), "num_hidden_layers": 3}, preset("h200"), **shape)
    assert 0.88 * stored < work.layers[1].activation_bytes < 1.05 * stored


def test_products_and_attention_take_their_flops():
    machine = unlimited("h200")
    work = workload_from_model(LLAMA, machine, sequence=2048, micro_batch=2)
    rate, attention = (machine.rate(f"{what}_flops_per_s") for what in ("device", "attention"))
    tokens = 2 * 2048
    layers = 2 * tokens * 32 * (4 * 4096**2 + 3 * 4096 * 11008) / rate
    head = 2 * tokens * 32000 * 4096 / rate
    scores = 32 * tokens * 2 * 2 * 4096 * 2048 / 2 / attention
    assert work.forward_s == pytest.approx(layers + head + scores, rel=1e-3)
    kept_s = 2 * layers + 2.5 * scores + 2 * head  # flash attention computes scores again: 5 products for 2
    assert work.backward_s == pytest.approx(kept_s + layers + scores, rel=1e-3)
    kept = workload_from_model(LLAMA, machine, sequence=2048, micro_batch=2, activation_checkpointing="none")
    assert kept.backward_s == pytest.approx(kept_s, rel=1e-3)
    half = workload_from_model(LLAMA, machine, sequence=2048, micro_batch=2, activation_checkpointing="selective")
    assert half.backward_s == pytest.approx(kept_s + 0.5 * (layers + scores), rel=1e-3)
    assert half.layers[1].activation_bytes == (LLAMA_STORES + 2) / 2 * tokens * 4096
    assert kept.layers[1].activation_bytes == LLAMA_STORES * tokens * 4096
    assert work.layers[1].activation_bytes == 2 * tokens * 4096


def mfu(machine, **shape):
    """Return the share of the GPU's possible flops that forward and backward of a workload use, with 8 flops
    per parameter and token.
    """
    work = workload_from_model(LLAMA, machine, **shape)
    used = 8 * work.params * work.tokens_per_iteration
    rate = machine.rate("device_flops_per_s")
    return used / (rate * (work.forward_s + work.backward_s))


def test_eager_kernels_and_their_loss_take_more_of_the_devices_memory():
    # With a fused loss, backward is shorter and needs less activation memory. With very fast GPU memory, backward takes
    # equally long in all of them, because only the ops between matrix products differ.
    shape = {"sequence": 2048, "micro_batch": 4, "activation_checkpointing": "none", "zero_stage": 2}
    ways = ({}, {"kernels": "eager"}, {"fused_loss": True})
    plain, eager, fused = (workload_from_model(LLAMA, preset("a100-80gb"), **shape, **way) for way in ways)
    assert 1.1 < eager.forward_s / plain.forward_s < 1.4
    assert 1.1 < eager.backward_s / plain.backward_s < 1.4
    assert 0.9 < fused.backward_s / plain.backward_s < 1
    assert eager.layers[1].activation_bytes > plain.layers[1].activation_bytes
    assert fused.layers[-1].activation_bytes < plain.layers[-1].activation_bytes / 2
    far = [workload_from_model(LLAMA, unlimited("a100-80gb"), **shape, **way) for way in ways]
    assert [work.backward_s for work in far] == pytest.approx([far[0].backward_s] * 3, rel=1e-3)


def test_scores_that_are_stored_take_time_and_memory():
    shape = {"sequence": 4096, "micro_batch": 1, "activation_checkpointing": "none"}
    flash = workload_from_model(LLAMA, preset("a100-80gb"), **shape)
    stored = workload_from_model(LLAMA, preset("a100-80gb"), flash_attention=False, **shape)
    assert stored.forward_s > 1.2 * flash.forward_s
    assert stored.layers[1].activation_bytes - flash.layers[1].activation_bytes == 2 * 32 * 4096**2


def test_without_hooks_a_layer_is_issued_sooner():
    # Under ZeRO-2 it is shorter than under ZeRO-3, because forward gathers no parameters.
    machine = preset("h100")
    three, two, eager = (
        workload_from_model(LLAMA, machine, sequence=1, zero_stage=stage, kernels=kernels).layers[1].forward_s
        for stage, kernels in ((3, "fused"), (2, "fused"), (2, "eager"))
    )
    assert two < eager < 0.3 * three


def test_small_and_narrow_products_are_slower_per_flop():
    machine = preset("h100-node")
    large = mfu(machine, sequence=4096, micro_batch=8)
    small = mfu(machine, sequence=512, micro_batch=1)
    narrow = mfu(machine, sequence=4096, micro_batch=8, tensor_parallel=4)
    assert small < 0.5 * large < large < 1
    assert narrow < large


def test_a_short_forward_takes_what_the_host_needs_to_issue_it():
    machine = preset("h100-node")
    work = workload_from_model(LLAMA, machine, sequence=1, micro_batch=1)
    issued, layer = machine.layer_issue_s.median, work.layers[1]
    assert issued < layer.forward_s < 1.1 * issued
    averaged = 6 * 2 * layer.params / machine.rate("device_memory_bytes_per_s")
    again, own = issued, ISSUED_BACKWARD * issued  # a recomputed forward, and the backward
    assert again + own < layer.backward_s - averaged < 1.1 * (again + own)
    for kind, thread in ONE_RANK.items():  # under a plan
        again, own = thread.forward * issued, thread.backward * ISSUED_BACKWARD * issued
        forward_s, backward_s = (getattr(layer, kind + name) for name in PASSES)
        assert again < forward_s < 1.1 * again
        assert again + own < backward_s - averaged < 1.1 * (again + own)


JOBS = (
    ({}, ONE_RANK),
    ({"data_parallel": 4}, SEVERAL_RANKS),
    ({"zero_stage": 2}, FLAT),
    ({"zero_stage": 1, "data_parallel": 4}, FLAT_SEVERAL),
)


@pytest.mark.parametrize(("job", "table"), JOBS)
def test_a_plan_takes_its_own_time_of_the_training_thread(job, table):
    machine = unlimited("h100-node", layer_issue_s=1.0, device_flops_per_s=1e21)  # the host takes nearly all time
    work = workload_from_model(LLAMA, machine, sequence=1, activation_checkpointing="none", **job)
    count = len(work.subgroups)
    for kind, thread in table.items():
        place = "device" if kind == "planned_" else "host"
        seconds = work.planned if place == "device" else work.fetched
        assert seconds.forward_s == pytest.approx(thread.forward * work.forward_s, rel=0.01)
        assert seconds.backward_s == pytest.approx(thread.backward * work.backward_s, rel=0.01)
        assert seconds.step_issue_s == thread.step * work.step_issue_s > 0
        ways = (Way("host", place),) * count
        plan = Plan(subgroup_size=work.subgroup_size, ways=ways, overlap_forward=work.overlaps_forward)
        schedule = build_schedule(work, plan)
        by_kind = {op.kind: [] for op in schedule.ops}
        for op in schedule.ops:
            by_kind[op.kind].append(op.work)
        assert sum(by_kind[OpKind.FORWARD]) == pytest.approx(3 * seconds.forward_s)
        assert sum(by_kind[OpKind.BACKWARD]) == pytest.approx(3 * seconds.backward_s)
        assert by_kind[OpKind.NORM] == [seconds.step_issue_s] * 3
        sweep = PlanSweep(work, machine)
        assert sweep.result(plan).iteration_s == simulate_fast(schedule, machine).iteration_s
        moved = work.paced(1.5)
        slower = simulate_fast(build_schedule(moved, plan), machine).iteration_s
        assert sweep.on(machine, moved).result(plan).iteration_s == slower


def test_below_zero_3_backward_and_step_have_the_hooks_of_deepspeed_alone():
    issued = 0.5  # of a layer's forward under ZeRO-3
    machine = unlimited("h100-node", layer_issue_s=issued, device_flops_per_s=1e21)
    three, two, one, ones = (
        workload_from_model(LLAMA, machine, sequence=1, activation_checkpointing="none", **job)
        for job in ({}, {"zero_stage": 2}, {"zero_stage": 1}, {"zero_stage": 1, "accumulation": 4})
    )
    hooks = 9 * GRADIENT_HOOK * issued / MODULES_OF_A_LAYER  # a layer of this model has 9 parameters
    assert two.layers[1].backward_s == one.layers[1].backward_s == pytest.approx(hooks, rel=0.01)
    assert ones.layers[1].backward_s == pytest.approx(hooks / 4, rel=0.01), "ZeRO-1 reduces in the last micro-batch"
    assert two.step_issue_s == FLAT_STEP * three.step_issue_s == one.step_issue_s


@pytest.mark.parametrize("ranks", [1, 4])
def test_whole_gradients_pass_through_device_memory_six_times_before_they_are_reduced(ranks):
    # The difference must be the time of the gradient reduction and of six reads or writes in GPU memory, each for the
    # two additional bytes per gradient element.
    machine = preset("h100-node")
    narrow, wide = (
        workload_from_model(
            LLAMA,
            machine,
            {"data_types": {"grad_accum_dtype": dtype}, "zero_optimization": {"overlap_comm": False}},
            data_parallel=ranks,
        ).backward_s
        for dtype in ("bf16", "fp32")
    )
    size = 2 * 6738415616
    wires = 0.8 * machine.other_rates["nvlink_bytes_per_s"].median
    reduced = (ranks - 1) / ranks * size / wires
    averaged = 6 * size / machine.rate("device_memory_bytes_per_s")
    assert wide - narrow == pytest.approx(averaged + reduced, rel=0.02)


def test_the_heads_loss_costs_memory_traffic():
    machine = preset("h100-node")
    small, large = (
        workload_from_model({**LLAMA, "vocab_size": v}, machine).layers[-1].forward_s for v in (32000, 128000)
    )
    assert large == pytest.approx(4 * small, rel=0.1)


def test_parts_of_a_fused_loss_are_as_small_as_the_input_of_the_head():
    def saved(vocabulary):
        sizes = {"layers": 2, "hidden": 512, "heads": 8, "vocabulary": vocabulary}
        plain, fused = (
            workload_from_model(sizes, preset("h100"), sequence=65536, fused_loss=fused).layers[-1].activation_bytes
            for fused in (False, True)
        )
        return (plain - fused) / (10 * 65536 * vocabulary)  # bytes of a logit and its fp32 copies

    assert saved(64 * 512) == pytest.approx(63 / 64, rel=5e-3)  # beside the gradient of the output layer
    assert saved(4 * 512) == pytest.approx(7 / 8, rel=1e-3)


def test_a_newer_version_of_flash_attention_computes_scores_faster():
    def forward_s(name, **given):
        return workload_from_model(LLAMA, preset(name), sequence=65536, **given).forward_s

    h100 = [forward_s("h100", flash_version=version) for version in (1, 2, 3)]
    assert h100 == sorted(h100, reverse=True)
    assert h100[2] < 0.6 * h100[0]
    assert forward_s("h100") == h100[1], "PyTorch's own attention is version 2"
    assert h100[0] > 1.1 * forward_s("h100"), "presets do not assume version 1"
    stored, first = (GpuSpeed.of(preset("h100"), 2, **given) for given in ({"flash": False}, {"flash_version": 1}))
    assert stored.attention_flops_per_s == first.attention_flops_per_s
    assert forward_s("rtx4090", flash_version=2) == forward_s("rtx4090")


def test_a_long_sequence_without_a_version_of_flash_attention_is_told():
    def told(**given):
        return " ".join(Job.of_deepspeed(LLAMA, None, **given).estimate_notes)

    assert "(flash_version)" in told(sequence=16384)
    assert "(flash_version)" not in told(sequence=16383)
    assert "(flash_version)" not in told(sequence=16384, flash_version=2)
    assert "(flash_version)" not in told(sequence=16384, flash_attention=False)


@pytest.mark.parametrize(("name", "version"), [("a100-80gb", 3), ("b200", 3), ("h100", 4), ("rtx4090", 4)])
def test_a_version_of_flash_attention_that_the_gpu_lacks_is_refused(name, version):
    with pytest.raises(ModelError, match=f"flash_version must be .*2.* on NVIDIA .*, but got {version}"):
        workload_from_model(LLAMA, preset(name), flash_version=version)


def test_tensor_and_pipeline_parallelism_divide_the_model():
    machine = unlimited("h100-node")
    whole = workload_from_model(LLAMA, machine, sequence=2048)
    halves = workload_from_model(LLAMA, machine, sequence=2048, tensor_parallel=2)
    norms = (32 * 2 + 1) * 4096
    assert halves.params == (whole.params - norms) // 2 + norms
    # Two all-reduces of the activations per layer, over the wires of one pair of GPUs.
    wires = 0.8 * machine.other_rates["nvlink_pair_bytes_per_s"].median
    exchange = 2 * 2 * (2e-5 + 0.5 * 2048 * 4096 * 2 / wires)
    assert halves.forward_s == pytest.approx(whole.forward_s / 2 + 32 * exchange, rel=1e-3)
    stages = [
        workload_from_model(
            LLAMA,
            machine,
            {"gradient_accumulation_steps": 8, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
            sequence=2048,
            pipeline_parallel=4,
            stage=i,
        )
        for i in range(4)
    ]
    assert sum(stage.params for stage in stages) == whole.params
    busy = stages[1].forward_s + stages[1].backward_s
    assert stages[1].pipeline_idle_s == pytest.approx(3 / 8 * busy)
    # DeepSpeed runs 1F1B: the first of four stages holds four micro-batches' activations at once, the last one.
    held = [stage.device_base_parts["activations"] for stage in stages]
    assert [n - held[-1] for n in held] == [
        left * stage.activation_bytes for left, stage in zip((3, 2, 1, 0), stages, strict=True)
    ]


def test_data_parallel_ranks_over_several_nodes_exchange_over_the_network():
    machine = preset("h100-node")
    inside = workload_from_model(LLAMA, machine, sequence=2048, data_parallel=4)
    outside = workload_from_model(LLAMA, machine, sequence=2048, data_parallel=16)
    assert inside.layers[1].network_gather_bytes == 0
    block = sum(architecture(LLAMA).blocks()[1].params)
    # A ring over 16 ranks copies 15 of 16 parts into each node, whose four ranks share the link.
    assert outside.layers[1].network_gather_bytes == pytest.approx(2 * 15 / 16 * block / 4, rel=1e-3)
    assert outside.nodes == 4
    assert outside.tokens_per_iteration == 16 * 2048


def test_auto_is_resolved_and_told():
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "sub_group_size": 1e8},
    }
    work = workload_from_model(
        LLAMA, preset("h200"), config, micro_batch=4, gradient_accumulation_steps=2, sequence=512
    )
    assert (work.gradient_accumulation_steps, work.samples_per_iteration) == (2, 8)
    assert work.wire_dtype == "bf16"
    assert work.clip
    assert work.subgroup_size == 10**8
    assert "reduce_bucket_size: auto -> 1.67772e+07" in work.provenance
    assert "train_micro_batch_size_per_gpu: auto -> 4" in work.provenance


def test_the_batch_rule_is_deepspeeds():
    machine = preset("h200")
    base = {"bf16": {"enabled": True}, "train_batch_size": 32}
    work = workload_from_model(
        LLAMA, machine, {**base, "train_micro_batch_size_per_gpu": 2}, data_parallel=4, sequence=64
    )
    assert work.gradient_accumulation_steps == 4
    with pytest.raises(ModelError, match=r"32 != 3 x 4 x 4|must divide the batch of a rank, 8"):
        workload_from_model(LLAMA, machine, {**base, "train_micro_batch_size_per_gpu": 3}, data_parallel=4)


BAD = [
    ({"model_type": "mine"}, {}, "model_type must be one .* got 'mine'"),
    ({"model_type": ["llama"]}, {}, "model_type must be one .* got .*llama"),
    ({"model_type": "llama"}, {}, "must give layers, hidden, heads, vocabulary"),
    ({**LLAMA, "hidden_size": -1}, {}, "hidden .*hidden_size.* must be a whole number"),
    ({**LLAMA, "hidden_size": 4096.5}, {}, "hidden .* but got 4096.5"),
    ({**LLAMA, "num_attention_heads": 33}, {}, "hidden must be a multiple of heads"),
    ({**LLAMA, "num_key_value_heads": 7}, {}, "heads must be a multiple of kv_heads"),
    ({"layers": 2, "hidden": 64, "heads": 4, "vocabulary": 9, "color": 1}, {}, "got 'color'"),
    (LLAMA, {"sequence": 0}, "sequence must be a whole number >= 1, but got 0"),
    (LLAMA, {"tensor_parallel": 5}, "tensor_parallel must divide the 32"),
    (LLAMA, {"pipeline_parallel": 64}, "pipeline_parallel must be at most the 32 layers"),
    (LLAMA, {"data_parallel": 0}, "data_parallel must be a whole number >= 1"),
    (LLAMA, {"ds_config": {"zero_optimization": {"stage": 0}}}, "stage must be 1, 2 or 3, .* 0"),
    (
        LLAMA,
        {"ds_config": {"zero_optimization": {"stage": 2}}, "zero_stage": 1},
        "stage is 2 in the DeepSpeed config, but zero_stage is 1",
    ),
    (
        LLAMA,
        {"ds_config": {"tensor_parallel": {"autotp_size": 2}}},
        "autotp_size is 2 in the DeepSpeed config, but tensor_parallel is 1",
    ),
    (LLAMA, {"ds_config": {"tensor_parallel": {"autotp_size": "2"}}}, "autotp_size must be a whole number >= 0"),
    (LLAMA, {"ds_config": {"optimizer": {"type": "SGD"}}}, "optimizer.type must be .* got 'SGD'"),
    (LLAMA, {"pipeline_parallel": 2}, "must be 1 under ZeRO-2 and ZeRO-3, .* but got 2 under ZeRO-3"),
    (LLAMA, {"ds_config": {"compile": {"backend": "inductor"}}}, "compile.backend must be a key that DeepSpeed knows"),
    (LLAMA, {"ds_config": {"hybrid_engine": {"speed": 1}}}, "hybrid_engine.speed must be a key that DeepSpeed knows"),
    (LLAMA, {"ds_config": {"gradient_clipping": "yes"}}, "gradient_clipping must be a number"),
    (LLAMA, {"ds_config": {"gradient_clipping": float("nan")}}, "gradient_clipping"),
    (LLAMA, {"ds_config": "/nonexistent.json"}, "a DeepSpeed config must be a JSON file"),
    ("/nonexistent", {}, "give its config.json"),
]


@pytest.mark.parametrize(("model", "options", "message"), BAD)
def test_bad_input_names_the_key(model, options, message):
    with pytest.raises(ModelError, match=message):
        workload_from_model(model, preset("h200"), **options)


def test_the_degree_of_tensor_parallelism_may_be_in_both_places():
    plain = workload_from_model(LLAMA, preset("h200"))
    for size, options in ((1, {}), (0, {}), (2, {"tensor_parallel": 2})):
        config = {"tensor_parallel": {"autotp_size": size}}
        job = Job.of_deepspeed(LLAMA, config, **options)
        assert (estimated(job, preset("h200")).params == plain.params) == (size < 2)
        assert "tensor_parallel" not in " ".join(job.estimate_notes)


def test_a_machine_without_flops_is_refused():
    machine = preset("h200").model_copy(update={"device_flops_per_s": None})
    with pytest.raises(ModelError, match="device_flops_per_s must be given"):
        workload_from_model(LLAMA, machine)


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=30), subgroup=st.integers(1, 200))
def test_subgroups_hold_everything_once_and_close_where_they_are_full(sizes, subgroup):
    found = cut(sizes, subgroup)
    assert sum(found) == sum(sizes)
    assert all(size >= subgroup for size in found[:-1])
    assert all(size < subgroup + max(sizes) for size in found)


def test_recut_is_what_deepspeed_does(only_rank):
    from ebbtide.profiler import profile_engine

    from studies.bench.byte_gpt import SIZES, Batches, train_step
    from tests.runtime.contract.training import start

    batches = Batches(2, SIZES["tiny"].sequence)
    coarse = start(subgroup_size=10**9)
    work = profile_engine(coarse, lambda e: train_step(e, batches.at(0)), iterations=1)
    coarse.destroy()
    for size in (20_000, 7_000, 50_000):
        engine = start(subgroup_size=size)
        expected = tuple(int(n) for n in engine.optimizer.fp16_partitioned_groups_flat_numel)
        engine.destroy()
        assert work.recut(size).subgroups == expected
    assert len(set(work.recut(7_000).subgroups)) > 1


def test_recut_needs_the_parameters():
    from ebbtide.simulator import Layer, Workload

    layer = Layer(params=10, forward_s=1.0, backward_s=1.0)
    work = Workload(name="w", layers=(layer,), subgroups=(10,))
    with pytest.raises(ValueError, match=r"workload.parameters is needed"):
        work.recut(5)


def test_a_text_config_beside_the_models_own_layers_is_ignored():
    whole = {**config("llama", 64, 2, 4, 1000, intermediate_size=128), "text_config": {"num_hidden_layers": 7}}
    assert architecture(whole).layers == 2


def test_a_number_that_is_none_is_refused_not_passed_over():
    with pytest.raises(ModelError, match=r"intermediate_size.* must be a whole number.*\[1\]"):
        architecture({**LLAMA, "intermediate_size": [1]})


def test_a_machine_that_does_not_tell_issues_layers_as_others_do():
    # The estimate must assume 1.8 ms. With 0 ms, such a machine would seem faster than a machine with a measured launch
    # time.
    told = preset("h200").model_copy(update={"layer_issue_s": Quantity.exact(1.8e-3)})
    silent = told.model_copy(update={"layer_issue_s": None})
    config = {"layers": 4, "hidden": 256, "heads": 4, "vocabulary": 1000}
    some = [workload_from_model(config, on, sequence=128) for on in (told, silent)]
    assert some[0].layers == some[1].layers
    assert some[1].layers[1].forward_s >= 1.8e-3


MIXTURE = {"layers": 2, "hidden": 2048, "heads": 16, "vocabulary": 1000, "ffn": 768, "experts_per_token": 8}
STACKED, ALONE = "norm q k v o norm router fused_experts", "norm q k v o norm router experts"


def of_experts(experts=128, tokens=4096, layout=STACKED, machine="h100", **job):
    model = {**MIXTURE, "experts": experts, "layout": layout}
    return workload_from_model(model, preset(machine), sequence=tokens, **{"micro_batch": 1, **job})


def test_experts_are_slower_than_one_dense_mlp_of_the_same_work():
    dense = {**MIXTURE, "ffn": 8 * 768, "gated": True}
    del dense["experts_per_token"]
    same = workload_from_model(dense, preset("h100"), sequence=4096, micro_batch=8).layers[1].forward_s
    few, many = (of_experts(experts, micro_batch=8).layers[1].forward_s for experts in (16, 128))
    assert 1.2 * same < few < many < 3 * same
    work_of = [of_experts(tokens=n, micro_batch=8).layers[1].forward_s / n for n in (1024, 4096)]
    assert work_of[0] > work_of[1], "fewer rows of each expert"


def test_rates_of_experts_move_only_experts():
    machine = preset("h100")
    slower = machine.model_copy(update={"expert_flops_per_s": machine.expert_flops_per_s.scaled(0.5)})
    for model, moves in ({**MIXTURE, "experts": 16, "layout": STACKED}, True), (LLAMA, False):
        before, after = (
            workload_from_model(model, on, sequence=4096, micro_batch=8).forward_s for on in (machine, slower)
        )
        assert (after > 1.1 * before) == moves


def test_a_loop_over_experts_is_launched_and_each_experts_matrix_gathered():
    grouped = of_experts()
    loop = of_experts(kernels="eager")
    assert loop.layers[1].forward_s - grouped.layers[1].forward_s > 0.5 * 128 * 1e-4
    together, alone = (of_experts(layout=one, data_parallel=8) for one in (STACKED, ALONE))
    matrices = 3 * 128
    assert alone.layers[1].forward_s > 0.9 * matrices * 0.7e-3 > 10 * together.layers[1].forward_s
    assert of_experts(layout=ALONE).layers[1].forward_s == pytest.approx(grouped.layers[1].forward_s), "one rank"


def test_a_mixture_says_that_no_run_was_used_for_fitting():
    assert "leaf_module" in of_experts().provenance
    assert "experts" not in workload_from_model(LLAMA, preset("h100")).provenance
