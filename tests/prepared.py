"""A process that imports torch and DeepSpeed once, and then forks itself for tests that start Python.

The imports take two to three seconds of a core in each new process. A forked process need not repeat them. Use a fork
to test what a program does. To test imports, a launcher or the start of Python, start a new process with `subprocess`.

`tests.conftest` starts this process before all tests. The imports are done when the first test requests a fork. Another
such process forks the workers of pytest. Without it, each worker would take ten seconds for the imports.

    python -m tests.prepared SOCKET [workers]
"""

import atexit
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
ADDRESS = "TESTS_PREPARED"  # environment variable with the path of the socket
LARGEST_REQUEST = 2**20
STACKS_S = 0.5  # time in which a process writes the stacks of its threads
FOLDERS = ("profiler", "runtime", "simulator", "tuner")
MODULES = ("setuptools", "tests.runtime.contract.training")


class Started:
    """A Python program that runs in a fork of a process that has already imported torch and DeepSpeed. The program's
    output goes to temporary files.

    Args:
        words: Arguments of Python: ``-c`` and the program, or ``-m`` and the module, then the program's arguments.
        env: The environment variables of the fork. None means those of this process.
        cwd: The working directory of the fork. None means that of this process.
        finalize: True if the interpreter is finalized at the end of the fork. This frees all modules, which takes most
            of a second. If False, the fork ends after its threads and its `atexit` functions.
    """

    def __init__(self, words, *, env=None, cwd=None, finalize=False):
        self.words = [str(word) for word in words]
        self._files = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115 - closed with this object
        env = dict(os.environ) if env is None else env
        request = {"words": self.words, "env": env, "cwd": str(cwd or Path.cwd()), "finalize": finalize}
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connection.connect(os.environ[ADDRESS])
        descriptors = [file.fileno() for file in self._files]
        socket.send_fds(self.connection, [json.dumps(request).encode()], descriptors)

    def send_signal(self, number):
        """Send a signal to the process, unless it has ended."""
        with contextlib.suppress(OSError):
            self.connection.send(str(int(number)).encode())

    def wait(self, timeout=None):
        """Wait until the process ends, and return its `subprocess.CompletedProcess` with the output as text.

        Raises:
            subprocess.TimeoutExpired: If the process has not ended after ``timeout`` seconds. Its standard error then
                shows where each of its threads was. The process is killed.
        """
        self.connection.settimeout(timeout)
        try:
            told = self.connection.recv(1000)
        except TimeoutError:
            self.send_signal(signal.SIGUSR1)
            time.sleep(STACKS_S)
            raise subprocess.TimeoutExpired(self.words, timeout, *self._output()) from None
        finally:
            self.connection.close()  # the prepared process kills a child whose connection is closed
        if not told:
            raise RuntimeError("the process `tests.prepared` has ended: its traceback is in the output of pytest")
        return subprocess.CompletedProcess(self.words, int(told), *self._output())

    def _output(self):
        for file in self._files:
            file.seek(0)
        return [file.read().decode(errors="replace") for file in self._files]


def run(words, *, env=None, cwd=None, finalize=False, timeout=None):
    """Run a Python program in a process forked from the prepared one, and return its `subprocess.CompletedProcess`."""
    return Started(words, env=env, cwd=cwd, finalize=finalize).wait(timeout)


def fork_program(*words, address=None):
    """Return a shell's command line that runs a Python program in a fork of a prepared process, with the shell's
    folder, environment, input and output.
    """
    client = Path(__file__).with_name("forked_client.py")
    return shlex.join([sys.executable, "-IS", str(client), address or os.environ[ADDRESS], *words])


class Prepared:
    """A handle with which pytest starts and ends a prepared process.

    A prepared process has imported torch and DeepSpeed, and forks itself on request.

    Args:
        workers: True if the forks are workers of pytest, False if they are Python programs that tests run.

    Attributes:
        address: Path of the socket at which the process accepts requests.
    """

    def __init__(self, *, workers=False):
        self._folder = tempfile.TemporaryDirectory(prefix="prepared-")
        self.address = str(Path(self._folder.name) / "socket")
        command = [sys.executable, "-m", "tests.prepared", self.address]
        environment = dict(os.environ)
        if workers:
            command.append("workers")
        else:  # it computes before it forks, and OpenMP's threads do not survive a fork
            environment["OMP_NUM_THREADS"] = "1"
        # In a session of its own, the process does not get Ctrl-C. It ends when its standard input ends.
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        if self._process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"`{' '.join(command)}` has ended at once: its traceback is above")

    def close(self):
        """End the prepared process and all its forks."""
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._folder.cleanup()


# -- in the prepared process -----------------------------------------------------------------------


def main():
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # so that a forked process may use the GPU
    made = serve(sys.argv[1], import_all if "workers" in sys.argv else prepare)
    if made is None:
        os._exit(0)
    request, files = made
    become(request, files)
    if request["finalize"]:
        atexit.unregister(gc.unfreeze)  # at the end, garbage collection then skips the prepared objects
        execute(*request["words"])
        return
    status = 0
    try:
        execute(*request["words"])
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Child(NamedTuple):
    """A fork of this process, which runs the Python program that a client has requested: a test, or pytest-xdist for a
    worker.
    """

    pid: int
    connection: socket.socket  # the client closes it when it stops waiting
    descriptor: int  # readable when the process has ended

    def kill(self):
        """Kill the process, and all that it has started."""
        with contextlib.suppress(ProcessLookupError):  # it has no process group of its own yet
            os.killpg(self.pid, signal.SIGKILL)
        os.kill(self.pid, signal.SIGKILL)

    def reap(self):
        """Wait until the forked process has ended, and send its exit code to the client that requested the fork."""
        _, status = os.waitpid(self.pid, 0)
        with contextlib.suppress(BrokenPipeError):  # the client has stopped waiting
            self.connection.send(str(os.waitstatus_to_exitcode(status)).encode())
        self.connection.close()
        os.close(self.descriptor)


def serve(path, before_fork):
    """Fork this process for each request that arrives at a Unix socket, until standard input ends.

    Return the request and the files for its input and output in each fork. Return None in the process that forks, once
    standard input has ended. At the end of that process, kill all forks and remove the socket's folder.

    Args:
        path: Path of the socket.
        before_fork: A function that is called before each fork.
    """
    children, own = set(), os.getpid()
    try:
        return _serve(path, before_fork, children)
    finally:
        if os.getpid() == own:
            for child in children:
                child.kill()
            shutil.rmtree(Path(path).parent, ignore_errors=True)


def _serve(path, before_fork, children):
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(64)
    print("ready", flush=True)
    while True:
        watched = {one: child for child in children for one in (child.connection, child.descriptor)}
        ready, _, _ = select.select([sys.stdin, listener, *watched], [], [])
        if sys.stdin in ready:
            return None
        for child in {watched[one] for one in ready if one in watched}:
            if child.descriptor not in ready:
                if number := child.connection.recv(100):
                    os.kill(child.pid, int(number))
                    continue
                child.kill()
            child.reap()
            children.remove(child)
        if listener in ready:
            connection, _ = listener.accept()
            message, files, _, _ = socket.recv_fds(connection, LARGEST_REQUEST, 3)
            before_fork()
            pid = os.fork()
            if not pid:
                os.setsid()
                for child in children:
                    os.close(child.descriptor)
                    child.connection.close()
                listener.close()
                connection.close()
                return json.loads(message), files
            for file in files:
                os.close(file)
            children.add(Child(pid, connection, os.pidfd_open(pid)))


def prepare():
    """Import once what most programs of the tests import, and load DeepSpeed's compiled ops and the tuner's kernels."""
    if MODULES[-1] in sys.modules:
        return
    from click.testing import CliRunner
    from ebbtide.tuner import cli

    from studies.bench.deepspeed_ops import build_host_ops
    from studies.bench.many_engines import answer_once
    from studies.checkpoints.run import warm_up

    for module in MODULES:
        importlib.import_module(module)
    build_host_ops()  # at the same time as tests that compile the same ops, of which one waits for the other
    warm_up()
    answer_once()
    plan = ["plan", "--quick", "--machine", "rtx4090", "--model", "Llama 3.2 1B"]
    made = CliRunner().invoke(cli.main, [*plan, "-o", str(Path(sys.argv[1]).with_name("plan.json"))])
    assert made.exit_code == 0, made.output


def import_all():
    """Import all modules of ebbtide, and what they import. Start no thread: a fork would lack it.

    A module that cannot be imported is left out: the tests that need it report why.
    """
    if MODULES[-1] in sys.modules:
        return
    names = []
    for folder in FOLDERS:
        package = importlib.import_module(f"ebbtide.{folder}")
        modules = pkgutil.walk_packages(package.__path__, f"{package.__name__}.", onerror=lambda _: None)
        names += [one.name for one in modules if not one.name.endswith((".__main__", ".sitecustomize"))]
    for name in (*names, *MODULES):
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.freeze()


def become(request, files):
    """Give this forked process what a new one would have: environment, folder, input and output."""
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    if len(files) < 3:  # the program of a test, whose stacks `Started.wait` asks for
        files = [os.open(os.devnull, os.O_RDONLY), *files]
        faulthandler.register(signal.SIGUSR1)
    for descriptor, number in zip(files, range(3), strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def execute(kind, program, *arguments):
    """Run ``python -m program`` or ``python -c program`` in this process."""
    sys.path[0] = str(Path.cwd())
    sys.argv = [program if kind == "-m" else kind, *arguments]
    if kind == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        exec(compile(program, "<string>", "exec"), vars(sys.modules["__main__"]))


if __name__ == "__main__":
    main()
