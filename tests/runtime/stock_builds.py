"""Builds of DeepSpeed's CPU optimizer ops for several kinds of CPU, such as CPUs without AVX-512.

The sources are DeepSpeed's, and the flags are those that DeepSpeed's own builder would choose on such a CPU. The build
takes seconds instead of a minute, because a small header replaces torch/extension.h, most of which the sources do not
use, and ctypes replaces pybind.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from ebbtide.simulator.engines.cache import cache_dir

# The results of `simd_width` and -march=native there. "scalar": neither cpuinfo nor lscpu is available. "unfused": a
# CPU from before 2013, without fused multiply-add.
BUILDS = {
    "avx512": ("-march=skylake-avx512", "-D__AVX512__"),
    "avx2": ("-march=haswell", "-D__AVX256__"),
    "scalar": ("-march=haswell", "-D__SCALAR__"),
    "unfused": ("-march=sandybridge", "-D__SCALAR__"),
}
HERE = "avx512" if "avx512f" in Path("/proc/cpuinfo").read_text() else "avx2"
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
_COMMON = """
struct Module { template <class... T> void def(T...) {} };
#define PYBIND11_MODULE(name, m) static void bindings(Module& m)
#include "%s"
static at::Tensor flat(float* data, int64_t n) { return at::from_blob(data, {n}, at::kFloat); }
"""
_ADAM = """
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
_LION = """
extern "C" void create_lion(int id, float lr, float b1, float b2, float wd)
{ create_lion_optimizer(id, lr, b1, b2, wd, false); }
extern "C" void destroy_lion(int id) { destroy_lion_optimizer(id); }
extern "C" void lion_update(int id, int64_t step, float lr, float b1, float b2, float wd,
                            float* p, float* g, float* m, int64_t n)
{
    at::Tensor params = flat(p, n), grads = flat(g, n), first = flat(m, n);
    ds_lion_step(id, step, lr, b1, b2, wd, params, grads, first);
}
"""
_ADAGRAD = """
extern "C" void create_adagrad(int id, float lr, float eps, float wd)
{ create_adagrad_optimizer(id, lr, eps, wd, false); }
extern "C" void destroy_adagrad(int id) { destroy_adagrad_optimizer(id); }
extern "C" void adagrad_update(int id, int64_t step, float lr, float eps, float wd,
                               float* p, float* g, float* v, int64_t n)
{
    at::Tensor params = flat(p, n), grads = flat(g, n), sum = flat(v, n);
    ds_adagrad_step(id, step, lr, eps, wd, params, grads, sum);
}
"""
_F, _I, _P, _L, _B = (ctypes.c_float, ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_bool)
# DeepSpeed's source file, its wrapper, and the arguments of create and update without the first and last.
_OPS = {
    "adam": ("adam/cpu_adam_impl.cpp", _ADAM, [*[_F] * 5, _B], [*[_F] * 5, _B, *[_P] * 4]),
    "lion": ("lion/cpu_lion_impl.cpp", _LION, [_F] * 4, [*[_F] * 4, *[_P] * 3]),
    "adagrad": ("adagrad/cpu_adagrad.cpp", _ADAGRAD, [_F] * 3, [*[_F] * 3, *[_P] * 3]),
}


def runs_here(build: str) -> bool:
    """Return whether this CPU has the instructions that a build of DeepSpeed's CPU ops needs."""
    flags = set(Path("/proc/cpuinfo").read_text().split())
    return {"avx512": "avx512f", "unfused": "avx"}.get(build, "fma") in flags


class StockOp:
    """A build of DeepSpeed's CPU op for one optimizer (such as `deepspeed.ops.adam.cpu_adam_op`), for one CPU kind."""

    def __init__(self, name: str, build: str) -> None:
        source, wrapper, created, updated = _OPS[name]
        self.__file__ = str(_library(name, _COMMON % source + wrapper, build))
        library = ctypes.CDLL(self.__file__)
        create, update = getattr(library, f"create_{name}"), getattr(library, f"{name}_update")
        create.argtypes = [_I, *created]
        update.argtypes = [_I, _L, *updated, _L]
        # The last argument says whether to print the op.
        setattr(self, f"create_{name}", lambda number, *settings: create(number, *settings[:-1]))
        setattr(self, f"destroy_{name}", getattr(library, f"destroy_{name}"))

        def call(*values):
            tensors = [v for v in values if isinstance(v, torch.Tensor)]
            assert all(t.is_contiguous() and t.dtype == torch.float32 for t in tensors)
            plain = [v.data_ptr() if isinstance(v, torch.Tensor) else v for v in values]
            update(*plain, tensors[0].numel())

        setattr(self, f"{name}_update", call)


stock_op = functools.cache(StockOp)


class RecountingOp:
    """An op for Adam that makes the installed DeepSpeed compute the bias correction as DeepSpeed 0.18.6 does.

    DeepSpeed 0.18.6 calls ``pow`` for every subgroup after the first one of a step. The installed version calls ``pow``
    only if the step number jumps. So before each of these subgroups, this op makes the step number jump: it calls the
    installed version with another step number, on tensors of one element.
    """

    def __init__(self, op: StockOp) -> None:
        self.__file__, self._op, self._step = op.__file__, op, 0
        self.create_adam, self.destroy_adam = op.create_adam, op.destroy_adam

    def adam_update(self, number: int, step: int, *values) -> None:
        if step == self._step:
            scalars = [v for v in values if not isinstance(v, torch.Tensor)]
            self._op.adam_update(number, step + 7, *scalars, *(torch.zeros(1) for _ in range(4)))
        self._step = step
        self._op.adam_update(number, step, *values)


def use_op(monkeypatch, op: object) -> None:
    """Make DeepSpeed's CPU Adam optimizers use the given build of the Adam op from now on."""
    module = importlib.import_module("deepspeed.ops.adam.cpu_adam")
    monkeypatch.setattr(module, "CPUAdamBuilder", lambda: SimpleNamespace(load=lambda: op))


def use_build(monkeypatch, build: str) -> None:
    """Make DeepSpeed's CPU optimizers use the ops of the given build (such as AVX2) from now on."""
    for name in _OPS:
        module = importlib.import_module(f"deepspeed.ops.{name}.cpu_{name}")
        builder = next(n for n in vars(module) if n.startswith("CPU") and n.endswith("Builder"))

        def load(name: str = name) -> StockOp:
            return stock_op(name, build)

        monkeypatch.setattr(module, builder, lambda load=load: SimpleNamespace(load=load))


def _library(name: str, source: str, build: str) -> Path:
    import deepspeed

    sources = Path(deepspeed.__file__).parent / "ops" / "csrc"
    own = [source, _EXTENSION_H, *BUILDS[build], deepspeed.__version__, torch.__version__]
    key = hashlib.sha256("\0".join(own).encode()).hexdigest()[:16]
    folder = cache_dir() / "tests" / f"{name}-{build}-{key}"
    library = folder / "op.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as made:  # several processes may compile it at the same time
        _compile(Path(made), sources, source, build).rename(library)
    return library


def _compile(folder: Path, sources: Path, source: str, build: str) -> Path:
    (folder / "torch").mkdir()
    (folder / "torch" / "extension.h").write_text(_EXTENSION_H)
    (folder / "op.cpp").write_text(source)
    library, lib = folder / "op.so", Path(torch.__file__).parent / "lib"
    command = [
        "g++",
        *_FLAGS,
        *BUILDS[build],
        f"-I{folder}",
        f"-I{sources}",
        f"-I{sources}/includes",
        "-isystem",
        str(lib.parent / "include"),
        str(folder / "op.cpp"),
        "-o",
        str(library),
        f"-L{lib}",
        "-lc10",
        "-ltorch_cpu",
    ]
    subprocess.run(command, check=True)
    return library
