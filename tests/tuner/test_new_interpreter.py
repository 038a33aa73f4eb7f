"""Tests that each `tune` command imports all modules that it uses.

In a test process, or in a fork of one (`tests.prepared`), other code has imported most modules of ebbtide before the
command begins. A missing import then shows only to users. So each command runs here in a new interpreter.
"""

import json
import subprocess

import click
import pytest
from ebbtide.tuner.cli import main

from tests.runtime.checkpoint.conftest import Bench, some_state

GPT = {"layers": 8, "hidden": 2048, "heads": 16, "vocabulary": 32000}
HERE = {  # command -> arguments, and exit code
    "simulate": ("--machine rtx4090 --model model.json", 0),
    "search": ("--machine rtx4090 --model small.json --global-batch 4 --micro-batch 4 --free recompute --trials 1", 0),
    "calibrate": ("rtx4090 --model model.json --runs runs.csv -o machine.json", 0),
    "verify": ("-- python -c pass", 2),  # a command that trains nothing
    "checkpoint list": ("checkpoints", 0),
    "checkpoint verify": ("checkpoints", 0),
    "checkpoint prune": ("checkpoints --keep 1", 0),
    "checkpoint export": ("checkpoints --to exported", 0),
}
# These commands run in a new interpreter in `test_wheel.py`, `test_first_contact.py`, `test_documents.py` (serve) and
# `profiler/test_launch.py`.
ELSEWHERE = {"profile", "plan", "show", "run", "doctor", "report", "serve"}


def names(group, before=()):
    with click.Context(group) as context:
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            if isinstance(command, click.Group):
                yield from names(command, (*before, name))
            else:
                yield " ".join((*before, name))


def test_each_command_is_started_somewhere():
    assert sorted(names(main)) == sorted(HERE.keys() | ELSEWHERE)


@pytest.mark.parametrize("command", HERE)
def test_a_new_interpreter_runs_the_command(command, tmp_path, new_shell):
    (tmp_path / "model.json").write_text(json.dumps(GPT))
    (tmp_path / "small.json").write_text(json.dumps({**GPT, "layers": 2, "hidden": 256}))
    (tmp_path / "runs.csv").write_text("forward_ms,backward_ms,step_ms,iteration_ms\n200,400,500,1100\n")
    Bench(tmp_path / "checkpoints").save(some_state(0), "step0", step=0)
    arguments, status = HERE[command]
    words = ["tune", *command.split(), *arguments.split()]
    done = subprocess.run(words, cwd=tmp_path, env=new_shell, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
