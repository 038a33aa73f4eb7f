"""What a user may set, and which combinations of it are worth asking about."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

Offload = Literal["none", "optimizer", "parameters", "nvme"]
SUBGROUP_SIZES = (10**9, 2 * 10**8, 5 * 10**7)
POWERS = tuple(2**i for i in range(8))


@dataclass(frozen=True)
class Configuration:
    """One way to train; the names are those of ``--free``.

    Attributes:
        micro_batch: samples per rank and micro-batch.
        accumulation: micro-batches per optimizer step.
        zero_stage: 1, 2 or 3.
        recompute: activations are computed again in backward (activation checkpointing).
        offload: ``optimizer``: its state is in host memory, under a plan; ``parameters``: they
            too, in stock DeepSpeed; ``nvme``: state on NVMe, parameters in host memory.
        sub_group_size: elements; without offload it changes nothing.
        gpus: data-parallel ranks.
    """

    micro_batch: int = 1
    accumulation: int = 1
    zero_stage: int = 3
    recompute: bool = True
    offload: Offload = "optimizer"
    sub_group_size: int = 10**9
    gpus: int = 1

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step, over all ranks."""
        return self.micro_batch * self.accumulation * self.gpus

    def changed(self, **knobs: Any) -> Configuration:
        """The same with other values; without offload ``sub_group_size`` is the default one, so
        that configurations that are the same compare equal.
        """
        made = replace(self, **knobs)
        return replace(made, sub_group_size=10**9) if made.offload == "none" else made

    def deepspeed(self) -> dict[str, Any]:
        """The part of DeepSpeed's config that it decides."""
        zero: dict[str, Any] = {"stage": self.zero_stage, "sub_group_size": self.sub_group_size}
        if self.offload != "none":
            zero["offload_optimizer"] = {"device": "nvme" if self.offload == "nvme" else "cpu"}
        if self.offload in ("parameters", "nvme"):
            zero["offload_param"] = {"device": "cpu"}
        return {
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.accumulation,
            "zero_optimization": zero,
        }

    def text(self) -> str:
        """One line for people."""
        where = _WHERE[self.offload]
        kept = "recomputed" if self.recompute else "kept"
        parts = [
            f"{self.gpus} GPU{'s' if self.gpus > 1 else ''}", f"ZeRO-{self.zero_stage}", where,
            f"micro-batch {self.micro_batch} x {self.accumulation}", f"activations {kept}",
        ]  # fmt: skip
        if self.offload != "none":
            parts.append(f"subgroups of {self.sub_group_size:.0e}")
        return ", ".join(parts)


_WHERE: dict[Offload, str] = {
    "none": "no offload", "optimizer": "state in host memory",
    "parameters": "state and parameters in host memory",
    "nvme": "state on NVMe, parameters in host memory",
}  # fmt: skip
KNOBS = tuple(Configuration.__dataclass_fields__)


@dataclass(frozen=True)
class Space:
    """Every combination of the free knobs' values; the others stay at the base's.

    Attributes:
        free: the knobs that may change.
        choices: values of those that are chosen one by one. With a global batch, accumulation
            follows from the others and is not among them.
        global_batch: samples per step that every configuration must have; None: whatever results.
    """

    base: Configuration
    free: tuple[str, ...]
    choices: Mapping[str, tuple[Any, ...]]
    global_batch: int | None = None

    @classmethod
    def of(cls, base: Configuration, free: Sequence[str], global_batch: int | None = None) -> Space:
        """The usual values of each free knob, and the base's own.

        Raises:
            ValueError: an unknown knob, none, or a global batch that nothing can have.
        """
        unknown = [name for name in free if name not in KNOBS]
        if unknown or not free:
            raise ValueError(
                f"--free must name some of {', '.join(KNOBS)}, but got "
                f"{unknown[0] if unknown else 'nothing'}"
            )
        if global_batch is not None and global_batch < 1:
            raise ValueError(f"--global-batch must be >= 1, but got {global_batch}")
        ordered = tuple(name for name in KNOBS if name in free)
        derived = "accumulation" if global_batch is not None else ""
        choices = {name: _values(name, base, global_batch) for name in ordered if name != derived}
        space = cls(base, ordered, choices, global_batch)
        if next(iter(space), None) is None:
            raise ValueError(
                "--global-batch must be micro_batch x accumulation x gpus for some of the values "
                f"searched, but {global_batch} is not: {_described(choices, base)}; free "
                "accumulation too (--free), or choose another --global-batch"
            )
        return space

    def made(self, chosen: Mapping[str, Any]) -> Configuration | None:
        """The configuration of these values; None: it cannot have the global batch."""
        configuration = self.base.changed(**chosen)
        if self.global_batch is None:
            return configuration
        if "accumulation" in self.free:
            ranks = configuration.micro_batch * configuration.gpus
            configuration = configuration.changed(accumulation=max(1, self.global_batch // ranks))
        return configuration if configuration.global_batch == self.global_batch else None

    def __iter__(self) -> Iterator[Configuration]:
        """All that are allowed, each once."""
        seen = set()
        for values in itertools.product(*self.choices.values()):
            configuration = self.made(dict(zip(self.choices, values, strict=True)))
            if configuration is not None and configuration not in seen:
                seen.add(configuration)
                yield configuration


def _values(name: str, base: Configuration, global_batch: int | None) -> tuple[Any, ...]:
    own = getattr(base, name)
    usual: dict[str, tuple[Any, ...]] = {
        "micro_batch": POWERS[:7] if global_batch is None else _divisors(global_batch),
        "accumulation": POWERS,
        "zero_stage": (1, 2, 3),
        "recompute": (True, False),
        "offload": get_args(Offload),
        "sub_group_size": SUBGROUP_SIZES,
        "gpus": tuple(n for n in POWERS if n < base.gpus),
    }
    return tuple(dict.fromkeys((own, *usual[name])))


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(n for n in range(1, min(number, 2**14) + 1) if number % n == 0)


def _described(choices: Mapping[str, tuple[Any, ...]], base: Configuration) -> str:
    fixed = asdict(base)
    return ", ".join(
        f"{name} {'/'.join(map(str, choices.get(name, (fixed[name],))))}"
        for name in ("micro_batch", "accumulation", "gpus")
    )
