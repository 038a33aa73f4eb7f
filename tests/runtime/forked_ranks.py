"""Two ranks of a job, forked from a process that has all imports done.

    python -m tests.runtime.forked_ranks MODULE FOLDER

Each rank runs ``main(folder)`` of the module. With torchrun, the start and the imports of a second
rank would take four seconds.
"""

import importlib
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

from ebbtide.runtime.hardware.launcher import free_port, remove_shared_buffers

from studies.bench.forked import Forked

RANKS = 2
LIMIT_S = 400  # a hang would run into it; compiling on a fresh machine does not


def launch(module, folder, environment):
    """Run a module in a process that forks two ranks, wait until this process ends, and return its
    `subprocess.CompletedProcess`. The captured output includes the output of every failed rank.
    """
    return subprocess.run(
        [sys.executable, "-m", "tests.runtime.forked_ranks", module, str(folder)],
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def work(module, folder, rank, port):
    os.environ.update(
        RANK=f"{rank}",
        LOCAL_RANK=f"{rank}",
        WORLD_SIZE=f"{RANKS}",
        LOCAL_WORLD_SIZE=f"{RANKS}",
        LOCAL_SIZE=f"{RANKS}",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=f"{port}",
    )
    import deepspeed

    deepspeed.init_distributed()
    module.main(folder)


def main():
    from studies.bench.many_engines import answer_once
    from studies.checkpoints.run import warm_up

    folder, port = Path(sys.argv[2]), free_port()
    warm_up()
    module = importlib.import_module(sys.argv[1])
    answer_once()
    ranks = [Forked(partial(work, module, folder, rank, port), folder / f"rank{rank}.log") for rank in range(RANKS)]
    failed = [one for one in ranks if one.ended(LIMIT_S)]
    remove_shared_buffers(port)
    sys.exit("\n".join(one.output for one in failed) or None)


if __name__ == "__main__":
    main()
