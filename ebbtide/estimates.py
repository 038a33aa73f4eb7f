"""Estimates of the memory and the time that training a model takes, before it is trained."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebbtide.simulator.display import Shown
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.rules import RuleError, checked

if TYPE_CHECKING:
    from ebbtide.simulator.estimates.job import Job
    from ebbtide.simulator.limits import Limits
    from ebbtide.simulator.plan import Plan
    from ebbtide.simulator.workload import Workload

GIB = 2**30
# Kinds of device memory as the simulator tells them -> as people call them.
_KINDS = {"state": "optimizer state", "buckets": "buffers", "staging": "buffers"}
_NAMES = {"no_offload": "no offload", "ebbtide": "ebbtide"}
MOST_WAYS = 3


@dataclass(frozen=True, repr=False)
class Estimate(Shown):
    """An answer to whether and how a model can be trained on a GPU. Memory is in bytes per GPU, and time in seconds.

    Attributes:
        sentence: Advice in one sentence, the same as that of `tune plan` and of the web page.
        about: Model, parameters and machine, as the first line of `tune plan` names them.
        strategy: Strategy that the numbers are for: "ebbtide", "no offload" or "stock ZeRO-3 offload". Without
            ``ds_config`` it is the one that the sentence advises.
        fits: True if the model can be trained so: GPU memory and host memory suffice.
        iteration_s: Seconds of one optimizer step, with its forwards and backwards.
        tokens_per_s: Tokens that all GPUs together train on per second.
        gpu: Peak bytes of GPU memory by kind: parameters, gradients, optimizer state, activations, buffers.
        host: Peak bytes of host memory by kind.
        gpu_limit_bytes, host_limit_bytes: Bytes of memory that training may use, after subtraction of the
            margin that stays free for safety and of the CUDA context.
        lacks: Sentence that says how much memory is missing. Empty if the training fits into memory.
        nearest: Smallest changes of the training, as sentences, with which it would fit into memory, best
            first. Empty if it fits already, or if no such change was found.
        faster: Up to three changes, as sentences, with which the same samples train faster, the dearest last. Empty if
            the training does not fit.
        notes: What was assumed, and what is not simulated, as sentences.
    """

    sentence: str
    about: str
    strategy: str
    fits: bool
    iteration_s: float
    tokens_per_s: float
    gpu: Mapping[str, int]
    host: Mapping[str, int]
    gpu_limit_bytes: int
    host_limit_bytes: int
    lacks: str = ""
    nearest: tuple[str, ...] = ()
    faster: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def gpu_bytes(self) -> int:
        """Return the peak GPU memory that the estimated training step needs, in bytes."""
        return sum(self.gpu.values())

    @property
    def host_bytes(self) -> int:
        """Return the peak host memory that the estimated training step needs, in bytes."""
        return sum(self.host.values())

    def in_short(self) -> str:
        answer = self.strategy if self.fits else f"{self.strategy} does not fit: it {self.lacks}"
        text = (
            f"{self.sentence} {self.about}. {answer}; {self.iteration_s:.3g} s per step, {self.tokens_per_s:,.0f} "
            f"tokens/s, {self.gpu_bytes / GIB:.1f} GiB of GPU memory, {self.host_bytes / GIB:.1f} GiB of host memory"
        )
        return text + (f"; fits: {self.nearest[0]}" if self.nearest else "")

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
    gpus: int | None = None,
    accumulation: int | None = None,
    gpu_memory_bytes: float | None = None,
    host_memory_bytes: float | None = None,
    full: bool = False,
) -> Estimate:
    """Estimate memory and time of training a model, say whether to offload, and suggest changes if nothing fits.

    The answer is that of `tune plan` and of the web page, which begin with the same sentence.

    >>> estimate("Llama 3 8B", batch=1, sequence=1024, gpu="RTX 4090").strategy
    'ebbtide'

    Args:
        model: A ``torch.nn.Module`` (live, or built under ``torch.device("meta")``), a Hugging Face model or
            config, a ``config.json``, or the name of a known model. Only shapes are read, no values.
        optimizer: A torch optimizer, its class or its name. None: the optimizer in ``ds_config``, otherwise AdamW.
        batch: Samples per GPU and forward pass.
        sequence: Tokens per sample.
        gpu: A `Machine`, a machine's file, or the name of a preset or of its card in any spelling.
        ds_config: DeepSpeed's config, or Accelerate's. If it contains ``"ebbtide"``, the numbers are those of training
            under a plan, otherwise those of plain DeepSpeed. None: they are for what the answer advises, in bf16.
        gpus: GPUs among which ZeRO partitions. None: 1, or all cards of a preset such as rtx4090-x2.
        accumulation: Micro-batches per optimizer step. None: as in ``ds_config``, or 1.
        gpu_memory_bytes: Memory of each GPU, if it is not the machine's.
        host_memory_bytes: Memory of the machine, if it is not the machine's own.
        full: True to search for the plan as thoroughly as `tune plan` does, which takes longer.

    Raises:
        ModelError, ValueError: an argument cannot be read. The message says what is possible.
    """
    from ebbtide.simulator.estimates.estimate import default_ranks, estimated
    from ebbtide.simulator.estimates.job import Job
    from ebbtide.simulator.limits import Limits, within

    if batch < 1:
        raise RuleError(f"batch must be a whole number >= 1, but got {batch}", key="batch")
    machine, memory, notes = within(_machine(gpu), gpu_memory_bytes, host_memory_bytes)
    shape: dict[str, Any] = {"sequence": sequence, "recompute": _recomputed(model)}
    if optimizer is not None:
        shape["optimizer"] = _rule(optimizer)
    shape["data_parallel"] = default_ranks(machine, shape) if gpus is None else gpus
    job = Job.of_deepspeed(model, _without_key(ds_config), micro_batch=batch, accumulation=accumulation, **shape)
    work = estimated(job, machine)
    limits = Limits.of(work, machine, **memory)
    all_notes = (*_notes(model, job), *notes, *work.notes, *limits.explained)
    return _answered(work, machine, limits, _strategy(ds_config), memory, all_notes, full=full)


def _answered(
    work: "Workload",
    machine: "Machine",
    limits: "Limits",
    strategy: str | None,
    memory: Mapping[str, Any],
    notes: tuple[str, ...],
    *,
    full: bool,
) -> Estimate:
    from ebbtide.simulator.analysis.best_setting import simulated
    from ebbtide.simulator.estimates.offloading import plan_refusal
    from ebbtide.tuner.answer.rows import alternatives, compare
    from ebbtide.tuner.answer.verdict import about, role_of, verdict
    from ebbtide.tuner.placements.planning import quick_or_roomiest

    refusal = plan_refusal(work.job.config, work.job.offload)
    plan, problem = (None, refusal) if refusal else _planned(work, machine, limits, memory, full=full)
    if plan is None or not plan.alternatives:
        others = alternatives(compare(work, machine, limits, plan))
    else:
        others = plan.alternatives
    own = [] if plan is None or plan.prediction is None else [("plan", plan.prediction)]
    rows: list[Any] = [*own, *((role_of(row.strategy), row) for row in others)]
    stock = next((row for role, row in rows if role == "stock"), None)
    if refusal and stock is not None and not stock.fits:
        problem = f"stock DeepSpeed {stock.note}. {refusal}"
    decided = verdict(rows, problem)
    known = {"ebbtide": plan and plan.prediction}
    if strategy is None:
        known |= {"no_offload": next((row for role, row in rows if role == "no offload"), None)}
        strategy = "no_offload" if decided.choice == "no offload" else "ebbtide"
    held: Mapping[Any, Any]
    if found := known.get(strategy):
        iteration_s, held, lacks = found.iteration_s, found.memory, ""
    else:
        setting: dict[str, Any] = {}
        if strategy == "stock":
            strategy, setting = work.job.offload.strategy(work.zero_stage)
        elif strategy == "ebbtide":
            away = not work.job.offload.keeps_parameters
            setting = {"plan": quick_or_roomiest(work, machine, limits, offload_parameters=away)}
        row = simulated(strategy, work, machine, limits, setting)
        iteration_s, held, lacks = row.result.iteration_s, row.memory, row.lacks
    ways = _nearest(work, machine, plan, memory) if lacks else ()
    quick = [] if full or plan is None else plan.reasons[:1]
    return Estimate(
        sentence=decided.sentence,
        about=about(work, machine),
        strategy=_NAMES.get(strategy, f"stock ZeRO-{work.zero_stage} offload"),
        fits=not lacks,
        iteration_s=iteration_s,
        tokens_per_s=(work.tokens_per_iteration or 0) / iteration_s,
        gpu=_by_kind(held.get("device", {})),
        host=_by_kind(held.get("host", {})),
        gpu_limit_bytes=limits.device_bytes,
        host_limit_bytes=limits.host_bytes,
        lacks=lacks,
        nearest=tuple(ways),
        faster=() if lacks else tuple(_faster(work, machine, iteration_s, memory)),
        notes=(*notes, *quick),
    )


def _planned(
    work: "Workload", machine: "Machine", limits: "Limits", memory: Mapping[str, Any], *, full: bool
) -> "tuple[Plan | None, str]":
    from ebbtide.tuner.placements.division import ImpossibleError
    from ebbtide.tuner.placements.planning import plan, quick_plan

    away = not work.job.offload.keeps_parameters
    try:
        if full:
            return plan(work, machine, **memory, offload_parameters=away), ""
        return quick_plan(work, machine, limits, offload_parameters=away), ""
    except ImpossibleError as error:
        return None, error.fact


def _nearest(work: "Workload", machine: "Machine", plan: "Plan | None", memory: Mapping[str, Any]) -> Iterator[str]:
    if plan is not None and plan.prediction is not None:
        prediction = plan.prediction
        yield (
            'DeepSpeed ZeRO-3 with "offload_optimizer": {"device": "cpu"} and "ebbtide": {"plan": "automatic"}, '
            f"{prediction.iteration_s:.3g} s per step, {prediction.device_peak_bytes / GIB:.1f} GiB of GPU memory and "
            f"{prediction.host_peak_bytes / GIB:.1f} GiB of host memory"
        )
        return
    from ebbtide.tuner.advice.ways_out import ways_out

    for way in ways_out(work.job, machine, **memory)[:MOST_WAYS]:
        yield f"{way.label}, {way.iteration_s:.3g} s per step under a plan"


def _faster(work: "Workload", machine: "Machine", iteration_s: float, memory: Mapping[str, Any]) -> Iterator[str]:
    from ebbtide.tuner.advice.tried import faster

    freedom = {"offload_parameters": not work.job.offload.keeps_parameters}
    for one in faster(work.job, machine, iteration_s, freedom=freedom, asked=memory):
        yield f"{one.label}, {one.outcome.iteration_s:.3g} s per step, {one.factor:.2f} times as fast"


def _by_kind(held: Mapping[Any, int]) -> dict[str, int]:
    named: dict[str, int] = {}
    for kind, size in held.items():
        if size:
            name = _KINDS.get(kind, kind)
            named[name] = named.get(name, 0) + size
    return named


def _machine(gpu: str | Path | Machine) -> Machine:
    if isinstance(gpu, Machine):
        return gpu
    return Machine.load(gpu) if Path(gpu).is_file() else Machine.preset(str(gpu))


def _rule(optimizer: Any) -> str:
    from ebbtide.simulator.optimizer import OPTIMIZERS

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


def _strategy(ds_config: Any) -> str | None:
    from ebbtide.simulator.estimates.offloading import left_to_stock

    config = _read(ds_config)
    if "ebbtide" in config and not left_to_stock(config):
        return "ebbtide"
    return "stock" if config else None


def _without_key(ds_config: Any) -> dict[str, Any] | None:
    return None if ds_config is None else {k: v for k, v in _read(ds_config).items() if k != "ebbtide"}


def _read(ds_config: Any) -> Mapping[str, Any]:
    from ebbtide.simulator.estimates.deepspeed_keys import of_accelerate, read_file

    if ds_config is None:
        return {}
    return of_accelerate(ds_config, Path()) if isinstance(ds_config, Mapping) else read_file(Path(ds_config))


def _recomputed(model: Any) -> bool:
    """Return True if a model recomputes activations. A config does not tell, so True is returned for it."""
    if isinstance(model, type) or not hasattr(model, "modules"):
        return True
    switches = [m.gradient_checkpointing for m in model.modules() if hasattr(m, "gradient_checkpointing")]
    return any(switches) if switches else False


def _notes(model: Any, job: "Job") -> tuple[str, ...]:
    activations = "recomputed in backward (gradient_checkpointing=True)" if job.recompute else "kept for backward"
    notes = [
        f"assumed: {job.precision}, micro-batch {job.micro_batch}, {job.sequence} tokens, activations {activations}"
    ]
    frozen = [p.numel() for p in model.parameters() if not p.requires_grad] if hasattr(model, "parameters") else []
    if frozen:
        notes.append(f"{sum(frozen)} frozen parameters are estimated as if they were trained: LoRA takes far less")
    return tuple(notes)
