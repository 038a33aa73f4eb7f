"""Predicted against executed iteration time of random plans, on an emulated device.

    python -m studies.fidelity --json fidelity.json

Machines and plans are drawn at random; each plan is executed by the runtime inside DeepSpeed on a
device of the given rates (`studies.trials.emulated_training`), and predicted by the simulator from
forward and backward as measured without updates, and from rates and contention as measured under
other schedules: all on the host, all visiting one by one, and all visiting at once (what both
directions of the link reach together). Beside it stands the prediction from the rates as given.
The emulated device shares link and device as the simulator does; what is tested is all the rest:
that the runtime runs the schedule that was simulated. No figure from here is a GPU figure.
"""

import logging
import random
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from ebbtide.runtime.replan.watch import measured_rates
from ebbtide.simulator import Machine, Placement, Plan, Way, Workload, build_schedule, simulate
from rich.progress import track

from studies.bench.bits import differences
from studies.bench.console import publish, study_parser
from studies.bench.pictures import picture
from studies.bench.rank import become_only_rank
from studies.trials.emulated_training import RATES, Bench, Setting, stock_state

PLANS_PER_MACHINE = 5
LEAST_DUPLEX = 0.3


def main() -> None:
    parser = study_parser("fidelity", __doc__)
    parser.add_argument("--plans", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each plan")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="small and fast, for tests")
    args = parser.parse_args()
    become_only_rank()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    base = Setting(hidden=256).scaled(0.08) if args.quick else Setting().scaled(0.4)
    figures = measure(base, args.plans, args.steps, args.seed)
    publish("fidelity", args.json, figures, draw)


def measure(base: Setting, plans: int, steps: int, seed: int) -> dict[str, Any]:
    """Execute and predict ``plans`` random plans on a new random machine every five."""
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = []
    same = True
    machines = [PLANS_PER_MACHINE] * (plans // PLANS_PER_MACHINE)
    rest = plans % PLANS_PER_MACHINE
    for number, count in enumerate(track([*machines, *([rest] if rest else [])], "machines")):
        setting = random_setting(base, rng)
        bench = Bench(setting)
        work, given = bench.workload(steps), setting.machine()
        machine = calibrated(bench, work, given, steps)
        drawn = [random_plan(work, rng) for _ in range(count)]
        rows += [{"machine": number, **_row(bench, plan, work, (machine, given), steps)} for plan in drawn]
        same = same and not differences(bench.close(), stock_state(setting, bench.steps))
    errors = [row["abs_error_pct"] for row in rows]
    return {
        "device_kind": "emulated",
        "seed": seed,
        "plans": plans,
        "steps_per_plan": steps,
        "median_abs_pct_error": statistics.median(errors),
        "p90_abs_pct_error": float(np.quantile(errors, 0.9)),
        "max_abs_pct_error": max(errors),
        "median_abs_pct_error_given_rates": statistics.median(abs(row["error_given_rates_pct"]) for row in rows),
        "bit_identical": same,
        "rows": rows,
    }


def random_setting(base: Setting, rng: random.Random) -> Setting:
    """Rates from a quarter of the balanced machine's to somewhat above, and some duplex factor."""
    rates = {name: getattr(base, name) * 2 ** rng.uniform(-2, 0.5) for name in RATES}
    return replace(base, duplex_factor=rng.uniform(0.6, 1.0), **rates)


def random_plan(work: Workload, rng: random.Random) -> Plan:
    """Any mix of placements, any number of slots, with and without overlap."""
    weights = [rng.random() + 0.1 for _ in range(3)]
    placements = rng.choices(["host", "device", "resident"], weights, k=len(work.subgroups))
    visits = placements.count("device")
    slots = min(rng.randint(1, 6), visits)
    return Plan(
        subgroup_size=work.subgroup_size,
        ways=Way.each(placements),  # type: ignore[arg-type]
        staging_slots=slots,
        prefetch=rng.randint(0, slots),
        # The runtime's slots are always there: it prefetches from the first gradient on.
        overlap_forward=rng.random() < 0.75,
    )


def calibrated(bench: Bench, work: Workload, given: Machine, steps: int) -> Machine:
    """Return the machine as three schedules show it; none of them is judged.

    One slot lets a visit begin when the one before is back home: each copy and each update is
    alone. With four, both directions work at once; what they reach together is what makes the
    simulator's iteration as long as the one measured.
    """
    count = len(work.subgroups)
    hosted, visiting = _waiting(work, "host", 0), _waiting(work, "device", 1)
    rates: dict[str, float] = {}
    for plan in (hosted, visiting):
        timeline = bench.measure(plan, steps, settle=True).timeline
        rates |= measured_rates(timeline, work, given)
    machine = given.with_rates(**rates, duplex_factor=1.0)
    both = _waiting(work, "device", min(4, count))
    measured_s = bench.measure(both, steps, settle=True).iteration_s

    def simulated_s(duplex: float) -> float:
        on = machine.with_rates(duplex_factor=duplex)
        return simulate(build_schedule(work, both), on).iteration_s

    low, high = LEAST_DUPLEX, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if simulated_s(middle) > measured_s else (low, middle)
    return machine.with_rates(duplex_factor=high)


def _waiting(work: Workload, placement: Placement, slots: int) -> Plan:
    """Return a plan with one placement for all subgroups, in steps that wait for their updates."""
    return Plan(
        subgroup_size=work.subgroup_size,
        ways=Way.each([placement] * len(work.subgroups)),
        staging_slots=slots,
        overlap_forward=False,
    )


def _row(bench: Bench, plan: Plan, work: Workload, machines: tuple[Machine, Machine], steps: int) -> dict[str, Any]:
    """``machines``: as measured under other schedules, and as given."""
    predicted, from_given = (simulate(build_schedule(work, plan), m) for m in machines)
    result = bench.measure(plan, steps)
    error = result.iteration_s / predicted.iteration_s - 1
    counts = {kind: plan.count(kind) for kind in ("host", "device", "resident")}
    return {
        **counts,
        "staging_slots": plan.staging_slots,
        "prefetch": plan.prefetch,
        "overlap_forward": plan.overlap_forward,
        "predicted_s": predicted.iteration_s,
        "executed_s": result.iteration_s,
        "error_pct": 100 * error,
        "abs_error_pct": 100 * abs(error),
        "predicted_given_rates_s": from_given.iteration_s,
        "error_given_rates_pct": 100 * (result.iteration_s / from_given.iteration_s - 1),
    }


def draw(figures: dict[str, Any], path: Path) -> None:
    """Executed over predicted, a point per plan."""
    rows = figures["rows"]
    with picture(path, figsize=(5.5, 5)) as (_, axes):
        highest = 1.05 * max(max(r["predicted_s"], r["executed_s"]) for r in rows)
        axes.plot([0, highest], [0, highest], color="0.6", linewidth=1, label="executed = predicted")
        for overlap, colour, label in ((True, "#0072b2", "overlap with forward"), (False, "#d55e00", "no overlap")):
            chosen = [r for r in rows if r["overlap_forward"] == overlap]
            axes.scatter(
                [r["predicted_s"] for r in chosen],
                [r["executed_s"] for r in chosen],
                color=colour,
                label=label,
                s=28,
                zorder=3,
            )
        axes.set(
            xlabel="predicted iteration (s)",
            ylabel="executed iteration (s)",
            xlim=(0, highest),
            ylim=(0, highest),
            aspect="equal",
            title=f"{len(rows)} random plans on emulated devices:\nmedian error {figures['median_abs_pct_error']:.1f}%",
        )
        axes.legend(loc="upper left", frameon=False)


if __name__ == "__main__":
    main()
