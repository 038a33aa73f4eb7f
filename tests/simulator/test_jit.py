"""Tests of ebbtide's cache of functions compiled by numba: compiled code is not reused if constants or
functions that it uses have changed.
"""

import importlib.util
import os
import subprocess
import sys

from ebbtide.simulator.engines import jit, kernel


def loaded(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_constants_and_functions_of_other_files_are_compiled_anew(tmp_path, monkeypatch):
    given, caller = tmp_path / "jit_given.py", tmp_path / "jit_caller.py"
    head = "from ebbtide.simulator.engines.jit import compiled\n"
    caller.write_text(f"{head}from jit_given import COUNT, twice\n@compiled\ndef f(x):\n    return twice(x) + COUNT\n")
    by_module = tmp_path / "jit_by_module.py"
    by_module.write_text(
        f"{head}import jit_given\n@compiled\ndef f(x):\n    return jit_given.twice(x) + jit_given.COUNT\n"
    )
    # Python regards a compiled file as current if time (in seconds) and size of the source are unchanged.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name in ("jit_given", "jit_caller", "jit_by_module"):
        monkeypatch.setitem(sys.modules, name, None)
    found, named = [], []
    for count, factor in ((3, 2), (4, 2), (4, 5), (4, 5)):
        given.write_text(f"{head}COUNT = {count}\n@compiled\ndef twice(x):\n    return x * {factor}\n")
        loaded(given)
        module = loaded(caller)
        found.append(module.f(10))
        named.append(loaded(by_module).f(10))
    assert found == named == [23, 24, 54, 54]
    assert sum(module.f.stats.cache_hits.values()) == 1, "the last version was not taken from the cache"


def test_how_functions_are_compiled_is_part_of_what_is_cached(tmp_path, monkeypatch):
    function = kernel.run.py_func
    before = jit._built_in(function)
    other = tmp_path / "jit.py"
    other.write_text("# with other options\n")
    monkeypatch.setattr(jit, "__file__", str(other))
    assert jit._built_in(function) != before


def test_a_compilation_of_ebbtide_is_told_once_and_one_of_another_program_is_not(tmp_path):
    own = (
        "import numpy as np\n"
        "from ebbtide.simulator.engines.schedule_arrays import totals\n"
        "for placement in (np.zeros(2, np.int8), np.zeros(2, np.int64)):\n"
        "    totals(placement, np.ones(2), 2)\n"
    )
    other = "import numba\nfrom ebbtide.simulator.engines import jit\nnumba.njit(lambda x: x)(1)\n"

    def told(script):
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, "-c", script]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stderr.splitlines()

    assert told(other) == []
    assert told(own) == ["ebbtide compiles its simulator for this machine, once: 10 to 30 s"]
    assert told(own) == []
