"""Predicted against executed iteration time of random plans, on an emulated device.

    python -m studies.fidelity --json fidelity.json
    python -m studies.fidelity --many-layers --json fidelity_many_layers.json

Machines and plans are drawn at random; each plan is executed by the runtime inside DeepSpeed on a
device of the given rates (`studies.trials.emulated_training`), and predicted by the simulator from
forward and backward as measured without updates, and from rates and contention as measured under
other schedules: all on the host, all visiting one by one, and all visiting at once (what both
directions of the link reach together). Beside it stands the prediction from the rates as given.
The emulated device shares link and device as the simulator does; what is tested is all the rest:
that the runtime runs the schedule that was simulated. No figure from here is a GPU figure.

With ``--many-layers`` subgroups hold several layers, with and without gradient accumulation, over
slower links. Rates are as given, passes as measured without updates just before, and each error is
the median of several rounds over all plans. ``predicted_whole_s`` is the prediction for gradients that leave when
their subgroup's last layer is done.
"""

import logging
import random
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from ebbtide.runtime.replan.watch import measured_rates
from ebbtide.simulator import Layer, Machine, Placement, Plan, Way, Workload, build_schedule, simulate
from rich.progress import track

from studies.bench.bits import differences
from studies.bench.console import publish, study_parser
from studies.bench.pictures import picture
from studies.bench.rank import become_only_rank
from studies.trials.emulated_training import RATES, Bench, Setting, reduced_beside, stock_state

PLANS_PER_MACHINE = 5
LEAST_DUPLEX = 0.3
# With --many-layers.
ACCUMULATIONS = {1: 0.4, 8: 0.15}  # micro-batches per step -> what `Setting` is scaled by
LAYERS = (4, 8)  # per subgroup
SLOWER_LINK = 8  # than the balanced machine's: gradients take as long as backward
ROUNDS = 3
QUICK = 0.2


def main() -> None:
    parser = study_parser("fidelity", __doc__)
    parser.add_argument("--plans", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each plan")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--many-layers", action="store_true", help="subgroups of several layers, accumulation 1 and 8")
    parser.add_argument("--quick", action="store_true", help="small and fast, for tests")
    args = parser.parse_args()
    become_only_rank()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if args.many_layers:
        scale = QUICK if args.quick else 1.0
        with reduced_beside():
            figures = measure_many_layers(args.plans, args.steps, args.seed, scale)
    else:
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
    given = statistics.median(abs(row["error_given_rates_pct"]) for row in rows)
    return {**_summary(rows, seed, plans, steps, same=same), "median_abs_pct_error_given_rates": given}


def _summary(rows: list[dict[str, Any]], seed: int, plans: int, steps: int, *, same: bool) -> dict[str, Any]:
    errors = [row["abs_error_pct"] for row in rows]
    return {
        "device_kind": "emulated",
        "seed": seed,
        "plans": plans,
        "steps_per_plan": steps,
        "median_abs_pct_error": statistics.median(errors),
        "p90_abs_pct_error": float(np.quantile(errors, 0.9)),
        "max_abs_pct_error": max(errors),
        "bit_identical": same,
        "rows": rows,
    }


def measure_many_layers(plans: int, steps: int, seed: int, scale: float) -> dict[str, Any]:
    """Execute and predict ``plans`` plans of subgroups of several layers, half of them with accumulation.

    Nothing is fitted: rates are as given, and passes are measured without updates in every round.

    Args:
        scale: Time of an iteration over the usual one.
    """
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = []
    same = True
    count = max(1, plans // (len(ACCUMULATIONS) * len(LAYERS)))
    for micro_batches, layers in track([(m, n) for m in ACCUMULATIONS for n in LAYERS], "settings"):
        setting = Setting(hidden=512).scaled(scale * ACCUMULATIONS[micro_batches])
        slower = {name: getattr(setting, name) / SLOWER_LINK for name in ("h2d_bytes_per_s", "d2h_bytes_per_s")}
        setting = replace(setting, layers_per_subgroup=layers, micro_batches=micro_batches, **slower)
        bench = Bench(setting)
        found = _rounds(bench, count, steps, rng)
        rows += [{"micro_batches": micro_batches, "layers_per_subgroup": layers, **row} for row in found]
        same = same and not differences(bench.close(), stock_state(setting, bench.steps))
    by = {m: [row["abs_error_pct"] for row in rows if row["micro_batches"] == m] for m in ACCUMULATIONS}
    return {
        **_summary(rows, seed, len(rows), steps, same=same),
        "rounds": ROUNDS,
        "max_abs_pct_error_whole": max(abs(row["error_whole_pct"]) for row in rows),
        "max_abs_pct_error_by_accumulation": {str(m): max(errors) for m, errors in by.items()},
    }


def _rounds(bench: Bench, plans: int, steps: int, rng: random.Random) -> list[dict[str, Any]]:
    """Return a row per plan: all on the host first, then random ones."""
    works: list[Workload] = []
    drawn: list[Plan] = []
    seconds: list[list[float]] = []
    for _ in range(ROUNDS):
        works.append(bench.workload(steps))
        if not drawn:
            hosted = _waiting(works[0], "host", 0).model_copy(update={"overlap_forward": True})
            drawn = [hosted, *(random_plan(works[0], rng) for _ in range(plans - 1))]
        seconds.append([bench.measure(plan, steps).iteration_s for plan in drawn])
    machine = bench.setting.machine()
    return [
        _row_of(plan, works, machine, list(some)) for plan, some in zip(drawn, zip(*seconds, strict=True), strict=True)
    ]


def _row_of(plan: Plan, works: list[Workload], machine: Machine, seconds: list[float]) -> dict[str, Any]:
    """``works`` and ``seconds``: as measured one after the other, round by round."""
    predicted, whole = (
        [simulate(build_schedule(work, plan), machine).iteration_s for work in some]
        for some in (works, [_joined(work) for work in works])
    )
    error, error_whole = (
        statistics.median(100 * (s / p - 1) for s, p in zip(seconds, some, strict=True)) for some in (predicted, whole)
    )
    return {
        **{kind: plan.count(kind) for kind in ("host", "device", "resident")},
        "staging_slots": plan.staging_slots,
        "prefetch": plan.prefetch,
        "overlap_forward": plan.overlap_forward,
        "passes_s": [work.forward_s + work.backward_s for work in works],
        "predicted_s": statistics.median(predicted),
        "executed_s": statistics.median(seconds),
        "executed_each_s": seconds,
        "error_pct": error,
        "abs_error_pct": abs(error),
        "predicted_whole_s": statistics.median(whole),
        "error_whole_pct": error_whole,
    }


def _joined(work: Workload) -> Workload:
    """Return the workload with one layer per subgroup, whose gradient leaves as a whole."""
    of = len(work.layers) // len(work.subgroups)
    layer = work.layers[0]
    joined = Layer(params=of * layer.params, forward_s=of * layer.forward_s, backward_s=of * layer.backward_s)
    return work.model_copy(update={"layers": (joined,) * len(work.subgroups)})


def random_setting(base: Setting, rng: random.Random) -> Setting:
    """Rates from a quarter of the balanced machine's to somewhat above, and some duplex factor."""
    rates = {name: getattr(base, name) * 2 ** rng.uniform(-2, 0.5) for name in RATES}
    return replace(base, duplex_factor=rng.uniform(0.6, 1.0), **rates)


def random_plan(work: Workload, rng: random.Random) -> Plan:
    """Any mix of placements, any number of slots, with and without overlap."""
    weights = [rng.random() + 0.1 for _ in range(3)]
    kinds: list[Placement] = ["host", "device", "resident"]
    placements = rng.choices(kinds, weights, k=len(work.subgroups))
    visits = placements.count("device")
    slots = min(rng.randint(1, 6), visits)
    return Plan(
        subgroup_size=work.subgroup_size,
        ways=Way.each(placements),
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
    hosted, staged = _waiting(work, "host", 0), _waiting(work, "device", 1)
    rates: dict[str, float] = {}
    for plan in (hosted, staged):
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
