"""Setup of all tests: few threads, ninja on PATH, and one rank of a DeepSpeed job for tests that need it."""

import atexit
import json
import os
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

# Set before torch is imported, because tests share the machine with each other and with people.
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(_variable, "2")
# A thread that waits by spinning occupies the core of the thread that it waits for, which takes twice the time.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("MPLBACKEND", "Agg")
# With this, tests/cheap_start/sitecustomize.py keeps child processes from importing torch's compiler (1.2 s).
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
if "TESTS_CPU_INFO" not in os.environ:  # workers and children inherit it
    import cpuinfo

    os.environ["TESTS_CPU_INFO"] = json.dumps(cpuinfo.get_cpu_info())
    del sys.modules["cpuinfo"]
ROOT = Path(__file__).parents[1]
_CHEAP_START = str(Path(__file__).parent / "cheap_start")
sys.path.insert(0, _CHEAP_START)
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [_CHEAP_START, str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])
)


# DeepSpeed asks for debug information, which takes a third of the time to compile one of its ops.
COMPILER = '#!/bin/sh\nexec c++ "$@" -g0\n'


def own_extensions(cache, prefix):
    """Return the folder of compiled torch extensions (such as DeepSpeed's ops) for the Python environment at
    ``prefix``. None means torch's own folder.

    torch keeps a build under its op's name, no matter which environment compiled it. Two environments that
    are tested on one machine would therefore compile each other's ops again, in the middle of the tests.
    Existing builds of this environment are copied with their times, so that ninja need not repeat them. Without such
    builds, the folder has a compiler ``c++`` of its own, which compiles the ops faster.
    """
    own = cache / "ebbtide" / f"test-ops-{zlib.crc32(str(prefix).encode()):08x}"
    if own.exists():
        return own
    builds = list((cache / "torch_extensions").glob("*/*/build.ninja"))
    mine = [file for file in builds if f"{prefix}/" in file.read_text()]
    complete = [file for file in mine if list(file.parent.glob("*.so"))]
    if mine and not complete:
        return None  # another process compiles the ops there
    made = own.with_name(f"{own.name}-{os.getpid()}")
    made.mkdir(parents=True)
    for file in complete:
        locks = shutil.ignore_patterns("lock", "ebbtide-*")
        shutil.copytree(file.parent, made / file.parent.name, ignore=locks)
    if not complete:  # ninja would repeat the builds of another compiler
        (made / "c++").write_text(COMPILER)
        (made / "c++").chmod(0o755)
    try:
        made.rename(own)
    except OSError:  # another run has made it already
        shutil.rmtree(made)
    return own


if "TORCH_EXTENSIONS_DIR" not in os.environ:  # workers and children inherit it
    _cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    if _folder := own_extensions(_cache, sys.prefix):
        os.environ["TORCH_EXTENSIONS_DIR"] = str(_folder)
        if (_folder / "c++").exists():
            os.environ.setdefault("CXX", str(_folder / "c++"))
# DeepSpeed calls ninja by name, even if .venv is not activated.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

import pytest
from ebbtide.runtime.hardware.launcher import VARIABLES
from filelock import FileLock
from hypothesis import settings

from studies.bench.rank import remove_left_buffers
from tests.prepared import ADDRESS, Prepared, fork_program

# In CI, the examples are always the same, so that a failed run can be repeated. No example has a deadline.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("dev", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


# First the files that wait for browsers and servers, then files that take long. The others fill the gaps.
FIRST = (
    "tuner/service/test_page.py",
    "tuner/service/test_jobs.py",
    "test_documents.py",
    "test_wheel.py",
    "studies/test_service_load.py",
    "studies/test_checkpoint_crash.py",
    "studies/test_demo.py",
    "studies/test_emulated_training.py",
    "tuner/service/test_answers.py",
    "runtime/storage/test_training_faults.py",
    "runtime/frontdoor/test_trainers.py",
    "profiler/test_launch.py",
    "runtime/contract/test_ranks.py",
    "tuner/test_verify.py",
    "tuner/test_inputs.py",
    "simulator/test_bounds.py",
    "runtime/evidence/test_happens_before.py",
    "tuner/service/test_errors.py",
    "tuner/test_ways_out.py",
    "tuner/test_decision.py",
    "studies/test_gpu.py",
    "tuner/service/test_contract.py",
    "runtime/contract/test_failed_switch.py",
    "runtime/contract/test_bits.py",
    "runtime/contract/test_footprint.py",
    "runtime/contract/test_early_pieces.py",
    "tuner/test_search.py",
    "tuner/test_option_walk.py",
    "runtime/test_generators.py",
    "tuner/test_plans_fit.py",
    "tuner/test_doors.py",
    "studies/test_checkpoint_stall.py",
    "studies/test_front_door_kills.py",
    "runtime/storage/test_checkpoint_kills.py",
    "studies/test_tuner_studies.py",
    "tuner/test_storage.py",
    "studies/test_published_runs.py",
    "runtime/storage/test_two_ranks.py",
    "runtime/contract/test_stored.py",
    "tuner/test_configurations.py",
    "studies/test_checkpoint_interval.py",
    "runtime/zoo/test_zoo.py",
    "runtime/contract/test_device_sums.py",
    "tuner/service/test_hostile.py",
    "tuner/test_laws.py",
    "runtime/contract/test_stored_steps.py",
    "tuner/service/test_client.py",
)


PREPARED = pytest.StashKey()


def pytest_configure(config):
    """Start the process in whose forks tests run Python programs. All pytest workers share this process.

    Let each pytest worker exit without Python's cleanup, because freeing all modules and engines takes seconds.
    """
    if hasattr(config, "workerinput"):
        atexit.register(os._exit, 0)
    else:
        config.stash[PREPARED] = [Prepared()]
        os.environ[ADDRESS] = config.stash[PREPARED][0].address


@pytest.hookimpl(optionalhook=True)  # a hook of pytest-xdist
def pytest_xdist_setupnodes(config, specs):
    """Make pytest's workers forks of one process that has imported ebbtide. Otherwise each worker imports it, which
    takes ten seconds.
    """
    import execnet

    forking = Prepared(workers=True)
    config.stash[PREPARED].append(forking)
    program = fork_program(address=forking.address)
    specs[:] = [execnet.XSpec(f"{spec}//id={spec.id}//python={program}") for spec in specs]


def pytest_unconfigure(config):
    for process in config.stash.get(PREPARED, ()):
        process.close()


def pytest_sessionfinish():
    """Remove the shared-memory buffers that killed test processes have left, 66 MiB each."""
    remove_left_buffers()


def pytest_collection_modifyitems(items):
    """Sort pytest's list of tests so that the test files in `FIRST` come first. All other tests keep their order."""
    first = {f"tests/{name}": rank for rank, name in enumerate(FIRST)}
    items.sort(key=lambda item: first.get(item.location[0], len(FIRST)))


def pytest_collection_finish(session):
    one_thread()
    if any("deepspeed_ops" in getattr(item, "fixturenames", ()) for item in session.items):
        compile_ops()


def compile_ops():
    """Compile DeepSpeed's ops on a fresh machine, before the first test: otherwise its time would have the minute."""
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR", os.devnull))
    if not (folder / "cpu_adam" / "cpu_adam.so").exists():
        # A lock lets one worker compile, and all others wait. The fixture `deepspeed_ops` tells what fails.
        subprocess.run([sys.executable, "-m", "studies.bench.deepspeed_ops"], cwd=ROOT, check=False)


def one_thread():
    """Limit torch to one thread for operations that the calling thread starts."""
    # With a second thread, the small matrix products of the tests take a twelfth more CPU time.
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


# Variables that trainers set in this process, and that a child process would read as its own.
RANK_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", *VARIABLES)


@pytest.fixture(autouse=True)
def as_many_threads():
    """Reset torch's number of threads after each test, because the bits of a matrix product's result depend on
    the number.
    """
    yield
    one_thread()


@pytest.fixture(scope="session")
def deepspeed_ops():
    """Compile DeepSpeed's ops for the CPU once per test run, which takes about a minute on a fresh machine."""
    from studies.bench.deepspeed_ops import build_host_ops

    build_host_ops()


@pytest.fixture(scope="session")
def only_rank(deepspeed_ops):
    """Make this test process the only rank of a torch.distributed job, so that ``deepspeed.initialize`` works in it."""
    import deepspeed
    import torch.distributed

    from studies.bench.many_engines import format_nothing
    from studies.bench.rank import become_only_rank

    become_only_rank()
    deepspeed.init_distributed()
    format_nothing()
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for variable in RANK_VARIABLES:
        os.environ.pop(variable, None)


def without_a_rank():
    """Return the environment variables for a process that a test starts, without the rank and port of this process."""
    return {k: v for k, v in os.environ.items() if k not in RANK_VARIABLES}


def of_a_new_shell():
    """Return the environment variables of a new shell: the commands of this Python are on PATH, and neither
    PYTHONPATH nor a rank is set.
    """
    kept = {name: value for name, value in without_a_rank().items() if not name.startswith(("PYTHONPATH", "EBBTIDE_"))}
    return kept | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}


@pytest.fixture
def child_environment():
    return without_a_rank()


@pytest.fixture
def new_shell():
    return of_a_new_shell()


@pytest.fixture(scope="session")
def quick_demo(tmp_path_factory, deepspeed_ops):
    """Run `python -m studies.demo --quick` once, and return the folder with its results (runs/demo/).

    All test processes share the folder. Later ones wait until the first one has made it.
    """
    folder = _shared_by_all_workers(tmp_path_factory) / "demo"
    with FileLock(f"{folder}.lock"):
        printed = folder / "printed.txt"
        if not printed.exists():
            folder.mkdir(exist_ok=True)
            done = subprocess.run(
                [sys.executable, "-m", "studies.demo", "--quick"],
                cwd=folder,
                env=without_a_rank(),
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            printed.write_text(done.stdout)
    return folder


def _shared_by_all_workers(tmp_path_factory):
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
