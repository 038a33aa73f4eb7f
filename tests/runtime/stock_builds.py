"""DeepSpeed's CPU ops built as its builder would build them on other machines.

Its own sources and flags, but seconds instead of a minute: a light header stands in for
torch/extension.h, most of which the sources do not use, and ctypes for pybind.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import subprocess
from pathlib import Path

import torch

from runtime.kernels.host import cache_dir

# What `simd_width` and -march=native come to there. "scalar": neither cpuinfo nor lscpu can be had.
# "unfused": a CPU of before 2013, which has no fused multiply-add.
BUILDS = {
    "avx512": ("-march=skylake-avx512", "-D__AVX512__"),
    "avx2": ("-march=haswell", "-D__AVX256__"),
    "scalar": ("-march=haswell", "-D__SCALAR__"),
    "unfused": ("-march=sandybridge", "-D__SCALAR__"),
}
WIDTHS = {"avx512": 16, "avx2": 8}
_FLAGS = ["-shared", "-fPIC", "-std=c++20", "-O3", "-Wno-reorder", "-fopenmp"]

_EXTENSION_H = """
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <math.h>  // torch brings it in: sqrt(float) is then not sqrt(double)
#include <cstring>
#include <memory>
#include <unordered_map>
namespace torch {
using at::Tensor;
constexpr auto kFloat32 = at::kFloat;
}
"""
_ADAM = """
#include "adam/cpu_adam_impl.cpp"
static at::Tensor flat(float* data, int64_t n) { return at::from_blob(data, {n}, at::kFloat); }
extern "C" void create_adam(int id, float lr, float b1, float b2, float eps, float wd, bool adamw)
{ create_adam_optimizer(id, lr, b1, b2, eps, wd, adamw, false); }
extern "C" void destroy_adam(int id) { destroy_adam_optimizer(id); }
extern "C" void adam_update(int id, int64_t step, float lr, float b1, float b2, float eps, float wd,
                            bool correct, float* p, float* g, float* m, float* v, int64_t n)
{
    at::Tensor params = flat(p, n), grads = flat(g, n), first = flat(m, n), second = flat(v, n);
    ds_adam_step(id, step, lr, b1, b2, eps, wd, correct, params, grads, first, second);
}
"""
_F, _I, _P, _L, _B = (
    ctypes.c_float, ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_bool,
)  # fmt: skip


def runs_here(build: str) -> bool:
    """Whether this CPU has the instructions of the build."""
    flags = set(Path("/proc/cpuinfo").read_text().split())
    return {"avx512": "avx512f", "unfused": "avx"}.get(build, "fma") in flags


class StockAdam:
    """`deepspeed.ops.adam.cpu_adam_op`, of one build."""

    def __init__(self, build: str) -> None:
        self.__file__ = str(_library("adam", _ADAM, build))
        self._library = ctypes.CDLL(self.__file__)
        self._library.create_adam.argtypes = [_I, *[_F] * 5, _B]
        self._library.adam_update.argtypes = [_I, _L, *[_F] * 5, _B, *[_P] * 4, _L]

    def create_adam(self, number, *settings):
        self._library.create_adam(number, *settings[:-1])  # the last: whether to print it

    def destroy_adam(self, number):
        self._library.destroy_adam(number)

    def adam_update(self, *values):
        *scalars, p, g, m, v = values
        pointers = [tensor.data_ptr() for tensor in (p, g, m, v)]
        self._library.adam_update(*scalars, *pointers, p.numel())


stock_adam = functools.cache(StockAdam)


def _library(name: str, source: str, build: str) -> Path:
    import deepspeed

    sources = Path(deepspeed.__file__).parent / "ops" / "csrc"
    own = [source, _EXTENSION_H, *BUILDS[build], deepspeed.__version__, torch.__version__]
    key = hashlib.sha256("\0".join(own).encode()).hexdigest()[:16]
    folder = cache_dir() / "tests" / f"{name}-{build}-{key}"
    library = folder / "op.so"
    if library.exists():
        return library
    (folder / "torch").mkdir(parents=True, exist_ok=True)
    (folder / "torch" / "extension.h").write_text(_EXTENSION_H)
    (folder / "op.cpp").write_text(source)
    lib = Path(torch.__file__).parent / "lib"
    command = [
        "g++", *_FLAGS, *BUILDS[build], f"-I{folder}", f"-I{sources}", f"-I{sources}/includes",
        "-isystem", str(lib.parent / "include"), str(folder / "op.cpp"), "-o", f"{library}.new",
        f"-L{lib}", "-lc10", "-ltorch_cpu",
    ]  # fmt: skip
    subprocess.run(command, check=True)
    Path(f"{library}.new").rename(library)
    return library
