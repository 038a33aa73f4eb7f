"""Functions for tests of ebbtide's Triton kernels for optimizer updates, on a machine without a GPU.

Triton compiles the kernels to PTX code and machine code of several GPU generations. The module `ptx_to_cpp` translates
the PTX code to C++, and the compiled C++ runs on the CPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import inspect
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from ebbtide.runtime.kernels.host import _cpu_model
from ebbtide.simulator.engines.cache import cache_dir

from tests.runtime.evidence import ptx_to_cpp

TRITON = tuple(map(int, version("triton").split(".")[:2])) if find_spec("triton") else (0, 0)
# The assembler of Triton 3.2 supports GPUs up to Hopper, and not Blackwell.
ARCHITECTURES = (80, 90, 100, 120) if TRITON >= (3, 3) else (80, 90)
BLOCK = 1024
TRITONS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# Dtypes of gradient and parameter on the GPU: for sums in 16 bits and in fp32, and for kept gradients.
WIRES = [
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
]


@dataclass(frozen=True)
class Form:
    """A compiled version of an update kernel that an optimizer step may run: the kernel (named after its
    optimizer), its variant (the kind of weight decay), the dtypes, and the GPU generation.

    Attributes:
        aligned: True if pointers and lengths are multiples of 16, so that Triton loads four words at a time.
    """

    kernel: str
    variant: int
    grad: torch.dtype
    out: torch.dtype
    architecture: int
    aligned: bool = True

    @property
    def name(self) -> str:
        types = f"{TRITONS[self.grad]}_{TRITONS[self.out]}"
        return f"{self.kernel}{self.variant}_{types}_{self.architecture}_{int(self.aligned)}"


def compiled(form: Form, *, assembled: bool) -> dict[str, Any]:
    """Compile an update kernel with Triton without a GPU. Return Triton's output as a dict with ``ptx`` and, if
    ``assembled``, ``cubin``.

    Triton caches its output. The key of Triton's cache does not include ``assembled``, so outputs with and
    without ``cubin`` are cached in separate folders.
    """
    import triton
    from ebbtide.runtime.kernels.device import KERNELS
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend

    kernel = KERNELS[form.kernel]
    types = {
        "grad_ptr": f"*{TRITONS[form.grad]}",
        "out_ptr": f"*{TRITONS[form.out]}",
        "n": "i32",
        "tail_begin": "i32",
        "VARIANT": "constexpr",
        "BLOCK": "constexpr",
    }
    names = kernel.arg_names
    signature = {n: types.get(n, "*fp32" if n.endswith("_ptr") else "fp32") for n in names}
    sixteens = [i for i, n in enumerate(names) if form.aligned and signature[n] in ("*fp32", "*bf16", "*fp16", "i32")]
    source = _source(kernel, signature, {"VARIANT": form.variant, "BLOCK": BLOCK}, sixteens)
    target = GPUTarget("cuda", form.architecture, 32)
    with pytest.MonkeyPatch.context() as patch:
        kept = cache_dir() / "tests" / f"triton-{'cubin' if assembled else 'ptx'}"
        patch.setenv("TRITON_CACHE_DIR", str(kept))
        if not assembled:  # assembling takes half of the time
            patch.setattr(CUDABackend, "make_cubin", staticmethod(lambda *_: b""))
        made = triton.compile(source, target=target, options={"enable_fp_fusion": False})
    return dict(made.asm)


def _source(kernel: Any, signature: dict[str, str], constants: dict[str, int], sixteens: list[int]) -> Any:
    from triton.compiler import ASTSource

    if "constexprs" in inspect.signature(ASTSource).parameters:
        at = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        attrs = {(i,): [["tt.divisibility", 16]] for i in sixteens}
        return ASTSource(fn=kernel, signature=signature, constexprs=at, attrs=attrs)
    from triton.backends.compiler import AttrsDescriptor  # the API of Triton 3.2

    attrs = AttrsDescriptor.from_hints(dict.fromkeys(sixteens, 16))
    types = {n: t for n, t in signature.items() if n not in constants}
    return ASTSource(fn=kernel, signature=types, constants=constants, attrs=attrs)


def library(functions: list[str]) -> Any:
    """Compile C++ functions into a shared library, cache this library, and load it.

    Args:
        functions: Source texts that `ptx_to_cpp.translate` returned.
    """
    source = ptx_to_cpp.HEAD + "\n".join(functions)
    flags = ["-O0", "-march=native", "-ffp-contract=off", "-std=c++17", "-shared", "-fPIC", "-w"]

    def make(made: Path) -> None:
        command = ["g++", *flags, "-x", "c++", "-", "-o", str(made)]
        subprocess.run(command, input=source.encode(), check=True)

    key = "\0".join([source, *flags, _cpu_model()])
    return ctypes.CDLL(str(_kept("ptx", key.encode(), make)))


def _kept(name: str, key: bytes, make: Callable[[Path], object]) -> Path:
    path = cache_dir() / "tests" / f"{name}-{hashlib.sha256(key).hexdigest()[:16]}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / "made"
            make(made)
            made.rename(path)
    return path


def run(
    function: Any, state: list[torch.Tensor], grad: torch.Tensor, out: torch.Tensor, scalars: list[float], tail: int
) -> None:
    """Run one optimizer update with a kernel translated to C++, with the arguments that
    `ebbtide.runtime.kernels.device.device_update` passes on a GPU.
    """
    n = grad.numel()
    arguments: list[Any] = [ctypes.c_uint64(t.data_ptr()) for t in (*state, grad, out)]
    arguments += [ctypes.c_int32(n), ctypes.c_int32(n - tail)]
    arguments += [ctypes.c_float(value) for value in scalars]
    pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
    function(pointers, ctypes.c_uint32(-(-n // BLOCK)))


def counted(text: str, *patterns: str) -> list[int]:
    """Return how often each instruction pattern occurs in a listing of PTX or machine code."""
    return [len(re.findall(pattern, text)) for pattern in patterns]


def sass(cubin: bytes) -> str:
    """Return the listing of a kernel's machine code by the disassembler that Triton ships. The result is cached."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"

    def make(made: Path) -> None:
        image = made.with_suffix(".cubin")
        image.write_bytes(cubin)
        listed = subprocess.run([tool, "-c", image], capture_output=True, check=True)
        made.write_bytes(listed.stdout)

    return _kept("sass", triton.__version__.encode() + cubin, make).read_text()
