"""Time of an optimizer step with stock DeepSpeed and with ebbtide, measured in turn in one process.

    python -m studies.update_phase --json update_phase.json

Two engines with the same seeds take each step one after the other, on the same batch. The plan has `overlap_forward`
off, so that ebbtide's step contains its whole update, as stock DeepSpeed's does.

The study measures the cost of the update. So forward and backward, which both engines compute in the same way, are kept
short. Otherwise their matrix products would take most of the time on a CPU without bf16 instructions. The model
predicts text byte by byte, and a training sample is a text of a single byte. `--sequence` sets a larger number of
bytes.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from ebbtide.runtime import session_of
from ebbtide.simulator import Plan, Way
from rich.progress import track

from studies.bench.bits import differences, state_of
from studies.bench.byte_gpt import SIZES, Batches, ByteGPT, ds_config, stock_engine
from studies.bench.console import publish, study_parser
from studies.bench.phase_clock import PhaseClock, medians, timed_step
from studies.bench.rank import become_only_rank

WARMUP = 2
# Parameter and moments read and written, gradient read, new parameter written past the caches.
KERNEL_BYTES_PER_PARAM = 28
TRIAD_BYTES_PER_ELEMENT = 16  # two reads, one write, and the read of the cache line before the write


def main() -> None:
    args = _arguments()
    become_only_rank()
    figures = measure(args.size, args.steps, args.sequence, args.subgroup)
    figures |= kernel_dram_fraction(args.kernel_elements)
    publish("update_phase", args.json, figures)


def _arguments() -> argparse.Namespace:
    parser = study_parser("update_phase", __doc__)
    parser.add_argument("--size", default="200m", choices=sorted(SIZES))
    parser.add_argument("--steps", type=int, default=9, help="number of timed steps, after 2 warm-up steps")
    parser.add_argument(
        "--sequence", type=int, default=1, help="number of bytes in a training sequence of the byte-level model"
    )
    parser.add_argument(
        "--subgroup", type=int, default=20_000_000, help="elements per subgroup (DeepSpeed's sub_group_size)"
    )
    parser.add_argument("--kernel-elements", type=int, default=64_000_000)
    return parser.parse_args()


def measure(size: str, steps: int, sequence: int, subgroup: int) -> dict[str, Any]:
    """Measure the phases of training steps with stock DeepSpeed and with ebbtide, which train in turn, one step at a
    time.

    The returned dict has the median seconds of each phase, ebbtide's speed-ups, and ``bit_identical``: True if losses
    and final state of both are bit-identical.
    """
    stock = _engine(size, sequence, subgroup)
    ours = _engine(size, sequence, subgroup)
    stock_bytes = _stock_host_bytes(stock)
    _attach(ours, subgroup)
    device = stock.device
    batches = Batches(1, sequence)
    clocks = {name: PhaseClock(device.type == "cuda") for name in ("stock", "ebbtide")}
    losses_equal = True
    for number in track(range(WARMUP + steps), description="training with DeepSpeed alone and with ebbtide"):
        batch = batches.at(number, device)
        expected = timed_step(stock, batch, clocks["stock"])
        received = timed_step(ours, batch, clocks["ebbtide"])
        losses_equal = losses_equal and torch.equal(expected, received)
    differing = differences(state_of(ours), state_of(stock))
    theirs = medians(clocks["stock"].iterations(), WARMUP)
    mine = medians(clocks["ebbtide"].iterations(), WARMUP)
    params = sum(stock.optimizer.fp16_partitioned_groups_flat_numel)

    figures = {
        "params": params,
        "steps": steps,
        "sequence": sequence,
        "speedup": theirs["step"] / mine["step"],
        "backward_speedup": theirs["backward"] / mine["backward"],
        "iteration_speedup": theirs["iteration"] / mine["iteration"],
        "bit_identical": losses_equal and not differing,
        "differing": list(differing[:10]),
        "stock_host_bytes_per_param": stock_bytes / params,
        "ebbtide_host_bytes_per_param": session_of(ours).host_bytes() / params,
    }
    for phase in ("forward", "backward", "step", "iteration"):
        figures[f"stock_{phase}_s"], figures[f"ebbtide_{phase}_s"] = theirs[phase], mine[phase]
    ours.destroy()
    stock.destroy()
    return figures


def _engine(size: str, sequence: int, subgroup: int) -> Any:
    return stock_engine(ByteGPT(SIZES[size].with_sequence(sequence)), ds_config(1, subgroup))


def _attach(engine: Any, subgroup: int) -> None:
    import ebbtide.runtime

    count = len(engine.optimizer.fp16_partitioned_groups_flat)
    plan = Plan(subgroup_size=subgroup, ways=Way.each(["host"] * count), overlap_forward=False)
    ebbtide.runtime.attach(engine, plan)


def _stock_host_bytes(engine: Any) -> int:
    optimizer = engine.optimizer
    masters = optimizer.fp32_partitioned_groups_flat
    held = sum(m.nbytes + m.grad.nbytes for m in masters)
    moments = 2 * sum(m.nbytes for m in masters)  # created in the first step
    return held + moments + optimizer.grad_partitions_flat_buffer.nbytes


def kernel_dram_fraction(elements: int, repeats: int = 7) -> dict[str, float]:
    """Measure the DRAM traffic per second of ebbtide's CPU kernel for the Adam update.

    The returned dict also has the traffic of a plain triad loop (which sums two arrays into a third) and the ratio.
    """
    from ebbtide.runtime.kernels.adam import AdamStep
    from ebbtide.runtime.kernels.host import host_update, triad

    p, m, v = (torch.rand(elements) for _ in range(3))
    grad, out = torch.randn(elements).bfloat16(), torch.empty(elements, dtype=torch.bfloat16)
    state, step = (p, m, v), AdamStep(1e-4, 0.9, 0.999, 1e-8, 0.1, 0.1, 1.0)
    threads = torch.get_num_threads()
    seconds: dict[str, list[float]] = {"kernel": [], "triad": []}
    for _ in range(repeats):
        seconds["kernel"].append(_timed(lambda: host_update(state, grad, out, step, 0.5, threads)))
        seconds["triad"].append(_timed(lambda: triad(p, m, v, threads)))
    kernel = elements * KERNEL_BYTES_PER_PARAM / statistics.median(seconds["kernel"])
    plain = elements * TRIAD_BYTES_PER_ELEMENT / statistics.median(seconds["triad"])
    return {
        "kernel_dram_bytes_per_s": kernel,
        "triad_dram_bytes_per_s": plain,
        "kernel_dram_fraction": kernel / plain,
        "kernel_params_per_s": elements / statistics.median(seconds["kernel"]),
        "threads": threads,
    }


def _timed(work: Callable[[], None]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
