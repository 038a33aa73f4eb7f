"""Each family's parameters are those of transformers' module, one by one and in its order.

DeepSpeed cuts subgroups at the borders of parameters: in another order an offline plan would be
for other subgroups than the engine's, and be refused.
"""

import pytest

from simulator import ModelError, architecture
from simulator.estimates.families import FAMILIES

FALCON_40B = {"new_decoder_architecture": True, "num_kv_heads": 8, "num_attention_heads": 64,
              "hidden_size": 4096}  # fmt: skip
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
    ("falcon", {"parallel_attn": False, "multi_query": False, "bias": True, "alibi": True,
                "hidden_size": 1024, "num_attention_heads": 16}),
    ("opt", {"ffn_dim": 512, "max_position_embeddings": 99, "tie_word_embeddings": False}),
    ("granite", {"mlp_bias": True}),
    ("seed_oss", {"attention_out_bias": True}),
    ("cohere", {"tie_word_embeddings": False}),
]  # fmt: skip


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


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "decoder_sparse_step must be 1"),
        ({"model_type": "opt", "word_embed_proj_dim": 512, "hidden_size": 1024},
         "word_embed_proj_dim must be hidden_size"),
        ({"model_type": "t5"}, "model_type must be one of llama, .*, but got 't5'"),
        ({"layers": 2, "hidden": 8, "heads": 2, "vocabulary": 9, "layout": "q k v o mlp"},
         "layout must be made of .*, but got mlp"),
        ({"layers": 2, "hidden": 8, "heads": 2, "vocabulary": 9, "layout": "q", "gated": False},
         "layout must be a text, and says what gated"),
        ({"layers": 2, "hidden": 8, "heads": 2, "vocabulary": 9, "experts": 4, "layout": "q"},
         "experts must be given where the layout has one of experts"),
    ],
)  # fmt: skip
def test_what_is_built_in_another_way_is_refused(model, message):
    with pytest.raises(ModelError, match=message):
        architecture(model)


def test_a_layout_describes_what_no_family_is():
    numbers = {"layers": 2, "hidden": 64, "heads": 4, "vocabulary": 100, "positions": 32}
    given = {**numbers, "layout": "norm qkv o norm up down", "norm_params": 2, "bias": True,
             "tied": True}  # fmt: skip
    gpt2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100,
            "n_positions": 32}  # fmt: skip
    assert architecture(given).blocks() == architecture(gpt2).blocks()
