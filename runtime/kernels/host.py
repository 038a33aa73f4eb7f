"""The update kernels for the CPU, which are compiled once per machine and called without the GIL."""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from ebbtide.runtime.kernels.step import UpdateStep
from ebbtide.simulator.engines.cache import cache_dir

_SOURCE = Path(__file__).with_name("host_update.cpp")
_FLAGS = [
    "-O3",
    "-march=native",
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
]
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class MissingCompilerError(RuntimeError):
    """An error: the CPU kernels cannot be built, because a C++ compiler is missing or fails."""


def _compiler() -> str:
    wanted = os.environ.get("CXX", "g++")
    compiler = shutil.which(wanted)
    if compiler is None:
        raise MissingCompilerError(
            f"a C++ compiler is needed to build the update kernel, but {wanted!r} was not found: "  # noqa: S608 - prose
            "install g++, or set CXX to another compiler that supports -fopenmp"
        )
    return compiler


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    known = ("model name", "flags", "CPU implementer", "CPU part", "CPU variant", "Features")
    return "".join(line for line in lines[:40] if line.startswith(known))


def build(source: Path) -> Path:
    """Compile one of ebbtide's C++ files, once per machine, and return the path of the shared library.

    Raises:
        MissingCompilerError: There is no compiler, or it refused the source.
    """
    compiler = _compiler()
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    key = "\0".join([source.read_text(encoding="utf-8"), version.stdout, _cpu_model(), *_FLAGS])
    target = cache_dir() / f"{source.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Compiled beside the target and then renamed, so that ranks that compile at the same time never load an incomplete
    # file.
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        out = Path(folder) / target.name
        command = [compiler, *_FLAGS, str(source), "-o", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise MissingCompilerError(f"building the update kernel failed: {' '.join(command)}\n{done.stderr}")
        with out.open("rb") as built:
            os.fsync(built.fileno())  # before the rename, so that a power failure cannot leave an incomplete library
        out.replace(target)
    return target


@functools.cache
def load() -> Any:
    """Return the loaded library of CPU update kernels. Compiling takes about 2 s the first time on a machine.

    Raises:
        MissingCompilerError: There is no compiler, or it refused the source.
    """
    library = ctypes.CDLL(str(build(_SOURCE)))
    pointer, integer, count = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    library.ebbtide_update.argtypes = [
        ctypes.c_char_p,
        pointer,
        pointer,
        pointer,
        integer,
        pointer,
        integer,
        count,
        pointer,
        integer,
        count,
        integer,
    ]
    library.ebbtide_norm.argtypes = [pointer, integer, count, integer]
    library.ebbtide_norm.restype = ctypes.c_double
    library.ebbtide_triad.argtypes = [pointer, pointer, pointer, ctypes.c_float, count, integer]
    library.ebbtide_triad.restype = None
    library.ebbtide_copy.argtypes = [pointer, pointer, count, integer]
    library.ebbtide_copy.restype = None
    return library


def host_update(
    state: Sequence[torch.Tensor],
    grad: torch.Tensor,
    out: torch.Tensor | None,
    step: UpdateStep,
    scale: float = 1.0,
    threads: int = 1,
    tail: int = 0,
    source: Sequence[torch.Tensor] | None = None,
) -> None:
    """Run one optimizer step on the CPU in one pass over memory, and write the model's new parameters to ``out``.

    The GIL is released. The result is bit-identical to DeepSpeed's CPU optimizer on ``grad.float() * scale``.

    Args:
        state: fp32 master parameters and the optimizer's moments, updated in place. All are flat, contiguous
            host tensors of the same length.
        grad: bf16, fp16 or fp32 gradient of the same length, which stays unchanged.
        out: bf16, fp16 or fp32 tensor for the new parameters, or None. It shares no memory with the others.
        scale: Factor that is first applied to the gradient in fp32 (unscale and clip).
        threads: Number of OpenMP threads. The result does not depend on it.
        tail: Number of last elements that DeepSpeed's scalar loop would update (`UpdateRule.tail`).
        source: The old state. If given, it stays unchanged, and the new state is written to ``state``.

    Raises:
        ValueError: The kernel does not support the lengths, dtypes, devices or strides.
    """
    _check(state, grad, out)
    if source is not None:
        _check(source, grad, None)
    scalars = step.scalars(scale)
    error = load().ebbtide_update(
        step.kernel.encode(),
        _addresses(source or state),
        _addresses(state),
        grad.data_ptr(),
        DTYPES[grad.dtype],
        out.data_ptr() if out is not None else None,
        DTYPES[out.dtype] if out is not None else -1,
        grad.numel(),
        scalars.ctypes.data,
        step.variant,
        tail,
        threads,
    )
    assert error == 0, f"host_update.cpp must have {step.kernel}, variant {step.variant}"


def _addresses(state: Sequence[torch.Tensor]) -> Any:
    return (ctypes.c_void_p * 3)(*(tensor.data_ptr() for tensor in state))


def _check(state: Sequence[torch.Tensor], grad: torch.Tensor, out: torch.Tensor | None) -> None:
    tensors = {f"state[{index}]": tensor for index, tensor in enumerate(state)} | {"grad": grad}
    if out is not None:
        tensors["out"] = out
    length = state[0].numel()
    for name, tensor in tensors.items():
        dtypes = (torch.float32,) if name.startswith("state") else tuple(DTYPES)
        if tensor.dtype not in dtypes:
            raise ValueError(f"{name} must have one of the dtypes {dtypes}, but got {tensor.dtype}")
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.numel() != length:
            raise ValueError(
                f"{name} must be a contiguous host tensor of {length} elements, but got "
                f"{tensor.numel()} on {tensor.device}, strides {tensor.stride()}"
            )


def norm(tensor: torch.Tensor) -> float:
    """Return the 2-norm of a flat host tensor, bit-identical to torch's norm in float64 but without a float64 copy.

    If the order in which torch adds squares is unknown on this machine, torch computes the norm.
    """
    lanes = _norm_lanes()
    if lanes == 0 or not tensor.is_contiguous() or tensor.dtype not in DTYPES:
        return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
    result: float = load().ebbtide_norm(tensor.data_ptr(), DTYPES[tensor.dtype], tensor.numel(), lanes)
    return result


@functools.cache
def _norm_lanes() -> int:
    generator = torch.Generator().manual_seed(0)
    samples = [torch.randn(n, generator=generator) for n in (5, 1003, 40009)]
    for lanes in (8, 4, 2):
        if all(_same_norm(sample, lanes) for sample in samples):
            return lanes
    return 0


def _same_norm(sample: torch.Tensor, lanes: int) -> bool:
    ours = load().ebbtide_norm(sample.data_ptr(), 0, sample.numel(), lanes)
    return bool(ours == float(sample.to(torch.float64).norm(2)))


def triad(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, threads: int) -> None:
    """Compute ``a = b + 2 c`` on fp32 host tensors, so that the caller can measure DRAM bandwidth."""
    _check_copy(a, b)
    load().ebbtide_triad(a.data_ptr(), b.data_ptr(), c.data_ptr(), 2.0, a.numel(), threads)


def copy(to: torch.Tensor, source: torch.Tensor, threads: int = 1) -> None:
    """Copy between contiguous host tensors of the same size, while the GIL is released."""
    _check_copy(to, source)
    size = to.numel() * to.element_size()
    load().ebbtide_copy(to.data_ptr(), source.data_ptr(), size, threads)


def _check_copy(to: torch.Tensor, source: torch.Tensor) -> None:
    if to.nbytes != source.nbytes or not (to.is_contiguous() and source.is_contiguous()):
        kinds = ["contiguous" if t.is_contiguous() else "not contiguous" for t in (source, to)]
        raise ValueError(
            "source and target of a copy must be contiguous tensors of the same size, but the source is "
            f"{kinds[0]} with {source.nbytes} bytes and the target is {kinds[1]} with {to.nbytes} bytes"
        )
