"""Compilation of DeepSpeed's CPU ops before a study builds its first engine.

    python -m studies.bench.deepspeed_ops cpu_adam    # without a name: all ops that the studies use

A stale lock of torch, left by a compilation that was killed, does not block this one.
"""

import contextlib
import fcntl
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

BUILDERS = {"cpu_adam": "CPUAdamBuilder", "deepspeed_shm_comm": "ShareMemCommBuilder"}


def build_host_ops(ops: Iterable[str] = BUILDERS) -> None:
    """Compile DeepSpeed's CPU ops with the given names, by default all that the studies use.

    These are CPU Adam and, on a machine without a GPU, the shared-memory collectives. The first compilation
    takes about a minute on two cores, and its result is cached in torch's extensions folder. If another
    process is compiling an op, this call waits for that process.

    Raises:
        RuntimeError: If ninja is not on PATH, or the compiler fails.
        KeyError: If an op is unknown.
    """
    from deepspeed.accelerator import get_accelerator

    if shutil.which("ninja") is None:
        raise RuntimeError(
            "DeepSpeed compiles its ops with ninja, which must be on PATH, but it is not: "
            "run through make, or put .venv/bin on PATH"
        )
    for op in ops:
        builder: Any = get_accelerator().create_op_builder(BUILDERS[op])
        if builder is None or "NotImplemented" in type(builder).__name__:
            continue  # DeepSpeed has no such op for this accelerator
        with _own_lock(_build_folder(op)):
            builder.load(verbose=False)


def _build_folder(op: str) -> Path:
    from torch.utils import cpp_extension

    return Path(cpp_extension._get_build_directory(op, verbose=False))


@contextlib.contextmanager
def _own_lock(folder: Path) -> Iterator[None]:
    # torch marks a running compilation with a plain file named ``lock``. If the compiling process is killed, this file
    # stays, and every later process waits forever. The lock held here is an flock, which the system releases when its
    # process ends.
    marker = folder / "ebbtide-building"
    with (folder / "ebbtide-lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        if marker.exists():
            (folder / "lock").unlink(missing_ok=True)
        marker.touch()
        yield
        marker.unlink()


if __name__ == "__main__":
    build_host_ops(sys.argv[1:] or BUILDERS)
