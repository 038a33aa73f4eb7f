"""Transformer architectures as lists of parameters: from Hugging Face configs or plain numbers.

Counts are exact and in the order in which the module registers its parameters, because DeepSpeed
cuts subgroups at the borders of parameters.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class ModelError(ValueError):
    """A model description that cannot be understood; the message names the key."""


@dataclass(frozen=True)
class Block:
    """One unit of forward and backward.

    Attributes:
        params: elements of each parameter, in order.
        split: which of them tensor parallelism divides; the others are on every rank.
        flops_per_token: of a forward, without attention scores.
        attention: heads x head size: what a token's scores cost per position of the sequence.
    """

    name: str
    params: tuple[int, ...]
    split: tuple[bool, ...]
    flops_per_token: float
    attention: int = 0

    @property
    def elements(self) -> int:
        return sum(self.params)


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer, by its numbers.

    Attributes:
        gated: the MLP has a gate (three matrices), as in Llama; else two, as in GPT-2.
        fused: queries, keys and values are one matrix, gate and up another, as in Phi-3 and
            Megatron-LM: subgroups end at the borders of parameters.
        bias: which of ``qkv``, ``out``, ``mlp``, ``head`` have a bias.
        norm_params: elements of one norm over the hidden size: 1x (RMS) or 2x (layer norm).
        norms: how many a block has.
        head_norms: norms over the head size (queries and keys), as in Qwen 3.
        positions: learned position embeddings, 0 with rotary ones.
        tied: the head is the embedding.
        experts, experts_per_token: of a mixture of experts; 0: a dense MLP.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocabulary: int
    gated: bool = True
    fused: bool = False
    bias: frozenset[str] = frozenset()
    norm_params: int = 1
    norms: int = 2
    head_norms: int = 0
    positions: int = 0
    tied: bool = False
    experts: int = 0
    experts_per_token: int = 0

    def __post_init__(self) -> None:
        for key in ("layers", "hidden", "heads", "kv_heads", "head_size", "ffn", "vocabulary"):
            value = getattr(self, key)
            if not (isinstance(value, int) and 0 < value < 10**9):
                raise ModelError(f"{key} must be a whole number > 0, but got {value!r}")
        if self.heads % self.kv_heads:
            raise ModelError(
                f"heads must be a multiple of kv_heads, but got {self.heads} and {self.kv_heads}"
            )

    @property
    def elements(self) -> int:
        """Parameters of the whole model."""
        return sum(block.elements for block in self.blocks())

    def blocks(self) -> list[Block]:
        """Embedding, the layers, and the last norm with the head."""
        layer = self._layer()
        numbered = [
            Block(f"layer {i}", layer.params, layer.split, layer.flops_per_token, layer.attention)
            for i in range(self.layers)
        ]
        return [self._embedding(), *numbered, self._head()]

    def _embedding(self) -> Block:
        params = [self.vocabulary * self.hidden]
        if self.positions:
            params.append(self.positions * self.hidden)
        return Block("embedding", tuple(params), (True, False)[: len(params)], 0.0)

    def _head(self) -> Block:
        params, split = [self.norm_params * self.hidden], [False]
        if not self.tied:
            params.append(self.vocabulary * self.hidden)
            split.append(True)
        if "head" in self.bias:
            params.append(self.vocabulary)
            split.append(True)
        flops = 2.0 * self.vocabulary * self.hidden
        return Block("head", tuple(params), tuple(split), flops)

    def _layer(self) -> Block:
        attention = self._matrices(self._attention_shapes())
        router = [self.hidden * self.experts] if self.experts else []
        mlp = self._matrices(self._mlp_shapes())
        norms = [self.norm_params * self.hidden] * self.norms + [self.head_size] * self.head_norms
        params = [*attention, *router, *mlp * max(1, self.experts), *norms]
        whole = len(params) - len(norms)
        active = sum(attention) + sum(router) + sum(mlp) * max(1, self.experts_per_token)
        return Block(
            "layer", tuple(params), (True,) * whole + (False,) * len(norms), 2.0 * active,
            self.heads * self.head_size,
        )  # fmt: skip

    def _attention_shapes(self) -> list[tuple[int, int, bool]]:
        """(rows, columns, bias) of the projections."""
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        qkv, out = "qkv" in self.bias, "out" in self.bias
        rows = [queries + 2 * keys] if self.fused else [queries, keys, keys]
        return [*((n, self.hidden, qkv) for n in rows), (self.hidden, queries, out)]

    def _mlp_shapes(self) -> list[tuple[int, int, bool]]:
        bias = "mlp" in self.bias
        rows = [self.ffn] * (2 if self.gated else 1)
        if self.fused:
            rows = [sum(rows)]
        return [*((n, self.hidden, bias) for n in rows), (self.hidden, self.ffn, bias)]

    @staticmethod
    def _matrices(shapes: list[tuple[int, int, bool]]) -> list[int]:
        elements: list[int] = []
        for rows, columns, bias in shapes:
            elements += [rows * columns, rows] if bias else [rows * columns]
        return elements


_ALL = frozenset({"qkv", "out", "mlp"})

# What a family has whatever its config says; the rest is read from the config.
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"bias": frozenset({"qkv"})},
    "qwen3": {"head_norms": 2},
    "gemma": {"tied": True},
    "gemma2": {"tied": True, "norms": 4},
    "phi3": {"fused": True},
    "mixtral": {},
    "phi": {"gated": False, "bias": _ALL | {"head"}, "norm_params": 2, "norms": 1},
    "gpt2": {"gated": False, "bias": _ALL, "norm_params": 2, "tied": True},
    "gpt_neox": {"gated": False, "bias": _ALL, "norm_params": 2},
    "opt": {"gated": False, "bias": _ALL, "norm_params": 2, "tied": True},
}

# Our name -> how configs call it, first found first taken.
_KEYS = {
    "layers": ("num_hidden_layers", "n_layer", "layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "hidden"),
    "heads": ("num_attention_heads", "n_head", "heads"),
    "kv_heads": ("num_key_value_heads", "kv_heads"),
    "head_size": ("head_dim", "head_size"),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "ffn"),
    "vocabulary": ("vocab_size", "vocabulary"),
    "experts": ("num_local_experts", "experts"),
    "experts_per_token": ("num_experts_per_tok", "experts_per_token"),
}


def architecture(model: Architecture | Mapping[str, Any] | str | Path) -> Architecture:
    """Reads a model's numbers, offline.

    Args:
        model: a Hugging Face config (its dict, its ``config.json`` or the folder with it), or a
            plain description with the keys ``layers, hidden, heads, vocabulary`` and, where they
            are not the usual ones, ``kv_heads, head_size, ffn, gated, fused, bias, tied,
            positions, norm_params, experts, experts_per_token``.

    Raises:
        ModelError: the file cannot be read, the family is not known, or a key is missing or wrong.
    """
    if isinstance(model, Architecture):
        return model
    if isinstance(model, (str, Path)):
        model = _read(Path(model))
    if not isinstance(model, Mapping):
        raise ModelError(f"a model must be a dict or a file, but got {type(model).__name__}")
    return _from_hugging_face(model) if "model_type" in model else _from_description(model)


def _read(path: Path) -> Mapping[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        result = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(
            f"a model must be a JSON file with its config (--model), but got {file}: {error}"
        ) from None
    if not isinstance(result, dict):
        raise ModelError(f"{file} must hold a JSON object, but holds a {type(result).__name__}")
    return result


def _numbers(config: Mapping[str, Any]) -> dict[str, Any]:
    result = {}
    for own, names in _KEYS.items():
        for name in names:
            if config.get(name) is not None:
                result[own] = config[name]
                break
    return result


def _completed(name: str, numbers: dict[str, Any]) -> Architecture:
    missing = [k for k in ("layers", "hidden", "heads", "vocabulary") if k not in numbers]
    if missing:
        raise ModelError(
            f"a model must give {', '.join(missing)} ("
            + "; ".join(f"{k}: {' or '.join(_KEYS[k])}" for k in missing)
            + "), but it does not"
        )
    for key in _KEYS:
        value = numbers.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ModelError(f"{key} ({' or '.join(_KEYS[key])}) must be a whole number >= 0, "
                             f"but got {value!r}")  # fmt: skip
    heads, hidden = numbers["heads"], numbers["hidden"]
    numbers.setdefault("kv_heads", heads)
    if "head_size" not in numbers:
        if not heads or hidden % heads:
            raise ModelError(
                f"hidden must be a multiple of heads where head_size is not given, but got "
                f"{hidden} and {heads}"
            )
        numbers["head_size"] = hidden // heads
    gated = numbers.get("gated", True)
    numbers.setdefault("ffn", 4 * hidden if not gated else _gated_ffn(hidden))
    return Architecture(name=name, **numbers)


def _gated_ffn(hidden: int) -> int:
    """Llama's rule: two thirds of four times the hidden size, up to a multiple of 256."""
    return 256 * math.ceil(8 * hidden / 3 / 256)


def _from_hugging_face(config: Mapping[str, Any]) -> Architecture:
    family = config["model_type"]
    if family not in _FAMILIES:
        raise ModelError(
            f"model_type must be one of {', '.join(_FAMILIES)}, but got {family!r}: describe the "
            "model by layers, hidden, heads, vocabulary [, kv_heads, ffn, gated, tied] instead"
        )
    numbers = {**_FAMILIES[family], **_numbers(config)}
    if family in ("gpt2", "opt"):
        # OPT's table starts with two rows that are never used.
        extra = 2 if family == "opt" else 0
        numbers["positions"] = extra + int(
            config.get("n_positions") or config.get("max_position_embeddings") or 1024
        )
    if config.get("tie_word_embeddings") is not None:
        numbers["tied"] = bool(config["tie_word_embeddings"])
    if family == "llama":
        flags = {"attention_bias": ("qkv", "out"), "mlp_bias": ("mlp",)}
        numbers["bias"] = frozenset(
            part for flag, parts in flags.items() if config.get(flag) for part in parts
        )
    return _completed(str(config.get("_name_or_path") or family), numbers)


def _from_description(config: Mapping[str, Any]) -> Architecture:
    flags = ("gated", "fused", "bias", "norm_params", "norms", "positions", "tied")
    known = {name for names in _KEYS.values() for name in names} | {*flags, "name"}
    unknown = sorted(set(config) - known)
    if unknown:
        raise ModelError(
            f"a plain description takes {', '.join(sorted(known))}, but got {unknown[0]!r}; a "
            "Hugging Face config must have model_type"
        )
    numbers = _numbers(config) | {k: config[k] for k in flags if k in config}
    if "bias" in numbers:
        numbers["bias"] = frozenset(_ALL if numbers["bias"] is True else numbers["bias"] or ())
    return _completed(str(config.get("name", "model")), numbers)
