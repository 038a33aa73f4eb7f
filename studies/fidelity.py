"""Comparison of predicted and executed iteration times of random plans, on an emulated device.

    python -m studies.fidelity --json fidelity.json
    python -m studies.fidelity --many-layers --json fidelity_many_layers.json

Machines and plans are drawn at random. ebbtide's runtime executes each plan inside DeepSpeed, on an emulated device
with the drawn speeds of copies and updates (`studies.trials.emulated_training`). The simulator predicts the iteration
time of each plan. For its prediction, forward and backward are measured without updates. The speeds of copies and
updates are measured under other plans: with all subgroups updated on the host, with all staged to the device one by
one, and with several staged at the same time, which shows the throughput of both link directions together. A second
prediction uses the drawn speeds.

The emulated device shares its link among concurrent copies as the simulator does. So this study does not test the
sharing. It tests that the runtime runs the schedule that is simulated. No number of this study is a GPU measurement.

With ``--many-layers``, a subgroup holds several layers, the link is slower, and half of the plans accumulate
gradients. Predictions use the drawn speeds. All plans are executed in several rounds, and the error of each plan is
the median over the rounds. For comparison, ``predicted_whole_s`` predicts a runtime that copies a subgroup's gradient
to the host as a whole, after backward has done all layers of the subgroup.
"""

import random
import statistics
from dataclasses import replace
from typing import Any

import numpy as np
from ebbtide.runtime.replan.observed import measured_rates
from ebbtide.simulator import Layer, Machine, Placement, Plan, Way, Workload, build_schedule, simulate
from rich.progress import track

from studies.bench.bits import differences
from studies.bench.console import publish, study_parser
from studies.bench.rank import become_only_rank
from studies.trials.emulated_training import Bench, reduced_beside, stock_state
from studies.trials.paced_model import RATES, PacedTraining

PLANS_PER_MACHINE = 5
LEAST_DUPLEX = 0.3
# The following constants are for --many-layers.
ACCUMULATIONS = {1: 0.3, 8: 0.12}  # micro-batches per step -> scale of `PacedTraining`, so that 8 plans take 12 minutes
LAYERS = (4, 8)  # per subgroup
SLOWER_LINK = 8  # factor. With this link, copies of gradients take as long as backward
ROUNDS = 3
QUICK = 0.2


def main() -> None:
    parser = study_parser("fidelity", __doc__)
    parser.add_argument("--plans", type=int, default=20, help="number of plans to execute")
    parser.add_argument("--steps", type=int, default=5, help="number of timed steps per plan")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--many-layers",
        action="store_true",
        help="use plans with 4 or 8 layers per subgroup, and 1 or 8 micro-batches per step (default: 1 layer per "
        "subgroup and 1 micro-batch per step)",
    )
    parser.add_argument("--quick", action="store_true", help="use a small, fast model, for tests")
    args = parser.parse_args()
    become_only_rank(quiet=True)
    if args.many_layers:
        model, scale = (PacedTraining(layers=8, hidden=256), QUICK) if args.quick else (PacedTraining(hidden=512), 1.0)
        with reduced_beside():
            figures = measure_many_layers(args.plans, args.steps, args.seed, model, scale)
    else:
        base = PacedTraining(layers=8, hidden=256).scaled(0.08) if args.quick else PacedTraining().scaled(0.4)
        figures = measure(base, args.plans, args.steps, args.seed)
    publish("fidelity", args.json, figures)


def measure(base: PacedTraining, plans: int, steps: int, seed: int) -> dict[str, Any]:
    """Execute random plans on an emulated device, and return their iteration times next to predicted ones.

    Every five plans get a new random machine.
    """
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


def measure_many_layers(plans: int, steps: int, seed: int, model: PacedTraining, scale: float) -> dict[str, Any]:
    """Train under plans with several layers per subgroup on an emulated device. Return measured and predicted
    iteration times.

    Half of the plans accumulate gradients over several micro-batches. All plans run one after the other, in several
    rounds. The predictions use the given rates of the emulated device. They also use the times of forward and backward
    that each round measures without updates.

    Args:
        scale: Factor by which all durations of the emulated training are multiplied. A small factor shortens the study.
    """
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = []
    same = True
    count = max(1, plans // (len(ACCUMULATIONS) * len(LAYERS)))
    for micro_batches, layers in track([(m, n) for m in ACCUMULATIONS for n in LAYERS], "settings"):
        setting = model.scaled(scale * ACCUMULATIONS[micro_batches])
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
    # Each plan has a row with its predicted and its measured iteration time.
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
    predicted, whole = (
        [simulate(build_schedule(work, plan), machine).iteration_s for work in some]
        for some in (works, [_joined(work) for work in works])
    )
    error, error_whole = (
        statistics.median(100 * (s / p - 1) for s, p in zip(seconds, some, strict=True)) for some in (predicted, whole)
    )
    return {
        **_facts(plan),
        "passes_s": [work.forward_s + work.backward_s for work in works],
        "predicted_s": statistics.median(predicted),
        "executed_s": statistics.median(seconds),
        "executed_each_s": seconds,
        "error_pct": error,
        "abs_error_pct": abs(error),
        "predicted_whole_s": statistics.median(whole),
        "error_whole_pct": error_whole,
    }


def _facts(plan: Plan) -> dict[str, Any]:
    counts = {kind: plan.count(kind) for kind in ("host", "device", "resident")}
    return counts | {name: getattr(plan, name) for name in ("staging_slots", "prefetch", "overlap_forward")}


def _joined(work: Workload) -> Workload:
    of = len(work.layers) // len(work.subgroups)
    layer = work.layers[0]
    joined = Layer(params=of * layer.params, forward_s=of * layer.forward_s, backward_s=of * layer.backward_s)
    return work.model_copy(update={"layers": (joined,) * len(work.subgroups)})


def random_setting(base: PacedTraining, rng: random.Random) -> PacedTraining:
    """Return settings of an emulated device with random rates, for one random machine of the study."""
    rates = {name: getattr(base, name) * 2 ** rng.uniform(-2, 0.5) for name in RATES}
    return replace(base, duplex_factor=rng.uniform(0.6, 1.0), **rates)


def random_plan(work: Workload, rng: random.Random) -> Plan:
    """Return a random plan for a workload.

    Each subgroup's state is kept and updated at random in host memory, on the GPU, or on the GPU after a copy from host
    memory. Also random are the number of buffers for such copies, and whether updates may overlap the next forward.
    """
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
        # The runtime prefetches from the first gradient on, because its slots always exist.
        overlap_forward=rng.random() < 0.75,
    )


def calibrated(bench: Bench, work: Workload, given: Machine, steps: int) -> Machine:
    """Return the machine ``given`` with the speeds of copies and updates that were measured on the emulated device. The
    speeds are measured under three simple plans, and the study then predicts other plans.

    - All optimizer state is updated on the host, which gives the speed of host updates.
    - All state is staged to the device through one staging buffer. A subgroup is copied to the device only after the
      previous subgroup has been copied back. So each copy and each update runs alone, which gives its speed.
    - All state is staged through up to four staging buffers, so copies in both directions run at the same time. Their
      joint throughput is set to the value at which the simulated iteration takes as long as the measured one.
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
    # A placement tells where a subgroup's state is kept and updated. A step under this plan does not return before its
    # updates end.
    return Plan(
        subgroup_size=work.subgroup_size,
        ways=Way.each([placement] * len(work.subgroups)),
        staging_slots=slots,
        overlap_forward=False,
    )


def _row(bench: Bench, plan: Plan, work: Workload, machines: tuple[Machine, Machine], steps: int) -> dict[str, Any]:
    predicted, from_given = (simulate(build_schedule(work, plan), m) for m in machines)
    result = bench.measure(plan, steps)
    error = result.iteration_s / predicted.iteration_s - 1
    return {
        **_facts(plan),
        "predicted_s": predicted.iteration_s,
        "executed_s": result.iteration_s,
        "error_pct": 100 * error,
        "abs_error_pct": 100 * abs(error),
        "predicted_given_rates_s": from_given.iteration_s,
        "error_given_rates_pct": 100 * (result.iteration_s / from_given.iteration_s - 1),
    }


if __name__ == "__main__":
    main()
