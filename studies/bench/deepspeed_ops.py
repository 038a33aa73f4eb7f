"""Compilation of DeepSpeed's host ops ahead of the first engine, safe against interrupted compiles.

python -m studies.bench.deepspeed_ops cpu_adam    # without a name: all ops
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
    """Compile DeepSpeed's host ops: CPU Adam and, without a GPU, the shared-memory collectives.

    The first compile takes about a minute on two cores. The result is cached in torch's extensions
    folder. An op that another process is compiling is waited for.

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
            continue  # this accelerator has no such op
        with _own_lock(_build_folder(op)):
            builder.load(verbose=False)


def _build_folder(op: str) -> Path:
    from torch.utils import cpp_extension

    return Path(cpp_extension._get_build_directory(op, verbose=False))


@contextlib.contextmanager
def _own_lock(folder: Path) -> Iterator[None]:
    """Hold a lock while an op is built, and remove torch's lock if an interrupted build left it.

    torch guards a build with a plain file ``lock``. If the building process is killed, every later
    process waits forever. This flock ends with its process. A process that gets it and finds the
    marker of an earlier build knows that the earlier build is dead.
    """
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
