"""Tests that every code block of README, docs and examples runs as written, in a new shell."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ebbtide.runtime.frontdoor.request import read_request

from studies.bench.rank import free_port
from tests.cheap_start.short_search import SHORT
from tests.conftest import of_a_new_shell
from tests.prepared import fork_program
from tests.test_pages import DOCS, ROOT, WRITTEN, what_pages_take_for_given

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Languages of blocks that are shown but not run: output of terminals and logs, excerpts for other programs.
SHOWN = {"text", "ini", "bibtex"}
# These pages are tested in test_wheel.py, test_readme.py and test_examples.py. One of the examples runs here, and the
# quickstart uses the Trainer.
EXAMPLES = ("hf_trainer.py", "accelerate_loop.py", "trl_sft.py")
ELSEWHERE = ("pip install", "make ", "cd ebbtide", *(f"tune run -- python examples/{name}" for name in EXAMPLES))
PAGES = [ROOT / "README.md", ROOT / "examples" / "README.md", *WRITTEN, DOCS / "architecture.md"]
PORT = "8377"
# Saves seconds per process. The folder holds no module of ebbtide.
CHEAP_START = str(ROOT / "tests" / "cheap_start")


def blocks(page):
    return BLOCK.findall(page.read_text())


RUN = [page for page in PAGES if any(kind in ("bash", "python") for kind, _ in blocks(page))]
# python.md is first, because its script reads the machine.json of its own `tune profile`. Later pages skip commands
# that have run, and get the machine.json of `what_pages_take_for_given`.
RUN.sort(key=lambda page: page.stem != "python")


def test_only_languages_that_are_run_or_shown():
    kinds = {kind for page in PAGES for kind, _ in blocks(page)}
    assert kinds <= SHOWN | {"bash", "python", "json"}
    assert len(RUN) >= 10
    texts = [text for page in RUN for kind, text in blocks(page) if kind == "bash"]
    assert sum(text.count("tune run -- python ") for text in texts) > len(EXAMPLES)


def test_a_config_that_is_shown_is_one():
    shown = [text for page in PAGES for kind, text in blocks(page) if kind == "json"]
    assert shown
    for text in shown:
        assert read_request({**json.loads(text)["ebbtide"], "plan": "auto"})


# A command `tune`, which a process forked from the prepared one runs (`tests.prepared`).
TUNE = f"""
import sys
from ebbtide.tuner.cli import main
from ebbtide.tuner.placements import decision
from short_search import shorten
shorten(decision)
sys.path[:] = [folder for folder in sys.path[1:] if folder != {str(ROOT)!r}]
main(prog_name="tune")
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Return environment variables for a shell in which the command `tune` starts fast.

    In this shell `tune` runs in a fork of a process that has already imported ebbtide. Tests of the start of `tune`
    itself use a new interpreter instead: `test_wheel.py`, `tuner/test_first_contact.py`.
    """
    variables = of_a_new_shell() | {"PYTHONPATH": CHEAP_START, SHORT: "1"}
    program = tmp_path_factory.mktemp("bin") / "tune"
    program.write_text(f'#!/bin/sh\nexec {fork_program("-c", TUNE)} "$@"\n')
    program.chmod(0o755)
    return variables | {"PATH": os.pathsep.join([str(program.parent), variables["PATH"]])}


@pytest.fixture(scope="module")
def run_before():
    """Return a set of the `tune` commands that have run already. A command that several pages show runs once."""
    return set()


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_blocks_run(page, deepspeed_ops, environment, run_before, tmp_path):
    what_pages_take_for_given(tmp_path)
    shell = Shell(tmp_path, environment)
    script = ""
    try:
        for kind, text in blocks(page):
            named = re.match(r"# (\w+\.py)\n", text)
            if kind == "bash":
                lines = left_to_run(text, run_before)
                run_before.update(line for line in lines if re.match(r"tune (?!run|serve)", line))
                text = "".join(f"{line}\n" for line in lines)
                check_that_plans_are_in_force(text, shell.run(text))
            elif kind == "python" and named:
                (tmp_path / named[1]).write_text(text)
            elif kind == "python":
                script += text
        if script:
            (tmp_path / "session.py").write_text(script)
            shell.run("python session.py")
    finally:
        shell.end()


def left_to_run(text, run_before):
    """Return the lines of a page's code block, without the commands that have run before or run in other tests."""
    return [line for line in text.splitlines() if not (line.startswith(ELSEWHERE) or line in run_before)]


def check_that_plans_are_in_force(block, said):
    """Check that every `tune run -- python` command of a page's code block has trained under a plan: the log
    names the plan once per command. Check that `tune verify` has found the training under a plan identical.
    """
    commands = len(re.findall(r"^tune run -- python ", block, re.MULTILINE))
    lines = [line for line in said.splitlines() if re.search(r"\b\d+ subgroups on ", line)]
    assert len(lines) == commands or not commands, said
    assert all("[INFO] ebbtide: " in line for line in lines), lines
    assert not commands or "loss" in said
    assert not block.startswith("tune verify") or "plan against stock: identical, every bit of 3 steps" in said


class Shell:
    """A runner of the code blocks of one page of the documentation, in one folder. Servers run in the
    background, on a free port.
    """

    def __init__(self, folder, environment):
        self.folder, self.environment, self.port = folder, environment, str(free_port())
        self.servers = []

    def run(self, text):
        lines = text.splitlines()
        for line in [line for line in lines if line.startswith("tune serve")]:
            self.serve(line)
            lines.remove(line)
        # The exit code of `tune doctor` depends on this machine.
        lines = [f"{line} || [ $? = 1 ]" if line.startswith("tune doctor") else line for line in lines]
        block = "\n".join(lines).replace(PORT, self.port)
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", block],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def serve(self, line):
        self.port = str(free_port())  # the port stays free for a minute
        log = (self.folder / "serve.log").open("w")
        # A new process and no fork, because the test waits for its end.
        words = [str(Path(sys.executable).parent / "tune"), *line.split()[1:], "--port", self.port]
        self.servers.append(
            subprocess.Popen(words, cwd=self.folder, env=self.environment, stdout=log, stderr=subprocess.STDOUT)
        )
        answers = f"until curl -sf localhost:{self.port}/api/v1/machines >/dev/null; do sleep 0.2; done"
        subprocess.run(["bash", "-c", answers], check=True, timeout=120)

    def end(self):
        for server in self.servers:
            server.send_signal(signal.SIGTERM)
            server.wait(60)
