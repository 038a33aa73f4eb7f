"""The families of models that are known without the transformers library, by the ``model_type`` of their configs.

A family gives the parts of a layer, such as matrices and norms, because a config does not list them. The parts are in
the order of the newest stable transformers library. There, a mixture-of-experts layer stacks the same matrix of all
experts, such as the up projection, into one parameter. Other families are read by transformers
(`ebbtide.simulator.estimates.models.modules`).
"""

from collections.abc import Callable, Mapping
from typing import Any

Config = Mapping[str, Any]
Numbers = dict[str, Any]

ALL = frozenset({"qkv", "out", "mlp"})
_SPLIT = "q k v o"
_GATED = "gate up down"
_TWO_NORMS = "norm norm"
_LLAMA = f"{_SPLIT} {_GATED} {_TWO_NORMS}"
_HEAD_NORMS = f"{_SPLIT} head_norm head_norm"
_PLAIN = "up down"
_MEGATRON = f"norm qkv o norm {_PLAIN}"
_LAYER_NORM: Numbers = {"norm_params": 2}
_GPT2: Numbers = {"layout": _MEGATRON, "bias": ALL, "tied": True, **_LAYER_NORM}

# The numbers of each family, unless a config says otherwise.
FAMILIES: dict[str, Numbers] = {
    "llama": {"layout": _LLAMA},
    "mistral": {"layout": _LLAMA},
    "qwen2": {"layout": _LLAMA, "bias": frozenset({"qkv"})},
    "qwen3": {"layout": f"{_HEAD_NORMS} {_GATED} {_TWO_NORMS}"},
    "gemma": {"layout": _LLAMA, "tied": True},
    "gemma2": {"layout": f"{_LLAMA} {_TWO_NORMS}", "tied": True},
    "gemma3_text": {"layout": f"{_HEAD_NORMS} {_GATED} {_TWO_NORMS} {_TWO_NORMS}", "tied": True},
    "phi3": {"layout": f"o qkv gate_up down {_TWO_NORMS}"},
    "phi": {"layout": f"{_SPLIT} {_PLAIN} norm", "bias": ALL | {"head"}, **_LAYER_NORM},
    "mixtral": {"layout": f"{_SPLIT} router fused_experts {_TWO_NORMS}"},
    "qwen2_moe": {
        "layout": f"{_SPLIT} router fused_experts shared_gate shared_up shared_down shared_router {_TWO_NORMS}",
        "bias": frozenset({"qkv"}),
    },
    "qwen3_moe": {"layout": f"{_HEAD_NORMS} fused_experts router {_TWO_NORMS}"},
    "olmoe": {"layout": f"{_SPLIT} q_norm k_norm router fused_experts {_TWO_NORMS}"},
    "gpt_oss": {"layout": f"sinks {_SPLIT} router fused_experts {_TWO_NORMS}", "bias": ALL | {"router"}},
    "olmo": {"layout": f"{_SPLIT} {_GATED}", "norm_params": 0},
    "olmo2": {"layout": f"{_SPLIT} q_norm k_norm {_GATED} {_TWO_NORMS}"},
    "granite": {"layout": _LLAMA},
    "smollm3": {"layout": _LLAMA, "tied": True},
    "ernie4_5": {"layout": _LLAMA, "tied": True},
    "seed_oss": {"layout": _LLAMA, "bias": frozenset({"qkv"})},
    "exaone4": {"layout": f"{_HEAD_NORMS} {_GATED} {_TWO_NORMS}"},
    "arcee": {"layout": f"{_SPLIT} {_PLAIN} {_TWO_NORMS}"},
    "glm4": {"layout": f"{_SPLIT} gate_up down {_TWO_NORMS} {_TWO_NORMS}", "bias": frozenset({"qkv"})},
    "cohere": {"layout": f"{_SPLIT} {_GATED} norm", "tied": True},
    "stablelm": {"layout": _LLAMA, **_LAYER_NORM},
    "starcoder2": {"layout": f"{_SPLIT} {_PLAIN} {_TWO_NORMS}", "bias": ALL, "tied": True, **_LAYER_NORM},
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neox": {"layout": f"{_TWO_NORMS} qkv o {_PLAIN}", "bias": ALL, **_LAYER_NORM},
    "gptj": {"layout": f"norm k v q o {_PLAIN}", "bias": frozenset({"mlp", "head"}), **_LAYER_NORM},
    "opt": {
        "layout": f"k v q o norm {_PLAIN} norm",
        "bias": ALL,
        "tied": True,
        **_LAYER_NORM,
        "embedding": ("tokens", "positions", "norm"),
        "head": ("head",),
    },
    "bloom": {"layout": _MEGATRON, "bias": ALL, "tied": True, **_LAYER_NORM, "embedding": ("tokens", "norm")},
    "falcon": {"layout": f"qkv o {_PLAIN} norm", "tied": True, **_LAYER_NORM},
}

# Flags of a config and the biases that they switch on or off, by family. Without the flag, the family's value holds.
_Flags = dict[str, tuple[str, ...]]
_ATTENTION: _Flags = {"attention_bias": ("qkv", "out")}
_MLP: _Flags = {"mlp_bias": ("mlp",)}
_ALL: _Flags = {"use_bias": ("qkv", "out", "mlp")}
_BIAS_FLAGS: dict[str, _Flags] = {
    **dict.fromkeys(
        (
            "qwen3",
            "qwen3_moe",
            "gemma",
            "gemma2",
            "gemma3_text",
            "gpt_oss",
            "olmo",
            "olmo2",
            "olmoe",
            "cohere",
            "gpt_neox",
        ),
        _ATTENTION,
    ),
    **dict.fromkeys(("llama", "granite", "smollm3", "arcee"), _ATTENTION | _MLP),
    **dict.fromkeys(("ernie4_5", "starcoder2"), _ALL),
    "qwen2_moe": {"qkv_bias": ("qkv",)},
    "seed_oss": {"attention_bias": ("qkv",), "attention_out_bias": ("out",), **_MLP},
    "glm4": {"attention_bias": ("qkv",)},
    "stablelm": {"use_qkv_bias": ("qkv",)},
    "falcon": {"bias": ("qkv", "out", "mlp")},
}

# Settings that change the parameters of a family's layout. Only the given value is supported: (key, value).
_MUST_BE: dict[str, tuple[tuple[str, Any], ...]] = {
    "qwen2_moe": (("decoder_sparse_step", 1), ("mlp_only_layers", [])),
    "qwen3_moe": (("decoder_sparse_step", 1), ("mlp_only_layers", [])),
    "stablelm": (("qk_layernorm", False),),
    "phi": (("qk_layernorm", False),),
    "cohere": (("use_qk_norm", False),),
    "opt": (
        ("do_layer_norm_before", True),
        ("_remove_final_layer_norm", False),
        ("enable_bias", True),
        ("layer_norm_elementwise_affine", True),
    ),
}
# Keys that must have the value of another key: (key, other key).
_MUST_BE_SAME = {"opt": (("word_embed_proj_dim", "hidden_size"),)}

# Keys of sizes for which transformers has a default that depends on the family. If a config lacks such a key,
# transformers builds the model.
_KV, _HEAD, _WIDTH = "num_key_value_heads", "head_dim", "intermediate_size"
_SIZES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("llama", "phi3", "phi", "olmoe", "olmo", "olmo2", "granite", "arcee", "cohere", "gpt_neox"), (_WIDTH,)
    ),
    **dict.fromkeys(("mistral", "qwen2", "mixtral", "smollm3", "exaone4", "stablelm", "starcoder2"), (_KV, _WIDTH)),
    **dict.fromkeys(
        ("qwen3", "gemma", "gemma2", "gemma3_text", "gpt_oss", "ernie4_5", "seed_oss", "glm4"), (_KV, _HEAD, _WIDTH)
    ),
    "qwen2_moe": (_KV, "moe_intermediate_size", "shared_expert_intermediate_size"),
    "qwen3_moe": (_KV, "moe_intermediate_size"),
    "opt": ("ffn_dim",),
}


def missing_size(config: Config) -> str | None:
    """Return the first key that a config leaves to a default of transformers, or None."""
    return next((key for key in _SIZES.get(str(config["model_type"]), ()) if config.get(key) is None), None)


def family_numbers(config: Config) -> Numbers | None:
    """Return the fields of a model description that follow from the model family of a Hugging Face config.

    One of these fields is ``layout``, the names of the parts of a layer. The result is None if the family is unknown
    here, or if a key of the config tells that the model differs from its family.
    """
    family = str(config["model_type"])
    if family not in FAMILIES or changed_key(config) is not None:
        return None
    numbers = {**FAMILIES[family], "bias": _bias(family, config)}
    change = _CHANGES.get(family)
    return {**numbers, **(change(config) if change else {})}


def changed_key(config: Config) -> tuple[str, Any] | None:
    """Return a Hugging Face config's first key that differs from the model family, with the family's value.

    Return None if there is no such key.
    """
    family = str(config["model_type"])
    same = ((key, config.get(other)) for key, other in _MUST_BE_SAME.get(family, ()))
    needed = (*_MUST_BE.get(family, ()), *same)
    return next(((key, value) for key, value in needed if config.get(key) not in (None, value)), None)


def _bias(family: str, config: Config) -> frozenset[str]:
    bias = set(FAMILIES[family].get("bias", ()))
    for flag, parts in _BIAS_FLAGS.get(family, {}).items():
        if config.get(flag) is not None:
            bias = bias | set(parts) if config[flag] else bias - set(parts)
    return frozenset(bias)


def _mixture(config: Config) -> Numbers:
    widths = {"ffn": "moe_intermediate_size", "shared_ffn": "shared_expert_intermediate_size"}
    return {own: config[key] for own, key in widths.items() if config.get(key)}


def _positions(config: Config) -> Numbers:
    return {"positions": config.get("n_positions") or 1024}


def _bigcode(config: Config) -> Numbers:
    one = {"kv_heads": 1} if config.get("multi_query", True) else {}
    return {**_positions(config), **one}


def _opt(config: Config) -> Numbers:
    # the first two rows of the table are never used
    return {"positions": 2 + (config.get("max_position_embeddings") or 2048)}


def _stablelm(config: Config) -> Numbers:
    return {"layout": f"{_SPLIT} {_GATED} norm"} if config.get("use_parallel_residual") else {}


def _falcon(config: Config) -> Numbers:
    heads = config.get("num_attention_heads")
    newer = bool(config.get("new_decoder_architecture"))
    keys = config.get("num_kv_heads") if newer else 1 if config.get("multi_query", True) else heads
    numbers: Numbers = {"kv_heads": keys or heads}
    two = newer and config.get("num_ln_in_parallel_attn") != 1
    if two or (not newer and not config.get("parallel_attn", True)):
        numbers["layout"] = f"qkv o {_PLAIN} {_TWO_NORMS}"
    width = config.get("ffn_hidden_size")
    return {**numbers, "ffn": width} if width else numbers


_CHANGES: dict[str, Callable[[Config], Numbers]] = {
    "qwen2_moe": _mixture,
    "qwen3_moe": _mixture,
    "gpt2": _positions,
    "gpt_bigcode": _bigcode,
    "opt": _opt,
    "stablelm": _stablelm,
    "falcon": _falcon,
}


def _llama(hidden: int, layers: int, heads: int, kv: int, ffn: int, vocabulary: int) -> Any:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": ffn,
        "vocab_size": vocabulary,
    }


def _gpt2(hidden: int, layers: int, heads: int) -> Any:
    sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads}
    return {"model_type": "gpt2", **sizes, "n_positions": 1024, "vocab_size": 50_257}


def _qwen3(hidden: int, layers: int, heads: int, ffn: int, tied: bool) -> Any:
    dense = _llama(hidden, layers, heads, 8, ffn, 151_936)
    return {**dense, "model_type": "qwen3", "head_dim": 128, "tie_word_embeddings": tied}


# Numbers from the published config.json files of these models.
MODELS: Mapping[str, dict[str, Any]] = {
    "GPT-2 124M": _gpt2(768, 12, 12),
    "GPT-2 1.5B": _gpt2(1600, 48, 25),
    "Llama 3.2 1B": _llama(2048, 16, 32, 8, 8192, 128_256) | {"tie_word_embeddings": True},
    "Llama 3.2 3B": _llama(3072, 28, 24, 8, 8192, 128_256) | {"tie_word_embeddings": True},
    "Llama 2 7B": _llama(4096, 32, 32, 32, 11_008, 32_000),
    "Llama 3 8B": _llama(4096, 32, 32, 8, 14_336, 128_256),
    "Llama 2 13B": _llama(5120, 40, 40, 40, 13_824, 32_000),
    "Llama 3 70B": _llama(8192, 80, 64, 8, 28_672, 128_256),
    "Mistral 7B": _llama(4096, 32, 32, 8, 14_336, 32_000) | {"model_type": "mistral"},
    "Mixtral 8x7B": _llama(4096, 32, 32, 8, 14_336, 32_000)
    | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    "Qwen3 4B": _qwen3(2560, 36, 32, 9728, True),
    "Qwen3 8B": _qwen3(4096, 36, 32, 12_288, False),
    "Qwen3 14B": _qwen3(5120, 40, 40, 17_408, False),
}

# Names on the Hugging Face Hub, without the organization -> the known model with the same sizes.
HUB: Mapping[str, str] = {
    "gpt2": "GPT-2 124M",
    "gpt2-xl": "GPT-2 1.5B",
    **{
        f"{name}{kind}": model
        for names, kinds, model in (
            (("Llama-3.2-1B",), ("-Instruct",), "Llama 3.2 1B"),
            (("Llama-3.2-3B",), ("-Instruct",), "Llama 3.2 3B"),
            (("Llama-2-7b",), ("-hf", "-chat", "-chat-hf"), "Llama 2 7B"),
            (("Llama-2-13b",), ("-hf", "-chat", "-chat-hf"), "Llama 2 13B"),
            (("Meta-Llama-3-8B", "Meta-Llama-3.1-8B", "Llama-3.1-8B"), ("", "-Instruct"), "Llama 3 8B"),
            (("Meta-Llama-3-70B", "Meta-Llama-3.1-70B", "Llama-3.1-70B"), ("", "-Instruct"), "Llama 3 70B"),
            (("Llama-3.3-70B",), ("-Instruct",), "Llama 3 70B"),
            (("Mistral-7B",), ("-v0.1", "-v0.2", "-Instruct-v0.1", "-Instruct-v0.2"), "Mistral 7B"),
            (("Mixtral-8x7B",), ("-v0.1", "-Instruct-v0.1"), "Mixtral 8x7B"),
            (("Qwen3-4B",), ("-Base",), "Qwen3 4B"),
            (("Qwen3-8B",), ("-Base",), "Qwen3 8B"),
            (("Qwen3-14B",), ("-Base",), "Qwen3 14B"),
        )
        for name in names
        for kind in kinds
    },
}
