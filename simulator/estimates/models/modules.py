"""Functions that read a model's architecture from torch modules, which transformers builds without weights."""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from ebbtide.simulator.estimates.models.blocks import Architecture, Block, BuiltArchitecture, Experts, ModelError
from ebbtide.simulator.estimates.models.families import FAMILIES, missing_size

# Keys of configs for the number of experts that a token uses in a layer.
PER_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
    "num_selected_experts",
    "router_top_k",
    "expert_top_k",
    "top_k",
)
DESCRIBE = "describe the model by layers, hidden, heads, vocabulary [, kv_heads, ffn, gated, tied, layout]"
EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
MOST_LAYERS, MOST_EXPERTS = 1000, 20000  # larger numbers are mistakes, and building such a model would take forever


def built(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture of a language model from its Hugging Face config."""
    return _built(json.dumps(config, sort_keys=True, default=str))


@lru_cache(maxsize=8)
def _built(text: str) -> Architecture:
    given = json.loads(text, object_hook=_as_float)
    family = str(given["model_type"])
    try:
        import torch
        from transformers import CONFIG_MAPPING
    except ImportError:
        missing = missing_size(given)
        if missing is not None:
            raise ModelError(
                f"{missing} must be in the config of a {family!r} model if transformers is not installed, but is "
                f"absent. Add {missing} to the config, or install transformers (pip install './ebbtide[hf]')",
                key=f"model.{missing}",
            ) from None
        raise ModelError(
            f"model_type must be one of {', '.join(FAMILIES)} if transformers is not installed, but got {family!r}. "
            f"Install transformers for other models (pip install './ebbtide[hf]'), or {DESCRIBE}",
            key="model.model_type",
        ) from None
    if family not in CONFIG_MAPPING:
        raise ModelError(
            f"model_type must be one that the installed transformers knows, but got {family!r}. Instead, {DESCRIBE}",
            key="model.model_type",
        )
    _check_size(given)
    try:
        config = CONFIG_MAPPING[family].from_dict(given)
        with torch.device("meta"):
            model = model_class(config).from_config(config)
        for one in (config, config.get_text_config()):
            one.allow_global_per_layer_attribute_access = True  # some layers have fewer heads
        return _ModuleReader(model, config).architecture(str(given.get("_name_or_path") or family))
    except ModelError:
        raise
    except Exception as error:  # the model's own code may raise any error
        lines = [*str(error).strip().splitlines(), type(error).__name__]
        raise ModelError(
            "model_type must be that of a language model which transformers can build from its config, "
            f"but for {family!r} transformers says: {lines[0]}. Give the whole config.json, or {DESCRIBE}",
            key="model.model_type",
        ) from None


def is_module(model: object) -> bool:
    """Return True if an object is a ``torch.nn.Module``. This check does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


def predicts_tokens(module: Any) -> bool:
    """Return True if a module is a transformers model that predicts tokens, and that its config describes whole.

    Others are models without a vocabulary, such as for images, encoders, and heads that classify.
    """
    config, outputs = getattr(module, "config", None), getattr(module, "get_output_embeddings", None)
    if not hasattr(config, "model_type") or outputs is None or outputs() is None:
        return False
    with suppress(ModelError):
        model_class(config)
        return True
    return False


def built_from(module: Any) -> Architecture:
    """Return the architecture of a torch module that has no Hugging Face config. The module may be on the ``meta``
    device.

    The layers are the elements of the ``nn.ModuleList`` or ``nn.Sequential`` that has the most parameter elements.
    If the module has no config with a number of attention heads, they are assumed to have a dimension of 64.
    """
    import torch

    if not _elements(module):
        raise ModelError(f"A model must have parameters, but {type(module).__name__} has none.", key="model")
    lists = [m for m in module.modules() if isinstance(m, torch.nn.ModuleList | torch.nn.Sequential)]
    layers = list(max(lists, key=_elements, default=[module])) or [module]
    held = _parted(module, layers)
    widths = Counter(p.shape[-1] for layer in layers for p in layer.parameters() if p.ndim > 1)
    hidden = widths.most_common(1)[0][0] if widths else 1
    tables = [m for m in module.modules() if isinstance(m, torch.nn.Embedding)]
    outputs = [p.shape[0] for p in held[-1] if p.ndim > 1]
    config = getattr(module, "config", None)
    reader = _ModuleReader(module, config if hasattr(config, "get_text_config") else None)
    heads = reader._number(("num_attention_heads",)) or max(1, hidden // 64)
    # A model without an output matrix uses its first embedding.
    head = [p for p in held[-1] if p.ndim > 1] or [m.weight for m in tables[:1]]
    return BuiltArchitecture(
        name=type(module).__name__,
        layers=len(layers),
        hidden=hidden,
        heads=heads,
        vocabulary=max([1, *outputs, *(m.num_embeddings for m in tables)]),
        kv_heads=reader._number(("num_key_value_heads",)) or heads,
        tied=not outputs,
        held=(
            _block("embedding", held[0], 0.0),
            *(
                _block(f"layer {i}", held[i + 1], reader.flops(layer), hidden, reader.experts(layer))
                for i, layer in enumerate(layers)
            ),
            _block("head", held[-1], 2.0 * sum(p.numel() for p in head)),
        ),
    )


def _elements(module: Any) -> int:
    return sum(p.numel() for p in module.parameters())


def _parted(model: Any, layers: Sequence[Any]) -> list[list[Any]]:
    owner: dict[int, int] = {}  # id of a parameter -> number of the first layer that has it
    for number, layer in enumerate(layers, start=1):
        for parameter in layer.parameters():
            owner.setdefault(id(parameter), number)
    every = list(model.parameters())
    last = max((i for i, parameter in enumerate(every) if id(parameter) in owner), default=0)
    held: list[list[Any]] = [[] for _ in range(len(layers) + 2)]
    now = 0
    for i, parameter in enumerate(every):
        now = owner.get(id(parameter), now if i < last else -1)
        held[now].append(parameter)
    return held


def model_class(config: Any) -> Any:
    """Return the transformers class that builds the model of a config, with all its parts, such as an encoder or the
    layers for images.

    Raises:
        ModelError: The config describes an encoder only, such as BERT.
    """
    import transformers

    masked = type(config) in transformers.AutoModelForMaskedLM._model_mapping
    if masked and not config.is_encoder_decoder and not getattr(config, "is_decoder", False):
        raise ModelError(
            f"{config.model_type!r} is an encoder. Estimates from a config are for models that predict the next token. "
            "Measure an encoder in its own script: tune profile --train-script train.py "
            "(with is_decoder: true in its config, the model is a decoder)",
            key="model.model_type",
        )
    one = ("AutoModelForMultimodalLM", "AutoModelForImageTextToText", "AutoModelForCausalLM")  # the first: version 5
    two = ("AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq")
    for name in (*two, *one) if config.is_encoder_decoder else (*one, *two):
        auto = getattr(transformers, name, None)
        if auto is not None and type(config) in auto._model_mapping:
            return auto
    return transformers.AutoModelForCausalLM


def _as_float(given: dict[str, Any]) -> Any:
    return float(given["__float__"]) if set(given) == {"__float__"} else given


def _check_size(config: Mapping[str, Any]) -> None:
    for word, most in (("layers", MOST_LAYERS), ("experts", MOST_EXPERTS)):
        for key, value in config.items():
            if word in key and isinstance(value, int) and value > most:
                raise ModelError(f"{key} must be at most {most}, but got {value}", key=f"model.{key}")


class _ModuleReader:
    def __init__(self, model: Any, config: Any) -> None:
        self.model, self.whole = model, config
        # The settings of the language model, if the model has other parts too, such as for images.
        self.config = config if config is None or config.is_encoder_decoder else config.get_text_config(decoder=True)

    def architecture(self, name: str) -> Architecture:
        layers = list(self._layers())
        held = _parted(self.model, layers)
        head, rows = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        vocabulary, hidden = head.weight.shape
        heads = self._number(("num_attention_heads",)) or 1
        return BuiltArchitecture(
            name=name,
            layers=len(layers),
            hidden=hidden,
            heads=heads,
            vocabulary=vocabulary,
            kv_heads=self._number(("num_key_value_heads",)) or heads,
            tied=head.weight is rows.weight,
            other_elements=self._other_elements([*held[0], *held[-1]], (head.weight, rows.weight)),
            held=(
                _block("embedding", held[0], 0.0),
                *(
                    _block(
                        f"layer {i}", held[i + 1], self.flops(layer), self._scores(layer, hidden), self.experts(layer)
                    )
                    for i, layer in enumerate(layers)
                ),
                _block("head", held[-1], 2.0 * head.weight.numel()),
            ),
        )

    def _layers(self) -> Iterator[Any]:
        import torch

        parts = [self.model]
        if self.whole.is_encoder_decoder:
            parts = [self.model.get_encoder(), self.model.get_decoder()]
        for part in parts:
            lists = [m for m in part.modules() if isinstance(m, torch.nn.ModuleList)]
            yield from max(lists, key=_elements)

    def _other_elements(self, outside: Sequence[Any], tables: Sequence[Any]) -> int:
        if self.config is self.whole:
            return 0
        return sum(p.numel() for p in outside if all(p is not table for table in tables))

    def flops(self, layer: Any) -> float:
        import torch

        tables = {id(m.weight) for m in layer.modules() if isinstance(m, torch.nn.Embedding)}
        flops: float = sum(
            2.0 * parameter.numel() * self._visited(path, parameter, layer)
            for path, parameter in layer.named_parameters()
            if parameter.ndim > 1 and id(parameter) not in tables
        )
        return flops

    def experts(self, layer: Any) -> Experts | None:
        found = [
            (parameter, share)
            for path, parameter in layer.named_parameters()
            if parameter.ndim > 1 and (share := self._visited(path, parameter, layer)) < 1
        ]
        if not found:
            return None
        per_token = self._number(PER_TOKEN)
        flops = sum(2.0 * parameter.numel() * share for parameter, share in found)
        modules = sum(parameter.ndim == 2 for parameter, _ in found)
        return Experts(round(per_token / found[0][1]), per_token, flops, modules)

    def _visited(self, path: str, parameter: Any, layer: Any) -> float:
        parts = path.split(".")
        stacked = parameter.ndim == 3 and parameter.shape[0] > 1
        if "experts" in parts:
            there = layer.get_submodule(".".join(parts[: parts.index("experts") + 1]))
            experts = len(there) if hasattr(there, "__len__") else self._number(EXPERTS)
        elif stacked and parameter.shape[0] == self._number(EXPERTS):
            experts = parameter.shape[0]
        else:
            return 1.0
        visited = self._number(PER_TOKEN)
        if not (visited and experts):
            raise ModelError(
                f"one of {', '.join(PER_TOKEN)} must give the number of experts per token, and one "
                f"of {', '.join(EXPERTS)} the number of experts, but got {visited} and {experts}",
                key=f"model.{PER_TOKEN[0]}",
            )
        return min(1.0, visited / experts)

    def _number(self, names: Sequence[str]) -> int:
        for config in (self.config, getattr(self.config, "ffn_config", None)):
            for name in names:
                value = getattr(config, name, None)
                value = max(value) if isinstance(value, (list, tuple)) and value else value
                if isinstance(value, int) and value:
                    return value
        return 0

    def _scores(self, layer: Any, hidden: int) -> int:
        if not any("attention" in type(m).__name__.lower() for m in layer.modules()):
            return 1
        heads, mine = self._number(("num_attention_heads",)) or 1, ("v_head_dim", "head_dim")
        size = self._number(mine) or max(1, hidden // heads)
        keys = self._number(("qk_nope_head_dim",)) + self._number(("qk_rope_head_dim",))
        return heads * (size + (keys or size)) // 2


def _block(name: str, held: Sequence[Any], flops: float, attention: int = 0, experts: Experts | None = None) -> Block:
    sizes, split = (p.numel() for p in held), (p.ndim > 1 for p in held)
    return Block(name, tuple(sizes), tuple(split), flops, attention, experts)
