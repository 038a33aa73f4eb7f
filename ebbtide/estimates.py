"""Estimates of the memory and the time that training a model takes, before it is trained."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebbtide.simulator.machine import Machine
from ebbtide.simulator.rules import RuleError, checked
from ebbtide.simulator.shown import Shown

if TYPE_CHECKING:
    from ebbtide.simulator.estimates.job import Job
    from ebbtide.simulator.limits import Limits
    from ebbtide.simulator.workload import Workload

GIB = 2**30
# Kinds of device memory as the simulator tells them -> as people call them.
_KINDS = {"state": "optimizer state", "buckets": "buffers", "staging": "buffers"}
_NAMES = {"no_offload": "no offload", "ebbtide": "ebbtide"}
MOST_WAYS = 3


@dataclass(frozen=True, repr=False)
class Estimate(Shown):
    """An estimate of one training step of a model on a GPU. Memory is in bytes per GPU, and time in seconds.

    Attributes:
        strategy: Strategy that was estimated: "no offload", "stock ZeRO-3 offload" or "ebbtide".
        fits: True if GPU memory and host memory suffice.
        iteration_s: Seconds of one optimizer step, with its forwards and backwards.
        gpu: Peak bytes of GPU memory by kind: parameters, gradients, optimizer state, activations, buffers,
            reserved (the CUDA context).
        host: Peak bytes of host memory by kind.
        gpu_limit_bytes, host_limit_bytes: Bytes of memory that training may use, after subtraction of the
            margin that stays free for safety.
        lacks: Sentence that says how much memory is missing. Empty if the training fits into memory.
        nearest: Smallest changes of the training, as sentences, with which it would fit into memory, best
            first. Empty if it fits already, or if no such change was found.
        notes: Assumptions of the estimate, as sentences.
    """

    strategy: str
    fits: bool
    iteration_s: float
    gpu: Mapping[str, int]
    host: Mapping[str, int]
    gpu_limit_bytes: int
    host_limit_bytes: int
    lacks: str = ""
    nearest: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def gpu_bytes(self) -> int:
        """Return the peak GPU memory that the estimated training step needs, in bytes: the sum over all uses of the
        memory.
        """
        return sum(self.gpu.values())

    @property
    def host_bytes(self) -> int:
        """Return the peak host memory that the estimated training step needs, in bytes: the sum over all uses of the
        memory.
        """
        return sum(self.host.values())

    def in_short(self) -> str:
        answer = "fits" if self.fits else f"does not fit: {self.lacks}"
        told = (
            f"{self.strategy} {answer}; {self.gpu_bytes / GIB:.1f} GiB of GPU memory, "
            f"{self.host_bytes / GIB:.1f} GiB of host memory, {self.iteration_s:.3g} s per step"
        )
        return told + (f"; fits: {self.nearest[0]}" if self.nearest else "")

    def records(self) -> list[dict[str, Any]]:
        """Return a table of the memory that the estimated training step needs on the GPU and on the host, in GiB.

        The table has a row for each use of memory, such as gradients or optimizer state, one for the total, and one
        for the memory that may be used.
        """
        kinds = dict.fromkeys([*self.gpu, *self.host])
        rows = [(kind, self.gpu.get(kind, 0), self.host.get(kind, 0)) for kind in kinds]
        rows += [
            ("total", self.gpu_bytes, self.host_bytes),
            ("may be used", self.gpu_limit_bytes, self.host_limit_bytes),
        ]
        return [{"memory": name, "GPU_GiB": gpu / GIB, "host_GiB": host / GIB} for name, gpu, host in rows]

    def drawn(self) -> tuple[str, ...]:
        return ("GPU_GiB", "host_GiB")


@checked
def estimate(
    model: Any,
    optimizer: Any = None,
    *,
    batch: int,
    sequence: int,
    gpu: str | Path | Machine = "rtx4090",
    ds_config: Mapping[str, Any] | str | Path | None = None,
) -> Estimate:
    """Estimate memory and time of training a model on one GPU, and suggest changes if it does not fit.

    >>> estimate("Llama 3 8B", batch=1, sequence=1024, gpu="RTX 4090").fits
    False

    Args:
        model: A ``torch.nn.Module`` (live, or built under ``torch.device("meta")``), a Hugging Face model or
            config, a ``config.json``, or the name of a known model. Only shapes are read, no values.
        optimizer: A torch optimizer, its class or its name. None: the optimizer in ``ds_config``, otherwise AdamW.
        batch: Samples per GPU and forward pass.
        sequence: Tokens per sample.
        gpu: A `Machine`, a machine's file, or the name of a preset in any spelling.
        ds_config: DeepSpeed's config. If it contains ``"ebbtide"``, a plan is estimated, otherwise plain
            DeepSpeed. None: everything stays on the GPU, in bf16.

    Raises:
        ModelError, ValueError: an argument cannot be read. The message says what is possible.
    """
    from ebbtide.simulator.estimates.job import Job
    from ebbtide.simulator.limits import Limits

    if batch < 1:
        raise RuleError(f"batch must be a whole number >= 1, but got {batch}", key="batch")
    machine = _machine(gpu)
    shape: dict[str, Any] = {"sequence": sequence, "recompute": _recomputed(model)}
    if optimizer is not None:
        shape["optimizer"] = _rule(optimizer)
    job = Job.of_deepspeed(model, _without_key(ds_config), micro_batch=batch, **shape)
    limits = Limits.of(job.workload(machine), machine)
    return _simulated(job, machine, limits, _strategy(ds_config), _notes(model, job))


def _simulated(job: "Job", machine: "Machine", limits: "Limits", strategy: str, notes: tuple[str, ...]) -> Estimate:
    from ebbtide.simulator.analysis.best_setting import simulated

    work = job.workload(machine)
    setting: dict[str, Any] = {}
    if strategy == "stock":
        strategy, setting = job.offload.strategy(work.zero_stage)
    elif strategy == "ebbtide":
        from ebbtide.tuner.advice.even import quick_or_roomiest

        away = not job.offload.keeps_parameters
        setting = {"plan": quick_or_roomiest(work, machine, limits, offload_parameters=away)}
    row = simulated(strategy, work, machine, limits, setting)
    return Estimate(
        strategy=_NAMES.get(strategy, f"stock ZeRO-{work.zero_stage} offload"),
        fits=row.fits,
        iteration_s=row.result.iteration_s,
        gpu=_by_kind(row.memory.get("device", {}), machine.device_reserved_bytes),
        host=_by_kind(row.memory.get("host", {}), 0),
        gpu_limit_bytes=limits.device_bytes + machine.device_reserved_bytes,
        host_limit_bytes=limits.host_bytes,
        lacks=row.lacks,
        nearest=() if row.fits else tuple(_nearest(work, machine, limits, strategy)),
        notes=notes,
    )


def _nearest(work: "Workload", machine: "Machine", limits: "Limits", strategy: str) -> Iterator[str]:
    """Yield changes that let a training job fit into memory, as sentences for the user.

    The job does not fit with its present strategy. If it fits under a plan, training under a plan is the only change.
    """
    from ebbtide.tuner.advice.even import quick_or_none

    away = not work.job.offload.keeps_parameters
    planned = None if strategy == "ebbtide" else quick_or_none(work, machine, limits, offload_parameters=away)
    if planned is not None and planned.prediction is not None:
        told = planned.prediction
        yield (
            'DeepSpeed ZeRO-3 with "offload_optimizer": {"device": "cpu"} and "ebbtide": {"plan": "auto"}, '
            f"{told.iteration_s:.3g} s per step, {told.device_peak_bytes / GIB:.1f} GiB of GPU memory and "
            f"{told.host_peak_bytes / GIB:.1f} GiB of host memory"
        )
        return
    from ebbtide.tuner.advice.ways_out import ways_out

    for way in ways_out(work.job, machine)[:MOST_WAYS]:
        yield f"{way.label}, {way.iteration_s:.3g} s per step under a plan"


def _by_kind(held: Mapping[Any, int], reserved: int) -> dict[str, int]:
    named: dict[str, int] = {}
    for kind, size in [*held.items(), ("reserved", reserved)]:
        if size:
            name = _KINDS.get(kind, kind)
            named[name] = named.get(name, 0) + size
    return named


def _machine(gpu: str | Path | Machine) -> Machine:
    if isinstance(gpu, Machine):
        return gpu
    return Machine.load(gpu) if Path(gpu).is_file() else Machine.preset(str(gpu))


def _rule(optimizer: Any) -> str:
    """Return the simulator's name for a torch optimizer's update rule, such as "adam" for ``torch.optim.AdamW``."""
    from ebbtide.simulator.update.optimizer import OPTIMIZERS

    kind = optimizer if isinstance(optimizer, str | type) else type(optimizer)
    name = kind if isinstance(kind, str) else kind.__name__
    found = [rule for rule in sorted(OPTIMIZERS, key=len, reverse=True) if rule in name.lower()]
    if not found:
        raise RuleError(
            f"The optimizer must be one of {', '.join(OPTIMIZERS)}, but got {name!r}. ebbtide knows the state of "
            "these optimizers only.",
            key="optimizer",
        )
    return found[0]


def _strategy(ds_config: Any) -> str:
    """Return the name of the strategy with which training runs under a DeepSpeed config: "ebbtide" (a plan), "stock"
    (DeepSpeed alone, with the offload that the config sets) or "no_offload".
    """
    from ebbtide.simulator.estimates.offloading import left_to_stock

    config = _read(ds_config)
    if "ebbtide" in config and not left_to_stock(config):
        return "ebbtide"
    return "stock" if config else "no_offload"


def _without_key(ds_config: Any) -> dict[str, Any] | None:
    return None if ds_config is None else {k: v for k, v in _read(ds_config).items() if k != "ebbtide"}


def _read(ds_config: Any) -> Mapping[str, Any]:
    from ebbtide.simulator.estimates.deepspeed_keys import of_accelerate, read_file

    if ds_config is None:
        return {}
    return of_accelerate(ds_config, Path()) if isinstance(ds_config, Mapping) else read_file(Path(ds_config))


def _recomputed(model: Any) -> bool:
    """Return True if a model recomputes activations in backward, instead of storing them in forward.

    A model's config does not tell, so True is returned for a config.
    """
    if isinstance(model, type) or not hasattr(model, "modules"):
        return True
    switches = [m.gradient_checkpointing for m in model.modules() if hasattr(m, "gradient_checkpointing")]
    return any(switches) if switches else False


def _notes(model: Any, job: "Job") -> tuple[str, ...]:
    activations = "recomputed in backward (gradient_checkpointing=True)" if job.recompute else "kept for backward"
    notes = [f"{job.precision}, micro-batch {job.micro_batch}, {job.sequence} tokens, activations {activations}"]
    frozen = [p.numel() for p in model.parameters() if not p.requires_grad] if hasattr(model, "parameters") else []
    if frozen:
        notes.append(f"{sum(frozen)} frozen parameters are estimated as if they were trained: LoRA takes far less")
    return tuple(notes)
