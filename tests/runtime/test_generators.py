"""Tests that nothing in ebbtide draws from the random generators that training draws from."""

import ast
from pathlib import Path

import ebbtide.runtime
import pytest
import torch
from ebbtide.runtime.replan.measuring import measured_machine
from ebbtide.runtime.zero.attach import session_of, switch_plan

from tests.runtime.forked_ranks import launch
from tests.runtime.generators import engine_with_dropout, losses, measure_quickly, unchanged

ROOT = Path(__file__).parents[2]
PACKAGES = ("simulator", "profiler", "tuner", "runtime")
# Functions that draw from a default generator unless they are given one.
DRAWS = {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli"}
DRAWS |= {"multinomial", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_"}
SEEDS = {"seed", "manual_seed", "manual_seed_all", "set_rng_state", "set_state", "setstate"}
# Processes of their own, and generators that a user asks ebbtide to set.
MAY_DRAW = {"runtime/frontdoor/verified.py", "runtime/checkpoint/deepspeed/loading.py"}


def draws_of(path):
    """Return the source lines of a module that draw from, or set, a random generator of the whole process."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        called, owner = node.func.attr, ast.unparse(node.func.value)
        of_torch = called in DRAWS and "random" not in owner and not owner.endswith("rng")
        given = any(word.arg == "generator" for word in node.keywords)
        of_process = owner in ("random", "np.random", "numpy.random") and called not in ("Random", "default_rng")
        seeds = called in SEEDS and "Generator" not in owner
        if (of_torch and not given) or of_process or seeds:
            found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    return found


def test_no_module_draws_from_a_default_generator():
    modules = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    found = [line for path in modules for line in draws_of(path) if str(path.relative_to(ROOT)) not in MAY_DRAW]
    assert not found, "\n".join(found)


def test_the_snapshot_sees_each_generator():
    for draw in ("random.random()", "np.random.rand()", "torch.rand(1)"):
        with pytest.raises(AssertionError, match="drew from the generators"), unchanged(draw):
            exec(f"import random, numpy as np, torch; {draw}")


def test_measuring_draws_nothing(tmp_path, monkeypatch):
    measure_quickly(monkeypatch, tmp_path)
    with unchanged("measured_machine"):
        measured_machine([str(tmp_path / "drive")])
    assert list(tmp_path.glob("machine.json"))  # otherwise nothing was measured


def test_dropout_is_stocks_in_the_first_run_on_a_machine_too(only_rank, tmp_path, monkeypatch):
    stock = losses(None, 2)
    measure_quickly(monkeypatch, tmp_path)
    assert losses("auto", 2) == stock
    assert list(tmp_path.glob("machine.json"))
    assert losses("auto", 2) == stock


def test_every_entry_point_leaves_the_generators_alone(only_rank, tmp_path, monkeypatch):
    from ebbtide.profiler import profile_engine
    from ebbtide.runtime.frontdoor.recorded import record
    from ebbtide.runtime.verify.lines import Lines

    measure_quickly(monkeypatch, tmp_path)
    stock = engine_with_dropout(None, 3)
    drawn = torch.zeros(4, 32, dtype=torch.bfloat16)

    def train(engine):
        """Take one training step in evaluation mode, so that the step itself draws no random numbers."""
        engine.eval()
        engine.backward(engine(drawn.to(engine.device)).float().square().mean())
        engine.step()

    with unchanged("profile_engine"):
        profile_engine(stock, train)
    stock.destroy()
    engine = engine_with_dropout(None, 3)
    sizes = engine.optimizer.sub_group_size
    with unchanged('attach(engine, "auto")'):
        ebbtide.runtime.attach(engine, "auto")
    with unchanged("a record"):
        record(engine, Lines(tmp_path, 0, {}), 3, lambda: None)
    with unchanged("the watched steps, what auto plans and the switch"):
        for _ in range(5):
            train(engine)
    assert session_of(engine).plan.subgroup_size <= sizes
    with unchanged("a save"):
        engine.save_checkpoint(str(tmp_path / "saved"))
        train(engine)
    with unchanged("another plan"):
        switch_plan(engine, session_of(engine).plan.model_copy(update={"overlap_forward": False}))
        train(engine)
    with unchanged("a load"):
        engine.load_checkpoint(str(tmp_path / "saved"))
        train(engine)
    engine.destroy()


@pytest.mark.slow
def test_two_ranks_draw_alike(deepspeed_ops, tmp_path):
    # Two ranks with dropout have stock's losses, although only the first measures the machine.
    done = launch("tests.runtime.generators", tmp_path, 3)
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("rank")) == [
        f"rank {rank}: [True, True]" for rank in (0, 1)
    ], done.stdout + done.stderr[-3000:]
