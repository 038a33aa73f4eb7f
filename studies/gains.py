"""Predicted gain of a plan over stock DeepSpeed on common machines, as in the README's table.

    python -m studies.gains --json gains.json

Nothing is measured or fitted. The machines are presets, which come from data sheets and published figures. Each row has
DeepSpeed alone as most configs have it (ZeRO-3, optimizer state in host memory), DeepSpeed alone at its best (any ZeRO
stage and any of its offload settings), the plan for the config as given, and the best change that `tune plan` offers
with which the same samples train faster, each from a full search for a plan.
"""

from typing import Any

import ebbtide.tuner
from ebbtide.simulator.analysis.best_setting import simulated
from ebbtide.simulator.estimates.estimate import estimated
from ebbtide.simulator.estimates.job import Job
from ebbtide.simulator.estimates.presets import preset
from ebbtide.simulator.limits import Limits
from ebbtide.simulator.machine import Machine
from ebbtide.tuner.advice.tried import faster
from ebbtide.tuner.answer.rows import StockTraining
from ebbtide.tuner.service.requests import MODELS

from studies.bench.console import publish, study_parser

# (model, machine, GPUs, sequence length). The micro-batch size is 1.
CASES = (
    ("Llama 3.2 3B", "rtx4090", 1, 2048),
    ("Llama 3 8B", "rtx4090", 1, 1024),
    ("Llama 3 8B", "a100-node", 1, 2048),
    ("Llama 2 13B", "a100-node", 4, 2048),
    ("Qwen3 14B", "h100-node", 2, 2048),
    ("Llama 3 8B", "gh200", 1, 2048),
    ("Llama 3 70B", "h200", 8, 2048),
)
ACCUMULATIONS = (1, 16)  # micro-batches per optimizer step. With more of them, the update is a smaller part of the step


def main() -> None:
    parser = study_parser("gains", __doc__)
    path = parser.parse_args().json
    cases = [gain(*case, steps) for case in CASES for steps in ACCUMULATIONS]
    publish("gains", path, {"cases": cases, "device_kind": "simulated"})


def gain(model: str, machine: str, gpus: int, sequence: int, accumulation: int) -> dict[str, Any]:
    """Return the predicted seconds of an iteration with DeepSpeed alone and under plans, as one row of a table.

    Times of plans are None if no plan is possible.
    """
    have = preset(machine)
    job = Job.of_deepspeed(MODELS[model], sequence=sequence, data_parallel=gpus, accumulation=accumulation)
    work = estimated(job, have)
    limits = Limits.of(work, have)
    usual = simulated("zero3_offload", work, have, limits, {})
    best = StockTraining(work, have, limits).best
    stock_s, best_s = usual.result.iteration_s, best.simulated.result.iteration_s
    try:
        made = ebbtide.tuner.plan(work, have)
    except ebbtide.tuner.ImpossibleError:
        made = None
    plan_s = made.prediction.iteration_s if made and made.prediction else None
    times = made.prediction.step_times if made and made.prediction else None
    return {
        "model": model,
        "machine": machine,
        "device": have.device_name,
        "gpus": gpus,
        "sequence": sequence,
        "accumulation": accumulation,
        "stock_s": stock_s,
        "stock_lacks": usual.lacks,
        "best_stock": best.name,
        "best_stock_s": best_s,
        "best_stock_lacks": best.simulated.lacks,
        "plan_s": plan_s,
        "clip_rate": work.expected_clip_rate,
        "every_step_clips_s": times.mean_s(1.0) if times else plan_s,
        "speedup": plan_s and stock_s / plan_s,
        "speedup_over_best_stock": plan_s and best_s / plan_s,
        **_same_samples(job, have, plan_s),
        "tokens_per_s": plan_s and (work.tokens_per_iteration or 0) / plan_s,
    }


def _same_samples(job: Job, have: Machine, plan_s: float | None) -> dict[str, Any]:
    lines = faster(job, have, plan_s) if plan_s else []
    if not lines:
        return {"same_samples": "", "same_samples_s": plan_s, "same_samples_stock_s": None}
    work, seconds = lines[-1].workload, lines[-1].outcome.iteration_s
    if lines[-1].outcome.plan is not None:
        made = ebbtide.tuner.plan(work, have).prediction
        seconds = min(seconds, made.iteration_s) if made else seconds
    stock = StockTraining(work, have, Limits.of(work, have)).best
    return {
        "same_samples": lines[-1].label,
        "same_samples_s": seconds,
        "same_samples_stock_s": None if stock.lacking_bytes else stock.simulated.result.iteration_s,
    }


if __name__ == "__main__":
    main()
