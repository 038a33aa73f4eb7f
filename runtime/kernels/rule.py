"""An optimizer's update rule: its state, its scalars, its kernels, and the stock op that it repeats.

DeepSpeed's CPU ops update a tensor in a loop over whole vectors and leave the last ``length mod
width`` elements to a scalar loop. There the compiler fuses other products than in the vector loop.
The width is that of the *build* (16 floats for AVX-512, 8 for AVX2, 4 for NEON; its scalar
build has no vector loop at all). It need not be the widest that this machine knows: an op may
have been built on another machine, by another compiler or for another CPU. So the loaded op itself is asked.
"""

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from ebbtide.runtime.kernels.host import host_update
from ebbtide.runtime.kernels.step import UpdateStep

NO_VECTORS = 1 << 62  # longer than any tensor: all of it is tail (scalar builds, ARM's SVE)
WIDTHS = (16, 8, 4, 1, NO_VECTORS)  # 1: a compiler that fuses both loops alike, so that no tail is

Group = Mapping[str, Any]  # a parameter group, as torch's optimizers have them
Part = tuple[int, int, torch.Tensor, float]  # elements from, to; their gradient, and its factor

_LENGTHS = (1, 127, 1087)  # 15, 7 and 3 elements behind the last vector of 16, 8 and 4
_STEPS = 3
_POOL = 1 << 15  # elements that telling ones are chosen from: one in twelve, at the least
_OPTIMIZER = 1_000_033  # an id that no optimizer of this process has


class UnknownRoundingError(RuntimeError):
    """DeepSpeed's op rounds in an order that the kernels do not repeat."""


class UpdateRule(ABC):
    """An optimizer as stock runs it on the host, element by element.

    Owned by the training thread. `ebbtide.runtime.kernels.rules` has the table of those that exist.

    Attributes:
        name: of the rule and of its kernels.
        moments: keys of torch's optimizer state beside the fp32 master, in the kernels' order.
        unused: keys that stock keeps, and saves, and never changes.
        stock: class names of DeepSpeed's optimizer whose bits these are.
        types: what it is called in the config's ``optimizer.type``, in lower case.
        trials: (arguments of the rule, a parameter group): what the loaded op is asked with.
        own_step: the optimizer runs its own code, on the host only, and keeps its moments itself.
        spends: stock's scalar loop leaves something else in the place of a gradient (`spent`).
        vector_width: of the loaded op.
    """

    name: ClassVar[str]
    moments: ClassVar[tuple[str, ...]]
    unused: ClassVar[tuple[str, ...]] = ()
    stock: ClassVar[str]
    types: ClassVar[tuple[str, ...]]
    trials: ClassVar[tuple[tuple[dict[str, Any], Group], ...]]
    vector_width: int = 1
    own_step: ClassVar[bool] = False
    spends: ClassVar[bool] = False

    @classmethod
    def of(cls, optimizer: Any) -> "UpdateRule":
        """Return the rule of a live optimizer, for the op that it has loaded.

        Raises:
            UnknownRoundingError: the op was built in a way whose bits are not known.
        """
        op, rule = getattr(optimizer, f"ds_opt_{cls.name}"), cls(**cls.settings(optimizer))
        rule.vector_width = vector_width(cls, op)
        rule.ask(op)
        return rule

    def ask(self, op: Any) -> None:
        """Learn from the loaded op the other differences between DeepSpeed versions.

        Raises:
            UnknownRoundingError: no known variant has this op's bits.
        """

    @classmethod
    def settings(cls, optimizer: Any) -> dict[str, Any]:
        """Return the optimizer's settings that belong to no parameter group."""
        del optimizer
        return {}

    def next_step(self, optimizer: Any, master: torch.nn.Parameter, group: int) -> UpdateStep:
        """Return the next step of a master of parameter group ``group``; its step counter goes up."""
        state = optimizer.state[master]
        state["step"] += 1
        return self.step(optimizer.param_groups[group], state["step"])

    def update(
        self,
        state: Sequence[torch.Tensor],
        parts: Iterable[Part],
        out: torch.Tensor,
        step: UpdateStep,
        threads: int,
        source: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Update a subgroup's ``state`` on the host and write its parameters to ``out``.

        Args:
            source: the old state, which then stays: ``state`` is only written.
        """
        elements = state[0].numel()
        for start, end, gradient, scale in parts:
            span = slice(start, end)
            host_update(
                [t[span] for t in state],
                gradient,
                out[span],
                step,
                scale,
                threads,
                self.tail(elements, start, end),
                None if source is None else [t[span] for t in source],
            )

    def unplaced_bytes(self, sizes: Sequence[int], master: torch.dtype) -> int:
        """Return the host bytes of state that a plan does not place, for subgroups of these sizes and
        masters of this precision.
        """
        del sizes, master
        return 0

    def spent(self, state: Sequence[torch.Tensor], gradient: torch.Tensor, step: UpdateStep) -> torch.Tensor:
        """Return the fp32 ``gradient`` as stock's scalar loop leaves it after its update of ``state``.

        Only for rules that overwrite the gradient.
        """
        raise NotImplementedError

    @abstractmethod
    def step(self, group: Group, number: int) -> UpdateStep:
        """Step ``number`` (from 1) of a group; to be called in the order of the subgroups."""

    @abstractmethod
    def stock_arguments(self, group: Group) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return the additional arguments of the op's ``create_NAME`` and ``NAME_update``."""

    def resume(self, number: int, groups: Sequence[Group]) -> None:
        """Go on as if ``number`` steps had been run without a break; ``groups`` by subgroup."""

    def forms(self) -> list[UpdateStep]:
        """Return a step of each variant that parameter groups may bring about."""
        steps = [copy.deepcopy(self).step(group, 1) for _, group in self.trials]
        return list({step.variant: step for step in steps}.values())

    def tail(self, elements: int, begin: int, end: int) -> int:
        """Return the number of last elements of ``begin:end`` that stock's scalar loop updates.

        Stock updates ``elements`` elements as one tensor.
        """
        return max(0, end - max(begin, self.tail_begin(elements)))

    def tail_begin(self, elements: int) -> int:
        return elements - elements % self.vector_width


@functools.cache
def vector_width(rule: type[UpdateRule], op: Any) -> int:
    """Elements of the vectors that DeepSpeed's loaded op works on; `NO_VECTORS` without.

    Takes milliseconds, once per op.

    Raises:
        UnknownRoundingError: none of the orders that are known has this op's bits.
    """
    equal = [width for width in WIDTHS if _has_width(rule, op, width)]
    if len(equal) != 1:
        raise UnknownRoundingError(
            f"DeepSpeed's cpu_{rule.name} op must round as its AVX-512, AVX2, NEON or scalar build "
            f"with fused multiply-add does, but {getattr(op, '__file__', op)} matches {len(equal)} of "
            "them, so a plan could not give the same bits. Delete that file so that DeepSpeed builds "
            "it again on this machine (CXX=g++), or train without a plan"
        )
    return equal[0]


def _has_width(rule: type[UpdateRule], op: Any, width: int) -> bool:
    return all(
        same_bits(rule(**settings), group, op, width, [length], _STEPS)
        for length in _LENGTHS
        for settings, group in rule.trials
    )


def same_bits(rule: UpdateRule, group: Group, op: Any, width: int, lengths: Sequence[int], steps: int) -> bool:
    """Return whether the rule and DeepSpeed's op give the same bits for subgroups of ``lengths`` elements."""
    ours = [_telling(rule, group, length) for length in lengths]
    theirs = [[tensor.clone() for tensor in state] for state, _ in ours]
    created, updated = rule.stock_arguments(group)
    getattr(op, f"create_{rule.name}")(_OPTIMIZER, *created, False)
    update = getattr(op, f"{rule.name}_update")
    try:
        for number in range(1, steps + 1):
            for (state, grad), (p, *moments) in zip(ours, theirs, strict=True):
                host_update(state, grad, None, rule.step(group, number), tail=len(p) % width)
                # A copy: Adagrad's scalar loop writes to the gradient.
                update(_OPTIMIZER, number, *updated, p, grad.clone(), *moments)
                grad.copy_(grad.flip(0) * 0.7)
    finally:
        getattr(op, f"destroy_{rule.name}")(_OPTIMIZER)
    pairs = zip(ours, theirs, strict=True)
    return all(torch.equal(*two) for (mine, _), stock in pairs for two in zip(mine, stock, strict=True))


def _telling(rule: UpdateRule, group: Group, length: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """State and gradient of elements that the two loops leave with different bits."""
    generator = torch.Generator().manual_seed(length)
    grad = torch.randn(_POOL, generator=generator)
    state = [torch.randn(_POOL, generator=generator)]
    state += [torch.rand(_POOL, generator=generator) for _ in rule.moments]
    step = copy.deepcopy(rule).step(group, 1)
    vector, scalar = ([t.clone() for t in state] for _ in range(2))
    host_update(vector, grad, None, step)
    host_update(scalar, grad, None, step, tail=_POOL)
    differ = torch.stack([a != b for a, b in zip(vector, scalar, strict=True)]).any(0)
    chosen = differ.nonzero().flatten()[:length]
    assert len(chosen) == length, f"{length} telling elements must be in the pool, but {chosen=}"
    return [tensor[chosen] for tensor in state], grad[chosen]
