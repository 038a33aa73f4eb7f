"""Two ranks of a job, forked from a process that has all imports done (`tests.prepared`).

Each rank runs ``main(folder)`` of a module. With torchrun, the start and the imports of three processes would take most
of the time of a test.

    python -m tests.runtime.forked_ranks MODULE FOLDER ARGUMENTS
"""

import importlib
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from ebbtide.runtime.hardware.launcher import free_port, remove_shared_buffers

from tests.conftest import without_a_rank
from tests.prepared import Started

RANKS = 2
LIMIT_S = 400  # a process that hangs reaches this limit. Compiling on a new machine does not


def launch(module, folder, *arguments):
    """Run ``main`` of a module on two ranks, wait until both end, and return a `subprocess.CompletedProcess` with the
    output of both. If a rank fails, the other is terminated, as torchrun does.
    """
    words = ["-m", "tests.runtime.forked_ranks", module, folder, *arguments]
    port = free_port()
    ranks = [Started(words, env=without_a_rank() | variables(rank, port)) for rank in range(RANKS)]
    with ThreadPoolExecutor(RANKS) as pool:
        waiting = [pool.submit(rank.wait, LIMIT_S) for rank in ranks]
        for one in as_completed(waiting):
            if one.exception() or one.result().returncode:
                for rank in ranks:
                    rank.send_signal(signal.SIGTERM)
    remove_shared_buffers(port)
    ended = [one.result() for one in waiting]
    output = ("".join(rank.stdout for rank in ended), "".join(rank.stderr for rank in ended))
    return subprocess.CompletedProcess(words, next((r.returncode for r in ended if r.returncode), 0), *output)


def variables(rank, port):
    """Return the environment variables of a rank."""
    made = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    made |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"), RANKS)
    return {name: str(value) for name, value in made.items()}


def main():
    import deepspeed

    module = importlib.import_module(sys.argv[1])
    deepspeed.init_distributed()
    module.main(Path(sys.argv[2]), *sys.argv[3:])


if __name__ == "__main__":
    main()
