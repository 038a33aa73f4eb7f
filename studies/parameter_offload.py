"""Training with 16-bit parameters in host memory, in three variants: stock DeepSpeed, ebbtide with all parameters in
host memory, and ebbtide with some of them in GPU memory.

    python -m studies.parameter_offload --json parameter_offload.json

Real DeepSpeed with ``offload_param`` trains on an emulated device. Copies and arithmetic are real, and their speeds
are given (`studies.trials.emulated_training`). The emulation favors stock DeepSpeed. Apart from its layers, only two
things take time: copies of parameters, which run ahead as DeepSpeed requests them, and the update on the host, at the
speed of ebbtide's own kernel. Stock DeepSpeed's gradient copies take no time.

The tuner decides for ebbtide where optimizer state is updated. In the third variant, the GPU keeps as many parameters
as fit into a given amount of memory. They are spaced evenly over the subgroups, as in the tuner's search
(`ebbtide.tuner.placements.parameters_and_early`). No number of this study is a GPU measurement.
"""

from dataclasses import asdict
from typing import Any

import torch
from ebbtide.runtime.devices.lane import Completion, LaneQueue
from ebbtide.runtime.zero.checks import private
from ebbtide.runtime.zero.fetches import Fetch, Fetches
from ebbtide.runtime.zero.gathers import gate_gathers
from ebbtide.simulator import Machine, Plan, Workload, build_schedule, simulate
from ebbtide.simulator.schedule import Lane as LaneName

from studies.bench.bits import differences
from studies.bench.console import publish, study_parser
from studies.bench.rank import become_only_rank
from studies.trials.emulated_training import WARMUP, Bench, EmulatedTimes, kernels_of
from studies.trials.paced_device import PacedDevice
from studies.trials.paced_model import PacedTraining

HEADROOM_SHARE = 0.5  # GPU memory beside activations and buffers, as a share of all parameters


def main() -> None:
    parser = study_parser("parameter_offload", __doc__)
    parser.add_argument(
        "--steps", type=int, default=7, help="number of timed steps of DeepSpeed alone and of each plan"
    )
    parser.add_argument("--quick", action="store_true", help="use a small, fast model, for tests")
    args = parser.parse_args()
    become_only_rank(quiet=True)
    setting = PacedTraining(layers=6, hidden=256).scaled(0.2) if args.quick else PacedTraining()
    publish("parameter_offload", args.json, measure(setting, args.steps))


def measure(setting: PacedTraining, steps: int) -> dict[str, Any]:
    """Measure training with 16-bit parameters in host memory: stock DeepSpeed, then each of ebbtide's plans.

    Times are medians over ``steps`` iterations. Plans run in turn on one engine.

    Returns:
        A dict. ``speedup_over_stock``: iteration time of stock DeepSpeed divided by that of ebbtide, with all
        parameters in host memory. ``speedup_of_share``: ebbtide's iteration time with all parameters in host memory,
        divided by its iteration time with some parameters on the device. ``predicted_over_measured``: ebbtide's
        predicted iteration time divided by the measured one, with all parameters in host memory. ``bit_identical``:
        True if stock DeepSpeed and ebbtide have the same parameters and optimizer state after the same number of steps.
    """
    zero = config(setting)
    bench = Bench(setting, **zero)
    work = bench.workload(steps)
    machine = setting.machine()
    plans = plans_of(work, machine)
    found = {name: bench.measure(plan, steps) for name, plan in plans.items()}
    predicted = {n: simulate(build_schedule(work, p), machine).iteration_s for n, p in plans.items()}
    stock = StockBench(setting, **zero)
    found["stock"] = stock.measure_stock(steps)
    while stock.steps < bench.steps:
        stock.train()
    same = differences(bench.close(), stock.close()) == ()
    all_away, share = found["all on the host"], found["a share on the device"]
    return {
        "device_kind": "emulated",
        "setting": asdict(setting),
        "steps_of_each": steps,
        "bit_identical": same,
        "speedup_over_stock": found["stock"].iteration_s / all_away.iteration_s,
        "speedup_of_share": all_away.iteration_s / share.iteration_s,
        "predicted_over_measured": predicted["all on the host"] / all_away.iteration_s,
        "rows": [{"name": n, "predicted_s": predicted.get(n), **one.seconds} for n, one in found.items()],
    }


def config(setting: PacedTraining) -> dict[str, Any]:
    """Return the keys of DeepSpeed's ``zero_optimization`` that put 16-bit parameters into host memory.

    Each layer's parameters are fetched for each pass, one layer ahead.
    """
    return {
        "offload_param": {"device": "cpu", "pin_memory": True},
        "stage3_max_reuse_distance": 0,
        "stage3_max_live_parameters": 3 * setting.subgroup,
        "stage3_prefetch_bucket_size": setting.subgroup,
        "stage3_param_persistence_threshold": 0,
    }


def plans_of(work: Workload, machine: Machine) -> dict[str, Plan]:
    """Return two plans by name: one with all 16-bit parameters in host memory, and one with some on the device.

    Both have the tuner's placement of optimizer state.
    """
    import ebbtide.tuner
    from ebbtide.tuner.placements.shares import spaced

    chosen, count = ebbtide.tuner.plan(work, machine), len(work.subgroups)
    away = {"all on the host": count, "a share on the device": round(HEADROOM_SHARE * count)}
    return {
        name: chosen.with_ways(
            [way._replace(parameters=h).fitted() for way, h in zip(chosen.ways, spaced(count, n), strict=True)]
        )
        for name, n in away.items()
    }


class StockBench(Bench):
    """Stock DeepSpeed on an emulated device, with parameter copies and updates at given rates."""

    def __init__(self, setting: PacedTraining, **zero: Any) -> None:
        super().__init__(setting, **zero)
        self.device = PacedDevice(setting.rates())
        self._lane = LaneQueue("stock's gathers")
        self._kernels = kernels_of(self.engine, self.device)
        parameters = self.engine.module.parameters()
        self._restore = gate_gathers(parameters, lambda _: None, self._fetch)
        self._pace_step()

    def _pace_step(self) -> None:
        optimizer = self.engine.optimizer
        step = optimizer.step

        def paced(*args: Any, **kwargs: Any) -> Any:
            with self.device.host_update(self.setting.params):
                return step(*args, **kwargs)

        optimizer.step = paced

    def _fetch(self, params: list[Any], gather: object) -> Fetches:
        del gather
        private.mark_in_flight(params)
        return Fetches({param: self._copy(param) for param in params})

    def _copy(self, param: Any) -> Fetch:
        held: torch.Tensor = param.ds_tensor.data
        to, completion = torch.empty_like(held), Completion("parameter fetch")
        self._lane.submit(lambda: self.device.copy(to, held, LaneName.H2D_FETCH, None), [], completion)
        return Fetch(param, to, [completion], self.device)

    def measure_stock(self, steps: int) -> EmulatedTimes:
        """Train with stock DeepSpeed, and return the median times over ``steps`` iterations after the warm-up."""
        return self._measured([self._step(settle=False) for _ in range(WARMUP + steps)])

    def train(self) -> None:
        self._step(settle=False)

    def close(self) -> dict[str, torch.Tensor]:
        from studies.bench.bits import state_of

        self._restore()
        self._lane.close()
        state = state_of(self.engine)
        self.engine.destroy()
        return state


if __name__ == "__main__":
    main()
