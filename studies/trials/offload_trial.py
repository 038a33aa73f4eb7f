"""One training run in a separate process, which measures times, memory, and a hash of the trained state.

    python -m studies.trials.offload_trial --variant stock --size tiny --steps 5 --json row.json

Variants: stock, twin_flow:RATIO, superoffload, zenflow, no_offload, deepcompile, torchao, ebbtide (with
--plan, or else with all optimizer state on the host). If two variants have the same hash, they have trained
the same bits. On a GPU, all variants run deterministic algorithms, because otherwise the backward of flash
attention adds numbers in a varying order.
"""

import argparse
import math
import resource
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ebbtide.profiler.watcher import reset_peak
from ebbtide.runtime.hardware.cores import BackwardThreads
from ebbtide.simulator import Plan, Way
from ebbtide.simulator.limits import GIB
from ebbtide.simulator.plan import ParameterLocation
from ebbtide.simulator.schedules.buckets import PLANNED_BUCKET_ELEMENTS

from studies.bench.bits import digest, optimizer_state
from studies.bench.byte_gpt import SIZES, Batches, ByteGPT, ds_config, stock_engine
from studies.bench.phase_clock import PhaseClock, TrainingThreads, medians, timed_step
from studies.bench.rank import become_only_rank
from studies.bench.record import write_record
from studies.trials.emulated_training import set_clipping

WARMUP = 3
INEXACT = ("zenflow", "torchao", "deepcompile")
UNCAPPED = ("no_offload",)  # without a memory limit, to show the time with unlimited memory


def main() -> None:
    args = arguments().parse_args()
    settle(args)
    become_only_rank()
    figures = trial(args)
    if args.device == "emulated":
        figures["device_kind"] = "emulated"
    write_record(args.json, "offload_trial", figures)
    print({name: figures[name] for name in ("variant", "iteration_s", "loss", "hash")})


def arguments() -> argparse.ArgumentParser:
    """Return the command-line parser of a training run. `studies.trials.plan_trials` adds its own options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--variant", default="stock")
    parser.add_argument("--plan", type=Path, help="with --variant ebbtide: plan file that the run trains under")
    parser.add_argument("--size", default="tiny", choices=sorted(SIZES))
    parser.add_argument("--steps", type=int, default=8, help="number of timed steps, after 3 warm-up steps")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--subgroup", type=int, default=100_000_000)
    parser.add_argument("--clipping", type=float, default=1.0)
    parser.add_argument(
        "--clip-rate",
        type=float,
        help="fraction of the steps that clip, evenly spread, if clipping is on (default: the gradient norm decides)",
    )
    parser.add_argument("--stage", type=int, default=3, choices=(1, 2, 3), help="ZeRO stage")
    parser.add_argument("--offload-param", action="store_true", help="keep parameters in host memory")
    parser.add_argument(
        "--keep",
        type=float,
        default=0.0,
        help="fraction of the parameters that ebbtide keeps in GPU memory, with --offload-param",
    )
    parser.add_argument("--cap-gib", type=float, help="limit on GPU memory, in GiB")
    parser.add_argument(
        "--unbound",
        action="store_true",
        help="do not bind autograd's thread to the core that ebbtide's updates leave free",
    )
    parser.add_argument("--device", choices=["auto", "cuda", "emulated"], default="auto")
    parser.add_argument(
        "--workload", type=Path, help="profile the engine and write this workload file, instead of training"
    )
    parser.add_argument("--timeline", type=Path, help="file for the measured timeline of ebbtide's steps")
    return parser


def settle(args: argparse.Namespace) -> None:
    """Prepare this process for a training run with the system that ``args.variant`` names, such as stock DeepSpeed or
    ebbtide.

    On a GPU, this limits the GPU memory, binds the process to the cores near the GPU, and selects deterministic
    kernels.

    Raises:
        SystemExit: If CUDA was requested and is not available.
    """
    cuda = torch.cuda.is_available()
    if args.device == "cuda" and not cuda:
        raise SystemExit("--device cuda needs a CUDA GPU, but torch finds none: use auto")
    if not cuda:
        return
    from ebbtide.runtime.hardware.cores import bind, near_cores
    from ebbtide.runtime.hardware.pci import pci_address

    cores = near_cores(pci_address(0))
    bind(cores)  # as the flag --bind_cores_to_rank of the deepspeed launcher does
    torch.set_num_threads(len(cores))
    same_sums(warn_only=args.variant.split(":")[0] in INEXACT)
    if args.cap_gib and args.variant not in UNCAPPED:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.cap_gib * GIB / total), 0)


def same_sums(*, warn_only: bool = False) -> None:
    """Make torch use deterministic kernels in this process, and leave uninitialized memory unfilled."""
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def trial(args: argparse.Namespace) -> dict[str, Any]:
    """Train with one variant, such as stock DeepSpeed, and return a row with its times, memory and state hash."""
    cuda = torch.cuda.is_available()
    engine = make_engine(args)
    size = SIZES[args.size]
    batches = Batches(args.micro_batch, size.sequence)
    if args.workload:
        return _profile(engine, batches, args)
    session = getattr(engine.optimizer, "_ebbtide", None)
    if session is not None and args.unbound:
        session.device.backward_threads = BackwardThreads()
    before = allocator_calls()
    run = timed(engine, batches, 0, args, TrainingThreads())
    after = allocator_calls()
    if args.timeline and hasattr(engine.optimizer, "timeline"):
        engine.optimizer.timeline().to_perfetto(args.timeline)
    tokens = args.micro_batch * args.accumulation * size.sequence
    figures = {
        "variant": args.variant,
        "exact": args.variant.split(":")[0] not in INEXACT,
        "params": size.params,
        **run.times,
        "tokens_per_s": tokens / run.times["iteration_s"],
        "loss": run.loss,
        "hash": digest(optimizer_state(engine.optimizer)),
        "device": str(engine.device),
        "cap_gib": None if args.variant in UNCAPPED else args.cap_gib,
        "threads": torch.get_num_threads(),
        "device_peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "device_reserved_peak_bytes": torch.cuda.max_memory_reserved() if cuda else None,
        "allocator_calls": {name: count - before[name] for name, count in after.items()},
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "steps": args.steps,
        "iterations": run.steps,
        "bound_to": None if session is None else [*session.device.backward_threads.cores],
        "phases": run.threads,
        **early_updates(session),
    }
    engine.destroy()
    return figures


def allocator_calls() -> dict[str, int]:
    """Return how often PyTorch's allocator has called the GPU driver in this process, by kind of call.

    ``num_alloc_retries`` counts allocations that first failed, so that all cached memory was returned to the driver.
    Such calls wait for the GPU and slow down training that fills the GPU's memory.
    """
    if not torch.cuda.is_available():
        return {}
    stats = torch.cuda.memory_stats()
    names = ("num_alloc_retries", "num_device_alloc", "num_device_free", "num_sync_all_streams")
    return {name: int(stats.get(name, 0)) for name in names}


@dataclass(frozen=True)
class RunTimes:
    """The times of a training run.

    Attributes:
        times: Median seconds of each phase after the warm-up, with keys such as ``forward_s``.
        steps: Seconds of each phase in each step, with the warm-up, with keys such as ``forward``.
        threads: What the training threads did in each phase of each micro-batch (see `PhaseClock.threads`).
    """

    times: dict[str, float]
    steps: list[dict[str, float]]
    threads: list[dict[str, dict[str, Any]]]
    loss: float


def early_updates(session: Any) -> dict[str, Any]:
    """Return how many steps clipped, and in how many the early updates were kept, redone or paused.

    The numbers include the warm-up steps. The dict is empty without a plan.
    """
    if session is None:
        return {}
    rule, early = session.pausing, any(session.plan.updated_early)
    return {
        "steps_that_clipped": rule.clipped,
        "early_updates_kept": rule.kept,
        "early_updates_redone": rule.redone,
        "early_updates_paused": rule.steps - rule.kept - rule.redone if early else 0,
    }


def clips(number: int, rate: float) -> bool:
    """Return True if a step clips, so that the fraction ``rate`` of the steps does, evenly spread and not the first."""
    return math.floor((number + 1) * rate) > math.floor(number * rate)


def timed(
    engine: Any, batches: Batches, first: int, args: argparse.Namespace, threads: TrainingThreads | None = None
) -> RunTimes:
    """Train with an engine, and return the times.

    Args:
        first: Number of the first batch. A step takes ``args.accumulation`` batches.
        threads: The training threads. By default, they are those of this process, and are not bound.
    """
    steps, accumulation = args.steps, args.accumulation
    told = args.clip_rate is not None and args.clipping and args.variant != "torchao"
    decided = partial(clips, rate=args.clip_rate) if told else None
    clock, loss = PhaseClock(torch.cuda.is_available(), threads or TrainingThreads()), torch.zeros(())
    # Made before the steps, because the time between two steps belongs to no phase, and updates would continue in it.
    numbers = range(first, first + (WARMUP + steps) * accumulation)
    made = [batches.at(number, engine.device) for number in numbers]
    for number, batch in enumerate(made):
        if number == WARMUP * accumulation:
            reset_peak()  # the peak of training, not that of building the model
        set_clipping(engine, decided and (lambda _: False), number)  # backward must not know whether the step clips
        loss = timed_step(engine, batch, clock, partial(set_clipping, engine, decided, number // accumulation))
    if hasattr(engine.optimizer, "wait"):
        engine.optimizer.wait()
    rows = clock.iterations()
    whole = [
        {phase: sum(row[phase] for row in rows[at : at + accumulation]) for phase in rows[at]}
        for at in range(0, len(rows), accumulation)
    ]
    times = {f"{name}_s": value for name, value in medians(whole, WARMUP).items()}
    return RunTimes(times, whole, clock.threads(), float(loss))


def make_engine(args: argparse.Namespace) -> Any:
    """Return an engine that trains with the variant named on the command line, such as ``stock`` or ``zenflow``.

    The model has the same initial weights for all variants.
    """
    import ebbtide.runtime

    name, _, setting = args.variant.partition(":")
    if name == "torchao":
        from studies.trials.torchao_offload import TorchaoEngine

        return TorchaoEngine(_model(args.size), args.clipping)
    # Memory that torch pins stays pinned, in powers of two. A plan page-locks exactly the memory that it needs.
    offload: dict[str, Any] = {"device": "cpu", "pin_memory": name != "ebbtide"}
    if name == "twin_flow":
        offload["ratio"] = float(setting)
    if name == "superoffload":
        offload["super_offload"] = True
    resident = name in ("no_offload", "deepcompile")  # DeepCompile moves it during the step
    zero: dict[str, Any] = {} if resident else {"offload_optimizer": offload}
    if name == "zenflow":
        zero["zenflow"] = {"topk_ratio": 0.1, "update_interval": 4, "overlap_step": False}
    if args.offload_param:
        zero |= {"offload_param": {"device": "cpu", "pin_memory": True}, "stage3_max_reuse_distance": 0}
    # DeepSpeed alone gets the bucket size that a plan sets if the config gives none.
    zero.setdefault("reduce_bucket_size", PLANNED_BUCKET_ELEMENTS)
    config = ds_config(
        args.micro_batch,
        args.subgroup,
        stage=args.stage,
        clipping=args.clipping,
        offload=not resident,
        accumulation=args.accumulation,
        **zero,
    )
    if name == "deepcompile":
        config["compile"] = {"deepcompile": True, "offload_opt_states": True}
    model = _model(args.size)
    engine = stock_engine(model, config)
    if name == "deepcompile":
        engine.compile()
    if name == "ebbtide":
        plan = Plan.load(args.plan) if args.plan else host_plan(engine, args.subgroup, args.keep)
        ebbtide.runtime.attach(engine, plan, device=args.device)
    return engine


def _model(size: str) -> ByteGPT:
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return ByteGPT(SIZES[size])


def host_plan(engine: Any, subgroup: int, keep: float = 0.0) -> Plan:
    """Return a plan that keeps all optimizer state of an engine in host memory and updates it there.

    Args:
        keep: Fraction of the subgroups that keep their 16-bit parameters in GPU memory. The 16-bit parameters of the
            other subgroups stay where DeepSpeed's config puts them.
    """
    from ebbtide.runtime.zero.checks.private import parameter_location
    from ebbtide.runtime.zero.flat_partitions import subgroups_of

    count = len(subgroups_of(engine.optimizer, subgroup))
    there, kept = parameter_location(engine.optimizer), int(keep * count)
    homes: list[ParameterLocation] = ["device" if i < kept else there for i in range(count)]
    return Plan(subgroup_size=subgroup, ways=tuple(Way("host", home) for home in homes), staging_slots=0)


def _profile(engine: Any, batches: Batches, args: argparse.Namespace) -> dict[str, Any]:
    from ebbtide.profiler import profile_engine

    from studies.bench.byte_gpt import train_step

    numbers = iter(range(10**6))
    workload = profile_engine(engine, lambda live: train_step(live, batches.at(next(numbers), live.device)), args.steps)
    workload.save(args.workload)
    engine.destroy()
    return {
        "variant": "profile",
        "iteration_s": 0.0,
        "loss": 0.0,
        "hash": "",
        "forward_s": workload.forward_s,
        "backward_s": workload.backward_s,
    }


if __name__ == "__main__":
    main()
