"""The launchers of a job's ranks, and the number of OpenMP threads that each gives to a rank.

DeepSpeed's updates on the host run on OpenMP threads: as many as a rank may use cores, unless
``OMP_NUM_THREADS`` says otherwise. `torchrun` sets that variable to 1 if a node has more than one rank
and the variable is unset (``torch/distributed/run.py``). `accelerate launch` starts its ranks by torchrun
and does the same (``num_cpu_threads_per_process``). DeepSpeed's launcher, `srun` and a plain interpreter
leave the variable alone. ebbtide's own updates do not depend on it.
"""

from typing import Literal, get_args

from ebbtide.simulator.workload import Workload

Launcher = Literal["deepspeed", "torchrun", "accelerate", "srun", "python"]
LAUNCHERS: tuple[Launcher, ...] = get_args(Launcher)
ONE_THREAD: tuple[Launcher, ...] = ("torchrun", "accelerate")


def stock_threads(launcher: Launcher, omp_threads: int | None, ranks_per_node: int) -> int | None:
    """Return the threads of one rank's host updates in DeepSpeed. None: as many as there are cores.

    Args:
        omp_threads: ``OMP_NUM_THREADS`` as set by the user. None: the launcher decides.
    """
    if omp_threads is None and launcher in ONE_THREAD and ranks_per_node > 1:
        return 1
    return omp_threads


def started(workload: Workload, launcher: Launcher = "deepspeed", omp_threads: int | None = None) -> Workload:
    """Return a workload with the number of OpenMP threads that another launcher would give to its ranks."""
    threads = stock_threads(launcher, omp_threads, workload.ranks_per_node)
    return workload.model_copy(update={"stock_threads": threads})
