"""The log line of a run that names the change with which its samples would train fastest. Nothing is changed."""

import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from ebbtide.runtime.execution.session import Session
from ebbtide.simulator.schedules.footprint import footprint
from ebbtide.simulator.workload import Workload

logger = logging.getLogger("ebbtide")

MOST_S = 120.0
# A process of its own, because a thread of this one would take turns with the training thread. It finds the modules
# that this process finds, and none in the working folder.
PYTHON = (sys.executable, "-P", "-c")
_CODE = "import sys; sys.path[:] = {path!r}; from ebbtide.tuner.advice.running import main; main()"


def memory_of(workload: Workload, session: Session, free_device: int, free_host: int) -> dict[str, int | None]:
    """Return the fields of `RunningJob` about memory, for a session whose workload was just watched.

    Args:
        free_device, free_host: Bytes that this rank may use beside those that it holds.
    """
    held = footprint(workload, session.plan)
    host_bytes = (held["host"] + free_host) * workload.ranks_per_node
    if session.device.name != "cuda":
        return {"host_bytes": host_bytes}
    activations = max(0, torch.cuda.max_memory_allocated() - held["device"])
    return {
        "host_bytes": host_bytes,
        "device_bytes": held["device"] + activations + free_device,
        "activation_bytes": activations,
    }


def tell_faster(describe: Callable[[], Mapping[str, Any]], watched: Mapping[str, Any]) -> None:
    """Log the change with which a run's samples would train fastest, or why none can be named. Another process finds
    it, so that training does not wait.

    Args:
        describe: Function for the fields of `RunningJob` that the engine knows.
        watched: The other fields of `RunningJob`.
    """
    from ebbtide.tuner.advice.running import RunningJob, UnknownRunError, unknown

    try:
        run = RunningJob.model_validate({**describe(), **watched})
    except UnknownRunError as error:
        logger.info(unknown(error))
        return
    threading.Thread(target=_tell, args=(run.model_dump_json(),), name="ebbtide-faster", daemon=True).start()


def _tell(run: str) -> None:
    code = _CODE.format(path=[folder for folder in sys.path if folder])
    try:
        done = subprocess.run([*PYTHON, code], input=run, capture_output=True, text=True, timeout=MOST_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        logger.info("no faster setting is named, because the search for one failed: %s", error)
        return
    if done.returncode:
        problem = (done.stderr.strip() or str(done.returncode)).splitlines()[-1]
        logger.info("no faster setting is named, because the search for one failed: %s", problem)
    elif done.stdout:
        logger.info(done.stdout)
