"""A process that runs `tune` commands in forks of itself, for tests that run many of them.

A new interpreter needs a second of CPU time to import ebbtide and load compiled kernels before a command begins. A fork
of a process that has already done so begins at once. The command has its own folder, environment, input and output, as
in a shell. Tests of the start of `tune` itself use a new interpreter instead: `test_wheel.py`,
`tuner/test_first_contact.py`.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path

# Without site-packages, an interpreter starts in 20 ms. It passes its arguments, folder, environment and files to the
# server.
TUNE = """#!{python} -IS
import json, os, socket, sys
asked = json.dumps([sys.argv, os.getcwd(), dict(os.environ)]).encode()
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [len(asked).to_bytes(8, "big")], [0, 1, 2])
    server.sendall(asked)
    status = server.recv(4)
sys.exit(int.from_bytes(status, "big", signed=True) if status else 1)
"""


class Commands:
    """A server process that runs the `tune` commands of tests, each in a fork of itself, so that the commands start
    fast.

    The server and its commands end with `end`, or with the process that started the server.

    Attributes:
        folder: Directory for the environment variable PATH. It contains a program ``tune`` that passes each command to
            the server process.
    """

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        folder.mkdir()
        address = str(folder / "socket")
        program = folder / "tune"
        program.write_text(TUNE.format(python=sys.executable, address=address))
        program.chmod(0o755)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.commands", address],
            cwd=Path(__file__).parents[1],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    def end(self) -> None:
        """Kill the server and all commands that still run."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


def serve(address: str) -> None:
    """Accept commands at a socket's address, and run each in a fork. When standard input ends, kill this process and
    its commands.
    """
    from click.testing import CliRunner
    from ebbtide.tuner.cli import main

    os.chdir(Path(address).parent)  # the plan below is written here
    # The forked processes need not import and compile again what this command imports and compiles.
    result = CliRunner().invoke(main, ["plan", "--quick", "--machine", "rtx4090", "--model", "Llama 3.2 1B"])
    assert result.exit_code == 0, result.output
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        print("ready", flush=True)
        while True:
            ready, _, _ = select.select([sys.stdin, listening], [], [])
            if sys.stdin in ready:
                os.killpg(os.getpid(), signal.SIGKILL)
            caller, _ = listening.accept()
            if not os.fork():
                listening.close()
                _run(caller)
            caller.close()
            while _ended():
                pass


def _ended() -> bool:
    """Reap one fork of this process that has ended. Return False if there is none."""
    try:
        return os.waitpid(-1, os.WNOHANG)[0] > 0
    except ChildProcessError:
        return False


def _run(caller: socket.socket) -> None:
    """Run one command that a client has sent, send the exit status to the client, and end this process.

    The command runs with the client's arguments, folder, environment, input and output. It runs in a child of this
    process, because `tune run` replaces its own process by another program.

    Args:
        caller: Connection to the client.
    """
    head, files, *_ = socket.recv_fds(caller, 8, 3)
    for number in range(3):  # the server's files, which a command that hangs would keep open
        os.dup2(files[number], number)
    size = int.from_bytes(head, "big")
    asked = b""
    while len(asked) < size:
        asked += caller.recv(size - len(asked))
    words, folder, environment = json.loads(asked)
    command = os.fork()
    if not command:
        caller.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        _call(words)
    for file in files:
        os.close(file)
    _, status = os.waitpid(command, 0)
    caller.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "big", signed=True))
    os._exit(0)


def _call(words: list[str]) -> None:
    """Call the command `tune` in this process, and end the process with its exit status."""
    from ebbtide.tuner.cli import main

    sys.argv, status = words, 1
    sys.path[0] = str(Path(words[0]).parent)
    sys.stdin, sys.stdout, sys.stderr = (open(n, mode, closefd=False) for n, mode in enumerate("rww"))  # noqa: SIM115
    try:
        main(prog_name="tune")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve(sys.argv[1])
