"""Random jobs for the simulator, and random plans for a job at any subgroup size and with any option."""

from dataclasses import dataclass

import numpy as np
from ebbtide.simulator import Layer, Machine, Quantity, Workload
from ebbtide.simulator.analysis.many_plans import PlanSweep, times_of
from ebbtide.simulator.engines import summary
from ebbtide.simulator.limits import Limits
from ebbtide.simulator.optimizer import OPTIMIZERS
from ebbtide.simulator.update.steps import Slot
from ebbtide.simulator.update.way import EARLY, of_codes, ways

from tests.machines import node

PLENTY = 2**45


def random_job(rng):
    """Return a random job (a workload that can be cut into other subgroups) and a random machine, with
    latencies, ranks, drives and a network.
    """
    return random_workload(rng), random_machine(rng)


def random_workload(rng):
    count, stage = int(rng.choice([rng.integers(1, 25), 60])), int(rng.choice([3, 3, 3, 3, 2, 1]))
    size = 10 ** rng.uniform(5, 8.5)
    params = [int(size * rng.uniform(0.3, 1.5)) if rng.random() < 0.3 else int(size)] * count
    if rng.random() < 0.4:  # such as the layers of an embedding and of an output
        for i in {0, -int(rng.integers(2))}:
            params[i] = int(params[i] * rng.uniform(2, 8))
    forward_s = float(10 ** rng.uniform(-1.5, 0.7)) * sum(params) / 7e9 / count
    network = rng.random() < 0.15
    step_s = float(rng.choice([0.0, forward_s / 3]))
    planned = float(rng.choice([0.0, rng.uniform(0.2, 2)]))  # a plan's share of DeepSpeed's times. 0: not known
    fetched = planned * rng.uniform(1, 2)

    def passes():
        seconds = {"forward_s": forward_s * rng.uniform(0.3, 2), "backward_s": forward_s * rng.uniform(0.3, 4)}
        return seconds | under_plans(seconds)

    def under_plans(seconds):
        shares = {"planned_": planned, "fetched_": fetched} if planned else {}
        return {kind + name: share * s for kind, share in shares.items() for name, s in seconds.items()}

    layers = tuple(
        Layer(
            params=n,
            **passes(),
            activation_bytes=int(rng.integers(0, 10**8)),
            network_gather_bytes=int(network and stage == 3 and n),
            network_reduce_bytes=int(network and n),
        )
        for n in params
    )
    parts = [n // 3 for n in params for _ in range(3)]
    parts = [n + rest for n, rest in zip(parts, [r for n in params for r in (0, 0, n - 3 * (n // 3))], strict=True)]
    subgroup = int(10 ** rng.uniform(np.log10(size) - 1, np.log10(sum(params)) + 0.1)) + 1
    work = Workload(
        name="random",
        layers=layers,
        subgroups=(sum(params),),
        subgroup_size=subgroup,
        parameters=(tuple(parts),),
        device_base_bytes=int(2 * sum(params) * rng.uniform(1, 1.5)),
        gradient_accumulation_steps=int(rng.choice([1, 1, 2, 3])),
        ranks_per_node=int(rng.choice([1, 1, 2, 4])),
        optimizer=str(rng.choice(list(OPTIMIZERS))),
        pipeline_idle_s=float(rng.choice([0, 0, forward_s])),
        grad_bytes_per_param=int(rng.choice([2, 4])),
        zero_stage=stage,
        step_gather_s=forward_s if stage < 3 and rng.random() < 0.5 else 0.0,
        clip_rate=float(rng.choice([0.0, 0.1, 1.0])),
        live_params=int(sum(params) * rng.uniform(0, 0.5)) if rng.random() < 0.2 else None,
        **under_plans({"step_issue_s": step_s}),
        step_issue_s=step_s,
    )
    return work.recut(subgroup)


def cut_anew(rng, work):
    """Return a copy of a workload with subgroups of another, random size."""
    # They are the subgroups that DeepSpeed forms for another ``sub_group_size``. In 30% of the cases under ZeRO-3, they
    # are parts of DeepSpeed's present subgroups instead.
    size = int(10 ** rng.uniform(np.log10(work.params) - 1.8, np.log10(work.params) - 0.5)) + 1
    return work.in_pieces(size) if work.zero_stage == 3 and rng.random() < 0.3 else work.recut(size)


def random_machine(rng):
    between = {
        "h2d_bytes_per_s": (9.3, 11),
        "d2h_bytes_per_s": (9.3, 11),
        "dram_bytes_per_s": (10.5, 12),
        "host_adam_params_per_s": (8.7, 10.3),
        "stock_host_adam_params_per_s": (8.7, 10.3),
        "storage_write_bytes_per_s": (8.5, 10.5),
        "device_adam_params_per_s": (9.3, 11.2),
    }
    rates = {name: float(10 ** rng.uniform(*span)) for name, span in between.items()}
    if rng.random() < 0.6:  # one of them is the slowest, so that many plans come near the bound
        slowest = rng.choice(["h2d_bytes_per_s", "d2h_bytes_per_s", "host_adam_params_per_s", "dram_bytes_per_s", "no"])
        rates = {name: rate if name == slowest else 50 * rate for name, rate in rates.items()}
    threads = {n: Quantity.exact(rates["host_adam_params_per_s"] * float(rng.uniform(0.3, 1.2))) for n in (2, 8, 16)}
    return node(
        name="random",
        cpu_cores=32,
        host_memory_bytes=PLENTY,
        device_memory_bytes=PLENTY,
        copy_latency_s=float(rng.choice([0, 0, 1e-5])),
        launch_latency_s=float(rng.choice([0, 0, 1e-5])),
        device_shares_host_cores=bool(rng.random() < 0.2),
        unified_memory=bool(rng.random() < 0.05),
        host_adam_by_threads=threads if rng.random() < 0.4 else {},
        duplex_factor=Quantity.exact(float(rng.uniform(0.5, 1.1))),
        storage_read_bytes_per_s=Quantity.exact(float(10 ** rng.uniform(8.5, 10.5))),
        storage_duplex_factor=Quantity.exact(float(rng.uniform(0.5, 1.0))),
        host_adam_out_of_place=Quantity.exact(float(rng.uniform(0.5, 1.0))) if rng.random() < 0.5 else None,
        network_bytes_per_s=Quantity.exact(float(10 ** rng.uniform(9, 11))),
        **rates,
    )


@dataclass(frozen=True)
class Tried:
    """A random plan that was simulated.

    The fields are the workload with its subgroups, the machine, the plan's other options, the smallest memory limits
    that the plan fits into, and one code per subgroup. A code is a number that stands for placement, parameter location
    and flags of the subgroup (`Way.code`).
    """

    work: Workload
    machine: Machine
    codes: np.ndarray
    options: tuple
    limits: Limits

    def seconds(self, iterations=3):
        """Return the mean seconds of an iteration in a simulated run.

        If the plan has early updates, this is a mean over steps that clip gradients and steps that do not. The weight
        of the steps that clip is the workload's expected fraction of such steps.

        Args:
            iterations: Number of iterations to simulate. The mean is over the second half of them, or over the last one
                if 3 are simulated.
        """
        plain, early = self.codes & ~EARLY, (self.codes & EARLY).any()
        row, before = (self._rows(self.codes, n) for n in (iterations, max(3, iterations // 2)))
        right_s = self._later(row, before, iterations)
        if not early:
            return right_s
        waits, earlier = (self._rows(plain, n) for n in (iterations, max(3, iterations // 2)))
        plain_s = self._later(waits, earlier, iterations)
        times = times_of((right_s, row[summary.BACKWARD_S]), (plain_s, waits[summary.BACKWARD_S]), 0.0)
        return times.mean_s(self.work.expected_clip_rate)

    def _rows(self, codes, iterations):
        return PlanSweep(self.work, self.machine, iterations=iterations).evaluate(codes, *self.options)

    @staticmethod
    def _later(row, before, iterations):
        if iterations == 3:
            return float(row[summary.ITERATION_S])
        half = iterations // 2
        sums = (float(r[summary.ITERATION_S]) * (n - 2) for r, n in ((row, iterations), (before, half)))
        return (next(sums) - next(sums)) / (iterations - half)


def random_plan(rng, work, machine):
    """Return a random plan for a job, already simulated, with any placements, buffers, threads and order that
    the job's subgroups and ZeRO stage allow.
    """
    stage, count, sweep = work.zero_stage, len(work.subgroups), PlanSweep(work, machine)
    some = [w for w in ways() if stage == 3 or (not w.early and w.parameters == "device" and w.placement != "stored")]
    some = [w for w in some if sweep.held.sums or not w.sum_on_device]
    shares = rng.dirichlet([rng.choice([0.02, 0.1, 1.0])] * len(some))
    codes = rng.choice([w.code for w in some], size=count, p=shares).astype(np.int8)
    staged = sum(Slot.STAGING in w.recipe.slots for w in of_codes(codes))
    slots = int(rng.integers(1, min(staged, rng.choice([4, 64])) + 1)) if staged else 0
    prefetch = slots if rng.random() < 0.7 else int(rng.integers(0, slots + 1))
    order = [None, np.arange(count)[::-1].copy(), rng.permutation(count)][rng.integers(3)]
    threads, overlap = int(rng.choice([0, 0, 1, 2, 4, 20])), bool(stage == 3 and rng.random() < 0.9)
    options = (slots, prefetch, threads, overlap, order, int(rng.integers(1, 5)))
    row = sweep.evaluate(codes, *options)
    held = (int(row[i]) for i in (summary.DEVICE_PEAK, summary.HOST_PEAK, summary.STORED))
    device, host, stored = held
    limits = Limits(device, host, storage_bytes=stored or None)
    if machine.unified_memory:
        limits = Limits(device, device + host, unified=True, storage_bytes=stored or None)
    return Tried(work, machine, codes, options, limits)
