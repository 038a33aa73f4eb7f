"""An optimizer's update rule: its state, scalars and kernels. It reproduces the bits of a DeepSpeed CPU op.

DeepSpeed's CPU ops update a tensor in a loop over whole vectors and leave the last ``length mod width``
elements to a scalar loop. In the scalar loop the compiler fuses other multiplications and additions than in
the vector loop. The width is that of the *build*: 16 floats for AVX-512, 8 for AVX2, 4 for NEON, and no
vector loop in a scalar build. It need not be the widest that this machine supports: an op may have been
built on another machine, by another compiler or for another CPU. The loaded op itself is therefore tested.
"""

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from ebbtide.runtime.kernels.host import host_update
from ebbtide.runtime.kernels.step import UpdateStep

NO_VECTORS = 1 << 62  # longer than any tensor, so that all elements are in the tail (scalar builds, ARM's SVE)
WIDTHS = (16, 8, 4, 1, NO_VECTORS)  # 1: the compiler fuses operations in both loops alike, so that there is no tail

Group = Mapping[str, Any]  # a parameter group of a torch optimizer
# First element, end, gradient of the elements between, and factor of the gradient.
Part = tuple[int, int, torch.Tensor, float]

_LENGTHS = (1, 127, 1087)  # lengths with 15, 7 and 3 elements after the last whole vector of 16, 8 and 4
_STEPS = 3
_POOL = 1 << 15  # number of random elements. At least one in twelve shows how the kernel rounds
_OPTIMIZER = 1_000_033  # an id that no optimizer of this process has


class UnknownRoundingError(RuntimeError):
    """An error: DeepSpeed's loaded CPU op rounds in an order that ebbtide's kernels cannot reproduce."""


class UpdateRule(ABC):
    """The update rule of an optimizer that stock DeepSpeed runs on the CPU, element by element.

    `ebbtide.runtime.kernels.rules` has the table of rules.

    Attributes:
        moments: Keys of torch's optimizer state apart from the fp32 master, in the kernels' order.
        unused: Keys of state that DeepSpeed keeps and saves but never changes.
        stock: Class name of the DeepSpeed optimizer whose results the rule reproduces bit by bit.
        types: Names of the optimizer in the config's ``optimizer.type``, in lower case.
        trials: Pairs (arguments of the rule's constructor, parameter group). For each pair, the rule's results are
            compared with those of DeepSpeed's compiled CPU op, to find the op's vector width.
        own_step: True if updates call the ``step()`` of the torch optimizer on the CPU. The optimizer then keeps its
            moments itself.
        spends: True if DeepSpeed's CPU op overwrites the last elements of the gradient (see `spent`).
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
        """Build a rule that is bit-identical to a DeepSpeed optimizer's CPU op, which is run to find out how it rounds.

        Raises:
            UnknownRoundingError: The op was built in a way that ebbtide's kernels cannot reproduce.
        """
        op, rule = getattr(optimizer, f"ds_opt_{cls.name}"), cls(**cls.settings(optimizer))
        rule.vector_width = vector_width(cls, op)
        rule.ask(op)
        return rule

    def ask(self, op: Any) -> None:
        """Choose the variant bit-identical to DeepSpeed's op, which is run. Raise `UnknownRoundingError` if none is."""

    @classmethod
    def settings(cls, optimizer: Any) -> dict[str, Any]:
        """Return arguments of this class: settings like ``adamw`` that the optimizer has outside of its groups."""
        del optimizer
        return {}

    def next_step(self, optimizer: Any, master: torch.nn.Parameter, group: int) -> UpdateStep:
        """Return the hyperparameters of a master parameter's next step, and advance its step counter."""
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
        """Update a subgroup's ``state`` on the CPU, and write the new parameters to ``out``.

        Args:
            parts: Ranges of the subgroup's elements, each with the gradient and scale for its update.
            source: The old state. If given, it stays unchanged, and the new state is written to ``state``.
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
        """Return the bytes of host memory that an optimizer takes for state which a plan does not place."""
        # Only an optimizer for which ebbtide has no update kernel has such state, because it allocates its own state.
        del sizes, master
        return 0

    def spent(self, state: Sequence[torch.Tensor], gradient: torch.Tensor, step: UpdateStep) -> torch.Tensor:
        """Return the values with which DeepSpeed's CPU op overwrites the end of an fp32 gradient."""
        # While the op updates ``state`` with the gradient, its scalar loop overwrites the elements after the last full
        # vector. ebbtide leaves the gradient unchanged. It needs these values if DeepSpeed would apply the same
        # gradient again in a later step, or if other code reads the gradient.
        raise NotImplementedError

    @abstractmethod
    def step(self, group: Group, number: int) -> UpdateStep:
        """Return the hyperparameters of a subgroup's step ``number``, from 1. Call this in the order of subgroups."""

    def stock_arguments(self, group: Group) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return the arguments that only this optimizer's DeepSpeed op takes, as two tuples."""
        raise NotImplementedError(f"{type(self).__name__} has no op of DeepSpeed's to compare with")

    def resume(self, number: int, groups: Sequence[Group]) -> None:
        """Set the update rule to its state after ``number`` optimizer steps, as if they had run in this process."""

    def forms(self) -> list[UpdateStep]:
        """Return example hyperparameters for each variant of the update kernel that training may need."""
        steps = [copy.deepcopy(self).step(group, 1) for _, group in self.trials]
        return list({step.variant: step for step in steps}.values())

    def tail(self, elements: int, begin: int, end: int) -> int:
        """Return how many last elements of ``begin:end`` DeepSpeed updates in its scalar loop, with other rounding."""
        return max(0, end - max(begin, self.tail_begin(elements)))

    def tail_begin(self, elements: int) -> int:
        return elements - elements % self.vector_width


@functools.cache
def vector_width(rule: type[UpdateRule], op: Any) -> int:
    """Find out by a test which vector width, in elements, DeepSpeed's compiled CPU op uses, and return it.

    Return `NO_VECTORS` if the op uses no vectors. The test runs once per op and takes milliseconds.

    Raises:
        UnknownRoundingError: The test cannot decide. Either no vector width that ebbtide knows gives results that are
            bit-identical to the op's, or several widths do.
    """
    equal = [width for width in WIDTHS if _has_width(rule, op, width)]
    if len(equal) != 1:
        raise UnknownRoundingError(
            f"DeepSpeed's compiled op cpu_{rule.name} must round like exactly one of the builds that ebbtide knows "
            "(AVX-512, AVX2, NEON, scalar with fused multiply-add), so that ebbtide's updates are bit-identical, but "
            f"{getattr(op, '__file__', op)} rounds like {len(equal)} of these builds. Delete this file so that "
            "DeepSpeed builds the op again on this machine (CXX=g++), or train without a plan"
        )
    return equal[0]


def _has_width(rule: type[UpdateRule], op: Any, width: int) -> bool:
    return all(
        same_bits(rule(**settings), group, op, width, [length], _STEPS)
        for length in _LENGTHS
        for settings, group in rule.trials
    )


def same_bits(rule: UpdateRule, group: Group, op: Any, width: int, lengths: Sequence[int], steps: int) -> bool:
    """Return whether an update rule and DeepSpeed's CPU op give identical bits in a test on random tensors.

    Args:
        width: Vector width of the op that the rule assumes, in elements.
    """
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
