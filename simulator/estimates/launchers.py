"""The launchers of a training job's ranks, and the number of OpenMP threads that each gives to a rank.

DeepSpeed's updates on the CPU run on OpenMP threads. Their number is ``OMP_NUM_THREADS`` if it is set,
otherwise the number of cores that the rank may use. `torchrun` sets the variable to 1 if it is unset and a
node has more than one rank (``torch/distributed/run.py``). `accelerate launch` starts its ranks by torchrun
and does the same (``num_cpu_threads_per_process``). DeepSpeed's launcher, `srun` and plain Python do not set
it. ebbtide's own updates do not depend on it.
"""

from typing import Literal, get_args

from ebbtide.simulator.workload import Workload

Launcher = Literal["deepspeed", "torchrun", "accelerate", "srun", "python"]
LAUNCHERS: tuple[Launcher, ...] = get_args(Launcher)
ONE_THREAD: tuple[Launcher, ...] = ("torchrun", "accelerate")


def stock_threads(launcher: Launcher, omp_threads: int | None, ranks_per_node: int) -> int | None:
    """Return the number of threads that one rank's DeepSpeed uses for updates on the CPU. None: all that it may use."""
    if omp_threads is None and launcher in ONE_THREAD and ranks_per_node > 1:
        return 1
    return omp_threads


def started(
    workload: Workload, launcher: Launcher | None = None, omp_threads: int | None = None, clip_rate: float | None = None
) -> Workload:
    """Return the workload with other settings of a run: the launcher, with the number of OpenMP threads that it sets,
    and the fraction of steps that clip.

    The number of threads decides how fast DeepSpeed updates on the CPU.

    Args:
        launcher: Program that starts the ranks. None: the workload's number of threads stays, unless ``omp_threads``
            is given.
        omp_threads: ``OMP_NUM_THREADS`` as set by the user. None: not set.
        clip_rate: Fraction of steps that clip gradients or overflow. None: the workload's own.
    """
    changes: dict[str, float | None] = {}
    if launcher is not None or omp_threads is not None:
        changes["stock_threads"] = stock_threads(launcher or "deepspeed", omp_threads, workload.ranks_per_node)
    if clip_rate is not None:
        changes["clip_rate"] = clip_rate
    return workload.model_copy(update=changes) if changes else workload
