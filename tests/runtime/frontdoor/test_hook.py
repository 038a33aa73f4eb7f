"""Tests of which processes get the wrapper that `tune run` puts around ``deepspeed.initialize``, each in a
new interpreter.

A stand-in for DeepSpeed starts in milliseconds. test_front_door.py tests the wrapper with the real DeepSpeed.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
WRAPPED = "print(hasattr(deepspeed.initialize, '_ebbtide_original'))"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "deepspeed.py").write_text("def initialize(*args, **kwargs):\n    return 'stock'\n")
    (tmp_path / "train.py").write_text(f"import deepspeed\n{WRAPPED}\n")
    return tmp_path


def tune_run(folder, *command, path=""):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), path])}
    done = subprocess.run(
        [sys.executable, "-m", "ebbtide.tuner.cli", "run", "--", *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split()


def test_a_script_and_the_process_it_starts(folder):
    (folder / "outer.py").write_text(
        "import subprocess, sys\nsubprocess.run([sys.executable, '-m', 'train'], check=True)\n"
    )
    assert tune_run(folder, sys.executable, "train.py") == ["True"]
    assert tune_run(folder, "sh", "-c", f"{sys.executable} outer.py") == ["True"]


def test_a_console_script_and_a_name_imported_out_of_deepspeed(folder):
    script = folder / "train"
    script.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, '')\n"
        "from deepspeed import initialize\nprint(hasattr(initialize, '_ebbtide_original'))\n"
    )
    script.chmod(0o755)
    assert tune_run(folder, str(script)) == ["True"]


def test_another_sitecustomize_runs_too(folder):
    other = folder / "site"
    other.mkdir()
    (other / "sitecustomize.py").write_text("print('other')\n")
    assert tune_run(folder, sys.executable, "train.py", path=str(other))[-2:] == ["other", "True"]


def test_a_spawned_worker(folder):
    (folder / "spawning.py").write_text(
        "import multiprocessing as mp\n"
        f"def work():\n    import deepspeed\n    {WRAPPED}\n"
        # The worker ends by itself. A pool that is dropped may kill it before its output is written.
        "if __name__ == '__main__':\n    pool = mp.get_context('spawn').Pool(1)\n"
        "    pool.apply(work), pool.close(), pool.join()\n"
    )
    assert tune_run(folder, sys.executable, "spawning.py") == ["True"]


def test_a_process_that_never_imports_deepspeed_meets_nothing_of_ours(folder):
    (folder / "runtime.py").write_text("print('mine')\n")
    (folder / "plain.py").write_text(
        "import sys, runtime\nprint([m for m in ('ebbtide', 'torch', 'click') if m in sys.modules])"
    )
    assert tune_run(folder, sys.executable, "plain.py") == ["mine", "[]"]


def test_stock_stays_stock_without_the_key(folder):
    (folder / "plain.py").write_text(
        "import sys, json, deepspeed\n"
        "json.dump({}, open('ds.json', 'w'))\n"
        "print(deepspeed.initialize(config={}), deepspeed.initialize(config='ds.json'),\n"
        "      deepspeed.initialize(config='e30='), 'ebbtide' in sys.modules)\n"
    )
    expected = ["stock", "stock", "stock", "False"]
    assert tune_run(folder, sys.executable, "plain.py") == expected


def test_an_op_of_stock_is_built_without_a_module_of_ours(folder):
    (folder / "torch" / "utils").mkdir(parents=True)
    (folder / "torch" / "__init__.py").touch()
    (folder / "torch" / "utils" / "__init__.py").touch()
    (folder / "torch" / "utils" / "cpp_extension.py").write_text("def load(name, sources):\n    return name\n")
    (folder / "builds.py").write_text(
        "import sys, torch.utils.cpp_extension as made\n"
        "print(made.load('cpu_adam', []), hasattr(made.load, '_ebbtide_tells'), 'ebbtide' in sys.modules)\n"
    )
    assert tune_run(folder, sys.executable, "builds.py") == ["cpu_adam", "True", "False"]


def test_a_scripts_own_runtime_and_profiler_are_in_nobodys_way(folder):
    for name in ("runtime", "profiler", "simulator", "tuner"):
        (folder / f"{name}.py").write_text("raise SystemExit('imported')\n")
    (folder / "own.py").write_text(
        "import sys, deepspeed\n"
        "print(deepspeed.initialize(config={'ebbtide': {'plan': 'auto'}}), 'ebbtide.runtime.zero' in sys.modules)\n"
    )
    assert tune_run(folder, sys.executable, "own.py") == ["stock", "True"]


def test_enabling_twice_and_disabling(folder):
    (folder / "calls.py").write_text(
        f"import sys\nsys.path.append({str(ROOT)!r})\n"
        "import ebbtide\nebbtide.enable()\nimport deepspeed\nebbtide.enable()\n"
        "wrapped = deepspeed.initialize\nstock = wrapped._ebbtide_original\n"
        "print(hasattr(stock, '_ebbtide_original'))\n"
        "ebbtide.disable()\nprint(deepspeed.initialize is stock)\n"
        "ebbtide.enable()\nprint(deepspeed.initialize._ebbtide_original is stock)\n"
        "print(sum(hasattr(f, 'is_ebbtides') for f in sys.meta_path))\n"
        "print(type(deepspeed.__loader__).__name__, 'torch' in sys.modules)\n"
    )
    expected = ["False", "True", "True", "1", "SourceFileLoader", "False"]
    assert tune_run(folder, sys.executable, "calls.py") == expected


def test_the_command_must_exist(folder):
    done = subprocess.run(
        [sys.executable, "-m", "ebbtide.tuner.cli", "run", "--", "no-such-launcher"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "must be a program on PATH, but got 'no-such-launcher'" in done.stderr
