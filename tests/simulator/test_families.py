"""Tests that ebbtide lists the parameters of each model family as the transformers module has them, in the same order.

DeepSpeed cuts subgroups at the borders of parameters. With another order, a plan made offline would be
for other subgroups than the engine's and would be refused.
"""

import json
import sys

import pytest
from ebbtide.simulator import ModelError, architecture, preset, workload_from_model
from ebbtide.simulator.estimates.estimate import estimated
from ebbtide.simulator.estimates.job import Job
from ebbtide.simulator.estimates.models.families import FAMILIES
from ebbtide.simulator.estimates.models.modules import built

FALCON_40B = {"new_decoder_architecture": True, "num_kv_heads": 8, "num_attention_heads": 64, "hidden_size": 4096}
VARIANTS = [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": True}),
    ("gpt_neox", {"attention_bias": False}),
    ("gpt2", {"n_inner": 1000}),
    ("gpt_bigcode", {"multi_query": False}),
    ("qwen3", {"attention_bias": True}),
    ("qwen3_moe", {"num_experts": 6, "moe_intermediate_size": 96}),
    ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}),
    ("starcoder2", {"use_bias": False}),
    ("falcon", FALCON_40B),
    ("falcon", {**FALCON_40B, "num_ln_in_parallel_attn": 1}),
    (
        "falcon",
        {
            "parallel_attn": False,
            "multi_query": False,
            "bias": True,
            "alibi": True,
            "hidden_size": 1024,
            "num_attention_heads": 16,
        },
    ),
    ("opt", {"ffn_dim": 512, "max_position_embeddings": 99, "tie_word_embeddings": False}),
    ("granite", {"mlp_bias": True}),
    ("seed_oss", {"attention_out_bias": True}),
    ("cohere", {"tie_word_embeddings": False}),
]


@pytest.mark.parametrize(
    ("family", "settings"),
    [*((family, {}) for family in FAMILIES), *VARIANTS],
    ids=lambda given: given if isinstance(given, str) else "-".join(given) or "default",
)
def test_parameters_are_those_of_the_module_in_its_order(family, settings):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    try:
        config = transformers.AutoConfig.for_model(family, num_hidden_layers=2, **settings)
    except ValueError:
        pytest.skip(f"this transformers has no {family}")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    blocks = architecture(config.to_dict()).blocks()
    expected = [parameter.numel() for parameter in model.parameters()]
    assert [elements for block in blocks for elements in block.params] == expected


SIZES = (
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "ffn_dim",
    "n_inner",
    "ffn_hidden_size",
    "num_kv_heads",
)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_size_that_a_config_leaves_out_is_the_one_of_transformers(family):
    # A model may be refused. Hidden size and heads are unusual, so that no family's default fits to them by chance.
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    of = transformers.CONFIG_MAPPING[family]
    chosen = {"hidden_size": 3072, "num_attention_heads": 48, "num_hidden_layers": 2, "vocab_size": 160_000}
    full = of(**{of.attribute_map.get(name, name): size for name, size in chosen.items()}).to_dict()
    for key in set(SIZES) & set(full):
        config = {name: value for name, value in full.items() if name != key}
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(of.from_dict(dict(config)))
        expected = sum(parameter.numel() for parameter in model.parameters())
        assert architecture(config).elements == expected, key


def test_without_transformers_a_size_that_a_config_leaves_out_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    config = {"model_type": "mistral", "num_hidden_layers": 2, "hidden_size": 96, "num_attention_heads": 6}
    with pytest.raises(ModelError, match="num_key_value_heads must be in the config of a 'mistral' model"):
        architecture({**config, "vocab_size": 100, "intermediate_size": 256})


# Models in none of the tables: with other layers, other experts, states, or an encoder beside a decoder.
BUILT = [
    ("deepseek_v3", {"num_hidden_layers": 4, "first_k_dense_replace": 3}),
    ("qwen3_next", {"num_hidden_layers": 4}),
    ("glm4_moe", {"num_hidden_layers": 2}),
    ("granitemoe", {"num_hidden_layers": 2, "num_local_experts": 4}),
    ("gemma4_text", {"num_hidden_layers": 6}),
    ("jamba", {"num_hidden_layers": 8}),
    ("mamba2", {"num_hidden_layers": 2}),
    ("gpt_neo", {}),
    ("t5", {}),
    ("qwen3_moe", {"decoder_sparse_step": 2, "num_hidden_layers": 4}),
    ("opt", {"word_embed_proj_dim": 512, "hidden_size": 1024, "num_attention_heads": 16}),
]


@pytest.mark.parametrize(("family", "settings"), BUILT, ids=[family for family, _ in BUILT])
def test_what_no_table_knows_is_read_from_its_modules(family, settings):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config = transformers.AutoConfig.for_model(family, **settings)
    both = family == "t5"
    auto = transformers.AutoModelForSeq2SeqLM if both else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config)
    read = architecture(json.loads(config.to_json_string(use_diff=False)))
    blocks = read.blocks()
    layers = config.num_hidden_layers + (config.num_decoder_layers if both else 0)
    assert len(blocks) == 2 + layers == 2 + read.layers
    expected = [parameter.numel() for parameter in model.parameters()]
    assert [elements for block in blocks for elements in block.params] == expected
    assert blocks[-1].flops_per_token == 2 * model.get_output_embeddings().weight.numel()
    assert all(block.flops_per_token and block.attention for block in blocks[1:-1])
    if both:  # the first layer has a table of biases, from which rows are looked up
        assert blocks[1].elements > blocks[2].elements
        assert blocks[1].flops_per_token == blocks[2].flops_per_token


TEXT = {"num_hidden_layers": 2}
MULTIMODAL = [
    ("qwen2_5_vl", {"text_config": TEXT, "vision_config": {"depth": 3}}),
    ("qwen3_vl_moe", {"text_config": TEXT}),
    ("llava", {"text_config": {**TEXT, "model_type": "llama"}}),
    ("gemma3", {"text_config": TEXT}),
    ("qwen2_audio", {"text_config": {**TEXT, "model_type": "qwen2"}}),
]


@pytest.mark.parametrize(("family", "settings"), MULTIMODAL, ids=[family for family, _ in MULTIMODAL])
def test_the_parts_for_images_and_sound_are_counted_and_said(family, settings):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    if not hasattr(transformers, "AutoModelForMultimodalLM"):
        pytest.skip("this transformers has no class for all multimodal models")
    config = transformers.AutoConfig.for_model(family, **settings)
    with torch.device("meta"):
        model = transformers.AutoModelForMultimodalLM.from_config(config)
    read = architecture(json.loads(config.to_json_string(use_diff=False)))
    assert read.layers == 2
    assert [n for block in read.blocks() for n in block.params] == [p.numel() for p in model.parameters()]
    language = sum(p.numel() for p in model.get_decoder().parameters()) + model.get_output_embeddings().weight.numel()
    language -= model.get_output_embeddings().weight.numel() if read.tied else 0
    assert read.other_elements == pytest.approx(read.elements - language, rel=1e-3)
    told = estimated(Job.of_deepspeed(read), preset("h100-node")).provenance
    assert f"parts for images or sound ({read.other_elements / 1e6:,.0f} M parameters)" in told


def test_both_parts_of_a_speech_model_are_counted():
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    config = transformers.AutoConfig.for_model("whisper")
    with torch.device("meta"):
        model = transformers.AutoModelForSpeechSeq2Seq.from_config(config)
    read = architecture(json.loads(config.to_json_string(use_diff=False)))
    assert [n for block in read.blocks() for n in block.params] == [p.numel() for p in model.parameters()]


@pytest.mark.parametrize("family", FAMILIES)
def test_modules_say_what_the_tables_say(family):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(family, num_hidden_layers=2)
    told = json.loads(config.to_json_string(use_diff=False))
    for one, other in zip(architecture(told).blocks(), built(told).blocks(), strict=True):
        assert (other.params, other.attention) == (one.params, one.attention)
        # There, biases are counted with their products.
        assert other.flops_per_token == pytest.approx(one.flops_per_token, rel=0.015)


def test_a_token_visits_some_of_the_experts():
    pytest.importorskip("transformers")
    published = {  # model -> all parameters, and those that a token uses, in billions
        "deepseek_v3": (
            671,
            37,
            {
                "hidden_size": 7168,
                "num_hidden_layers": 61,
                "num_attention_heads": 128,
                "n_routed_experts": 256,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 2048,
                "intermediate_size": 18432,
                "vocab_size": 129280,
                "first_k_dense_replace": 3,
            },
        ),
        "glm4_moe": (
            106.9,
            12.8,
            {
                "hidden_size": 4096,
                "num_hidden_layers": 46,
                "num_attention_heads": 96,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "n_routed_experts": 128,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 1408,
                "vocab_size": 151552,
                "intermediate_size": 10944,
                "n_shared_experts": 1,
                "first_k_dense_replace": 1,
            },
        ),
    }
    for family, (params, active, config) in published.items():
        read = architecture({"model_type": family, **config})
        visited = sum(block.flops_per_token for block in read.blocks()) / 2
        assert read.elements / 1e9 == pytest.approx(params, rel=0.001), family
        assert visited / 1e9 == pytest.approx(active, rel=0.02), family


def test_without_transformers_others_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match=r"one of llama, .* got 'rwkv'.*pip install './ebbtide\[hf\]'"):
        architecture({"model_type": "rwkv"})


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"model_type": "vit"}, "model_type must be that of a language model .* for 'vit' transformers says: U"),
        ({"model_type": "mine"}, r"one that the installed transformers knows, but got 'mine'\. Instead, desc"),
        ({"model_type": "rwkv", "num_hidden_layers": 10**6}, "num_hidden_layers must be at most"),
        (
            {"model_type": "glm4_moe", "num_hidden_layers": 2, "num_experts_per_tok": 0},
            "one of num_experts_per_tok, .* must give the number of experts per token",
        ),
        (
            {"layers": 2, "hidden": 8, "heads": 2, "vocabulary": 9, "layout": "q k v o mlp"},
            "layout .* must contain only .*, but got mlp",
        ),
        (
            {"layers": 2, "hidden": 8, "heads": 2, "vocabulary": 9, "layout": "q", "gated": False},
            "layout must be a text .* must not be given together with gated, .* but got layout 'q' and gated. Give",
        ),
        (
            {"layers": 2, "hidden": 8, "heads": 2, "vocabulary": 9, "experts": 4, "layout": "q"},
            "experts must be given if and only if layout .* contains one of experts",
        ),
    ],
)
def test_what_is_built_in_another_way_is_refused(model, message):
    with pytest.raises(ModelError, match=message):
        architecture(model)


def test_a_layout_describes_what_no_family_is():
    numbers = {"layers": 2, "hidden": 64, "heads": 4, "vocabulary": 100, "positions": 32}
    given = {**numbers, "layout": "norm qkv o norm up down", "norm_params": 2, "bias": True, "tied": True}
    gpt2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 32}
    assert architecture(given).blocks() == architecture(gpt2).blocks()


def bert(**changes):
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    return {"model_type": "bert", "vocab_size": 1000, **sizes, **changes}


@pytest.mark.parametrize("family", ["bert", "distilbert"])
def test_an_encoder_is_not_planned_as_a_decoder(family):
    with pytest.raises(ModelError, match="is an encoder"):
        workload_from_model(bert(model_type=family), preset("h200"))


def test_an_encoder_that_is_made_a_decoder_is_planned():
    assert workload_from_model(bert(is_decoder=True), preset("h200")).params > 0
