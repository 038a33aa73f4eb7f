"""The check in ``tune doctor`` of the checkpoint folder.

It tests if files can be written, and if synchronized files survive a crash of the machine.
"""

import os
import statistics
import tempfile
import time
from pathlib import Path

import psutil
from ebbtide.tuner.doctor.finding import Finding, bad, ok, slow

TRIALS = 8
BLOCK = b"\0" * 4096
# A shorter fsync writes nothing to the medium: the fastest flash drives with capacitors take this long for a block.
LEAST_FSYNC_S = 5e-6
_VOLATILE = ("tmpfs", "ramfs")
_UNSAFE = {"nobarrier", "barrier=0"}


def checkpoint_folder(folder: str) -> list[Finding]:
    """Write, synchronize, rename and remove a small file in the folder for training checkpoints, and report
    problems as findings of ``tune doctor``.
    """
    name = "checkpoint folder"
    where = Path(folder)
    if not where.is_dir():
        return [bad(name, f"{folder} is not a folder", f"mkdir -p {folder}")]
    try:
        fsync_s = _fsync_s(where)
    except OSError as error:
        return [bad(name, f"{folder}: {error}", "choose another folder (--checkpoint-dir), or make this one writable")]
    kind, options = _mount_of(where)
    detail = f"{folder} ({kind}): a sync takes {fsync_s * 1e3:.2f} ms"
    return [ok(name, f"{folder} can be written"), _honesty(detail, kind, options, fsync_s)]


def _honesty(detail: str, kind: str, options: set[str], fsync_s: float) -> Finding:
    name = "fsync"
    if "eatmydata" in os.environ.get("LD_PRELOAD", ""):
        return bad(name, "libeatmydata is loaded: nothing is synced", "unset LD_PRELOAD")
    if kind in _VOLATILE:
        return slow(name, f"{detail}. Its files are lost when the machine stops", "put checkpoint.dir on a disk")
    unsafe = _UNSAFE & options
    if unsafe:
        return bad(
            name,
            f"{detail}; mounted with {', '.join(sorted(unsafe))}",
            "mount it without these options: with them, a power cut loses synced data",
        )
    if fsync_s < LEAST_FSYNC_S:
        return bad(
            name,
            f"{detail}, which is faster than any drive can sync",
            "check for a write cache without a battery, or a file system that ignores fsync",
        )
    return ok(name, detail)


def _fsync_s(folder: Path) -> float:
    handle, path = tempfile.mkstemp(dir=folder, prefix=".ebbtide-doctor-")
    renamed = f"{path}.renamed"
    seconds = []
    try:
        for _ in range(TRIALS):
            os.write(handle, BLOCK)
            begin = time.perf_counter()
            os.fsync(handle)
            seconds.append(time.perf_counter() - begin)
        os.rename(path, renamed)  # noqa: PTH104 - one name to the other
        above = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(above)
        finally:
            os.close(above)
    finally:
        os.close(handle)
        for name in (path, renamed):
            Path(name).unlink(missing_ok=True)
    return statistics.median(seconds)


def _mount_of(folder: Path) -> tuple[str, set[str]]:
    around = [mount for mount in psutil.disk_partitions(all=True) if folder.resolve().is_relative_to(mount.mountpoint)]
    if not around:
        return "unknown file system", set()
    # If several file systems are mounted at the same place, the last one hides the others.
    nearest = max(reversed(around), key=lambda mount: len(mount.mountpoint))
    return nearest.fstype, set(nearest.opts.split(","))
