"""Timing of several plans, one after the other, on one engine that switches from plan to plan.

    python -m studies.trials.plan_trials --plans a.plan.json b.plan.json --size tiny --json P

The result file has a row per plan, with the median times of an iteration and of its phases. The file is written again
after each plan.
"""

import argparse
from pathlib import Path
from typing import Any

from ebbtide.simulator import Plan

from studies.bench.byte_gpt import SIZES, Batches
from studies.bench.rank import become_only_rank
from studies.bench.record import write_record
from studies.trials.offload_trial import WARMUP, arguments, early_updates, make_engine, settle, timed


def main() -> None:
    parser = arguments()
    parser.add_argument("--plans", type=Path, nargs="+", required=True)
    args = parser.parse_args()
    args.variant, args.plan = "ebbtide", None
    settle(args)
    become_only_rank()
    rows: list[dict[str, Any]] = []
    kind = {"device_kind": "emulated"} if args.device == "emulated" else {}
    for row in trials(args):
        rows.append(row)
        write_record(args.json, "plan_trials", {"rows": rows, **kind})
        print(row)


def trials(args: argparse.Namespace) -> Any:
    """Train under each plan in turn on one engine, and yield a row of measured times per plan."""
    from ebbtide.runtime.zero.attach import switch_plan

    plans = {path.name: Plan.load(path) for path in args.plans}
    engine = make_engine(args)  # first with all state on the host, which takes the least GPU memory
    batches, number = Batches(args.micro_batch, SIZES[args.size].sequence), 0
    for name, plan in plans.items():
        switch_plan(engine, plan)
        run = timed(engine, batches, number, args)
        number += (WARMUP + args.steps) * args.accumulation
        yield {
            "name": name.removesuffix(".plan.json").split("_", 1)[1],
            "variant": "ebbtide",
            "exact": True,
            **run.times,
            "loss": run.loss,
            "steps": args.steps,
            "phases": run.threads,
            **early_updates(engine.optimizer._ebbtide),
        }
    engine.destroy()


if __name__ == "__main__":
    main()
