"""The architecture of a model as blocks (embedding, layers, head) with their parameters.

Parameters have the order in which the model's modules register them. DeepSpeed cuts the optimizer state into
subgroups in this order, at borders of parameters.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from ebbtide.simulator.rules import RuleError


class ModelError(RuleError):
    """An error for a model's description or a config that cannot be used. The message names the wrong key."""


@dataclass(frozen=True)
class Experts:
    """The experts of a layer in a mixture-of-experts model.

    Attributes:
        flops_per_token: Floating-point operations of a token's experts in a forward. They are part of the block's.
        modules: Number of modules with a matrix of one expert each. 0 if the matrices of all experts are stacked.
    """

    count: int
    per_token: int
    flops_per_token: float
    modules: int = 0


@dataclass(frozen=True)
class Block:
    """A block of a model (embedding, layer or head), which is a unit of forward and backward.

    Attributes:
        params: Number of elements of each parameter, in order.
        split: For each parameter, whether tensor parallelism divides it. The others are whole on every rank.
        flops_per_token: Floating-point operations of a forward per token, without attention scores.
        attention: Number of heads times head size. It determines the cost of a token's attention scores.
        experts: Experts of a layer. None in a dense layer.
    """

    name: str
    params: tuple[int, ...]
    split: tuple[bool, ...]
    flops_per_token: float
    attention: int = 0
    experts: Experts | None = None

    @property
    def elements(self) -> int:
        return sum(self.params)


@dataclass(frozen=True)
class LayerPart:
    """A part of a layer, such as a matrix or a norm, with its parameters.

    Attributes:
        flops: Floating-point operations of a forward per token.
        split: True if tensor parallelism divides the parameters.
    """

    params: tuple[int, ...]
    flops: float = 0.0
    split: bool = True
    experts: Experts | None = None


@dataclass(frozen=True, kw_only=True)
class Architecture(ABC):
    """The architecture of a decoder-only transformer, or of another stack of layers that predicts tokens.

    Attributes:
        tied: True if the output head and the embedding share their weights.
        other_elements: Number of parameters of the parts beside the language model, such as for images. Their compute
            is not estimated, because it depends on the data.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = False
    other_elements: int = 0

    @abstractmethod
    def blocks(self) -> list[Block]:
        """Return the blocks of the model in order: embedding, layers, and the last norm together with the head."""

    @property
    def elements(self) -> int:
        """Return the number of parameters of the whole model with this architecture."""
        return sum(block.elements for block in self.blocks())


@dataclass(frozen=True, kw_only=True)
class BuiltArchitecture(Architecture):
    """The architecture of a model, read from its torch modules (`ebbtide.simulator.estimates.models.modules`)."""

    held: tuple[Block, ...]

    def blocks(self) -> list[Block]:
        return list(self.held)


@dataclass(frozen=True, kw_only=True)
class DescribedArchitecture(Architecture):
    """The architecture of a model as described by a few numbers and by the list of the parts of a layer.

    Attributes:
        layout: Names of the parts of a layer (see `PARTS`), in the order of their parameters.
        embedding, head: Names of the parts before the first layer and after the last one (see `PARTS`).
        bias: Groups of parts with a bias: ``qkv``, ``out``, ``mlp``, ``router``, ``head``.
        norm_params: Number of parameter tensors of a norm: 0, 1 (RMS norm) or 2 (layer norm: weight and bias).
        positions: Number of learned position embeddings. 0 for rotary embeddings.
        experts, experts_per_token: Number of experts in a layer, and number of them that a token uses. 0
            experts mean a dense MLP.
        ffn: Width of the MLP, or of an expert.
        shared_ffn: Width of the additional expert that every token uses.
    """

    head_size: int
    ffn: int
    layout: tuple[str, ...]
    embedding: tuple[str, ...] = ("tokens", "positions")
    head: tuple[str, ...] = ("norm", "head")
    bias: frozenset[str] = frozenset()
    norm_params: int = 1
    positions: int = 0
    experts: int = 0
    experts_per_token: int = 0
    shared_ffn: int = 0

    def __post_init__(self) -> None:
        for key in ("layers", "hidden", "heads", "kv_heads", "head_size", "ffn", "vocabulary"):
            value = getattr(self, key)
            if not (isinstance(value, int) and 0 < value < 10**9):
                raise ModelError(
                    f"{key} must be a whole number > 0 and at most 999,999,999, but got {value!r}", key=f"model.{key}"
                )
        if self.heads % self.kv_heads:
            raise ModelError(
                f"heads must be a multiple of kv_heads, but got {self.heads} and {self.kv_heads}", key="model.heads"
            )
        unknown = [part for part in self.layout if part not in PARTS]
        if unknown or not self.layout:
            raise ModelError(
                f"layout (the parts of one layer, separated by spaces) must contain only {', '.join(PARTS)}, but got "
                f"{' '.join(unknown) or 'an empty text'}"
            )
        for key, parts in _ONLY_WITH.items():
            value = getattr(self, key)
            if bool(value) != any(part in self.layout for part in parts):
                raise ModelError(
                    f"{key} must be given if and only if layout (the parts of one layer) contains one of "
                    f"{', '.join(parts)}, but got {key} {value!r} with layout {' '.join(self.layout)!r}"
                )

    def blocks(self) -> list[Block]:
        attention = self.heads * self.head_size
        layer = self._block("layer", self.layout, attention)
        numbered = [
            Block(f"layer {i}", layer.params, layer.split, layer.flops_per_token, attention, layer.experts)
            for i in range(self.layers)
        ]
        return [self._block("embedding", self.embedding), *numbered, self._block("head", self.head)]

    def _block(self, name: str, layout: tuple[str, ...], attention: int = 0) -> Block:
        parts = [PARTS[part](self) for part in layout]
        return Block(
            name,
            tuple(elements for part in parts for elements in part.params),
            tuple(part.split for part in parts for _ in part.params),
            sum(part.flops for part in parts),
            attention,
            next((part.experts for part in parts if part.experts), None),
        )

    @property
    def queries(self) -> int:
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head_size


Width = Callable[[DescribedArchitecture], int]


def _matrix(rows: Width, columns: Width, bias: str) -> Callable[[DescribedArchitecture], LayerPart]:
    def part(arch: DescribedArchitecture) -> LayerPart:
        elements = rows(arch) * columns(arch)
        params = (elements, rows(arch)) if bias in arch.bias else (elements,)
        # The work of a bias is counted as if it were a product. It is a thousandth of the product's.
        return LayerPart(params, 2.0 * sum(params))

    return part


def _norm(width: Width) -> Callable[[DescribedArchitecture], LayerPart]:
    return lambda arch: LayerPart((width(arch),) * arch.norm_params, split=False)


def _experts(each: tuple[str, ...], *, fused: bool) -> Callable[[DescribedArchitecture], LayerPart]:
    def part(arch: DescribedArchitecture) -> LayerPart:
        one = [elements for name in each for elements in PARTS[name](arch).params]
        params = [arch.experts * n for n in one] if fused else one * arch.experts
        per_token = max(1, arch.experts_per_token)
        flops = 2.0 * sum(one) * per_token
        modules = 0 if fused else len(each) * arch.experts
        return LayerPart(tuple(params), flops, experts=Experts(arch.experts, per_token, flops, modules))

    return part


def _head(arch: DescribedArchitecture) -> LayerPart:
    weights = () if arch.tied else (arch.vocabulary * arch.hidden,)
    bias = (arch.vocabulary,) if "head" in arch.bias else ()
    return LayerPart((*weights, *bias), 2.0 * arch.vocabulary * arch.hidden)


_hidden, _ffn, _shared_ffn = map(attrgetter, ("hidden", "ffn", "shared_ffn"))
_queries, _keys = map(attrgetter, ("queries", "keys"))

_ONLY_WITH = {
    "experts": ("experts", "plain_experts", "fused_experts"),
    "shared_ffn": ("shared_gate", "shared_up", "shared_down"),
}

# The parts that a block may consist of, by name.
PARTS: dict[str, Callable[[DescribedArchitecture], LayerPart]] = {
    "q": _matrix(_queries, _hidden, "qkv"),
    "k": _matrix(_keys, _hidden, "qkv"),
    "v": _matrix(_keys, _hidden, "qkv"),
    "qkv": _matrix(lambda arch: arch.queries + 2 * arch.keys, _hidden, "qkv"),
    "o": _matrix(_hidden, _queries, "out"),
    "sinks": lambda arch: LayerPart((arch.heads,)),
    "gate": _matrix(_ffn, _hidden, "mlp"),
    "up": _matrix(_ffn, _hidden, "mlp"),
    "gate_up": _matrix(lambda arch: 2 * arch.ffn, _hidden, "mlp"),
    "down": _matrix(_hidden, _ffn, "mlp"),
    "router": _matrix(attrgetter("experts"), _hidden, "router"),
    "experts": _experts(("gate", "up", "down"), fused=False),
    "plain_experts": _experts(("up", "down"), fused=False),
    "fused_experts": _experts(("gate_up", "down"), fused=True),
    "shared_gate": _matrix(_shared_ffn, _hidden, "mlp"),
    "shared_up": _matrix(_shared_ffn, _hidden, "mlp"),
    "shared_down": _matrix(_hidden, _shared_ffn, "mlp"),
    "shared_router": lambda arch: LayerPart((arch.hidden,), 2.0 * arch.hidden),
    "norm": _norm(_hidden),
    "head_norm": _norm(attrgetter("head_size")),
    "q_norm": _norm(_queries),
    "k_norm": _norm(_keys),
    "tokens": lambda arch: LayerPart((arch.vocabulary * arch.hidden,)),
    "positions": lambda arch: LayerPart((arch.positions * arch.hidden,) if arch.positions else (), split=False),
    "head": _head,
}
