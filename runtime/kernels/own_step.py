"""The update rule of optimizers that run their own code on the CPU, one subgroup at a time, as in stock DeepSpeed.

ebbtide has no kernel for these optimizers: torch's own (`torch_adam`, or one that the script passes),
others that DeepSpeed accepts with ``zero_allow_untested_optimizer``, and all whose masters DeepSpeed keeps
in 16 bits (``*_master_weights_and_grads``). Results are bit-identical to stock by construction: the same
code runs on the same tensors with the same number of torch threads. The number matters because torch
divides a tensor among threads and rounds the last elements of each share differently.
"""

import inspect
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from ebbtide.runtime.kernels.rule import Group, Part, UpdateRule
from ebbtide.runtime.kernels.rules import rule_class
from ebbtide.runtime.kernels.step import UpdateStep


@dataclass(frozen=True, slots=True)
class OwnStep:
    """One update of a master parameter by ``step()`` of a torch optimizer that ebbtide has no kernel for.

    The object holds the optimizer's parameter groups as they were when the update was launched.
    """

    kernel: ClassVar[str] = "own"
    master: torch.nn.Parameter
    group: int
    groups: list[dict[str, Any]]  # parameter groups without their parameters
    threads: int

    @property
    def variant(self) -> int:
        return 0

    def scalars(self, scale: float) -> np.ndarray:
        raise NotImplementedError(
            "ebbtide called its update kernel for an optimizer whose own step() must compute the update. "
            "Report this as a defect of ebbtide"
        )


class OwnStepRule(UpdateRule):
    """An update rule for optimizers without an ebbtide kernel. It runs ``step()`` of a private copy of the optimizer.

    Each call of ``step()`` updates one master parameter. The training thread creates an `OwnStep` for each update, and
    the thread of CPU updates runs these in order. The optimizer state of a master parameter stays in the original
    optimizer's ``state``, where checkpoints and other code look for it. This rule does not know which tensors that
    state contains.
    """

    name = "own step"
    moments = ()
    stock = ""
    types = ()
    trials = ()
    own_step = True

    def __init__(self, optimizer: torch.optim.Optimizer, *, group_by_group: bool = False) -> None:
        """Create the rule. With ``group_by_group``, each ``step()`` sees one group only, as under ZeRO-1 and 2.

        Otherwise it also sees the other groups, but without their parameters.
        """
        self._optimizer, self._group_by_group = optimizer, group_by_group
        self._mine = _copy_of(optimizer)
        self._seen: list[dict[str, Any]] = []
        self._gradient = torch.empty(0)

    def next_step(self, optimizer: Any, master: torch.nn.Parameter, group: int) -> OwnStep:
        self._optimizer = optimizer  # loading a checkpoint may have replaced the optimizer
        groups = [_values(each) for each in optimizer.param_groups]
        return OwnStep(master, group, groups, torch.get_num_threads())

    def update(
        self,
        state: Sequence[torch.Tensor],
        parts: Iterable[Part],
        out: torch.Tensor,
        step: UpdateStep,
        threads: int,
        source: Sequence[torch.Tensor] | None = None,
    ) -> None:
        del threads  # the number of threads is torch's, not that of ebbtide's kernels
        assert isinstance(step, OwnStep)
        assert source is None, "an optimizer that runs its own step is never updated early"
        if torch.get_num_threads() != step.threads:
            torch.set_num_threads(step.threads)
        step.master.grad = self._unscaled(state[0], parts)
        try:
            self._run(step)
        finally:
            step.master.grad = None
        out.copy_(step.master.detach())

    def _unscaled(self, master: torch.Tensor, parts: Iterable[Part]) -> torch.Tensor:
        elements = master.numel()
        if self._gradient.numel() < elements:
            self._gradient = torch.empty(elements, dtype=master.dtype)
        gradient = self._gradient[:elements]
        for start, end, part, scale in parts:
            gradient[start:end].copy_(part).mul_(scale)
        return gradient

    def _run(self, step: OwnStep) -> None:
        mine, live = self._mine, self._optimizer
        self._follow(step.groups)
        for number, group in enumerate(mine.param_groups):
            group["params"] = [step.master] if number == step.group else []
        mine.state = defaultdict(dict)
        for key, kept in live.state.items():
            if key is step.master or not torch.is_tensor(key):  # leave out the state of other masters
                mine.state[key] = kept
        before = [_values(group) for group in mine.param_groups]
        groups = mine.param_groups
        if self._group_by_group:
            mine.param_groups = [groups[step.group]]
        with torch.no_grad():
            type(mine).step(mine)
        mine.param_groups = groups
        live.state.update(mine.state)
        for was, group, shown in zip(before, mine.param_groups, live.param_groups, strict=True):
            shown.update({k: v for k, v in _values(group).items() if _differ(v, was.get(k))})

    def _follow(self, groups: list[dict[str, Any]]) -> None:
        mine = self._mine
        if len(mine.param_groups) != len(groups):
            mine.param_groups = [dict(group) for group in groups]
        for group, now, seen in zip(mine.param_groups, groups, self._seen or [{} for _ in groups], strict=True):
            group.update({k: v for k, v in now.items() if k not in seen or _differ(v, seen[k])})
        self._seen = groups

    def unplaced_bytes(self, sizes: Sequence[int], master: torch.dtype) -> int:
        kept = kept_bytes(self._optimizer, master)
        return sum(sizes) * kept + max(sizes, default=0) * master.itemsize

    def step(self, group: Group, number: int) -> UpdateStep:
        raise NotImplementedError("see next_step")


def kept_bytes(optimizer: torch.optim.Optimizer, master: torch.dtype) -> int:
    """Return the bytes of optimizer state that an optimizer keeps per element of a master parameter, without the
    master.

    The number is known for the optimizers that ebbtide has an update rule for. Any other optimizer of torch is run once
    with a parameter of two elements to find the number. An optimizer that is not torch's is assumed to keep as much as
    Adam.
    """
    rule = rule_class(optimizer)
    if rule is not None:
        wide = getattr(optimizer, "fp32_optimizer_states", True)
        return len(rule.moments) * (4 if wide else master.itemsize)
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim"):
        return 2 * master.itemsize
    tiny = torch.nn.Parameter(torch.zeros(2, dtype=master))
    tiny.grad = torch.zeros_like(tiny)
    taken = inspect.signature(kind).parameters
    probe = kind([tiny], **{k: v for k, v in optimizer.defaults.items() if k in taken})
    probe.step()
    kept = probe.state[tiny].values()
    return sum(t.element_size() for t in kept if torch.is_tensor(t) and t.shape == tiny.shape)


def _copy_of(optimizer: torch.optim.Optimizer) -> Any:
    kind = type(optimizer)
    made: Any = object.__new__(type(kind.__name__, (kind,), {"__del__": lambda _: None}))
    # `copy.copy` would use the __getstate__ of an optimizer that leaves fields out.
    made.__dict__.update(optimizer.__dict__)
    # A learning-rate scheduler wraps the original's step. The copy uses the step of its class.
    made.__dict__.pop("step", None)
    made.param_groups = []
    return made


def _values(group: Group) -> dict[str, Any]:
    return {key: value.clone() if torch.is_tensor(value) else value for key, value in group.items() if key != "params"}


def _differ(a: Any, b: Any) -> bool:
    if torch.is_tensor(a) or torch.is_tensor(b):
        return not (torch.is_tensor(a) and torch.is_tensor(b) and torch.equal(a, b))
    return bool(a != b)
