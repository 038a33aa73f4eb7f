"""Functions that find the sizes of a model's layers, from a Hugging Face config, a torch module or a description.

They need no internet connection.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ebbtide.simulator.estimates.models.blocks import Architecture, DescribedArchitecture, ModelError
from ebbtide.simulator.estimates.models.families import ALL, HUB, MODELS, family_numbers, missing_size
from ebbtide.simulator.estimates.models.modules import built, built_from, is_module, predicts_tokens
from ebbtide.simulator.page import HIDDEN, LAYERS
from ebbtide.simulator.rules import RuleError, spelled

# Our name of a size -> the keys that configs use for it. The first key that a config has is taken.
KEYS = {
    "layers": LAYERS,
    "hidden": HIDDEN,
    "heads": ("num_attention_heads", "n_head", "heads"),
    "kv_heads": ("num_key_value_heads", "kv_heads"),
    "head_size": ("head_dim", "head_size"),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "ffn"),
    "vocabulary": ("vocab_size", "vocabulary"),
    "experts": ("num_local_experts", "num_experts", "experts"),
    "experts_per_token": ("num_experts_per_tok", "experts_per_token"),
}

# An `Architecture`, a config, a name, a file or a torch module. Any, so that torch is not imported for a type.
Model = Any


def architecture(model: Model) -> Architecture:
    """Read the architecture of a model: the sizes of its layers and their parameters. It needs no network.

    Args:
        model: The name of a known model ("Llama 3 8B"), a ``torch.nn.Module`` (live or on the ``meta`` device), a
            Hugging Face config (the object, its dict, its ``config.json`` or the folder with it), or a description.
            Configs of families that `ebbtide.simulator.estimates.models.families` does not know are built by the
            transformers library, and so are configs that leave out a size for which transformers has a default. A
            description has the keys ``layers, hidden, heads, vocabulary``. Other keys are needed if the model differs
            from Llama: ``kv_heads, head_size, ffn, gated, fused, bias, tied, positions, norm_params, norms, experts,
            experts_per_token``. If layers have other parts, give ``layout`` instead of ``gated``, ``fused`` and
            ``norms``. It lists the parts in the order of their parameters, by the names in
            `ebbtide.simulator.estimates.models.blocks`, such as ``"norm qkv o norm up down"``.

    Raises:
        ModelError: The file cannot be read, a key is missing or wrong, or the family is unknown. A family that
            only transformers knows needs transformers to be installed.
    """
    if isinstance(model, Architecture):
        return model
    if isinstance(model, str) and not model.endswith(".json") and not (model and Path(model).exists()):
        model = known_config(model)
    if isinstance(model, (str, Path)):
        model = _read(Path(model))
    if is_module(model) and not predicts_tokens(model):
        return built_from(model)
    model = _config_of(model)
    if not isinstance(model, Mapping):
        raise ModelError(
            "A model must be a name, a file, a dict, a Hugging Face config or a torch.nn.Module, but got "
            f"{type(model).__name__}.",
            key="model",
        )
    return _from_hugging_face(model) if "model_type" in model else _from_description(model)


def known_config(name: str) -> dict[str, Any]:
    """Return the config of a known model, by its name here or on the Hugging Face Hub.

    Raises:
        ModelError: There is no such model. The error tells how to get the config of any other model.
    """
    try:
        known = spelled(name, MODELS, "known model", key="model", also=HUB)
    except RuleError as error:
        hub = f" {name} config.json --local-dir ." if "/" in name else " with its name and config.json"
        raise ModelError(
            f"{error} For any other model, give its config.json: `hf download{hub}`.", key="model"
        ) from None
    return {**MODELS[known], "_name_or_path": known}


def _config_of(model: Any) -> Any:
    candidates: tuple[Any, ...] = (model, getattr(model, "config", None))
    for config in candidates:
        if hasattr(config, "to_dict") and hasattr(config, "model_type"):
            return config.to_dict()
    return model


def _read(path: Path) -> Mapping[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        result = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ModelError(
            "the model (--model) must be given as a JSON file, such as a Hugging Face config.json, but reading "
            f"{file} failed: {error}",
            key="model",
        ) from None
    if not isinstance(result, dict):
        raise ModelError(
            f"the model's file {file} must hold a JSON object, but holds a {type(result).__name__}", key="model"
        )
    return result


def _numbers(config: Mapping[str, Any]) -> dict[str, Any]:
    result = {}
    for own, names in KEYS.items():
        for name in names:
            if config.get(name) is not None:
                result[own] = config[name]
                break
    return result


def _missing(numbers: Mapping[str, Any]) -> list[str]:
    return [k for k in ("layers", "hidden", "heads", "vocabulary") if k not in numbers]


def _completed(name: str, numbers: dict[str, Any]) -> Architecture:
    missing = _missing(numbers)
    if missing:
        raise ModelError(
            f"the model's config must give {', '.join(missing)}, but does not. Add "
            + ", ".join(" or ".join(KEYS[k]) for k in missing),
            key="model",
        )
    for key in KEYS:
        value = numbers.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ModelError(
                f"{key} ({' or '.join(KEYS[key])}) must be a whole number >= 0, but got {value!r}", key=f"model.{key}"
            )
    heads, hidden = numbers["heads"], numbers["hidden"]
    numbers.setdefault("kv_heads", heads)
    if "head_size" not in numbers:
        if not heads or hidden % heads:
            raise ModelError(
                f"hidden must be a multiple of heads if head_size is not given, but got {hidden} and {heads}",
                key="model.heads",
            )
        numbers["head_size"] = hidden // heads
    layout = tuple(numbers.pop("layout").split())
    plain = not {"gate", "gate_up", "experts", "fused_experts"} & set(layout)
    numbers.setdefault("ffn", 4 * hidden if plain else 256 * math.ceil(8 * hidden / 3 / 256))
    return DescribedArchitecture(name=name, layout=layout, **numbers)


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """Return True if a Hugging Face config describes a language model with other parts, such as for images."""
    return isinstance(config.get("text_config"), Mapping) and not any(name in config for name in KEYS["layers"])


def _from_hugging_face(config: Mapping[str, Any]) -> Architecture:
    if is_multimodal(config):
        return built(config)
    # The family's numbers come last, because the same key may have another meaning in this family.
    family = family_numbers(config)
    if family is None:
        return built(config)
    numbers = {**_numbers(config), **family}
    if missing_size(config) is not None and not _missing(numbers):
        return built(config)
    if config.get("tie_word_embeddings") is not None:
        numbers["tied"] = bool(config["tie_word_embeddings"])
    return _completed(str(config.get("_name_or_path") or config["model_type"]), numbers)


_LAYOUT_FLAGS = ("gated", "fused", "norms")


def _from_description(config: Mapping[str, Any]) -> Architecture:
    flags = ("bias", "norm_params", "positions", "tied", "shared_ffn")
    known = {name for names in KEYS.values() for name in names}
    known |= {*flags, *_LAYOUT_FLAGS, "layout", "name"}
    unknown = sorted(set(config) - known)
    if unknown:
        raise ModelError(
            f"a model without the key model_type may have the keys {', '.join(sorted(known))}, but got "
            f"{unknown[0]!r}. If the model is a Hugging Face config, give its model_type too",
            key=f"model.{unknown[0]}",
        )
    numbers = _numbers(config) | {k: config[k] for k in flags if k in config}
    numbers["layout"] = _layout(config, bool(numbers.get("experts")))
    if "bias" in numbers:
        numbers["bias"] = frozenset(ALL if numbers["bias"] is True else numbers["bias"] or ())
    return _completed(str(config.get("name", "model")), numbers)


def _layout(config: Mapping[str, Any], mixture: bool) -> str:
    given = [flag for flag in _LAYOUT_FLAGS if flag in config]
    if "layout" in config:
        if given or not isinstance(config["layout"], str):
            raise ModelError(
                "layout must be a text that names the parts of a layer, and must not be given together with gated, "
                f"fused or norms, but got layout {config['layout']!r} and {', '.join(given) or 'none of these keys'}. "
                "Give layout alone, or leave it out",
                key="model.layout",
            )
        return config["layout"]
    gated, fused = config.get("gated", True), config.get("fused", False)
    norms = config.get("norms", 2)
    mlp = ("gate_up down" if fused else "gate up down") if gated else "up down"
    if mixture:
        mlp = "router " + (("fused_experts" if fused else "experts") if gated else "plain_experts")
    return " ".join(["qkv o" if fused else "q k v o", mlp, *["norm"] * norms])


def quantized(config: Mapping[str, Any]) -> str:
    """Return a sentence on why training a quantized model cannot be planned. Empty if the model is not quantized."""
    given = config.get("quantization_config")
    if not given:
        return ""
    how = ", ".join(f"{key} {value}" for key, value in given.items()) if isinstance(given, Mapping) else str(given)
    return (
        f"quantization_config must be absent for full fine-tuning, but got {how[:80]}: "
        "quantized weights are trained with adapters (QLoRA), which ebbtide does not plan"
    )
