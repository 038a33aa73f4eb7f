"""A timer of the training steps of a DeepSpeed engine, for `tune search --measure`.

It also checks that the engine trains in the configuration that is to be measured. If not, the process ends with the
difference, so that no other configuration is measured.
"""

import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from ebbtide.runtime.checkpoint.deepspeed.installation import call_after_step, is_pipeline
from ebbtide.runtime.frontdoor.configured import BATCHES, CHANGED, KEY, ZERO, configured, current_job
from ebbtide.runtime.frontdoor.initialize import config_of, read, without_config
from ebbtide.runtime.frontdoor.verified import end
from ebbtide.runtime.hardware.launcher import rank, world_size
from ebbtide.runtime.zero.checks.other_steps import recomputes

REFUSED = 3  # exit code of a process that would train in another configuration
SAME = 0.01  # share of a model's parameters that a description may miss, such as biases
MOST = 4  # as many times the steps of a measurement may be taken, if some are skipped for overflows


def initialize(original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Build a DeepSpeed engine in the configuration to measure, and time its steps.

    Only the first engine that trains is changed and timed.

    Args:
        original: The ``initialize`` function to call: DeepSpeed's, in ebbtide's wrapper.
    """
    job = current_job()
    call = inspect.signature(original).bind(*args, **kwargs).arguments
    given, source = config_of(call)
    config, _ = read(given)
    trains = config is not None and (call.get("optimizer") is not None or config.get("optimizer"))
    if config is None or not trains or _Timer.started:
        plain = config is None or CHANGED not in config
        config = {k: v for k, v in (config or {}).items() if k != CHANGED}
        return original(*args, **kwargs) if plain else original(config=config, **without_config(call, source))
    trusts_batch = bool(config.get(CHANGED))  # it is the trainer's, and is compared with the wanted one
    made = config if CHANGED in config else configured(config, job["deepspeed"])
    config = {name: value for name, value in made.items() if name != CHANGED}
    _write(job, device=_device(), ranks=world_size())
    _check(job, _given_facts(call.get("model"), job))
    result = original(config=config, **without_config(call, source))
    if getattr(result[0], "optimizer", None) is not None:
        _Timer(result[0], job, trusts_batch=trusts_batch)
    return result


class _Timer:
    started = False

    def __init__(self, engine: Any, job: Mapping[str, Any], *, trusts_batch: bool) -> None:
        _Timer.started = True
        self._engine, self._job, self._trusts_batch = engine, job, trusts_batch
        self._marks: list[tuple[Any, int]] = []
        self._steps = self._backwards = 0
        self._tokens: list[float] = []
        self._forwards = self._again = 0
        _check(job, _engine_facts(engine, job))
        self._hooks = [
            engine.module.register_forward_pre_hook(self._forward, prepend=True, with_kwargs=True),
            torch.nn.modules.module.register_module_forward_pre_hook(self._module),
        ]
        self._count_backwards(engine)
        call_after_step(engine, self._stepped)

    def _count_backwards(self, engine: Any) -> None:
        backward = engine.backward

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._backwards += 1
            return backward(*args, **kwargs)

        engine.backward = counted

    def _forward(self, _: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        wanted, sequence = self._job["micro_batch"], self._job["sequence"]
        tensors = [t for t in _tensors((args, kwargs)) if t.dim()]
        ids = next((t for t in tensors if t.dim() == 2 and t.dtype in (torch.int64, torch.int32)), None)
        if ids is not None:
            self._tokens.append(ids.numel() / wanted)
        packed = ids is not None and abs(ids.numel() - wanted * sequence) <= 0.02 * wanted * sequence
        rows = {int(t.shape[0]) for t in tensors if t.dim() > 1}
        if rows and wanted not in rows and not packed and not self._trusts_batch and not is_pipeline(self._engine):
            _check(self._job, [("micro_batch", wanted, max(rows), "samples in a forward")])

    def _module(self, module: torch.nn.Module, _: Any) -> None:
        # Modules run again in backward only where activations are recomputed.
        if module is not self._engine.module:
            again = torch._C._current_graph_task_id() != -1
            self._again += again
            self._forwards += not again

    def _stepped(self) -> None:
        engine, job = self._engine, self._job
        self._marks.append((_mark(), engine.skipped_steps))
        self._steps += 1
        # Not the engine's own count, because Accelerate calls its step() only for the last micro-batch of a step.
        if self._backwards:  # none is seen if the script calls ``loss.backward()``
            _check(job, [("accumulation", job["accumulation"], self._backwards, "micro-batches in a step")])
        self._backwards = 0
        if self._steps == 1:
            self._hooks.pop().remove()
            recomputing = recomputes(engine.module)
            recomputed = True if self._again else bool(recomputing) if recomputing or self._forwards else None
            _check(job, [("recompute", job["recompute"], recomputed, "recomputed activations")])
        if self._steps == job["warm_up"] and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        _write(job, step=self._steps)
        if self._steps >= job["steps"]:
            gaps = self._gaps()
            if len(gaps) >= job["steps"] - job["warm_up"] or self._steps >= MOST * job["steps"]:
                _write(
                    job,
                    seconds=gaps,
                    device_peak_bytes=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
                    tokens=sum(self._tokens) / len(self._tokens) if self._tokens else None,
                )
                end()

    def _gaps(self) -> list[float]:
        """Return the seconds between the ends of measured steps, without steps that an overflow skipped."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        pairs = pairwise(self._marks[self._job["warm_up"] - 1 :])
        return [_seconds(one, other) for (one, before), (other, after) in pairs if before == after]


def _check(job: Mapping[str, Any], facts: Iterable[tuple[str, Any, Any, str]]) -> None:
    for name, wanted, real, what in facts:
        if real is not None and real != wanted:
            _write(job, refused={"setting": name, "wanted": wanted, "real": real, "what": what})
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(REFUSED)


def _write(job: Mapping[str, Any], **line: Any) -> None:
    with Path(job["folder"], f"rank{rank()}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _given_facts(model: torch.nn.Module | None, job: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any, str]]:
    yield "gpus", job["gpus"], world_size(), "ranks"
    if isinstance(model, torch.nn.Module):
        elements = sum(int(getattr(p, "ds_numel", p.numel())) for p in model.parameters())
        same = abs(elements - job["parameters"]) <= SAME * job["parameters"]
        yield "parameters", job["parameters"], job["parameters"] if same else elements, "parameters of the model"


def _engine_facts(engine: Any, job: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any, str]]:
    config = job["deepspeed"]
    yield "zero_stage", config[ZERO]["stage"], engine.zero_optimization_stage(), "ZeRO stage"
    yield "micro_batch", config[BATCHES[0]], engine.train_micro_batch_size_per_gpu(), BATCHES[0]
    yield "accumulation", config[BATCHES[1]], engine.gradient_accumulation_steps(), BATCHES[1]
    for key, settings in (
        ("offload_optimizer", engine.zero_offload_optimizer()),
        ("offload_param", engine.zero_offload_param()),
    ):
        device = str(getattr(settings, "device", None) or "none").rpartition(".")[2]
        yield "offload", config[ZERO].get(key, {}).get("device", "none"), device, f"{ZERO}.{key}.device"
    yield "plan", KEY in config, getattr(engine.optimizer, "_ebbtide", None) is not None, "plan in force"
    dtype = "bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "fp32"
    yield "precision", job["precision"], dtype, "precision"


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)


def _mark() -> Any:
    """Return the time, or with CUDA an event in the current stream, because waiting here would lengthen the step."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _seconds(one: Any, other: Any) -> float:
    return float(one.elapsed_time(other)) / 1e3 if torch.cuda.is_available() else float(other - one)


def _device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
