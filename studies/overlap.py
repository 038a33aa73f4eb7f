"""Distance of executed plans from the lower bound of an iteration, on an emulated device.

    python -m studies.overlap --json overlap.json
    python -m studies.overlap --json overlap-zero-2.json --zero-stage 2

The lower bound is a time that no plan can beat: ``backward + max(forward, U*)``, where ``U*`` is the shortest time in
which the machine could do all updates (`ebbtide.simulator.analysis.bounds`). DeepSpeed, copies and arithmetic are real.
The duration of each layer, copy and update is given (`studies.trials.emulated_training`). The durations are chosen so
that neither the CPU alone nor the device alone could update all state within one forward.

While a GPU runs a kernel, DeepSpeed's Python code already prepares the next kernel. On the emulated device, the Python
code runs first, and then the kernel's duration passes. So the duration is shortened by the time of the Python code, as
if both ran at the same time.

Stride k and Twin-Flow, two published placements, run on the same device with ebbtide's kernels and gradient copies. So
only placement and timing are compared.

The second part measures plans with early updates, which start before the gradient norm is known. All updates together
take 0.5, 1 and 2 times as long as forward and backward. The iteration time is compared with the lower bound of plans
with early updates, and with the time of the best plan without early updates. In further runs, 5, 50 and 100% of the
steps clip. No number of this study is a GPU measurement.
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ebbtide.simulator import Machine, Plan, Way, Workload, build_schedule, simulate
from ebbtide.simulator.analysis.bounds import lower_bound
from rich.progress import track

from studies.bench.bits import differences
from studies.bench.console import publish, study_parser
from studies.bench.rank import become_only_rank
from studies.trials.emulated_training import Bench, stock_state
from studies.trials.guessed_overlap import UPDATE_RATIOS, many_layers, measure_early_updates
from studies.trials.paced_model import PacedTraining

STRIDES = (2, 3)
RATIOS = (0.8, 0.7)  # share of the state on the host, because the GPU has memory for 0.3 of it


def main() -> None:
    parser = study_parser("overlap", __doc__)
    parser.add_argument("--steps", type=int, default=7, help="number of timed steps of each plan")
    parser.add_argument(
        "--clipped-steps",
        type=int,
        default=16,
        help="number of timed steps in each run with clipping. The runs differ in the share of steps that clip",
    )
    parser.add_argument(
        "--quick", action="store_true", help="use a small, fast model, and plans for the given times, for tests"
    )
    parser.add_argument("--zero-stage", type=int, choices=(1, 2, 3), default=3, help="DeepSpeed's ZeRO stage")
    args = parser.parse_args()
    become_only_rank(quiet=True)
    setting = PacedTraining(layers=6, hidden=256).scaled(0.2) if args.quick else PacedTraining()
    setting = replace(setting, zero_stage=args.zero_stage)
    figures = measure(setting, args.steps, args.json.with_suffix(".trace.json"))
    passes = PacedTraining(layers=8, hidden=256).scaled(0.1) if args.quick else many_layers()
    ratios = (1.0,) if args.quick else UPDATE_RATIOS
    passes = replace(passes, zero_stage=args.zero_stage)
    figures |= measure_early_updates(passes, args.steps, args.clipped_steps, ratios, profiled=not args.quick)
    publish("overlap", args.json, figures)


def measure(setting: PacedTraining, steps: int, trace: Path | None = None) -> dict[str, Any]:
    """Execute several plans in turn on one engine, and compare their iteration times with the lower bound.

    The parameters and optimizer state at the end are compared with those of stock DeepSpeed, bit by bit. The value
    ``over_floor`` of a plan is its iteration time divided by the lower bound, which no plan can beat.
    """
    bench = Bench(setting)
    work, machine = bench.workload(steps), setting.machine()
    given = setting.given_workload()
    floor_s = lower_bound(given, machine).iteration_s
    rows = dict[str, dict[str, float]]()
    for name, plan in track(plans(work, machine).items(), description="executing plans"):
        result = bench.measure(plan, steps)
        predicted = simulate(build_schedule(work, plan), machine)
        over_floor = result.iteration_s / floor_s
        rows[name] = {**result.seconds, "predicted_s": predicted.iteration_s, "over_floor": over_floor}
        if name == "ebbtide" and trace is not None:
            result.timeline.to_perfetto(trace, predicted)
    same = differences(bench.close(), stock_state(setting, bench.steps)) == ()
    return {
        "device_kind": "emulated",
        "setting": asdict(setting),
        "floor_s": floor_s,
        "layers_measured_over_given": (work.forward_s + work.backward_s) / (given.forward_s + given.backward_s),
        "steps_per_plan": steps,
        "bit_identical": same,
        "iteration_over_floor": rows["ebbtide"]["over_floor"],
        "stride_over_floor": min(row["over_floor"] for name, row in rows.items() if name.startswith("stride")),
        "twin_flow_over_floor": min(row["over_floor"] for name, row in rows.items() if name.startswith("Twin")),
        "rows": [{"name": name, **row} for name, row in rows.items()],
    }


def plans(work: Workload, machine: Machine) -> dict[str, Plan]:
    """Return the plans to compare with the lower bound of an iteration's time, as a dict by name.

    The first plan is the tuner's. The other plans do not overlap updates with forward, and most of them
    have simpler or published placements of optimizer state.
    """
    import ebbtide.tuner

    count, size = len(work.subgroups), work.subgroup_size
    chosen = ebbtide.tuner.plan(work, machine)

    def in_turn(placements: list[Any], slots: int) -> Plan:
        return Plan(
            subgroup_size=size, ways=Way.each(placements), staging_slots=slots, prefetch=0, overlap_forward=False
        )

    result = {"ebbtide": chosen}
    result["ebbtide, no overlap with forward"] = chosen.model_copy(update={"overlap_forward": False})
    result["all on the host"] = in_turn(["host"] * count, 0)
    for stride in STRIDES:
        visits = ["device" if (i + 1) % stride == 0 else "host" for i in range(count)]
        result[f"stride {stride}"] = in_turn(visits, 2)
    for ratio in RATIOS:
        residents = round((1 - ratio) * count)
        flow = ["resident"] * residents + ["host"] * (count - residents)
        result[f"Twin-Flow, ratio {ratio}"] = in_turn(flow, 0)
    return result


if __name__ == "__main__":
    main()
