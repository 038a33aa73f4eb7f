"""Predicted gain of a plan over stock DeepSpeed on common machines, as in the README's table.

    python -m studies.gains --json gains.json

Nothing is measured or fitted. The machines are presets, which come from data sheets and published
figures. Each row is one full search for a plan, compared with stock DeepSpeed that offloads the
optimizer state, and with the faster of DeepSpeed's settings ``offload_param.device`` none and cpu.
"""

from typing import Any

import ebbtide.tuner
from ebbtide.simulator.estimates.job import Job
from ebbtide.simulator.estimates.presets import preset
from ebbtide.simulator.limits import Limits
from ebbtide.tuner.answer.rows import compare
from ebbtide.tuner.service.scenario import MODELS

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
    """Return the predicted seconds of an iteration with stock DeepSpeed and under a plan, as one row of a table.

    The row also tells which memory stock DeepSpeed lacks. The plan's time is None if no plan is possible.
    """
    have = preset(machine)
    job = Job.of_deepspeed(MODELS[model], sequence=sequence, data_parallel=gpus, accumulation=accumulation)
    work = job.workload(have)
    try:
        made = ebbtide.tuner.plan(work, have)
    except ebbtide.tuner.ImpossibleError:
        made = None
    rows = compare(work, have, Limits.of(work, have), made, others=False)
    by_role = {row.role: row for row in rows}
    settings = [row for row in rows if row.role in ("stock", "peer")]
    fastest = min(settings, key=lambda row: (not row.simulated.fits, row.result.iteration_s))
    stock, plan = by_role["stock"], by_role.get("plan")
    stock_s, plan_s = stock.result.iteration_s, plan and plan.result.iteration_s
    times = made.prediction.step_times if made and made.prediction else None
    return {
        "model": model,
        "machine": machine,
        "device": have.device_name,
        "gpus": gpus,
        "sequence": sequence,
        "accumulation": accumulation,
        "stock": stock.label,
        "stock_s": stock_s,
        "stock_lacks": stock.simulated.lacks,
        "plan_s": plan_s,
        "clip_rate": work.expected_clip_rate,
        "every_step_clips_s": times.mean_s(1.0) if times else plan_s,
        "speedup": plan_s and stock_s / plan_s,
        "fastest_stock": fastest.label,
        "fastest_stock_s": fastest.result.iteration_s,
        "speedup_over_fastest_stock": plan_s and fastest.result.iteration_s / plan_s,
        "tokens_per_s": plan_s and (work.tokens_per_iteration or 0) / plan_s,
    }


if __name__ == "__main__":
    main()
