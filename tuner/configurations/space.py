"""The settings that a configuration search may change, and their useful combinations."""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from ebbtide.simulator.estimates.compute import Kernels
from ebbtide.simulator.estimates.knobs import MOST_ACCUMULATION, TRIED
from ebbtide.simulator.rules import RuleError

Offload = Literal["none", "optimizer", "parameters", "nvme"]  # keys of `job.OFFLOADS`
SUBGROUP_SIZES = (10**9, 2 * 10**8, 5 * 10**7)
POWERS = tuple(2**i for i in range(8))
# Without a global batch, more accumulation is always a little faster, because steps become rarer. Beyond these values
# the gain is a few percent, and the question would only be how large the batch is.
ACCUMULATIONS = POWERS[:5]


@dataclass(frozen=True)
class Configuration:
    """A training configuration: the settings that a search varies. Fields have the names that ``--free`` takes.

    The fields are the settings in `ebbtide.simulator.estimates.knobs` that leave the samples of a step as they are, the
    micro-batch, and the number of ranks (``gpus``).

    Attributes:
        micro_batch: Samples per rank and micro-batch.
        accumulation: Micro-batches per optimizer step.
        zero_stage: ZeRO stage: 1, 2 or 3.
        recompute: True if activations are computed again in backward (activation checkpointing).
        recompute_share: Fraction of the layers with recomputed activations. It has no effect without ``recompute``.
        offload: Data that is offloaded. ``none``: nothing. ``optimizer``: optimizer state in host memory, under a
            plan. ``parameters``: also parameters, if that is faster or needed. ``nvme``: state on NVMe drives and
            parameters in host memory, with DeepSpeed alone.
        sub_group_size: Elements per subgroup of optimizer state. It has no effect without offload.
        fused_loss: True if the loss is computed without storing all logits.
        kernels: ``fused`` or ``eager`` kernels between matrix products.
        flash_attention: True if attention scores are not stored in memory.
        gpus: Number of data-parallel ranks.
    """

    micro_batch: int = 1
    accumulation: int = 1
    zero_stage: int = 3
    recompute: bool = True
    recompute_share: float = 1.0
    offload: Offload = "optimizer"
    sub_group_size: int = 10**9
    fused_loss: bool = False
    kernels: Kernels = "fused"
    flash_attention: bool = True
    gpus: int = 1

    @property
    def global_batch(self) -> int:
        """Return the number of samples per optimizer step of a training configuration over all ranks."""
        return self.micro_batch * self.accumulation * self.gpus

    @property
    def impossible(self) -> str:
        """Return the reason that no machine can train with this configuration, or an empty string if one can."""
        if self.zero_stage < 3 and self.offload in ("parameters", "nvme"):
            return (
                f"offload {self.offload} needs ZeRO-3, but got zero_stage {self.zero_stage} "
                "(--zero-stage, zero_optimization.stage)"
            )
        if self.accumulation > MOST_ACCUMULATION:
            return (
                f"accumulation must be at most {MOST_ACCUMULATION} micro-batches to be searched, "
                f"but got {self.accumulation} (--accumulation, gradient_accumulation_steps)"
            )
        return ""

    def changed(self, **knobs: Any) -> "Configuration":
        """Return a copy in which settings without effect have their defaults, so that equivalent ones are equal."""
        made = replace(self, **knobs)
        made = replace(made, sub_group_size=10**9) if made.offload == "none" else made
        return made if made.recompute else replace(made, recompute_share=1.0)

    def text(self) -> str:
        """Return a description of this training configuration in one line of text."""
        where = _WHERE[self.offload]
        kept = "recomputed" if self.recompute else "kept"
        if self.recompute and self.recompute_share < 1:
            kept += f" in {self.recompute_share:.0%} of the layers"
        parts = [
            f"{self.gpus} GPU{'s' if self.gpus > 1 else ''}",
            f"ZeRO-{self.zero_stage}",
            where,
            f"micro-batch {self.micro_batch} x {self.accumulation}",
            f"activations {kept}",
        ]
        if self.offload != "none":
            parts.append(f"subgroups of {self.sub_group_size:.0e}")
        others = {
            "fused loss": self.fused_loss,
            f"{self.kernels} kernels": self.kernels != "fused",
            "no FlashAttention": not self.flash_attention,
        }
        parts += [words for words, holds in others.items() if holds]
        return ", ".join(parts)


_WHERE: dict[Offload, str] = {
    "none": "no offload",
    "optimizer": "state in host memory",
    "parameters": "state and parameters in host memory",
    "nvme": "state on NVMe, parameters in host memory",
}
KNOBS = tuple(Configuration.__dataclass_fields__)
# Settings that no DeepSpeed config has: the script or its launcher has them.
OF_SCRIPT = ("recompute", "recompute_share", "fused_loss", "kernels", "flash_attention", "gpus")


@dataclass(frozen=True)
class Space:
    """The set of training configurations that a search covers: every combination of the varied settings.

    Attributes:
        base: Configuration with the values of all other settings.
        free: Settings that the search varies.
        choices: Values of the varied settings. If the global batch is given, accumulation follows from the
            other settings and is not included.
        global_batch: Samples per optimizer step that every configuration must have. None allows any number.
    """

    base: Configuration
    free: tuple[str, ...]
    choices: Mapping[str, tuple[Any, ...]]
    global_batch: int | None = None

    @classmethod
    def of(
        cls, base: Configuration, free: Sequence[str], global_batch: int | None = None, *, fixed: Collection[str] = ()
    ) -> "Space":
        """Build the set of configurations of a search from the usual values of each varied setting and the base
        configuration's own values.

        Args:
            base: Configuration with the values of all settings that do not vary.
            free: Names of the settings that vary.
            global_batch: Samples per optimizer step that every configuration must have. If None, the number may vary.
                Accumulation then follows from micro-batch and GPUs, unless it is fixed.
            fixed: Settings whose values a flag or the DeepSpeed config gives.

        Raises:
            ValueError: A setting is unknown, no setting varies, or no possible configuration has ``global_batch``
                samples per optimizer step.
        """
        unknown = [name for name in free if name not in KNOBS]
        if unknown or not free:
            got = unknown[0] if unknown else "nothing"
            raise RuleError(
                f"the settings to search (--free) must be some of {', '.join(KNOBS)}, but got {got}", key="free"
            )
        if global_batch is not None and global_batch < 1:
            raise RuleError(
                f"the global batch (--global-batch) must be >= 1, but got {global_batch}", key="global_batch"
            )
        follows = global_batch is not None and "accumulation" not in fixed
        ordered = tuple(name for name in KNOBS if name in free or (follows and name == "accumulation"))
        derived = "accumulation" if global_batch is not None else ""
        choices = {name: _values(name, base, global_batch) for name in ordered if name != derived}
        choices.pop("sub_group_size", None)  # each plan chooses its own
        space = cls(base, ordered, choices, global_batch)
        if next(iter(space), None) is None:
            raise RuleError(space.why_empty(), "free")
        return space

    def made(self, chosen: Mapping[str, Any]) -> Configuration | None:
        """Return a configuration, or None if no machine can train with it or its global batch is another one."""
        configuration = self.of_batch(chosen)
        return None if configuration is None or configuration.impossible else configuration

    def of_batch(self, chosen: Mapping[str, Any]) -> Configuration | None:
        """Return the training configuration with the chosen values for the settings that the search varies.

        Whether any machine can train with it is not checked. Return None if the search requires a global batch, and the
        configuration has another one.
        """
        configuration = self.base.changed(**chosen)
        if self.global_batch is None:
            return configuration
        if "accumulation" in self.free:
            ranks = configuration.micro_batch * configuration.gpus
            configuration = configuration.changed(accumulation=max(1, self.global_batch // ranks))
        return configuration if configuration.global_batch == self.global_batch else None

    def __iter__(self) -> Iterator[Configuration]:
        made = (self.made(chosen) for chosen in self._combinations())
        yield from dict.fromkeys(c for c in made if c is not None)

    def _combinations(self) -> Iterator[dict[str, Any]]:
        for values in itertools.product(*self.choices.values()):
            yield dict(zip(self.choices, values, strict=True))

    def why_empty(self) -> str:
        """Return the reason that no training configuration of this search can be used, and a change that
        would help, as text.
        """
        batched = [c for chosen in self._combinations() if (c := self.of_batch(chosen))]
        batch = self.global_batch
        if batched:
            why = min(batched, key=lambda c: c.accumulation).impossible
            return why if batch is None else f"{why} for a global batch of {batch}"
        ranks = self.choices.get("gpus", (self.base.gpus,))
        if batch is not None and all(batch % n for n in ranks):
            return (
                f"the global batch (--global-batch) must be a multiple of the {'/'.join(map(str, ranks))} GPUs, but "
                f"got {batch}: take another number of GPUs (--gpus), search the number too (--free), or take another "
                "global batch"
            )
        bound = [k for k in ("micro_batch", "accumulation") if k not in self.free]
        advice = f"search {' or '.join(bound)} too (--free), or " if bound else ""
        return (
            "the global batch (--global-batch) must be micro_batch x accumulation x gpus for some of the values "
            f"searched, but {batch} is not: {_described(self.choices, self.base)}; {advice}choose "
            "another global batch"
        )


def _values(name: str, base: Configuration, global_batch: int | None) -> tuple[Any, ...]:
    own = getattr(base, name)
    usual: dict[str, tuple[Any, ...]] = {
        "micro_batch": POWERS[:7] if global_batch is None else _divisors(global_batch),
        "accumulation": ACCUMULATIONS,
        **TRIED,
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
