"""A script that draws docs/iteration.png: a training iteration of DeepSpeed alone, and one under a plan.

    python scripts/draw_iteration.py [OUT]

The iterations are simulated on a made-up machine with round numbers, so that every bar can be read. No time
in the drawing was measured.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from ebbtide.simulator import (
    Layer,
    Machine,
    Placement,
    Plan,
    Quantity,
    Timeline,
    Way,
    Workload,
    build_schedule,
    build_strategy,
    simulate,
)

OUT = Path(__file__).parents[1] / "docs" / "iteration.png"
SUBGROUPS = 8
PARAMS = 90_000_000  # parameters of each layer, which is one subgroup here


def machine() -> Machine:
    """Return the made-up machine on which the training iterations in docs/iteration.png are simulated.

    Neither its CPU nor its GPU alone could run the optimizer update of all subgroups within one forward of the model,
    so that a plan uses both.
    """
    rates = {
        "h2d_bytes_per_s": 20e9,
        "d2h_bytes_per_s": 20e9,
        "dram_bytes_per_s": 100e9,
        "host_adam_params_per_s": 2e9,
        "stock_host_adam_params_per_s": 1.2e9,
        "device_adam_params_per_s": 20e9,
        "host_copy_bytes_per_s": 40e9,
        "pageable_h2d_bytes_per_s": 6e9,
        "pageable_d2h_bytes_per_s": 6e9,
        "storage_write_bytes_per_s": 2e9,
    }
    return Machine(
        name="made up",
        device_kind="cuda",
        cpu_cores=32,
        host_memory_bytes=2**38,
        device_memory_bytes=2**35,
        **{name: Quantity.exact(rate) for name, rate in rates.items()},
    )


def workload() -> Workload:
    layer = Layer(params=PARAMS, forward_s=0.03, backward_s=0.06)
    return Workload(
        name="eight equal layers",
        layers=(layer,) * SUBGROUPS,
        subgroups=(PARAMS,) * SUBGROUPS,
        subgroup_size=PARAMS,
        clip=True,
    )


def plan() -> Plan:
    placements: list[Placement] = ["resident", "host", "device", "host", "device", "host", "device", "host"]
    return Plan(subgroup_size=PARAMS, ways=Way.each(placements), staging_slots=2, prefetch=2, overlap_forward=True)


def one_iteration(timeline: Timeline) -> Timeline:
    """Return a part of a simulated timeline, from the start of the second iteration's backward to the next
    forward's end.

    Times in the result count from that start, and ops that reach beyond the part are cut.
    """
    kept = [s for s in timeline.spans if s.iteration in (1, 2)]
    begin = min(s.start_s for s in kept if s.iteration == 1 and s.kind.value == "backward")
    end = max(s.end_s for s in kept if s.iteration == 2 and s.kind.value == "forward")
    inside = [s for s in kept if s.start_s < end - 1e-9 and s.end_s > begin + 1e-9]
    moved = [replace(s, start_s=max(s.start_s, begin) - begin, end_s=min(s.end_s, end) - begin) for s in inside]
    return replace(timeline, spans=tuple(moved), memory=())


def sides() -> dict[str, Timeline]:
    """Return the two drawn timelines by their titles."""
    schedules = {
        "stock ZeRO-3 offload": build_strategy("zero3_offload", workload()),
        "the same iteration under a plan": build_schedule(workload(), plan()),
    }
    return {name: one_iteration(simulate(schedule, machine())) for name, schedule in schedules.items()}


def description(drawn: dict[str, Timeline]) -> str:
    """Return the text in the picture's file that says what is drawn: each title with the number of bars and the time.

    With it, a test sees if the picture is older than the simulator.
    """
    return ", ".join(
        f"{name}: {len(timeline.spans)} ops, {1e3 * timeline.makespan_s:.1f} ms" for name, timeline in drawn.items()
    )


def main() -> None:
    import matplotlib.pyplot as plt

    figure, rows = plt.subplots(2, 1, figsize=(13, 6.4), layout="constrained")
    cut = sides()
    longest_s = max(timeline.makespan_s for timeline in cut.values())
    for axes, (name, timeline) in zip(rows, cut.items(), strict=True):
        timeline.plot(axes)
        axes.set_xlim(0, longest_s * (1e3 if timeline.makespan_s < 2 else 1))
        axes.set_title(f"{name}: backward, update, next forward: {timeline.makespan_s * 1e3:.0f} ms", loc="left")
    figure.supxlabel(
        "Simulated on a made-up machine. l7: layer 7, s0: subgroup 0 of the optimizer state. Under the plan, the GPU "
        "gets state during backward, and CPU and GPU update while the next forward runs.",
        fontsize=9,
    )
    figure.savefig(sys.argv[1] if len(sys.argv) > 1 else OUT, dpi=110, metadata={"Description": description(cut)})


if __name__ == "__main__":
    main()
