"""Parsers for sizes, rates, durations and fractions as people write them, such as ``24GiB`` or ``5%``."""

import math
import re
from pathlib import Path

_SIZES = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "k": 2**10,  # as Slurm writes sizes: 64G
    "m": 2**20,
    "g": 2**30,
    "t": 2**40,
}
_SPEEDS = {"gflops": 1e9, "tflops": 1e12, "pflops": 1e15}
_ENDURANCE = {"": 10**12, "tb": 10**12, "tbw": 10**12, "pb": 10**15, "pbw": 10**15}
_DURATIONS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_LEAST_BARE_SIZE = 10**6  # a smaller number without a unit probably means GiB, not bytes
LONGEST_S = 1e10  # three centuries, longer than any training
_PATTERN = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][0-9]+)?)\s*([a-zA-Z]*)\s*")


def seconds_text(seconds: float) -> str:
    """Return a duration in seconds as text, in milliseconds below a second: ``4.45 s``, ``255 ms``, ``2.3 ms``."""
    if seconds >= 0.9995:
        return f"{seconds:.0f} s" if seconds >= 100 else f"{seconds:.2f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.0995 else f"{seconds * 1e3:.1f} ms"


def least_text(seconds: float) -> str:
    """Return text like `seconds_text`, but rounded down, so that a lower bound's text is never above the bound."""
    digit = 1.0 if seconds >= 100 else 1e-2 if seconds >= 0.9995 else 1e-3 if seconds >= 0.0995 else 1e-4
    return seconds_text(math.floor(seconds / digit) * digit)


def size_bytes(text: str) -> int:
    """Parse a size such as ``24GiB``, ``100 GB`` or ``1e9`` into bytes.

    Raises:
        ValueError: The text is no positive number with a known unit, or a small number without a unit.
    """
    value = int(_parse(text, _SIZES, "a size such as 24GiB or 100GB"))
    number = text.strip()
    if value < _LEAST_BARE_SIZE and not number[-1].isalpha():
        raise ValueError(f"a size needs its unit, but got {text!r}: write {number}GiB or {number}GB")
    return value


def directory_bytes(text: str) -> tuple[str, int]:
    """Parse ``/mnt/nvme:500GB`` into a directory, as an absolute path, and a size in bytes.

    Raises:
        ValueError: The directory or the size is missing, or the size is invalid.
    """
    directory, colon, size = text.rpartition(":")
    if not directory or not colon:
        raise ValueError(
            f"a folder and a size for optimizer state on a drive must be given as DIR:SIZE, such as /mnt/nvme:500GB, "
            f"but got {text!r}. If you mean the write rate of checkpoints, use `tune plan --checkpoint-rate`"
        )
    return str(Path(directory).absolute()), size_bytes(size)


def endurance_bytes(text: str) -> float:
    """Parse a drive's rated write endurance, such as ``600`` (terabytes), ``600TBW`` or ``14PB``, into bytes."""
    return _parse(text, _ENDURANCE, "an endurance such as 600 (terabytes written) or 14PB")


def rate_bytes_per_s(text: str) -> float:
    """Parse a rate such as ``2GB/s`` or ``500MB`` into bytes per second."""
    amount = text.strip().removesuffix("/s")
    return _parse(amount, _SIZES, "a rate such as 2GB/s or 500MB/s")


def flops_per_s(text: str) -> float:
    """Parse a speed such as ``125TFLOPS`` or ``1.2 PFLOP/s`` into floating-point operations per second."""
    amount = text.strip().lower().replace("flop/s", "flops")
    return _parse(amount, _SPEEDS, "a speed such as 125TFLOPS")


def duration_s(text: str) -> float:
    """Parse a duration such as ``4h``, ``30m`` or ``90s`` into seconds.

    Raises:
        ValueError: The text is no positive number with a known unit, or is longer than three centuries.
    """
    value = _parse(text, _DURATIONS, "a duration with its unit, such as 4h, 30m or 90s,")
    if value > LONGEST_S:
        raise ValueError(f"a duration must be at most {LONGEST_S:g} s, but got {text!r}")
    return value


def chance(text: str) -> float:
    """Parse a fraction such as ``5%`` or ``0.05``, with 100% allowed."""
    return 1.0 if text.strip() in ("100%", "1", "1.0") else share(text)


def share(text: str) -> float:
    """Parse a fraction such as ``5%`` or ``0.05``, which must be below 100%.

    Raises:
        ValueError: The text is no number, or is not in [0%, 100%).
    """
    number = text.strip()
    try:
        value = float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise ValueError(f"a share in [0%, 100%) such as 5% is needed, but got {text!r}")
    return value


def _parse(text: str, units: dict[str, int] | dict[str, float], wanted: str) -> float:
    match = _PATTERN.fullmatch(text)
    factor = units.get(match.group(2).lower()) if match else None
    value = float(match.group(1)) * factor if match and factor is not None else 0.0
    # float() turns 1e400 into infinity, which is no valid size or duration.
    if not 0 < value < math.inf:
        raise ValueError(f"{wanted} is needed, greater than 0 and finite, but got {text!r}")
    return value
