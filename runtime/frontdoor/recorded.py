"""A recorder of the training steps of a DeepSpeed engine. `tune verify` compares the records of several runs."""

import copy
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from ebbtide.runtime.checkpoint.deepspeed.installation import call_after_step, is_pipeline
from ebbtide.runtime.frontdoor.hook import KEY
from ebbtide.runtime.frontdoor.initialize import config_of, read, without_config
from ebbtide.runtime.verify.lines import Lines, RecordingSettings, number
from ebbtide.runtime.zero.pieces import pieces
from ebbtide.simulator.page import versions

OFFLOADS = ("offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_params", "cpu_offload_use_pin_memory")


def initialize(
    original: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    job: RecordingSettings,
    done: Callable[[], None],
) -> tuple[Any, Any, Any, Any]:
    """Build a DeepSpeed engine for one of the runs that `tune verify` compares, and record the run.

    After each step, the losses, the gradient norm and digests of all parameters are written to a file. Only the first
    engine that trains is recorded.

    Args:
        original: The ``initialize`` function to call: DeepSpeed's, or ebbtide's replacement.
        done: Function to call after the last recorded step, on every rank.
    """
    call = inspect.signature(original).bind(*args, **kwargs).arguments
    given, source = config_of(call)
    config, _ = read(given)
    if config is None:  # DeepSpeed reports what is wrong with the config
        return original(*args, **kwargs)
    facts = {"key": config.get(KEY) is not None, "offload": offloads(config), "config": _plain(config)}
    made = for_side(config, job.side)
    result = original(*args, **kwargs) if made is None else original(config=made, **without_config(call, source))
    if getattr(result[0], "optimizer", None) is not None and not _RunRecorder.started:
        _RunRecorder(result[0], job, facts, done)
    return result


def offloads(config: Mapping[str, Any]) -> bool:
    """Return whether a DeepSpeed config offloads optimizer state or parameters from GPU memory."""
    zero = config.get("zero_optimization") or {}
    return any(
        zero.get(key) and (not isinstance(zero[key], dict) or zero[key].get("device") != "none") for key in OFFLOADS[:3]
    )


def for_side(config: Mapping[str, Any], side: str) -> dict[str, Any] | None:
    """Return the DeepSpeed config for one of the runs that `tune verify` compares, with the changes that it needs.

    None if the run uses the given config unchanged.

    Args:
        side: The run: ``plan``, ``stock`` (DeepSpeed without ebbtide) or ``no-offload``.
    """
    if side == "plan":
        return None
    made = {name: copy.deepcopy(value) for name, value in config.items() if name != KEY}
    if side == "no-offload" and isinstance(made.get("zero_optimization"), dict):
        for key in OFFLOADS:
            made["zero_optimization"].pop(key, None)
    return made


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in config.items() if name != KEY}
    return json.loads(json.dumps(kept, default=str))


def record(engine: Any, lines: Lines, steps: int, done: Callable[[], None]) -> None:
    """Record the losses and training state of a DeepSpeed engine now and after every step, for `tune verify`.

    Each read of the state waits for updates in progress. The order of computations does not change.

    Args:
        steps: Number of steps after which ``done`` is called.
    """
    losses: list[torch.Tensor] = []
    backward = engine.backward

    def noted(loss: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            losses.append(loss.detach().clone())
        return backward(loss, *args, **kwargs)

    def stepped() -> None:
        if lines.steps < steps:
            of_batch = [engine.agg_train_loss] if is_pipeline(engine) else losses
            _write(engine, lines, [number(loss) for loss in of_batch])
            losses.clear()
            if lines.steps == steps:
                done()

    engine.backward = noted
    call_after_step(engine, stepped)
    _write(engine, lines, [])


def _write(engine: Any, lines: Lines, losses: list[float | None]) -> None:
    norm = engine.get_global_grad_norm() if lines.steps >= 0 else None
    lines.step(
        pieces(engine, frozen=lines.steps < 0),
        losses=losses,
        norm=number(norm),
        rates=[number(rate) for rate in engine.get_lr()],
        global_step=engine.global_steps,
        skipped=engine.skipped_steps,
    )


class _RunRecorder:
    started = False

    def __init__(self, engine: Any, job: RecordingSettings, facts: dict[str, Any], done: Callable[[], None]) -> None:
        _RunRecorder.started = True
        about = {
            **facts,
            "side": job.side,
            "ranks": torch.distributed.get_world_size(),
            "versions": versions("deepspeed", "torch"),
            "stage": engine.zero_optimization_stage(),
            "dtype": "bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "fp32",
            "port": os.environ.get("MASTER_PORT"),
        }
        lines = Lines(Path(job.folder), torch.distributed.get_rank(), about)
        record(engine, lines, job.steps, done)
