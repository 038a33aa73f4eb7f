"""Setup of a training job with a single rank, for a study that was started without torchrun. Removal of the shared
memory that killed jobs have left.
"""

import atexit
import contextlib
import logging
import os
import warnings

from ebbtide.runtime.hardware.launcher import free_port, left_shared_buffers, remove_shared_buffers


def become_only_rank(*, quiet: bool = False) -> None:
    """Make this process the only rank of a job, unless a launcher such as torchrun has set up its ranks.

    The environment variables that torch.distributed reads are set, with a port that is free now, so
    that several studies can run at the same time. torch's warnings about renamed collectives are
    silenced, because DeepSpeed calls the old names at every step.

    Args:
        quiet: True to silence DeepSpeed's log too, except for errors.
    """
    if quiet:
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    if "RANK" in os.environ:
        return
    # LOCAL_SIZE as DeepSpeed's launcher sets it. Without it, DeepSpeed on CPUs would start numactl at every reduction.
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    atexit.register(remove_shared_buffers, int(os.environ["MASTER_PORT"]))


def remove_left_buffers() -> None:
    """Remove the shared-memory files that ended DeepSpeed processes have left."""
    for path in left_shared_buffers():
        with contextlib.suppress(OSError):
            path.unlink()
