"""The settings that advice may change: those that keep a step's samples, change what is learned, or must be bought.

Advice that makes a job fit, advice that makes it faster, `tune search` and the web page all go through this table, so
that none of them lacks a setting that the estimate has.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any, Literal, NamedTuple

from ebbtide.simulator.estimates.job import SELECTIVE_SHARE, Job
from ebbtide.simulator.estimates.models.blocks import ModelError
from ebbtide.simulator.limits import GIB

Effect = Literal["same samples", "learned", "bought"]
Changes = Mapping[str, Any]
Words = Callable[[Any], str]


class Knob(NamedTuple):
    """A setting that advice may change.

    Attributes:
        effect: ``same samples``: a step trains the same samples by the same rule. ``learned``: another number or length
            of samples. ``bought``: hardware.
        words, option: Functions of the new value: the change in words, and the ``tune`` option that makes it. Where
            there is no option, the words are told.
        needs: What the change of a setting with the effect ``same samples`` asks of the user. 0: a line of the
            DeepSpeed config. 1: arguments of the trainer. 2: other kernels in the training script.
    """

    effect: Effect
    words: Words
    option: Words | None = None
    needs: int = 0

    def text(self, value: Any, *, as_option: bool = False) -> str:
        return (self.option or self.words)(value) if as_option else self.words(value)


def _of(format_: str, unit: int | None = None) -> Words:
    return lambda value: format_.format(value if unit is None else value / unit)


def _either(yes: str, no: str) -> Words:
    return lambda value: yes if value else no


_OFFLOADED = {
    "none": "no offload",
    "optimizer": "state in host memory",
    "parameters": "parameters may move to host memory",
    "nvme": "state on NVMe",
}
_OFFLOAD_OPTIONS = {
    "none": "no offload (remove offload_optimizer from the DeepSpeed config, and train without a plan)",
    "optimizer": "--no-offload-param",
    "parameters": "--offload-param",
    "nvme": "--storage DIR:SIZE",
}
# From cheap to dear.
KNOBS: dict[str, Knob] = {
    "zero_stage": Knob("same samples", _of("ZeRO-{}"), _of("--zero-stage {}")),
    "offload": Knob("same samples", lambda word: _OFFLOADED[word], lambda word: _OFFLOAD_OPTIONS[word]),
    "sub_group_size": Knob("same samples", _of("subgroups of {:.3g}"), _of("--subgroup-size {:.12g}")),
    "recompute": Knob(
        "same samples",
        _either("activation checkpointing", "no activation checkpointing"),
        _either("without --keep-activations", "--keep-activations"),
        1,
    ),
    "recompute_share": Knob(
        "same samples",
        lambda share: f"activation checkpointing in {'all' if share == 1 else f'{share:.0%} of the'} layers",
        lambda share: "without --recompute-share" if share == 1 else f"--recompute-share {share:.0%}",
        1,
    ),
    "accumulation": Knob("same samples", _of("accumulation {}"), _of("--accumulation {}"), 1),
    "fused_loss": Knob(
        "same samples",
        _either("a fused or chunked loss (such as Liger's)", "a loss with all logits"),
        _either("--fused-loss", "without --fused-loss"),
        2,
    ),
    "kernels": Knob("same samples", _of("{} kernels"), _of("--kernels {}"), 2),
    "flash_attention": Knob(
        "same samples",
        _either("FlashAttention", "stored attention scores"),
        _either("without --no-flash-attention", "--no-flash-attention"),
        2,
    ),
    "sequence": Knob("learned", _of("sequence {}"), _of("--sequence {}")),
    # With another accumulation that keeps the samples of a step, a micro-batch changes nothing that is learned.
    "micro_batch": Knob("learned", _of("micro-batch {}"), _of("--micro-batch {}"), 1),
    "device_memory_bytes": Knob("bought", _of("{:.4g} GiB of GPU memory", GIB), _of("--gpu-memory {:.4g}GiB", GIB)),
    "storage_bytes": Knob(
        "bought", _of("state on a drive, {:g} TB per node", 10**12), _of("--storage DIR:{:g}TB", 10**12)
    ),
    "data_parallel": Knob("bought", _of("{} GPUs"), _of("--data-parallel {}")),
    "host_memory_bytes": Knob("bought", _of("{:.0f} GiB of host memory per node", GIB)),
}
PRICES = tuple(KNOBS)
OF_MACHINE = ("device_memory_bytes", "host_memory_bytes")
BOUGHT_BESIDE = (*OF_MACHINE, "storage_bytes")  # changes of the machine or of its use, not fields of a job
MOST_ACCUMULATION = 1024  # micro-batches per step that advice and searches try


def price(changes: Changes) -> int:
    """Return the rank of the dearest change (0: cheapest). Accumulation covers a smaller micro-batch."""
    kept = "accumulation" in changes
    return max((PRICES.index(name) for name in changes if not (kept and name == "micro_batch")), default=0)


def needs(changes: Changes) -> int:
    """Return what a set of changes that leaves the samples of a step asks of the user (`Knob.needs`)."""
    return max((KNOBS[name].needs for name in changes), default=0)


def changes_text(changes: Changes) -> str:
    """Return the new values of the changed settings as text, such as "ZeRO-3, micro-batch 4"."""
    return ", ".join(KNOBS[name].text(value) for name, value in changes.items())


def same_samples(job: Job) -> Iterator[Changes]:
    """Yield every set of changes that leaves the samples of a step as they are, the unchanged job first.

    Each set holds only what differs from the job. Sets that no job can have (a stage without the offload) are left out.
    """
    choices = {name: values(name, job) for name in SAME_SAMPLES}
    keys = [_FIELDS.get(name, (name,)) for name in choices]
    for chosen in product(*choices.values()):
        changes: dict[str, Any] = {}
        for fields, value in zip(keys, chosen, strict=True):
            pairs = zip(fields, value if len(fields) > 1 else (value,), strict=True)
            changes |= {field: new for field, new in pairs if new != present(job, field)}
        if possible(job, changes):
            yield changes


# Settings of which only some combinations mean something -> the fields that one value of theirs sets.
_FIELDS: dict[str, tuple[str, ...]] = {
    "recompute": ("recompute", "recompute_share"),
    "accumulation": ("micro_batch", "accumulation"),
}
SAME_SAMPLES = (
    *("zero_stage", "offload", "recompute", "accumulation", "fused_loss", "kernels", "flash_attention"),
    "sub_group_size",
)
# Values that advice and searches try beside a job's own. Other values of the last three are never faster.
TRIED: Mapping[str, tuple[Any, ...]] = {
    "zero_stage": (3, 2, 1),
    "recompute": (True, False),
    "recompute_share": (1.0, SELECTIVE_SHARE),
    "fused_loss": (True,),
    "kernels": ("fused",),
    "flash_attention": (True,),
}


def values(name: str, job: Job) -> list[Any]:
    """Return the values that searches try for a setting, the job's own first. For recomputation and for accumulation,
    a value is a pair: with its fraction of layers, and with its micro-batch.
    """
    samples = job.micro_batch * job.accumulation
    usual: dict[str, list[Any]] = {
        **{name: list(tried) for name, tried in TRIED.items()},
        "offload": ["none"],
        "recompute": [*((True, share) for share in TRIED["recompute_share"]), (False, job.recompute_share)],
        "accumulation": [
            (samples // more, more) for more in range(1, min(samples, MOST_ACCUMULATION) + 1) if samples % more == 0
        ],
        "sub_group_size": [],  # a plan chooses its own
    }
    if name == "offload" and job.offload.keeps_parameters:
        usual["offload"].append("parameters")
    if name in _FIELDS:
        own: Any = tuple(present(job, field) for field in _FIELDS[name])
    else:
        own = present(job, name)
    return list(dict.fromkeys([own, *usual[name]]))


def present(job: Job, name: str) -> Any:
    """Return a job's value of a setting. An offload is told by its name in `OFFLOADS`."""
    if name != "offload":
        return getattr(job, name)
    moved = job.offload
    if moved.optimizer == "nvme":
        return "nvme"
    if moved.optimizer == "none":
        return "none"
    return "parameters" if moved.parameters == "cpu" else "optimizer"


def possible(job: Job, changes: Changes) -> bool:
    """Return True if a job can have these settings together."""
    try:
        applied(job, changes)
    except ModelError:
        return False
    return True


def applied(job: Job, changes: Changes) -> Job:
    """Return a job with changed settings. Changes of the machine are ignored.

    Raises:
        ModelError: The settings cannot be combined.
    """
    mine = {name: value for name, value in changes.items() if name not in BOUGHT_BESIDE}
    if mine.get("zero_stage", job.zero_stage) < 3 and "offload" not in mine and job.offload.parameters == "cpu":
        mine["offload"] = "optimizer"  # DeepSpeed reads offload_param under ZeRO-3 only
    if mine.get("offload") == "none":  # a DeepSpeed config cannot tell this from a config for a plan to offload
        mine["offload"] = replace(job.offload, optimizer="none", parameters="none")
    return job.changed(**mine)
