"""The peak of the host memory that is resident for this process."""

from pathlib import Path


def reset_host_peak() -> None:
    """Reset the peak of this process's resident host memory, so that `host_peak_bytes` measures from now on."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def host_peak_bytes() -> int:
    """Return the peak resident host memory of this process in bytes, since `reset_host_peak` or the process's start."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
