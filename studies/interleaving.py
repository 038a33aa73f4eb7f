"""Simulated iteration times when every n-th subgroup is updated on the GPU, compared with published measurements.

    python -m studies.interleaving --json interleaving.json

The measurements are those of "Deep Optimizer States" (Maurya et al., arXiv 2410.21316) on its two testbeds, which are
presets of ebbtide. Four settings are varied: n (the stride), the ratio of offloaded state, the subgroup size and the
model size. Nothing is fitted, and this study measures nothing itself: each simulated time is printed next to the
published median. For measurements on a GPU, see `python -m studies.gpu`.

The columns "stock" are for the DeepSpeed build of 2024, which widens gradients on the host. The columns "stock today"
are for DeepSpeed 0.19.8, which copies gradients asynchronously by default.

The plan of ebbtide may use as much device memory as an update with stride 2. The plan has two columns: with ebbtide's
fused update kernel, and with *equal kernels*. With *equal kernels*, the host updates at the speed of stock DeepSpeed,
with separate passes for unscaling and rounding. So this column shows the gain of the schedule alone.

The share of DRAM bandwidth that each rank of a node gets depends on how ranks were bound to cores. If there are two
published figures, as for four A100s, the middle of both is simulated, and the results for both are printed.
"""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from ebbtide.simulator import Machine
from ebbtide.simulator.analysis.many_plans import PlanSweep
from ebbtide.simulator.engines.compiled import simulate_fast
from ebbtide.simulator.limits import UNKNOWN_MARGIN
from ebbtide.simulator.quantity import EIGHTY_PERCENT, QUARTILE
from ebbtide.tuner.calibrate.calibration import knobs_of, turned
from ebbtide.tuner.placements.planning import plan
from rich.progress import track

from studies.bench.console import publish, study_parser
from studies.bench.offload_runs import SHAPES, PublishedRun, read_runs
from studies.published_runs.shipped import HARNESS_S, machine_of, predict, schedule_of, workload_of

PUBLISHED = Path(__file__).with_name("data") / "published_offload_runs.csv"
TESTBEDS = ("a100", "h100x4")
STRIDES = (2, 3, 4, 5, 6, 8, 10)
RATIOS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
SUBGROUPS = (10**7, 5 * 10**7, 10**8, 2 * 10**8, 5 * 10**8, 10**9)
MODELS = {**SHAPES, 30: (60, 6656)}
SIZES = (7, 13, 20, 30)
PAPER = "2.5x faster iterations than ZeRO-3 offload; best stride 2 on these machines"
BINDINGS = (-1, 1)  # binding of ranks to cores and memory: that of the slowest published run, and that of the fastest
EQUAL, FUSED = "ebbtide, equal kernels", "ebbtide, fused kernel"


@dataclass(frozen=True)
class StepVariant:
    """A variant of DeepSpeed's optimizer step in the study of interleaved updates. One variant has asynchronous
    gradient copies, for example.

    Each variant is one column of the study's tables.
    """

    name: str
    prefetch: bool
    async_grads: bool


STOCK = StepVariant("stock", prefetch=False, async_grads=False)
ASYNC = StepVariant("asynchronous gradients", prefetch=False, async_grads=True)
INTERLEAVED = StepVariant("stride 2", prefetch=True, async_grads=True)


def main() -> None:
    parser = study_parser("interleaving", __doc__)
    parser.add_argument("--quick", action="store_true", help="simulate only two models, for tests")
    args = parser.parse_args()
    figures = measure([7, 13] if args.quick else list(SIZES))
    publish("interleaving", args.json, figures)


def measure(models: list[int]) -> dict[str, Any]:
    """Simulate training iterations on the paper's two testbeds, with one setting varied at a time.

    The paper is "Deep Optimizer States" (arXiv 2410.21316). The settings are the stride (every n-th subgroup is updated
    on the GPU), the fraction of state on the host, the subgroup size and the model size.

    Args:
        models: Model sizes, in billions of parameters.
    """
    runs = read_runs(PUBLISHED)
    beds = {name: _sweeps(name, runs, models) for name in TESTBEDS}
    gains: dict[str, Any] = {
        f"{name}_{label}": _gain(bed, slower, faster)
        for name, bed in beds.items()
        for label, slower, faster in (
            ("stride_2_over_stock", "stock", "stride 2"),
            ("ebbtide_over_stride_2", "stride 2", EQUAL),
            ("ebbtide_fused_over_stride_2", "stride 2", FUSED),
            ("ebbtide_over_stock_today", "asynchronous gradients", EQUAL),
            ("ebbtide_fused_over_stock_today", "asynchronous gradients", FUSED),
            ("ebbtide_over_stock", "stock", EQUAL),
            ("ebbtide_fused_over_stock", "stock", FUSED),
        )
    }
    for name, bed in beds.items():
        gains[f"{name}_stride_2_over_stock_as_bound"] = [
            _gain(bed, "stock", "stride 2", end) for end in range(len(BINDINGS))
        ]
    return {
        "device_kind": "simulated",
        "paper": PAPER,
        "kernels": "equal: the host updates at stock's rate; fused: at that of ebbtide's kernel",
        "measured_here": None,
        "testbeds": beds,
        **gains,
    }


def _gain(bed: dict[str, Any], slower: str, faster: str, binding: int | None = None) -> float:
    def seconds(row: dict[str, Any], name: str) -> float:
        return float(row[name] if binding is None else row[f"{name}, as bound"][binding])

    return statistics.median(seconds(row, slower) / seconds(row, faster) for row in bed["models"])


def as_bound(machine: Machine, end: int) -> Machine:
    """Return a preset machine with each rank's share of DRAM bandwidth at one end of its expected range.

    The range comes from the quartiles of the share in the machine's preset. If ``end`` > 0, the share is at
    the upper end, otherwise at the lower end.
    """
    knobs = [knob for knob in knobs_of(machine) if knob.ranks]
    shares = [machine.rank_shares[knob.ranks]["dram"] for knob in knobs]
    far = [math.log((share.q3 if end > 0 else share.q1) / share.median) for share in shares]
    return turned(machine, knobs, np.array(far) * EIGHTY_PERCENT / QUARTILE)


def _sweeps(name: str, runs: list[PublishedRun], models: list[int]) -> dict[str, Any]:
    base = _base(name, 13)
    ways = (STOCK, ASYNC, INTERLEAVED)
    own = [run for run in runs if run.testbed == name]
    return {
        "strides": [
            {
                "stride": k,
                "iteration_s": _seconds(replace(_as(base, INTERLEAVED), stride=k)),
                "published_s": _published(own, params_b=13, prefetch=True, stride=k, micro_batch=1),
            }
            for k in STRIDES
        ],
        "ratios": [
            {"ratio": r, **{w.name: _seconds(replace(_as(base, w), offload_ratio=r)) for w in ways}} for r in RATIOS
        ],
        "subgroups": [
            {"subgroup": n, **{w.name: _seconds(replace(_as(base, w), subgroup=n)) for w in ways}} for n in SUBGROUPS
        ],
        "models": [_model_row(name, own, size) for size in track(models, description=f"making plans for {name}")],
    }


def _model_row(name: str, own: list[PublishedRun], size: int) -> dict[str, Any]:
    base = _base(name, size)
    row: dict[str, Any] = {"params_b": size}
    machine = machine_of(name)
    for way in (STOCK, ASYNC, INTERLEAVED):
        row[way.name] = _seconds(_as(base, way))
        row[f"{way.name}, as bound"] = [_seconds(_as(base, way), as_bound(machine, end)) for end in BINDINGS]
        row[f"{way.name}, published"] = _published(
            own,
            params_b=size,
            prefetch=way.prefetch,
            async_grads=way.async_grads,
            micro_batch=1,
            dp=4,
            offload_ratio=base.offload_ratio,
            stride=2 if way.prefetch else 0,
        )
    row[EQUAL] = ebbtide_s(_as(base, INTERLEAVED), machine, fused=False)
    row[FUSED] = ebbtide_s(_as(base, INTERLEAVED), machine, fused=True)
    return row


def _base(testbed: str, size: int) -> PublishedRun:
    layers, hidden = MODELS[size]
    return PublishedRun(
        testbed=testbed,
        params_b=size,
        layers=layers,
        hidden=hidden,
        seq=2048,
        tp=1,
        dp=4,
        micro_batch=1,
        offload_ratio=1.0 if testbed == "a100" else 0.8,
        subgroup=10**8,
        prefetch=False,
        async_grads=False,
        stride=0,
        family="",
        heads=hidden // 128,
    )


def _as(run: PublishedRun, way: StepVariant) -> PublishedRun:
    return replace(run, prefetch=way.prefetch, async_grads=way.async_grads, stride=2 if way.prefetch else 0)


def _seconds(run: PublishedRun, machine: Machine | None = None) -> float:
    return predict(run, machine or machine_of(run.testbed))["iter_ms"] / 1e3


def _published(runs: Iterable[PublishedRun], **wanted: Any) -> float | None:
    same = [
        run.measured["iter_ms"] / 1e3
        for run in runs
        if all(getattr(run, key) == value for key, value in wanted.items())
    ]
    return statistics.median(same) if same else None


def equal_kernels(machine: Machine) -> Machine:
    """Return the machine with CPU updates at the rate of stock DeepSpeed, which makes three passes over memory."""
    stock = machine.stock_host_adam_params_per_s
    return machine.model_copy(update={"host_adam_params_per_s": stock, "host_adam_by_threads": {}})


def ebbtide_s(run: PublishedRun, machine: Machine, *, fused: bool) -> float:
    """Simulate the training of a published run's model under a plan of the tuner, and return the seconds of an
    iteration.

    Args:
        run: Published run that updates every n-th subgroup on the GPU. The plan may take as much GPU memory as this
            run.
        fused: True to simulate ebbtide's fused CPU kernel. False to simulate the speed of stock DeepSpeed's CPU
            updates.
    """
    limit = simulate_fast(schedule_of(run, machine), machine).device_peak_bytes
    limit += machine.device_reserved_bytes
    work = workload_of(run, machine)
    made = plan(
        work, machine if fused else equal_kernels(machine), device_memory_bytes=int(limit / (1 - UNKNOWN_MARGIN)) + 1
    )
    return PlanSweep(work.cut_as(made), machine, fused=fused).result(made).iteration_s + HARNESS_S


if __name__ == "__main__":
    main()
